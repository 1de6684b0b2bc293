"""The other cases: angles, plans, shifted keys, weights, ONNX graphs, start-up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare, table_bound
from rope_cpu.array_types import DTYPES, Array

from ..measurement.case import Case, Contender, UnavailableError
from ..measurement.rows import Row
from ..measurement.timing import Call, Effort
from ..workload import Pair, allocate
from .case_names import described
from .contenders import baselines

_PAIRS = 64
_ROPE = RotaryEmbedding(2 * _PAIRS, rope_theta=5e5)

_USUAL_EFFORT = Effort()

# Positions whose cos and sin are compared with the reference.
_CHECKED_POSITIONS = 64


def cases() -> list[Case]:
    """Return the cases of everything that is not a rotation of q and k."""
    long = Effort(budget=3.0)
    process_starts = Effort(budget=4.0, least=6, most=13)
    decode_ids = np.arange(64)[:, None]
    # Seconds by which slow calls exceed the budget: a hundred thousand cosines of NumPy, processes.
    return [
        _case("angles-4096", "64 pairs, float32", partial(_angles, 4096)),
        _case("angles-131072", "64 pairs", partial(_angles, 131072), long, 6.0),
        _case("angles-axes", "64 pairs", partial(_angles, 131072, 3), long, 6.0),
        _case("plan-64", "64 pairs", partial(_plan, decode_ids)),
        _case("plan-4096", "64 pairs", partial(_plan, np.arange(4096))),
        _case("shift/bfloat16", "8 heads of 128, in place", partial(_shift, "bfloat16")),
        _case("shift/float32", "8 heads of 128, in place", partial(_shift, "float32")),
        _case("convert", "4096 by 4096, float32, 32 heads", _convert, overrun=1.5),
        _case("export", "in memory", _export),
        _case("import", "rope_cpu or numba", _imports, process_starts, 6.0),
    ]


def _case(
    name: str,
    details: str,
    contenders: Callable[[], list[Contender]],
    effort: Effort = _USUAL_EFFORT,
    overrun: float = 0.0,
) -> Case:
    return Case(name, described(name, details), contenders, effort=effort, overrun=overrun)


def _angles(count: int, axes: int = 1) -> list[Contender]:
    # Each pair rotates with one axis, as in multimodal models.
    omega = _ROPE.inv_freq * (np.arange(_PAIRS) % axes == np.arange(axes)[:, None])
    rope = RotaryEmbedding.from_inv_freq(omega if axes > 1 else omega[0])
    coordinates = np.arange(count)[:, None] + np.arange(axes)
    position_ids = coordinates if axes > 1 else coordinates[:, 0]
    bytes_accessed = count * rope.rotary_dim * 4 + coordinates.nbytes

    def in_numpy(ids: Array) -> Pair:
        angles = ids.reshape(coordinates.shape) @ omega
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def error(returned: Any) -> float:
        checked = np.linspace(0, count - 1, _CHECKED_POSITIONS).astype(int)
        ids = coordinates[checked]
        # The float64 angles of the peer are rounded.
        angle_rounding = np.abs(ids @ omega)[None, :, None] * 2.0**-53
        fractions = []
        for table, exact in zip(returned, reference.cos_sin(rope.spec, ids[None]), strict=True):
            bound = table_bound(exact.high, 1.0) + angle_rounding
            _, fraction = compare(exact.error(table[checked][None, :, None]), bound)
            fractions.append(fraction)
        return max(fractions)

    def call(function: Any, allocates: bool = False) -> Call:
        return Call(function, [(position_ids,)], bytes_accessed, error, allocates=allocates)

    out = (np.zeros((count, _PAIRS), np.float32), np.zeros((count, _PAIRS), np.float32))
    preallocated = partial(rope.cos_sin, out=out)
    return [
        (Row("cos_sin", "ours"), partial(call, rope.cos_sin, allocates=True)),
        (Row("cos_sin, preallocated arrays", "ours"), partial(call, preallocated)),
        (Row("NumPy float64, cast", "peer"), partial(call, in_numpy)),
        *baselines(bytes_accessed, new_bytes=bytes_accessed),
    ]


def _plan(ids: Array) -> list[Contender]:
    bytes_accessed = ids.size * _ROPE.rotary_dim * 4 + ids.nbytes

    def call() -> Call:
        return Call(_ROPE.plan, [(ids,)], bytes_accessed, allocates=True)

    return [(Row("plan", "ours"), call), *baselines(bytes_accessed, new_bytes=bytes_accessed)]


def _shift(dtype_name: str) -> list[Contender]:
    dtype = DTYPES[dtype_name]
    shape = (1, 4096, 8, 128)
    size = int(np.prod(shape)) * dtype.itemsize
    keys = allocate(size).view(dtype).reshape(shape)
    keys[:] = np.random.default_rng(7).standard_normal(shape[1:]).astype(dtype)
    before = keys[:, :1].copy()
    delta = -256

    def shift(keys: Array) -> Array:
        return _ROPE.shift(keys, delta, out=keys)

    def error(returned: Array) -> float:
        exact, bound = reference.rotation(_ROPE.spec, before, np.array([[delta]]))
        _, fraction = compare(exact.error(returned[:, :1]), bound)
        return fraction

    def call() -> Call:
        return Call(shift, [(keys,)], 2 * size, error)

    return [(Row("shift", "ours"), call), *baselines(2 * size)]


def _convert() -> list[Contender]:
    size = 4096
    heads = 32
    weight = allocate(size * size * 4).view(np.float32).reshape(size, size)
    weight[:] = np.arange(size, dtype=np.float32)[:, None]

    def in_numpy(w: Array) -> Array:
        pairs = w.reshape(heads, -1, 2, size)
        halves: Array = pairs.swapaxes(1, 2).reshape(size, size)
        return halves

    def error(returned: Array) -> float:
        rows = np.arange(size).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
        return 0.0 if np.array_equal(returned[:, 0], weight[rows, 0]) else float("inf")

    def call(function: Any, allocates: bool = False) -> Call:
        return Call(function, [(weight,)], 2 * weight.nbytes, error, allocates=allocates)

    to_half_split = partial(rope_cpu.convert_weight, num_heads=heads, to="half")
    return [
        (Row("convert_weight", "ours"), partial(call, to_half_split, allocates=True)),
        (Row("NumPy reshape", "peer"), partial(call, in_numpy)),
        *baselines(2 * weight.nbytes, new_bytes=weight.nbytes),
    ]


def _export() -> list[Contender]:
    def call(target: str) -> Call:
        if find_spec("onnx") is None:
            raise UnavailableError("onnx is not installed")
        from rope_cpu import export

        return Call(partial(export.export_rope, _ROPE, target=target), [()])

    targets = ("onnx", "primitive", "ort")
    return [(Row(f"export_rope {target}", "ours"), partial(call, target)) for target in targets]


def _imports() -> list[Contender]:
    def call(module: str) -> Call:
        command = [sys.executable, "-c", f"import {module}"]
        return Call(partial(subprocess.run, command, check=True), [()])

    return [
        (Row("import rope_cpu", "ours"), partial(call, "rope_cpu")),
        (Row("import numba", "peer"), partial(call, "numba")),
    ]
