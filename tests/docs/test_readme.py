import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "README.md", "exec"), names)
    assert names["report"].passed
    assert (tmp_path / "rope.onnx").stat().st_size > 0


def test_ci_takes_its_test_line_from_here():
    (pattern,) = re.findall(r"grep -m 1 -x '(.*)' README.md", (ROOT / ".ci" / "run").read_text())
    assert re.search(f"^{pattern}$", README, re.MULTILINE)


def test_extras_that_are_named_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for group in re.findall(r"\.\[([\w,]+)\]", README):
        assert set(group.split(",")) <= set(extras)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
