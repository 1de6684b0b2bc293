"""Compiled kernels in Numba's cache on disk: later processes find them and never mix them up."""

import ast
import functools
import hashlib
import itertools
import logging
import os
import platform
import re
import shutil
import sys
import textwrap
from pathlib import Path

import numba
import numpy as np
import pytest
from fewer_cases import sample
from numba import config, types
from numba.core.errors import TypingError
from numba.core.registry import CPUDispatcher

import rope_cpu
from rope_cpu.kernels import compile as compiling

ONE_KERNEL = """
    from rope_cpu.kernels.angles import cos_sin_kernel
    print("loaded" if cos_sin_kernel("float32").stats.cache_hits else "compiled")
"""


@pytest.fixture
def installed(tmp_path):
    """A folder with a copy of the library, for PYTHONPATH."""
    folder = tmp_path / "installed"
    ignored = shutil.ignore_patterns("__pycache__", "export", "bench")
    shutil.copytree(Path(rope_cpu.__file__).parent, folder / "rope_cpu", ignore=ignored)
    return folder


@pytest.mark.processes
def test_a_kernel_is_compiled_once_for_each_processor_and_source(tmp_path, installed, run_program):
    def found(**settings):
        environment = {"PYTHONPATH": str(installed), "NUMBA_CACHE_DIR": str(tmp_path), **settings}
        return run_program(ONE_KERNEL, env=environment)[0].strip()

    other = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    assert [found(), found()] == ["compiled", "loaded"]
    assert [found(**other), found(**other)] == ["compiled", "loaded"]
    with (installed / "rope_cpu/kernels/vectors.py").open("a") as file:
        file.write("# of another version\n")
    assert found() == "compiled"


COMPILED = """
    import rope_cpu
    made = rope_cpu.warmup("float32", "bfloat16")
    print({kernel.name for kernel in made if kernel.compiled})
"""
MANUAL = Path(__file__).parents[2] / "docs" / "threads.md"


def copy_at_another_time(source, target):
    shutil.copyfile(source, target)
    os.utime(target, (1e9, 1e9))


@pytest.mark.processes
@pytest.mark.skipif(numba.version_info < (0, 68), reason="Numba compares times of files")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the manual names an x86-64")
def test_a_cache_filled_in_an_image_is_found_in_its_containers(tmp_path, installed, run_program):
    """By the lines of the manual. Layers of an image keep paths and contents, but not times."""
    image = re.search(r"^ENV (.*)\nRUN (\S+=\S+) rope-cpu (.*)$", MANUAL.read_text(), re.MULTILINE)
    given, building, command = (text.split() for text in image.groups())
    home = tmp_path / "home"
    container = environment_of(
        installed, HOME=str(home), **dict(name.split("=", 1) for name in given)
    )
    fill = f"from rope_cpu.cli.main import main; main({command})"
    run_program(fill, env=container | dict(name.split("=") for name in building))
    for folder in (installed, home):
        layer = shutil.move(folder, tmp_path / "layer")
        shutil.copytree(layer, folder, copy_function=copy_at_another_time)
        shutil.rmtree(layer)
    found, _ = run_program(COMPILED, env=container)
    assert found == "set()\n"


# The variables that choose the folder of the cache, and that folder; {} is the folder of the test.
CACHE_SETTINGS = {
    "home": ({"HOME": "{}"}, ".cache/rope_cpu"),
    "XDG": ({"HOME": "{}/home", "XDG_CACHE_HOME": "{}/xdg"}, "xdg/rope_cpu"),
    "NUMBA_CACHE_DIR": ({"HOME": "{}/home", "NUMBA_CACHE_DIR": "{}/numba"}, "numba"),
    "locator": (
        {"HOME": "{}/home", "NUMBA_CACHE_LOCATOR_CLASSES": "InTreeCacheLocator"},
        "installed/rope_cpu/kernels/__pycache__",
    ),
}


