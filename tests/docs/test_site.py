"""The manual: its code runs, its pictures are those of docs/draw.py, its facts agree."""

import json
import re
import runpy
import shlex
import shutil
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from packaging.requirements import Requirement

import rope_cpu
from rope_cpu import export, positions
from rope_cpu.cli import main as cli
from rope_cpu.cli import verify_rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name != "recipes.md")
README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SVG = "{http://www.w3.org/2000/svg}"


def blocks(path, language):
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def pages_with(language):
    return [
        pytest.param(path, id=str(path.relative_to(DOCS)))
        for path in PAGES
        if blocks(path, language)
    ]


@pytest.fixture
def model_folder(tmp_path, monkeypatch):
    """Enter a folder in which path/to/model holds a config.json."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "path" / "to" / "model"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "rope_cpu" / "configs" / "data" / "llama3.1-8b.json", folder / "config.json")


@pytest.mark.parametrize("path", pages_with("python"))
def test_python_blocks_run_in_order(path, model_folder):
    names = {}
    for text in blocks(path, "python"):
        exec(compile(text, path.name, "exec"), names)
    assert any(isinstance(value, rope_cpu.RotaryEmbedding) for value in names.values())


def test_figures_of_differences():
    """Each figure is that of its line: to its digits, or, where it is of roundings, its size."""
    names = {}
    figures = 0
    for text in blocks(DOCS / "differences.md", "python"):
        exec(compile(text, "differences.md", "exec"), names)
        for line, figure in re.findall(r"^(np\..*\))  # (\S+)$", text, re.MULTILINE):
            value = eval(line, names)
            figures += 1
            if float(figure) < 1e-5:
                assert value < 4 * float(figure), line
            else:
                assert f"{value:.1e}" == f"{float(figure):.1e}", line
    assert figures == 9


def variants():
    """Return (variant, code) of every piece of code in the table of variants that is a call."""
    page = (DOCS / "configs.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1:-1] for line in page.split("## Variants")[1].splitlines() if "|" in line
    ]
    found = [(row[0].strip(), code) for row in rows for code in re.findall(r"`([^`]+)`", row[-1])]
    return [(variant, code) for variant, code in found if "(" in code]


def test_the_table_of_variants_has_rows():
    assert len(variants()) > 25


@pytest.mark.parametrize(("variant", "code"), variants(), ids=[name for name, _ in variants()])
def test_code_in_the_table_of_variants(variant, code):
    names = {}
    for text in blocks(DOCS / "configs.md", "python"):
        exec(compile(text, "configs.md", "exec"), names)
    result = eval(code, names)
    if isinstance(result, tuple):
        result = result[0]
    assert isinstance(result, rope_cpu.RotaryEmbedding | np.ndarray), variant


def commands():
    texts_of_blocks = [text for path in (README, *PAGES) for text in blocks(path, "sh")]
    lines = [line for text in texts_of_blocks for line in text.splitlines()]
    lines = [part for line in lines for part in line.partition(" #")[0].split("&&")]
    return sorted({line.strip() for line in lines if line.strip()})


@pytest.mark.parametrize("command", commands())
def test_shell_lines(command, capsys, tmp_path, monkeypatch):
    """rope-cpu commands run here; .ci/run reads its install and test commands from the README."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify_rows, "TOKENS", 64)
    words = shlex.split(command)
    if words[0] == "rope-cpu":
        assert cli.main(words[1:]) == 0
        assert capsys.readouterr().out
    else:
        assert words[0] == "pytest" or words[:2] == ["pip", "install"]


def test_every_block_says_its_language():
    for path in (README, *PAGES):
        languages = re.findall(r"^```(\w*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(languages[::2]) <= {"python", "sh"}, path
        assert set(languages[1::2]) <= {""}, path


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((DOCS / "tour.ipynb").read_text(encoding="utf-8"))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "the site runs the notebook: commit it without outputs"
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert "`model_type` is 'lama'" in capsys.readouterr().out
    assert names["report"].passed


def texts(path):
    return {element.text for element in ElementTree.parse(path).iter(f"{SVG}text")}


def test_the_pictures_are_those_of_the_script(tmp_path):
    """Their texts are compared: paths differ between releases of matplotlib."""
    runpy.run_path(str(DOCS / "draw.py"))["main"](tmp_path)
    drawn = {path.name: texts(path) for path in tmp_path.iterdir()}
    assert drawn == {path.name: texts(path) for path in (DOCS / "pictures").iterdir()}


def test_every_picture_is_shown():
    shown = set(re.findall(r"\(pictures/(\w+\.svg)\)", (DOCS / "concepts.md").read_text()))
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}


def test_the_readme_leads_to_each_use_and_is_short():
    readme = README.read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    for page in ("numpy", "onnx", "configs", "performance", "differences"):
        assert f"](docs/{page}.md)" in readme


def test_figures_of_the_readme_are_those_of_the_manual():
    """Both show the table of errors, and the README some rows of the table of times."""
    readme = set(README.read_text(encoding="utf-8").splitlines())
    for page, fact in (
        ("precision.md", "| 1e6, 1048576 |"),
        ("performance.md", "| rope_cpu plan |"),
    ):
        lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
        assert readme.intersection(line for line in lines if line.startswith(fact)), page


def test_every_public_name_has_its_entry_in_the_reference():
    text = "".join(path.read_text() for path in (DOCS / "api").iterdir())
    entries = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    documented = {entry.rpartition(".")[2] for entry in entries}
    public = {*rope_cpu.__all__, *export.__all__, *positions.__all__} - {"positions"}
    assert documented == public
    assert len(entries) == len(documented)


def test_versions_and_addresses_agree():
    version = rope_cpu.__version__
    assert PROJECT["dynamic"] == ["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)} ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    repository = PROJECT["urls"]["Repository"]
    assert f"repo_url: {repository}\n" in (ROOT / "mkdocs.yml").read_text()
    assert all(url.startswith(repository) for url in PROJECT["urls"].values())


def test_oldest_packages_are_those_of_the_requirements():
    """docs/support.md names the lower bounds."""
    text = " ".join((DOCS / "support.md").read_text(encoding="utf-8").split())
    for requirement in map(Requirement, PROJECT["dependencies"]):
        (lower,) = requirement.specifier
        assert re.search(rf"\b{requirement.name} {re.escape(lower.version)}\b", text, re.IGNORECASE)
