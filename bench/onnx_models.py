"""Rotations under onnxruntime: exported models, by `run` and with bound arrays, and the operator.

Arrays are (batch, seq, heads·head_dim), as projections leave them. Views of a packed buffer are
copied into such arrays by each call, since onnxruntime takes contiguous arrays only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.array_types import DTYPES, Array

from .rotations import require, rotation_call
from .timing import Call
from .workload import Pair, Workload

# Modules that are imported.
MODULES = ("onnx", "onnxruntime")


def run_call(target: str, workload: Workload) -> Call:
    """Rotate by `run`, which copies inputs and allocates outputs."""
    # onnxruntime takes NumPy's bfloat16 in bound arrays only.
    session = _session(target, workload, dtypes=("float32", "float16"))
    ids = _position_ids(workload)

    def run(q: Array, k: Array) -> list[Array]:
        outputs: list[Array] = session.run(
            None, {"q": _flat(q), "k": _flat(k), "position_ids": ids}
        )
        return outputs

    pairs = workload.bshd_arrays()
    results = partial(_shaped, pairs[0])
    return rotation_call(workload, run, pairs, pairs[0], arithmetic="own", results=results)


def bound_call(target: str, workload: Workload) -> Call:
    """Rotate with inputs and outputs that `rope_cpu.export.bind` binds once."""
    session = _session(target, workload, dtypes=("float32", "float16", "bfloat16"))
    return _bound(workload, session, {})


def operator_call(workload: Workload) -> Call:
    """Rotate by the operator alone, bound: an export also expands position ids to all rows."""
    require(workload, modules=MODULES, dtypes=("float32",), one_axis=True)
    from onnx import parser

    from rope_cpu.export.validation.session import open_session

    interleaved = int(workload.rope.interleaved)
    text = f"""<ir_version: 10, opset_import: ["": 23]>
        rotation (float[b, s, q_width] q, float[b, s, k_width] k, int64[b, s] position_ids,
            float[n, pairs] cos, float[n, pairs] sin)
        => (float[b, s, q_width] q_rot, float[b, s, k_width] k_rot) {{
            q_rot = RotaryEmbedding <interleaved={interleaved}, num_heads={workload.heads}>
                (q, cos, sin, position_ids)
            k_rot = RotaryEmbedding <interleaved={interleaved}, num_heads={workload.kv_heads}>
                (k, cos, sin, position_ids)
        }}"""
    session = open_session(parser.parse_model(text), rope_cpu.get_num_threads())
    cos, sin = workload.rope.cos_sin(np.arange(_table_rows(workload)))
    return _bound(workload, session, {"cos": cos, "sin": sin})


def _bound(workload: Workload, session: Any, tables: dict[str, Array]) -> Call:
    """Return a call of a session on bound arrays, into which views of packed ones are copied."""
    from rope_cpu.export import bind

    pairs = workload.bshd_arrays()
    ids = _position_ids(workload)
    argument_sets = []
    for (q, k), out in zip(pairs, workload.outputs(), strict=True):
        feeds = {"q": _flat(q), "k": _flat(k), "position_ids": ids, **tables}
        outputs = {"q_rot": _flat(out[0]), "k_rot": _flat(out[1])}
        views = [(feeds["q"].reshape(q.shape), q), (feeds["k"].reshape(k.shape), k)]
        copied = views if workload.packed else []
        argument_sets.append((bind(session, feeds, outputs), copied, tuple(outputs.values())))

    def run(step: Callable[[], None], copied: list[Pair], outputs: Pair) -> Pair:
        for bound, view in copied:
            np.copyto(bound, view)
        step()
        return outputs

    results = partial(_shaped, pairs[0])
    return rotation_call(workload, run, argument_sets, pairs[0], arithmetic="own", results=results)


def _session(target: str, workload: Workload, dtypes: tuple[str, ...]) -> Any:
    """Return a session of the rotation of both q and k, with tables of all positions."""
    require(workload, modules=MODULES, dtypes=dtypes, one_axis=True)
    from rope_cpu.export import export_rope
    from rope_cpu.export.validation.session import open_session

    model = export_rope(
        workload.rope,
        target=target,
        dtype=DTYPES[workload.dtype],
        layout="bsd",
        num_heads=workload.heads,
        num_kv_heads=workload.kv_heads,
        max_positions=_table_rows(workload),
    )
    return open_session(model, rope_cpu.get_num_threads())


def _table_rows(workload: Workload) -> int:
    return int(workload.ids.max()) + 1


def _position_ids(workload: Workload) -> Array:
    return np.broadcast_to(workload.ids, workload.shape).astype(np.int64)


def _flat(x: Array) -> Array:
    """Return (batch, seq, heads, head_dim) as contiguous (batch, seq, width)."""
    batch, tokens, _, _ = x.shape
    return np.ascontiguousarray(x).reshape(batch, tokens, -1)


def _shaped(inputs: Pair, outputs: Any) -> Pair:
    """Return flat outputs in the shapes of the inputs."""
    q, k = (output.reshape(x.shape) for x, output in zip(inputs, outputs, strict=True))
    return q, k