def environment_of(installed, **variables):
    """Return an environment in which nothing else chooses the folder of the cache."""
    names = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES")
    imports = {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    return dict.fromkeys(names) | imports | variables


def files_in(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(sys.platform == "win32", reason="another variable is the home")
@pytest.mark.parametrize("setting", sample(CACHE_SETTINGS, "home"))
def test_the_cache_is_in_a_folder_of_the_user(setting, tmp_path, installed, run_program):
    """By default no file is written beside the package, where an uninstall would leave it."""
    variables, folder = CACHE_SETTINGS[setting]
    chosen = {name: value.format(tmp_path) for name, value in variables.items()}
    before = files_in(tmp_path)
    environment = environment_of(installed, **chosen)
    assert run_program(ONE_KERNEL, env=environment)[0] == "compiled\n"
    assert run_program(ONE_KERNEL, env=environment)[0] == "loaded\n"
    written = files_in(tmp_path) - before
    assert sorted(path.suffix for path in written) == [".nbc", ".nbi"]
    assert all(path.is_relative_to(tmp_path / folder) for path in written)


@pytest.mark.processes
def test_without_a_home_no_kernel_is_cached_beside_the_package(installed, run_program):
    before = files_in(installed)
    environment = environment_of(installed, XDG_CACHE_HOME=os.devnull)
    out, err = run_program(ONE_KERNEL, env=environment)
    assert out == "compiled\n"
    assert "no folder for the kernel cache of rope_cpu can be written" in err
    assert files_in(installed) == before


@pytest.mark.processes
def test_without_a_home_the_warning_may_be_an_error(installed, run_program):
    """The first call works as the second one does, and the text is logged."""
    program = """
    import warnings
    warnings.simplefilter("error", UserWarning)
    import numpy as np, rope_cpu
    rope = rope_cpu.RotaryEmbedding(8)
    print([rope.cos_sin([0])[0].sum() for _ in range(2)])
    """
    out, err = run_program(program, env=environment_of(installed, XDG_CACHE_HOME=os.devnull))
    assert out == "[np.float32(4.0), np.float32(4.0)]\n"
    assert err.count("no folder for the kernel cache of rope_cpu can be written") == 1


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="another variable is the home")
@pytest.mark.parametrize("suffix", [".zip", ".whl", ".pyz"])
def test_kernels_of_an_archive_are_cached(suffix, tmp_path, installed, run_program):
    """In the same folder, for each version of the sources."""
    archive = tmp_path / f"archive{suffix}"

    def found():
        shutil.make_archive(str(tmp_path / "packed"), "zip", installed)
        (tmp_path / "packed.zip").rename(archive)
        environment = environment_of(archive, XDG_CACHE_HOME=str(tmp_path / "caches"))
        return [run_program(ONE_KERNEL, env=environment)[0].strip() for _ in range(2)]

    assert found() == ["compiled", "loaded"]
    first = files_in(tmp_path / "caches" / "rope_cpu")
    with (installed / "rope_cpu/kernels/vectors.py").open("a") as file:
        file.write("# of another version\n")
    assert found() == ["compiled", "loaded"]
    assert len(files_in(tmp_path / "caches" / "rope_cpu") - first) == 2
    clear = environment_of(archive, XDG_CACHE_HOME=str(tmp_path / "caches"))
    assert run_program(CLEAR, env=clear)[0].startswith("4 files")


@pytest.mark.processes
def test_without_a_folder_of_sources(run_program):
    """PyInstaller puts modules into its executable."""
    program = """
    import pathlib
    from importlib import resources
    found = resources.files
    resources.files = lambda x: pathlib.Path("none") if x == "rope_cpu.kernels" else found(x)
    import rope_cpu
    print(rope_cpu.RotaryEmbedding(8).rotary_dim)
    """
    assert run_program(program)[0] == "8\n"


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="no modes")
def test_nobody_else_may_write_to_the_cache(tmp_path, installed, run_program):
    program = f"import os; os.umask(0)\n{textwrap.dedent(ONE_KERNEL)}"
    run_program(program, env=environment_of(installed, XDG_CACHE_HOME=str(tmp_path)))
    assert (tmp_path / "rope_cpu").stat().st_mode & 0o777 == 0o700


# A module that is imported while the cache of a kernel is enabled, before and afterwards.
OTHER_PROGRAM = """
    from numba import njit

    @njit(cache=True)
    def increment(x):
        return x + 1

    found = increment(41), increment.stats.cache_path
"""
IMPORTS_OTHER = """
    import importlib, other
    from numba.core.registry import CPUDispatcher

    enable_caching = CPUDispatcher.enable_caching
    def and_import_other(dispatcher):
        CPUDispatcher.enable_caching = enable_caching
        print(importlib.reload(other).found)
        enable_caching(dispatcher)

    print(other.found)
    CPUDispatcher.enable_caching = and_import_other
    from rope_cpu.kernels.angles import cos_sin_kernel
    cos_sin_kernel("float32")
    print(importlib.reload(other).found)
"""


