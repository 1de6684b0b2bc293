"""What a timing depends on besides the code: processor, caches, threads, versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import rope_cpu
from rope_cpu.machine import caches, cores

_CPU = Path("/sys/devices/system/cpu/cpu0")
_PACKAGES = (
    *("rope-cpu", "numpy", "numba", "llvmlite", "ml_dtypes"),
    *("torch", "transformers", "jax", "onnx", "onnxruntime"),
)
_SETTINGS = ("NUMBA_", "OMP_", "ROPE_CPU_")


def record() -> dict[str, Any]:
    """Return the environment of a run, as JSON can hold it."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "architecture": platform.machine(),
        "cores": cores(),
        "governor": _read(_CPU / "cpufreq/scaling_governor") or "unknown",
        "caches": caches(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "threads": rope_cpu.get_num_threads(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


@cache
def processor() -> str:
    """Return the processor's name."""
    lines = (_read(Path("/proc/cpuinfo")) or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def available_memory() -> int:
    """Return how many bytes of memory are free to use; a large number where the system does not say."""
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return rope_cpu.__version__ if package == "rope-cpu" else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
