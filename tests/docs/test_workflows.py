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


def jobs_of(workflow):
    """Return the text of each job of a workflow by its name."""
    _, jobs = workflow.read_text(encoding="utf-8").split("\njobs:\n")
    _, *parts = re.split(r"^  (\w+):\n", jobs, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(workflow):
    uses = [line for line in lines_of(workflow) if "uses:" in line]
    assert uses
    assert [line for line in uses if not PINNED.fullmatch(line)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read(workflow):
    text = workflow.read_text(encoding="utf-8")
    assert re.findall(r"^permissions:.*\n((?: +.*\n)*)", text, re.MULTILINE) == [
        "  contents: read\n"
    ]


def test_only_the_job_that_publishes_gets_a_token_and_does_nothing_else():
    jobs = {
        (workflow.name, name): text
        for workflow in WORKFLOWS
        for name, text in jobs_of(workflow).items()
    }
    assert [job for job, text in jobs.items() if "permissions:" in text] == [
        ("publish.yml", "publish")
    ]
    publish = jobs["publish.yml", "publish"]
    assert "    permissions:\n      id-token: write\n    steps:\n" in publish
    assert "run:" not in publish
    assert PINNED.findall(publish) == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