@pytest.mark.processes
def test_functions_of_other_programs_keep_their_cache(tmp_path, installed, run_program):
    """One that is decorated while the cache of a kernel is enabled is cached with the kernels."""
    (installed / "other.py").write_text(textwrap.dedent(OTHER_PROGRAM))
    environment = environment_of(installed, XDG_CACHE_HOME=str(tmp_path))
    lines = run_program(IMPORTS_OTHER, env=environment)[0].splitlines()
    before, meanwhile, after = (ast.literal_eval(line) for line in lines)
    assert before == after == (42, str(installed / "__pycache__"))
    assert meanwhile[0] == 42
    assert Path(meanwhile[1]).parent == tmp_path / "rope_cpu"


ROTATE = """
    import hashlib, numpy as np, ml_dtypes, rope_cpu
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 66))
    order = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in (False, True)]
    for dtype, kind in ORDER:
        rope = rope_cpu.RotaryEmbedding(66, interleaved=kind)
        cast = x.astype(dtype)
        rotated = rope.rotate(cast)
        apply = rope_cpu.apply_rotary(cast, *rope.cos_sin(np.arange(5)), interleaved=kind)
        assert apply.tobytes() == rotated.tobytes(), (dtype, kind)
        print(dtype, kind, hashlib.sha256(rotated.tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def expected():
    """The lines of ROTATE by the kernels of this process, whose cache is another."""
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 66))
    lines = set()
    for dtype, kind in itertools.product(("float32", "bfloat16"), (False, True)):
        rotated = rope_cpu.RotaryEmbedding(66, interleaved=kind).rotate(x.astype(dtype))
        lines.add(f"{dtype} {kind} {hashlib.sha256(rotated.tobytes()).hexdigest()}")
    return lines


@pytest.mark.processes
def test_kernels_of_several_processes_are_not_taken_for_each_other(tmp_path, run_program, expected):
    """Each process counts its functions from the start, so kernels may share a number."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    for one in range(len(expected)):
        run_program(ROTATE.replace("ORDER", f"order[{one}:{one + 1}]"), env=cache)
    assert set(run_program(ROTATE.replace("ORDER", "order"), env=cache)[0].splitlines()) == expected


@pytest.mark.nightly
def test_processes_that_fill_a_cache_at_once(tmp_path, run_program, expected):
    cache, orders = {"NUMBA_CACHE_DIR": str(tmp_path)}, ("order[:2]", "order[:2]", "order[1::-1]")
    running = [run_program.start(ROTATE.replace("ORDER", order), env=cache) for order in orders]
    found = [process.communicate(timeout=300) for process in running]
    found.append(run_program(ROTATE.replace("ORDER", "order[:2]"), env=cache))
    for out, err in found:
        assert set(out.splitlines()) == {line for line in expected if line.startswith("float32")}, (
            err
        )


CLEAR = "from rope_cpu.cli.main import main; main(['warmup', '--clear'])"


def deleted(*files):
    size = sum(path.stat().st_size for path in files)
    return f"{len(files)} files, {size / 1e6:.1f} MB deleted from"


@pytest.mark.processes
def test_clear_deletes_the_kernels_of_all_versions_and_nothing_else(
    tmp_path, installed, run_program
):
    """Those of earlier versions of the sources, and those that were cached beside the package."""
    shared = environment_of(installed, NUMBA_CACHE_DIR=str(tmp_path / "shared"))
    beside = environment_of(installed, NUMBA_CACHE_LOCATOR_CLASSES="InTreeCacheLocator")
    before = files_in(tmp_path)
    run_program(ONE_KERNEL, env=shared)
    run_program(ONE_KERNEL, env=beside)
    with (installed / "rope_cpu/kernels/vectors.py").open("a") as file:
        file.write("# of another version\n")
    run_program(ONE_KERNEL, env=shared)

    (folder,) = (tmp_path / "shared").iterdir()
    kernels = files_in(folder)
    old = files_in(tmp_path) - before - kernels
    assert (len(kernels), len(old)) == (4, 2)
    (folder / "other.increment-4.py311.nbi").touch()
    (folder / "other.increment-4.py311.1.nbc").touch()
    others = files_in(tmp_path) - kernels - old

    expected = [
        f"{deleted(*kernels)} {folder}",
        f"{deleted(*old)} {installed / 'rope_cpu/kernels/__pycache__'}",
    ]
    assert run_program(CLEAR, env=shared)[0].splitlines() == expected
    assert files_in(tmp_path) == others
    assert run_program(CLEAR, env=shared)[0].count("0 files, 0.0 MB deleted from") == 2
    assert run_program(ONE_KERNEL, env=shared)[0] == "compiled\n"


@pytest.mark.processes
def test_clear_counts_a_folder_once(installed, run_program):
    beside = environment_of(installed, NUMBA_CACHE_LOCATOR_CLASSES="InTreeCacheLocator")
    run_program(ONE_KERNEL, env=beside)
    folder = installed / "rope_cpu/kernels/__pycache__"
    expected = f"{deleted(*folder.iterdir())} {folder}\n"
    assert run_program(CLEAR, env=beside)[0] == expected


