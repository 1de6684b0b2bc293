"""Compiled code on disk, for the processes that come after."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

_HERE = Path(__file__).parent
_VARIABLES = ("CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE")
_DIGEST = 32  # bytes


@cache
def _machine() -> bytes:
    """Return all that machine code depends on besides the sources of kernels: the processor, LLVM, Python, options.

    It is written for the sizes of Python's objects, which differ without a GIL.
    """
    processor = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    python = sys.implementation.cache_tag, object.__basicsize__
    options: list[object] = [os.environ.get(f"NUMBA_{name}") for name in _VARIABLES]
    with suppress(OSError):  # Numba looks there as well
        options.append(Path(".numba_config.yaml").read_bytes())
    return repr((processor, python, llvmlite.__version__, options)).encode()


def _digest_of_sources() -> bytes:
    """Return the digest of the files that kernels are written by, empty where there are none, as in an archive."""
    files = [path.name.encode() + path.read_bytes() for path in sorted(_HERE.glob("[!.]*.py*"))]
    return sha256(b"".join(files)).digest() if files else b""


# Taken when they are imported: another version may be installed in their place before the first kernel is compiled.
_SOURCES = _digest_of_sources()


def _digest(name: str, code: bytes) -> bytes:
    """Return what stands before machine code on disk: where it differs, the file is of other sources, or broken."""
    return sha256(_SOURCES + _machine() + name.encode() + code).digest()


def _file(name: str) -> str:
    """Return the name of a kernel's file, one for each machine that shares a folder."""
    return f"{name}.{sha256(_machine()).hexdigest()[:16]}.o"


def _folders() -> Iterator[Path]:
    """Return where kernels may be cached: beside this file, or else in the user's cache, unless a variable says where.

    Several installations may share the latter two. Nowhere without sources, by which versions are told apart.
    """
    if not _SOURCES:
        return
    own = f"rope_cpu_{sha256(str(_HERE).encode()).hexdigest()[:16]}"
    said = os.environ.get("NUMBA_CACHE_DIR")
    if said:
        yield Path(said, own)
        return
    yield _HERE / "__pycache__"
    from platformdirs import user_cache_path  # only where others have not found theirs beside this file

    try:
        of_user = user_cache_path("rope_cpu", appauthor=False)
    except RuntimeError:  # who has no home has none
        return
    if of_user.is_absolute():
        yield of_user / own


def cached(name: str) -> tuple[bytes, Path] | None:
    """Return the machine code of a kernel and the folder that holds it, or None where none does."""
    for folder in _folders():
        try:
            stored = (folder / _file(name)).read_bytes()
        except OSError:
            continue
        code = stored[_DIGEST:]
        if stored[:_DIGEST] == _digest(name, code):
            return code, folder
    return None


def keep(name: str, code: bytes) -> Path | None:
    """Write machine code to the first folder that takes it, and return that; warn and return None where none does."""
    errors = []
    for folder in _folders():
        own = folder / f"{_file(name)}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.write_bytes(_digest(name, code) + code)
            own.replace(folder / _file(name))  # at once: others see a whole file or none
        except OSError as error:
            errors.append(f"{folder}: {error.strerror}")
            with suppress(OSError):
                own.unlink()  # a disk that is full has taken a part of it
            continue
        return folder
    why = "their sources, by which versions are told apart, are not found"
    if _SOURCES:
        why = f"{'; '.join(errors)}; name a folder that can be written in NUMBA_CACHE_DIR"
    warnings.warn(f"kernels cannot be cached, so that every process compiles them: {why}", stacklevel=2)
    return None
