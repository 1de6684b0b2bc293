"""Calls that rotate: by rope_cpu, NumPy, torch and JAX, as models use them, and by onnxruntime.

torch and JAX rotate (batch, heads, seq, head_dim) by given cos and sin. Arrays of onnxruntime are
(batch, seq, heads·head_dim), as projections leave them. Views of a packed buffer are copied into
such arrays by each call, since onnxruntime takes contiguous arrays only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.array_types import DTYPES, Array

from .timing import Call
from .workloads import Pair, Workload

# In float64 transformers rotates interleaved pairs in float32, and JAX computes in float32.
_FRAMEWORK_DTYPES = ("float32", "float16", "bfloat16")

# The model of transformers whose function rotates half-split (False), and interleaved pairs; both
# functions take cos and sin of head_dim width.
_MODELS = {False: "llama", True: "cohere"}


class UnavailableError(Exception):
    """A call that cannot be timed here; the message is the reason."""


def _require(workload: Workload, dtypes: Collection[str] = DTYPES) -> None:
    """Raise UnavailableError unless a peer of these dtypes rotates whole heads of a workload."""
    if workload.dtype not in dtypes:
        raise UnavailableError(f"has no {workload.dtype}")
    rope = workload.rope
    if rope.rotary_dim != rope.head_dim or len(rope.blocks) > 1:
        raise UnavailableError("rotates whole head vectors only")


def plan(workload: Workload) -> Call:
    """Rotate by a plan into given arrays."""
    return _call_into(workload, workload.rope.plan(workload.ids))


def plan_unaligned_out(workload: Workload) -> Call:
    """Rotate by a plan into arrays that start where large ones of NumPy do."""
    return plan(replace(workload, aligned_out=False))


def plan_new_arrays(workload: Workload) -> Call:
    """Rotate by a plan that allocates its results."""
    return Call(workload.rope.plan(workload.ids), workload.arrays(), tuple)


def make_plan(workload: Workload) -> Call:
    """Make the plan alone."""
    return Call(workload.rope.plan, (workload.ids,))


def single_call(workload: Workload) -> Call:
    """Rotate by calling the rotary embedding, with an offset for the tokens of one sequence."""
    ids = workload.ids
    given = {"offset": int(ids[0])} if ids.ndim == 1 else {"position_ids": ids}
    return _call_into(workload, partial(workload.rope, **given))


def _call_into(workload: Workload, function: Callable[..., Pair]) -> Call:
    """Return the call of a function that rotates into given arrays."""

    # By keyword, as programs do.
    def rotate(q: Array, k: Array, out: Pair) -> Pair:
        return function(q, k, out=out)

    q, k = workload.arrays()
    out = (q, k) if workload.in_place else workload.outputs()
    return Call(rotate, (q, k, out), tuple)


def rotate_half(workload: Workload) -> Call:
    """Rotate by x·cos + (x, elements of pairs swapped, one negated)·sin, in the compute dtype."""
    _require(workload)
    cos, sin = (table[:, :, None] for table in workload.wide_cos_sin())
    interleaved = workload.rope.interleaved

    def rotate(x: Array) -> Array:
        if interleaved:
            swapped = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        else:
            half = x.shape[-1] // 2
            swapped = np.concatenate([-x[..., half:], x[..., :half]], -1)
        rotated: Array = x * cos + swapped * sin
        return rotated

    def rotate_both(q: Array, k: Array) -> list[Array]:
        wide = (x.astype(workload.compute_dtype, copy=False) for x in (q, k))
        return [rotate(x).astype(q.dtype, copy=False) for x in wide]

    return Call(rotate_both, workload.arrays(), tuple)


def torch_call(workload: Workload, compiled: bool = False) -> Call:
    """Rotate by apply_rotary_pos_emb of transformers, perhaps under torch.compile."""
    _require(workload, _FRAMEWORK_DTYPES)
    import torch

    torch.set_num_threads(rope_cpu.get_num_threads())
    torch.set_grad_enabled(False)
    model = _MODELS[workload.rope.interleaved]
    rotate = import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    if compiled:
        torch.compiler.reset()  # else the ninth shape of a process would silently run uncompiled
        rotate = torch.compile(rotate, dynamic=False)
    pair = replace(workload, aligned=True).arrays()  # aligned like torch's own tensors
    # A model casts cos and sin to the dtype of its activations once a step.
    tables = [_tensor(table.astype(DTYPES[workload.dtype])) for table in workload.wide_cos_sin()]
    q, k = (_tensor(x.swapaxes(1, 2)) for x in pair)

    def results(returned: Any) -> list[Array]:
        return [tensor.float().numpy().swapaxes(1, 2) for tensor in returned]

    return Call(rotate, (q, k, *tables), results)


def _tensor(x: Array) -> Any:
    """Return a tensor that shares the memory of `x`."""
    import torch

    if x.dtype.itemsize == 2:
        dtype = torch.float16 if x.dtype == np.float16 else torch.bfloat16
        return torch.from_numpy(x.view(np.int16)).view(dtype)
    return torch.from_numpy(x)


def jax_jit(workload: Workload) -> Call:
    """Rotate under jax.jit, computed in float32 and rounded at the end."""
    _require(workload, _FRAMEWORK_DTYPES)
    import jax
    import jax.numpy as jnp

    if rope_cpu.get_num_threads() != (os.cpu_count() or 1):
        raise UnavailableError("XLA always uses all cores")
    interleaved = workload.rope.interleaved
    cos, sin = (jnp.asarray(table[:, None]) for table in workload.wide_cos_sin())

    def rotate(x: Any) -> Any:
        y = x.astype(jnp.float32)
        if interleaved:
            rotated = jnp.stack([-y[..., 1::2], y[..., ::2]], -1).reshape(y.shape)
        else:
            first, second = jnp.split(y, 2, axis=-1)
            rotated = jnp.concatenate([-second, first], -1)
        return (y * cos + rotated * sin).astype(x.dtype)

    rotate_pair = jax.jit(lambda q, k: (rotate(q), rotate(k)))

    def call(q: Any, k: Any) -> Any:
        rotated = rotate_pair(q, k)
        rotated[1].block_until_ready()
        return rotated

    arguments = tuple(jnp.asarray(x.swapaxes(1, 2)) for x in workload.arrays())

    def results(returned: Any) -> list[Array]:
        return [np.asarray(x).swapaxes(1, 2) for x in returned]

    return Call(call, arguments, results)


def exported_run(target: str, workload: Workload) -> Call:
    """Rotate by `run` of an exported model, which copies inputs and allocates outputs."""
    # onnxruntime takes NumPy's bfloat16 in bound arrays only.
    session = _exported_session(target, workload, ("float32", "float16"))
    ids = _position_ids(workload)

    def run(q: Array, k: Array) -> list[Array]:
        feeds = {"q": _flat(q), "k": _flat(k), "position_ids": ids}
        outputs: list[Array] = session.run(None, feeds)
        return outputs

    return Call(run, workload.arrays(), tuple)


def exported_bound(target: str, workload: Workload) -> Call:
    """Rotate by an exported model whose inputs and outputs `export.bind` binds once."""
    session = _exported_session(target, workload, ("float32", "float16", "bfloat16"))
    return _bound(workload, session, {})


def onnx_operator(workload: Workload) -> Call:
    """Rotate by the operator alone, bound: an export also expands position ids to all rows."""
    _require_onnxruntime(workload, ("float32",))
    from onnx import parser

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
    cos, sin = workload.rope.cos_sin(np.arange(workload.ids.max() + 1))
    return _bound(workload, onnx_session(parser.parse_model(text)), {"cos": cos, "sin": sin})


def _bound(workload: Workload, session: Any, tables: dict[str, Array]) -> Call:
    """Return a call of a session on bound arrays, into which views of packed ones are copied."""
    from rope_cpu.export import bind

    q, k = workload.arrays()
    feeds = {"q": _flat(q), "k": _flat(k), "position_ids": _position_ids(workload), **tables}
    q_rot, k_rot = map(_flat, workload.outputs())
    step = bind(session, feeds, {"q_rot": q_rot, "k_rot": k_rot})
    views = [(feeds["q"].reshape(q.shape), q), (feeds["k"].reshape(k.shape), k)]
    copied = views if workload.packed else []

    def run() -> Pair:
        for bound, view in copied:
            np.copyto(bound, view)
        step()
        return q_rot, k_rot

    return Call(run, (), tuple)


def _exported_session(target: Any, workload: Workload, dtypes: Collection[str]) -> Any:
    """Return a session of the rotation of both q and k, with tables of all positions."""
    _require_onnxruntime(workload, dtypes)
    from rope_cpu.export import export_rope

    model = export_rope(
        workload.rope,
        target=target,
        dtype=DTYPES[workload.dtype],
        layout="bsd",
        num_heads=workload.heads,
        num_kv_heads=workload.kv_heads,
        max_positions=int(workload.ids.max()) + 1,
    )
    return onnx_session(model)


def onnx_session(model: Any) -> Any:
    """Return a session of a model, with as many threads as rope_cpu has."""
    from rope_cpu.export.validation.session import open_session

    return open_session(model, rope_cpu.get_num_threads())


def _require_onnxruntime(workload: Workload, dtypes: Collection[str]) -> None:
    _require(workload, dtypes)
    if workload.rope.axes > 1:
        raise UnavailableError("takes one position per token")


def _position_ids(workload: Workload) -> Array:
    return np.broadcast_to(workload.ids, workload.shape).astype(np.int64)


def _flat(x: Array) -> Array:
    """Return (batch, seq, heads, head_dim) as contiguous (batch, seq, width)."""
    batch, tokens, _, _ = x.shape
    return np.ascontiguousarray(x).reshape(batch, tokens, -1)
