"""The environment of a run: processor, caches, threads, versions."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import rope_cpu
from rope_cpu.launch.rotate import caches

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
_GOVERNOR = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"

# More bytes than any machine has.
_UNKNOWN_MEMORY = 2**62


def record() -> dict[str, Any]:
    """Return the environment of a run, in types of JSON."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": _cores(),
        "governor": _text_of_file(_GOVERNOR).strip() or "unknown",
        "caches": caches(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "threads": rope_cpu.get_num_threads(),
        "versions": _versions(),
        "settings": _settings(),
    }


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Return the available memory in bytes; a huge number if it is unknown."""
    available = _system_value("/proc/meminfo", "MemAvailable")
    if not available:
        return _UNKNOWN_MEMORY
    return int(available.removesuffix(" kB")) * 1024


def _processor() -> str:
    model_name = _system_value("/proc/cpuinfo", "model name")
    return model_name or platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"rope-cpu": rope_cpu.__version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _settings() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}


def _system_value(path: str, name: str) -> str:
    """Return the first value of a name in a file of lines `name: value`; "" if there is none."""
    for line in _text_of_file(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _text_of_file(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
