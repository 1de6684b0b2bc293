"""What a timing depends on besides the code: processor, caches, threads, versions."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import rope_cpu
from rope_cpu.machine import caches, cores

_PACKAGES = (
    "numpy",
    "numba",
    "llvmlite",
    "ml_dtypes",
    "torch",
    "transformers",
    "jax",
    "onnx",
    "onnxruntime",
)
_SETTINGS = ("NUMBA_", "OMP_", "ROPE_CPU_")


def record() -> dict[str, Any]:
    """Return the environment of a run, as JSON can hold it."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _system_value("/proc/cpuinfo", "model name")
        or platform.processor()
        or platform.machine(),
        "cores": cores(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
        or "unknown",
        "caches": caches(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "threads": rope_cpu.get_num_threads(),
        "versions": _versions(),
        "settings": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)
        },
    }


def available_memory() -> int:
    """Return how many bytes of memory are free to use; a large number where that is unknown."""
    kibibytes = _system_value("/proc/meminfo", "MemAvailable").removesuffix(" kB")
    return int(kibibytes) * 1024 if kibibytes else 2**62


def _versions() -> dict[str, str]:
    found = {"rope-cpu": rope_cpu.__version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _system_value(path: str, name: str) -> str:
    """Return the first value of a name in a file of lines `name: value`, or nothing."""
    lines = (line.partition(":") for line in _read(path).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
