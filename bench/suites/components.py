"""What is timed besides rotations: angles, plans, shifted keys, weights, graphs, start-up."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu import RotaryEmbedding, reference
from rope_cpu.tolerance import compare, table_bound

from ..implementations.base import UnavailableError
from ..measurement.case import Case, Contender, Ready
from ..measurement.timing import Effort
from ..workload import DTYPES, Array
from ..workload import memory as memory_of
from .contenders import limits, memory
from .rotations import inv_freq


def _rope(interleaved: bool = False) -> RotaryEmbedding:
    return RotaryEmbedding.from_inv_freq(inv_freq(128), interleaved=interleaved)


def cases() -> list[Case]:
    """Return the cases of everything that is not a rotation of q and k."""
    long = Effort(budget=3.0)
    starts = Effort(budget=4.0, least=6, most=13)
    keys = "4096 cached keys of 8 heads of 128, shifted in place"
    return [
        Case("angles-4096", "cos and sin of 4096 positions, 64 pairs, float32", partial(_angles, 4096)),
        Case("angles-131072", "cos and sin of 131072 positions, 64 pairs", partial(_angles, 131072), effort=long),
        Case("angles-axes", "the same of 131072 positions on three axes", partial(_angles, 131072, 3), effort=long),
        Case("plan-64", "a plan of one token of 64 sequences", partial(_plan, np.arange(64)[:, None])),
        Case("plan-4096", "a plan of 4096 tokens", partial(_plan, np.arange(4096))),
        Case("shift/bfloat16", keys, partial(_shift, "bfloat16")),
        Case("shift/float32", keys, partial(_shift, "float32")),
        Case("convert", "a 4096 by 4096 float32 projection weight, 32 heads, made half-split", _convert),
        Case("export", "an ONNX graph of a rotation, in memory", _export),
        Case("import", "a new Python process that imports one module", _imports, effort=starts),
    ]


def _angles(count: int, axes: int = 1) -> list[Contender]:
    # Pairs turn with one axis each, as those of multimodal models do.
    omega = _rope().inv_freq * (np.arange(64) % axes == np.arange(axes)[:, None])
    rope = RotaryEmbedding.from_inv_freq(omega if axes > 1 else omega[0])
    ids = np.arange(count)[:, None] + np.arange(axes)
    given = ids if axes > 1 else ids[:, 0]
    bytes_accessed = count * rope.rotary_dim * 4 + ids.nbytes

    def numpy_form(given: Array) -> tuple[Array, Array]:
        angle = given.reshape(ids.shape) @ omega
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def preallocated() -> Ready:
        out = np.zeros((count, 64), np.float32), np.zeros((count, 64), np.float32)
        return Ready(partial(rope.cos_sin, out=out), [(given,)], bytes_accessed, error)

    def error(returned: Any) -> float:
        some = np.linspace(0, count - 1, 64).astype(int)
        exact = reference.cos_sin(rope.spec, ids[some][None])
        rounded = np.abs(ids[some] @ omega) * 2.0**-53  # what float64 forms lose of the angle
        found = zip(returned, exact, strict=True)
        return max(
            compare(e.error(table[some][None, :, None]), table_bound(e.high, 1.0) + rounded[None, :, None])[1]
            for table, e in found
        )

    return [
        Contender("cos_sin", "ours", lambda: Ready(rope.cos_sin, [(given,)], bytes_accessed, error, new=True)),
        Contender("cos_sin into arrays preallocated", "ours", preallocated),
        Contender("NumPy float64, cast", "peer", lambda: Ready(numpy_form, [(given,)], bytes_accessed, error)),
        *limits(bytes_accessed),
        memory(bytes_accessed),
    ]


def _plan(ids: Array) -> list[Contender]:
    rope = _rope()
    bytes_accessed = ids.size * rope.rotary_dim * 4 + ids.nbytes
    return [
        Contender("plan", "ours", lambda: Ready(rope.plan, [(ids,)], bytes_accessed, new=True)),
        *limits(bytes_accessed),
        memory(bytes_accessed),
    ]


def _shift(dtype: str) -> list[Contender]:
    rope = _rope()
    size = 4096 * 8 * 128 * DTYPES[dtype].itemsize
    keys = memory_of(size).view(DTYPES[dtype]).reshape(1, 4096, 8, 128)
    keys[:] = np.random.default_rng(7).standard_normal(keys.shape[2:]).astype(keys.dtype)
    before = keys[:, :1].copy()

    def shift(keys: Array) -> Array:
        return rope.shift(keys, -256, out=keys)

    def error(returned: Array) -> float:
        exact, bound = reference.rotation(rope.spec, before, np.array([[-256]]))
        return compare(exact.error(returned[:, :1]), bound)[1]

    return [Contender("shift", "ours", lambda: Ready(shift, [(keys,)], 2 * size, error)), *limits(2 * size)]


def _convert() -> list[Contender]:
    weight = memory_of(4096 * 4096 * 4).view(np.float32).reshape(4096, 4096)
    weight[:] = np.arange(4096, dtype=np.float32)[:, None]

    def numpy_form(w: Array) -> Array:
        halves: Array = w.reshape(32, 64, 2, 4096).swapaxes(1, 2).reshape(4096, 4096)
        return halves

    def error(returned: Array) -> float:
        rows = np.arange(4096).reshape(32, 64, 2).swapaxes(1, 2).ravel()
        return 0.0 if np.array_equal(returned[:, 0], weight[rows, 0]) else float("inf")

    def ours(w: Array) -> Array:
        return rope_cpu.convert_weight(w, 32, to="half")

    sets, bytes_accessed = [(weight,)], 2 * weight.nbytes
    return [
        Contender("convert_weight", "ours", lambda: Ready(ours, sets, bytes_accessed, error, new=True)),
        Contender("NumPy reshape", "peer", lambda: Ready(numpy_form, sets, bytes_accessed, error)),
        *limits(bytes_accessed),
        memory(bytes_accessed // 2),
    ]


def _export() -> list[Contender]:
    def bind(target: str) -> Ready:
        if find_spec("onnx") is None:
            raise UnavailableError("onnx is not installed")
        from rope_cpu import export

        return Ready(partial(export.export_rope, _rope(), target=target), [()])

    targets = "onnx", "primitive", "ort"
    return [Contender(f"export_rope {target}", "ours", partial(bind, target)) for target in targets]


def _imports() -> list[Contender]:
    def bind(module: str) -> Ready:
        return Ready(partial(subprocess.run, [sys.executable, "-c", f"import {module}"], check=True), [()])

    roles: dict[str, str] = {"rope_cpu": "ours", "numba": "peer"}
    return [Contender(f"import {module}", role, partial(bind, module)) for module, role in roles.items()]
