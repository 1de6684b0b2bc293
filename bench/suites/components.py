"""What is timed besides rotations: angles, plans, shifted keys, weights, graphs, start-up."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare, table_bound
from rope_cpu.array_types import Array

from ..implementations.base import UnavailableError
from ..measurement.case import Case, Contender, Ready
from ..measurement.timing import Effort
from ..workload import DTYPES, allocate
from .contenders import baselines

_ROPE = RotaryEmbedding(128, rope_theta=5e5)


def cases() -> list[Case]:
    """Return the cases of everything that is not a rotation of q and k."""
    long = Effort(budget=3.0)
    starts = Effort(budget=4.0, least=6, most=13)
    keys = "4096 cached keys of 8 heads of 128, shifted in place"
    return [
        Case(
            "angles-4096",
            "cos and sin of 4096 positions, 64 pairs, float32",
            partial(_angles, 4096),
        ),
        Case(
            "angles-131072",
            "cos and sin of 131072 positions, 64 pairs",
            partial(_angles, 131072),
            effort=long,
        ),
        Case(
            "angles-axes",
            "the same of 131072 positions on three axes",
            partial(_angles, 131072, 3),
            effort=long,
        ),
        Case(
            "plan-64", "a plan of one token of 64 sequences", partial(_plan, np.arange(64)[:, None])
        ),
        Case("plan-4096", "a plan of 4096 tokens", partial(_plan, np.arange(4096))),
        Case("shift/bfloat16", keys, partial(_shift, "bfloat16")),
        Case("shift/float32", keys, partial(_shift, "float32")),
        Case(
            "convert",
            "a 4096 by 4096 float32 projection weight, 32 heads, made half-split",
            _convert,
        ),
        Case("export", "an ONNX graph of a rotation, in memory", _export),
        Case("import", "a new Python process that imports one module", _imports, effort=starts),
    ]


def _angles(count: int, axes: int = 1) -> list[Contender]:
    # Each pair rotates with one axis, as in multimodal models.
    omega = _ROPE.inv_freq * (np.arange(64) % axes == np.arange(axes)[:, None])
    rope = RotaryEmbedding.from_inv_freq(omega if axes > 1 else omega[0])
    ids = np.arange(count)[:, None] + np.arange(axes)
    given = ids if axes > 1 else ids[:, 0]
    bytes_accessed = count * rope.rotary_dim * 4 + ids.nbytes

    def in_numpy(given: Array) -> tuple[Array, Array]:
        angle = given.reshape(ids.shape) @ omega
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def error(returned: Any) -> float:
        some = np.linspace(0, count - 1, 64).astype(int)
        angle_rounding = (
            np.abs(ids[some] @ omega)[None, :, None] * 2.0**-53
        )  # of the peer's float64 angles
        exact = reference.cos_sin(rope.spec, ids[some][None])
        return max(
            compare(e.error(table[some][None, :, None]), table_bound(e.high, 1.0) + angle_rounding)[
                1
            ]
            for table, e in zip(returned, exact, strict=True)
        )

    out = np.zeros((count, 64), np.float32), np.zeros((count, 64), np.float32)
    ready = partial(Ready, sets=[(given,)], bytes_accessed=bytes_accessed, error=error)
    return [
        Contender("cos_sin", "ours", partial(ready, rope.cos_sin, new=True)),
        Contender(
            "cos_sin, preallocated arrays", "ours", partial(ready, partial(rope.cos_sin, out=out))
        ),
        Contender("NumPy float64, cast", "peer", partial(ready, in_numpy)),
        *baselines(bytes_accessed, new_bytes=bytes_accessed),
    ]


def _plan(ids: Array) -> list[Contender]:
    bytes_accessed = ids.size * _ROPE.rotary_dim * 4 + ids.nbytes
    return [
        Contender("plan", "ours", lambda: Ready(_ROPE.plan, [(ids,)], bytes_accessed, new=True)),
        *baselines(bytes_accessed, new_bytes=bytes_accessed),
    ]


def _shift(dtype: str) -> list[Contender]:
    size = 4096 * 8 * 128 * DTYPES[dtype].itemsize
    keys = allocate(size).view(DTYPES[dtype]).reshape(1, 4096, 8, 128)
    keys[:] = np.random.default_rng(7).standard_normal(keys.shape[2:]).astype(keys.dtype)
    before = keys[:, :1].copy()

    def shift(keys: Array) -> Array:
        return _ROPE.shift(keys, -256, out=keys)

    def error(returned: Array) -> float:
        exact, bound = reference.rotation(_ROPE.spec, before, np.array([[-256]]))
        return compare(exact.error(returned[:, :1]), bound)[1]

    return [
        Contender("shift", "ours", lambda: Ready(shift, [(keys,)], 2 * size, error)),
        *baselines(2 * size),
    ]


def _convert() -> list[Contender]:
    weight = allocate(4096 * 4096 * 4).view(np.float32).reshape(4096, 4096)
    weight[:] = np.arange(4096, dtype=np.float32)[:, None]

    def in_numpy(w: Array) -> Array:
        halves: Array = w.reshape(32, 64, 2, 4096).swapaxes(1, 2).reshape(4096, 4096)
        return halves

    def error(returned: Array) -> float:
        rows = np.arange(4096).reshape(32, 64, 2).swapaxes(1, 2).ravel()
        return 0.0 if np.array_equal(returned[:, 0], weight[rows, 0]) else float("inf")

    ours = partial(rope_cpu.convert_weight, num_heads=32, to="half")
    ready = partial(Ready, sets=[(weight,)], bytes_accessed=2 * weight.nbytes, error=error)
    return [
        Contender("convert_weight", "ours", partial(ready, ours, new=True)),
        Contender("NumPy reshape", "peer", partial(ready, in_numpy)),
        *baselines(2 * weight.nbytes, new_bytes=weight.nbytes),
    ]


def _export() -> list[Contender]:
    def bind(target: str) -> Ready:
        if find_spec("onnx") is None:
            raise UnavailableError("onnx is not installed")
        from rope_cpu import export

        return Ready(partial(export.export_rope, _ROPE, target=target), [()])

    targets = "onnx", "primitive", "ort"
    return [Contender(f"export_rope {target}", "ours", partial(bind, target)) for target in targets]


def _imports() -> list[Contender]:
    def bind(module: str) -> Ready:
        return Ready(
            partial(subprocess.run, [sys.executable, "-c", f"import {module}"], check=True), [()]
        )

    roles = {"rope_cpu": "ours", "numba": "peer"}
    return [
        Contender(f"import {module}", role, partial(bind, module)) for module, role in roles.items()
    ]
