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
from rope_cpu.models.vision import CLASSES, REFUSED_CLASSES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(path for path in DOCS.rglob("*.md") if path.name != "recipes.md")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SVG = "{http://www.w3.org/2000/svg}"


def blocks(path, language):
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def pages_with(language):
    return [
        pytest.param(path, id=str(path.relative_to(ROOT)))
        for path in PAGES
        if blocks(path, language)
    ]


@pytest.fixture
def model_folder(tmp_path, monkeypatch):
    """Enter a folder in which path/to/model holds a config.json."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "path" / "to" / "model"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "rope_cpu" / "models" / "data" / "llama3.1-8b.json", folder / "config.json")


@pytest.mark.parametrize("path", pages_with("python"))
def test_python_blocks_run_in_order(path, model_folder):
    names = {}
    for text in blocks(path, "python"):
        exec(compile(text, path.name, "exec"), names)
    assert any(isinstance(value, rope_cpu.RotaryEmbedding) for value in names.values())
    assert "report" not in names or names["report"].passed


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


def test_code_in_the_table_of_variants():
    names = {}
    for text in blocks(DOCS / "configs.md", "python"):
        exec(compile(text, "configs.md", "exec"), names)
    table = (DOCS / "configs.md").read_text(encoding="utf-8").split("## Variants")[1]
    cells = [line.split("|")[-2] for line in table.splitlines() if "|" in line]
    calls = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell) if "(" in code]
    assert len(calls) > 25
    for code in calls:
        result = eval(code, names)
        result = result[0] if isinstance(result, tuple) else result
        assert isinstance(result, rope_cpu.RotaryEmbedding | np.ndarray), code


def commands():
    lines = [line for path in PAGES for text in blocks(path, "sh") for line in text.splitlines()]
    lines = [line.partition(" #")[0].strip() for line in lines]
    return sorted({line for line in lines if line.startswith("rope-cpu")})


@pytest.mark.usefixtures("brief_verify")
@pytest.mark.parametrize("command", commands())
def test_shell_lines(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gemma = Path("gemma-3", "config.json")
    gemma.parent.mkdir()
    gemma.write_text('{"model_type": "gemma3_text"}', encoding="utf-8")
    rope = rope_cpu.RotaryEmbedding.from_config(gemma, layer_type="sliding_attention")
    for name in ("model.onnx", "attention.onnx"):
        export.save(export.export_rope(rope), name)
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_every_block_says_its_language():
    for path in PAGES:
        languages = re.findall(r"^```(\w*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(languages[::2]) <= {"python", "sh", "dockerfile"}, path
        assert set(languages[1::2]) <= {""}, path


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("differences.md", ("100k", "outputs differ")),
        ("recipes.md", ("# From MLX", "Megatron core", "KerasHub", "penzai", "timm and others")),
        ("serving.md", ("bfloat16 and int8 caches",)),
        ("support.md", ("Windows", "macOS")),
        ("threads.md", ("gunicorn", "Docker", "slow first call")),
    ],
)
def test_words_that_users_search_stand_on_the_page_that_answers(page, words):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [word for word in words if word not in text] == []


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


def test_the_readme_prints_its_first_result(capsys):
    first = blocks(README, "python")[0]
    exec(compile(first, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == first.splitlines()[-1].rpartition("# ")[2]


@pytest.mark.parametrize("path", sorted((DOCS / "pictures").iterdir()), ids=lambda path: path.stem)
def test_texts_of_pictures_follow_the_palette(path):
    """The style of a picture changes this dark ink; white text is on boxes of a color."""
    picture = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in picture
    styles = re.findall('style="(font[^"]*)"', picture)
    assert styles
    assert all(re.search("fill: #(333333|ffffff)", style) for style in styles)


def test_figures_of_the_readme_are_those_of_the_manual():
    """Rows of the table of times, and the last row of the table of errors, told in a sentence."""
    readme = README.read_text(encoding="utf-8")
    times = (DOCS / "performance.md").read_text(encoding="utf-8").splitlines()
    rows = {line for line in readme.splitlines() if line.startswith("| rope_cpu plan |")}
    assert rows
    assert rows <= set(times)
    errors = (DOCS / "precision.md").read_text(encoding="utf-8")
    (figures,) = re.findall(r"is (\S+), of float32 angles (\S+) \(", readme)
    assert f"| 1e6, 1048576 | {figures[1]} | {figures[0]} |" in errors


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


# The releases that mended published advisories: on external data, the sandbox, and chunked bodies.
SAFE = {"onnx": "1.21", "jinja2": "3.1.6", "h11": "0.16"}


def test_requirements_admit_no_release_with_a_known_vulnerability():
    server = ROOT / "examples" / "server" / "pyproject.toml"
    if not server.exists():
        pytest.skip("an sdist holds no example server")
    listed = tomllib.loads(server.read_text())["project"]["dependencies"]
    listed += PROJECT["optional-dependencies"]["onnx"]
    requirements = {one.name: one.specifier for one in map(Requirement, listed)}
    assert {name: str(requirements[name]) for name in SAFE} == {
        name: f">={version}" for name, version in SAFE.items()
    }


def test_ci_takes_its_test_line_from_the_readme():
    (pattern,) = re.findall(r"grep -m 1 -x '(.*)' README.md", (ROOT / ".ci" / "run").read_text())
    assert re.search(f"^{pattern}$", README.read_text(encoding="utf-8"), re.MULTILINE)


def test_extras_and_files_in_the_readme_exist():
    text = README.read_text(encoding="utf-8")
    for group in re.findall(r"\.\[([\w,]+)\]", text):
        assert set(group.split(",")) <= set(PROJECT["optional-dependencies"])
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_each_class_of_diffusers_stands_once_in_its_list():
    page = (DOCS / "configs.md").read_text(encoding="utf-8")
    section = page.split("## Classes of diffusers\n")[1].split("\n## ")[0]
    table, refused = section.split("Refused are")
    pattern = re.compile(r"`(\w+(?:Model|Transformer))`")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in pattern.findall(row)]
    assert sorted(names) == sorted(CLASSES)
    assert set(pattern.findall(refused)) == set(REFUSED_CLASSES)
