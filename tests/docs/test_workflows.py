"""The workflows of the repository: what they may do, and the code of others that they run.

They are read by lines, because no parser of YAML is among the packages of the tests.
"""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.y*ml"))
PINNED = re.compile(r"- uses: ([\w./-]+)@[0-9a-f]{40} # v[\d.]+")

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="not run from a checkout")


def lines_of(workflow):
    return [line.strip() for line in workflow.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(workflow):
    uses = [line for line in lines_of(workflow) if "uses:" in line]
    assert uses
    assert [line for line in uses if not PINNED.fullmatch(line)] == []


def test_packages_that_build_a_release_are_pinned():
    text = (FOLDER / "publish.yml").read_text(encoding="utf-8")
    installed = re.findall(r"pip install ([^&\n]+)", text)
    assert installed
    assert [line for line in installed if not re.fullmatch(r"[\w-]+==[\d.]+ ?", line)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read(workflow):
    text = workflow.read_text(encoding="utf-8")
    assert re.findall(r"^permissions:.*\n((?: +.*\n)*)", text, re.MULTILINE) == [
        "  contents: read\n"
    ]


def test_one_job_gets_a_token():
    texts = {workflow.name: workflow.read_text(encoding="utf-8") for workflow in WORKFLOWS}
    tokens = [name for name, text in texts.items() for _ in re.findall("id-token: write", text)]
    assert tokens == ["publish.yml"]
    _, job = texts["publish.yml"].split("id-token: write\n")
    assert "run:" not in job, "the job that publishes does nothing else"
