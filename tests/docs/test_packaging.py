import os
import shutil
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import rope_cpu

ROOT = Path(__file__).parents[2]
PARTS = ("rope_cpu", "export", "bench")
# What the sdist holds beside the parts.
FOLDERS = (".ci", "docs", "examples", "tests", "tools")
FILES = (
    ".codespell-words",
    "CHANGELOG.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "SECURITY.md",
    "mkdocs.yml",
    "pyproject.toml",
)

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="not run from a source tree"
)


def modules(folder):
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if "__pycache__" not in path.parts
    }


def expected():
    """Every module of the tree, where it must be once it is installed."""
    found = {
        f"rope_cpu/{name}"
        for name in modules(ROOT / "rope_cpu")
        if not name.startswith(("export/", "bench/"))
    }
    return found | {
        f"rope_cpu/{part}/{name}" for part in ("export", "bench") for name in modules(ROOT / part)
    }


@pytest.fixture(scope="module")
def build(run_program):
    def build(source, kind, to):
        """Build with the declared backend alone: no isolation, no network."""
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(to)!r}))"
        return to / run_program(code, cwd=source)[0].splitlines()[-1]

    return build


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source tree, because a build leaves files behind."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for folder in PARTS + FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree, build, tmp_path_factory):
    return build(tree, "wheel", tmp_path_factory.mktemp("wheel"))


def names_in(wheel):
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_wheel_holds_every_module_and_nothing_at_the_top(wheel):
    names = names_in(wheel)
    assert {name for name in names if name.endswith(".py")} == expected()
    data = {f"rope_cpu/models/data/{name}" for name in ("llama3.1-8b.json", "SOURCES.md")}
    assert {"rope_cpu/py.typed", *data} <= names
    assert {name.split("/")[0] for name in names} == {
        "rope_cpu",
        f"rope_cpu-{rope_cpu.__version__}.dist-info",
    }


@pytest.fixture(scope="module")
def sdist(tree, build, tmp_path_factory):
    return build(tree, "sdist", tmp_path_factory.mktemp("sdist"))


def test_sdist_holds_every_file_once(tree, sdist):
    """Also the tests, the manual and the notes, and none a second time through the links.

    The example server is a package of its own, with a model.
    """
    with tarfile.open(sdist) as file:
        names = sorted(
            name.partition("/")[2] for name in file.getnames() if file.getmember(name).isfile()
        )
    generated = ("PKG-INFO", "setup.cfg", "rope_cpu.egg-info/")
    held = [name for name in names if not name.startswith(generated)]
    links = ("rope_cpu/export/", "rope_cpu/bench/")
    left_out = (*links, "examples/server/", "build/", "rope_cpu.egg-info/")
    files = [str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()]
    assert held == sorted(name for name in files if not name.startswith(left_out))


def test_editable_install_finds_every_part(tree, build, run_program, tmp_path):
    link = build(tree, "editable", tmp_path)
    site = tmp_path / "site"
    with zipfile.ZipFile(link) as file:
        file.extractall(site)
    # With -S no .pth file of this environment runs, so an editable install of rope_cpu in it is not
    # found.
    code = (
        f"import site, sys; site.addsitedir({str(site)!r})\n"
        f"sys.path.append({sysconfig.get_path('purelib')!r})\n"
        # Ahead of a rope_cpu that is installed for these tests.
        "def is_other(finder): return '__editable__' not in getattr(finder, '__module__', '')\n"
        "sys.meta_path.sort(key=is_other)\n"
        "import rope_cpu, rope_cpu.export, rope_cpu.bench\n"
        "print(rope_cpu.__file__, rope_cpu.export.__file__, rope_cpu.bench.__file__)"
    )
    assert run_program(code, "-S")[0].count(str(tree)) == 3


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an sdist holds no links")
def test_links_lead_to_the_parts():
    """Tools that run from the repository root find the parts through these links."""
    for part in ("export", "bench"):
        link = ROOT / "rope_cpu" / part
        assert link.is_symlink()
        assert os.readlink(link) == f"../{part}"


def test_nothing_imports_the_commands():
    importing = {
        str(path.relative_to(ROOT))
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
        if "rope_cpu.cli" in path.read_text() and "cli" not in path.parts[:-1]
    }
    assert importing == {"rope_cpu/__main__.py"}