def test_without_a_folder_for_the_cache_clear_searches_beside_the_package(installed, run_program):
    environment = environment_of(installed, XDG_CACHE_HOME=os.devnull)
    out, _ = run_program(CLEAR, env=environment)
    assert out == f"{deleted()} {installed / 'rope_cpu/kernels/__pycache__'}\n"


def increment(x):
    return x + 1


def compiled_increment():
    """Compile a kernel of its own, or load it from the cache; return whether it was loaded."""
    kernel = compiling.compile_kernel(increment, "increment", (types.intp,))
    assert kernel(41) == 42
    return bool(kernel.stats.cache_hits)


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """An empty cache of this test alone, which no warning has named yet."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_warned", set())
    return tmp_path


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "garbage": lambda content: bytes(range(255, 0, -1)) * (len(content) // 255 + 1),
}


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_once_and_done_without(cache_folder, suffix, damage):
    assert [compiled_increment(), compiled_increment()] == [False, True]
    (damaged,) = cache_folder.rglob(f"*{suffix}")
    damaged.write_bytes(DAMAGES[damage](damaged.read_bytes()))
    with pytest.warns(UserWarning, match="delete that folder") as warned:
        assert [compiled_increment(), compiled_increment()] == [False, False]
    assert len(warned) == 1
    assert str(damaged.parent) in str(warned[0].message)


def test_the_first_compilation_of_a_process_is_announced(cache_folder, monkeypatch, caplog):
    """The message comes before the wait, once, and not for kernels that the cache holds."""
    monkeypatch.setattr(compiling, "_log_once", functools.cache(compiling._log_once.__wrapped__))
    caplog.set_level(logging.INFO, "rope_cpu")
    assert not compiled_increment()
    compiling.compile_kernel(increment, "other", (types.intp,))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("rope_cpu", "INFO")
    assert all(word in record.message for word in ("seconds", str(cache_folder)))
    compiling._log_once.cache_clear()
    assert compiled_increment()
    assert len(caplog.records) == 1


def test_an_unreadable_file_is_done_without(cache_folder):
    compiled_increment()
    (index,) = cache_folder.rglob("*.nbi")
    index.unlink()
    index.mkdir()
    with pytest.warns(UserWarning, match=re.escape(str(index.parent))):
        assert not compiled_increment()


def test_an_error_of_the_compiler_is_not_taken_for_one_of_the_cache(cache_folder):
    with pytest.raises(TypingError):
        compiling.compile_kernel(lambda x: x.no_such_attribute, "wrong", (types.intp,))


def test_without_a_folder_every_process_compiles_and_says_so(monkeypatch, cache_folder):
    def no_locator(self):
        raise RuntimeError("cannot cache function 'increment': no locator available for file")

    monkeypatch.setattr(CPUDispatcher, "enable_caching", no_locator)
    with pytest.warns(UserWarning, match="no folder .* every process compiles .* NUMBA_CACHE_DIR"):
        assert not compiled_increment()


# Writing the kernels fails, by a full file system or by a limit on the size of files.
ON_A_FULL_DISK = """
    import resource, warnings
    import numpy as np
    import rope_cpu
    if LIMITED:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        cos, sin = rope_cpu.RotaryEmbedding(64).cos_sin(np.arange(9))
        wide, _ = rope_cpu.RotaryEmbedding(64).cos_sin(np.arange(9), np.float64)
    assert np.abs(cos**2 + sin**2 - 1).max() < 2.0**-22
    assert np.array_equal(cos, wide.astype(np.float32))
    print(len(warned), warned[0].message)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of files")
def test_where_files_cannot_be_written_kernels_run_all_the_same(tmp_path, run_program):
    program = ON_A_FULL_DISK.replace("LIMITED", "True")
    out, _ = run_program(program, env={"NUMBA_CACHE_DIR": str(tmp_path)})
    assert out.startswith("1 the kernel cache of rope_cpu in")
    assert f"{tmp_path}" in out
    assert "OSError: [Errno 27]" in out


def test_a_compiler_that_is_switched_off_is_named(run_program):
    program = (
        "import numpy as np, rope_cpu; rope_cpu.RotaryEmbedding(8).rotate(np.ones((1, 1, 1, 8)))"
    )
    _, err = run_program(program, env={"NUMBA_DISABLE_JIT": "1"}, exits=1, timeout=60)
    assert "RuntimeError: NUMBA_DISABLE_JIT is set" in err
