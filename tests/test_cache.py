"""Compiled kernels on disk: found by those that come after, never taken for others, done without where need be."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import platformdirs
import pytest

from rope_cpu._kernels import cache

PROGRAM = """
    import sys, warnings
    import numpy as np
    import rope_cpu
    x = np.random.default_rng(0).standard_normal((1, 900, 8, 128)).astype(np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print(rope_cpu.RotaryEmbedding(128).rotate(x).astype(float).sum())
    print("numba" in sys.modules)
    for warning in caught:
        print(warning.message)
"""


def python(program, folder, within=None, **variables):
    """Run a program with its kernels in a folder; return the lines that it prints."""
    start, variables = [sys.executable, "-c", textwrap.dedent(program)], {"NUMBA_CACHE_DIR": str(folder)} | variables
    result = subprocess.run(start, capture_output=True, text=True, timeout=300, env=os.environ | variables, cwd=within)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def run(folder, more="", within=None, **variables):
    """Rotate in another process; return the sum, whether Numba was loaded, and further lines."""
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(more)
    rotated, loaded, *rest = python(program, folder, within, **variables)
    return float(rotated), loaded == "True", rest


def files(folder):
    return sorted(folder.rglob("*.o"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder that holds the kernels of a rotation, and what it gave."""
    folder = tmp_path_factory.mktemp("cache")
    rotated, loaded, rest = run(folder)
    assert loaded
    assert rest == []
    return folder, rotated


def test_a_process_that_finds_its_kernels_does_without_numba(filled):
    folder, rotated = filled
    held = files(folder)
    assert run(folder) == (rotated, False, [])
    assert files(folder) == held
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == held  # nothing half written is left


def test_what_is_compiled_after_that_finds_numba(filled):
    """By us, where a kernel is missing, or by others."""
    more = """
    print(np.abs(rope_cpu.RotaryEmbedding(128).rotate(x.astype(float)) - rope_cpu.RotaryEmbedding(128).rotate(x)).max())
    import numba
    print(numba.njit(lambda a: np.sort(a.ravel())[-1])(x) == x.max())
    """
    _, loaded, (error, agrees) = run(filled[0], more)
    assert not loaded
    assert float(error) < 1e-5
    assert agrees == "True"


def test_options_of_numba_are_told_apart(tmp_path):
    """What is compiled for other processors or not at all optimised is of other files."""
    kept, sums = [], set()
    for options in ({}, {"NUMBA_OPT": "0"}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, {}):
        rotated, loaded, _ = run(tmp_path, **options)
        kept.append((len(files(tmp_path)), loaded))
        sums.add(round(rotated, 2))
    one = kept[0][0]
    assert kept == [(one, True), (2 * one, True), (3 * one, True), (3 * one, False)]
    assert len(sums) == 1


def test_a_file_of_options_of_numba_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = cache._machine.__wrapped__()
    (tmp_path / ".numba_config.yaml").write_bytes(b"opt: 0 # \xff")
    assert cache._machine.__wrapped__() != before


def test_the_compiler_may_be_switched_off_for_others(filled, tmp_path):
    for folder in (filled[0], tmp_path):
        assert run(folder, NUMBA_DISABLE_JIT="1")[0] == filled[1]


def _flipped(content):
    return content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:]


@pytest.mark.parametrize(
    "broken", [lambda content: b"", lambda content: content[:-1], lambda content: b"\0" * 32 + content[32:], _flipped]
)
def test_a_broken_file_is_written_anew(filled, tmp_path, broken):
    folder, rotated = filled
    own = tmp_path / "own"
    for path in files(folder):
        target = own / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(broken(path.read_bytes()))
    assert run(own) == (rotated, True, [])
    assert run(own) == (rotated, False, [])


def test_a_kernel_is_not_taken_for_another(filled, tmp_path):
    """Where files were renamed, as by hand."""
    folder, rotated = filled
    held = files(folder)
    for path, other in zip(held, held[1:] + held[:1], strict=True):
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(other.read_bytes())
    assert run(tmp_path) == (rotated, True, [])


def test_without_a_folder_every_process_compiles_and_says_so(filled, tmp_path):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        rotated, loaded, warnings = run(tmp_path / "file")
        assert (rotated, loaded) == (filled[1], True)
        assert len(set(warnings)) == 1  # Python shows it once, not for each kernel
        assert "every process compiles them" in warnings[0]
        assert f"{tmp_path / 'file'}" in warnings[0]
        assert "NUMBA_CACHE_DIR" in warnings[0]
    made = "print({m.cache for m in rope_cpu.warmup('float16')})"
    assert run(tmp_path / "file", made)[2][-1] == "{None}"


@pytest.fixture
def two_folders(tmp_path, monkeypatch):
    folders = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(cache, "_folders", lambda: iter(folders))
    return folders


def test_a_folder_that_cannot_be_written_is_passed_over(two_folders):
    first, second = two_folders
    first.write_text("")  # a file: nothing can be written below it
    assert cache.keep("kernel", b"code") == second
    assert cache.cached("kernel") == (b"code", second)
    assert cache.cached("other") is None


def test_half_a_file_is_taken_away(two_folders, monkeypatch):
    def fill(self, content):
        self.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.warns(UserWarning, match="No space left"):
        assert cache.keep("kernel", b"code") is None
    assert [list(folder.iterdir()) for folder in two_folders] == [[], []]


def test_the_first_folder_is_preferred(two_folders):
    first, second = two_folders
    assert cache.keep("kernel", b"code") == first
    second.mkdir()
    (path,) = files(first)
    path.rename(second / path.name)
    assert cache.cached("kernel") == (b"code", second)  # as where an image was filled by another user


def test_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside, of_user = cache._folders()
    assert beside == Path(cache.__file__).parent / "__pycache__"
    if sys.platform == "linux":
        assert of_user.is_relative_to(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "said"))
    (said,) = cache._folders()
    assert said.parent == tmp_path / "said"
    assert said.name == of_user.name  # of this installation, as others may share the folder


def test_other_sources_are_other_kernels(two_folders, monkeypatch):
    cache.keep("kernel", b"code")
    monkeypatch.setattr(cache, "_SOURCES", b"other")
    assert cache.cached("kernel") is None


@pytest.fixture
def installed(tmp_path):
    """A copy of the package, in a folder to import it from."""
    folder = tmp_path / "installed"
    shutil.copytree(Path(cache.__file__).parents[1], folder / "rope_cpu", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_a_version_installed_after_the_import_does_not_count(tmp_path, installed):
    """Kernels of the sources that were imported are not taken for those of what is in their place now."""
    form = installed / "rope_cpu/_kernels/form.py"
    program = """
    import sys, numpy as np, rope_cpu
    open({form!r}, "a").write({more!r})
    rope_cpu.RotaryEmbedding(128).rotate(np.ones((1, 3, 2, 128), np.float32))
    print("numba" in sys.modules)
    """
    loaded = []
    for more in ("# of another version", "", ""):
        loaded += python(program.format(form=str(form), more=more), tmp_path / "cache", installed)
    assert loaded == ["True", "True", "False"]


def test_without_sources_nothing_is_cached(tmp_path, installed, filled):
    """Versions cannot be told apart, as where the package is in an archive."""
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", installed)
    rotated, loaded, warnings = run(tmp_path / "cache", within=tmp_path, PYTHONPATH=archive)
    assert (rotated, loaded) == (filled[1], True)
    assert len(set(warnings)) == 1
    assert "their sources" in warnings[0]
    assert files(tmp_path) == []


@pytest.mark.parametrize("home", [RuntimeError("could not determine the home directory"), Path("~/.cache")])
def test_who_has_no_home_has_no_cache_of_a_user(monkeypatch, home):
    def user_cache_path(*_, **__):
        if isinstance(home, Exception):
            raise home
        return home

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", user_cache_path)
    assert list(cache._folders()) == [Path(cache.__file__).parent / "__pycache__"]


def test_a_kernel_that_cannot_be_cached_is_compiled_once(tmp_path):
    """By all threads of a process together, and where warnings are errors."""
    (tmp_path / "file").write_text("")
    more = """
    import threading
    from rope_cpu._kernels import compiler
    compiled, real = [], compiler.object_code
    compiler.object_code = lambda name, write: (compiled.append(name), real(name, write))[1]
    small, rope = x[:, :3].astype(float), rope_cpu.RotaryEmbedding(128)
    warnings.simplefilter("error")
    said = []
    def first():
        for _ in range(4):
            try:
                rope.rotate(small)
            except UserWarning as warning:
                said.append(warning)
    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    rope.rotate(small)
    print(len(compiled) == len(set(compiled)) == len(said))
    """
    assert run(tmp_path / "file", more)[2][-1] == "True"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_warming_up_one_dtype_is_enough_for_it(tmp_path, dtype):
    python(f"import rope_cpu; rope_cpu.warmup({dtype!r})", tmp_path)
    use = f"""
    import sys, ml_dtypes, numpy as np, rope_cpu
    x = np.ones((2, 900, 4, 128), {dtype!r})
    for settings in ({{}}, {{"angle_dtype": "float32"}}, {{"interleaved": True}}):
        rope = rope_cpu.RotaryEmbedding(128, **settings)
        for far in (0, 10**9):
            plan = rope.plan(np.arange(900) + far)
            plan(x, x), plan.rotate(x), rope(x, x), rope.rotate(x[:, :1], offset=5)
            rope.shift(x, far + 1), rope.cos_sin(np.arange(3) + far, x.dtype)
    print("numba" in sys.modules)
    """
    assert python(use, tmp_path) == ["False"]


def test_processes_that_fill_a_cache_at_once(tmp_path, filled):
    program, variables = textwrap.dedent(PROGRAM), os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    start = [sys.executable, "-c", program]
    running = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True, env=variables) for _ in range(4)]
    assert {float(process.communicate()[0].splitlines()[0]) for process in running} == {filled[1]}
    assert run(tmp_path) == (filled[1], False, [])
