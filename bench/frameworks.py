"""torch and JAX, as models use them: on (batch, heads, seq, head_dim), with given cos and sin."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.array_types import Array

from .measure import UnavailableError
from .rotations import require, rotation_call
from .timing import Call
from .workload import Pair, Workload

# Modules that the implementations import.
TORCH_MODULES = ("torch", "transformers")
JAX_MODULES = ("jax",)

# In float64 transformers rotates interleaved pairs in float32, and JAX computes in float32.
_DTYPES = ("float32", "float16", "bfloat16")

# The model of transformers whose function rotates half-split, and interleaved pairs; both functions
# take cos and sin of head_dim width.
_HALF_SPLIT_MODEL = "llama"
_INTERLEAVED_MODEL = "cohere"


def torch_eager(workload: Workload) -> Call:
    """Rotate by apply_rotary_pos_emb of transformers."""
    return _transformers_call(workload, compiled=False)


def torch_compiled(workload: Workload) -> Call:
    """Rotate by apply_rotary_pos_emb of transformers under torch.compile."""
    return _transformers_call(workload, compiled=True)


def _transformers_call(workload: Workload, compiled: bool) -> Call:
    require(workload, modules=TORCH_MODULES, dtypes=_DTYPES)
    import torch

    torch.set_num_threads(rope_cpu.get_num_threads())
    torch.set_grad_enabled(False)
    model = _INTERLEAVED_MODEL if workload.rope.interleaved else _HALF_SPLIT_MODEL
    rotate = import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    if compiled:
        torch.compiler.reset()  # else the ninth shape of a process would silently run uncompiled
        rotate = torch.compile(rotate, dynamic=False)
    pairs = replace(workload, aligned=True).bshd_arrays()  # aligned like torch's own tensors
    first_q, _ = pairs[0]
    dtype = first_q.dtype
    # A model casts cos and sin to the dtype of its activations once a step.
    cos, sin = (as_tensor(table.astype(dtype)) for table in workload.wide_cos_sin())
    argument_sets = [
        (as_tensor(q.transpose(0, 2, 1, 3)), as_tensor(k.transpose(0, 2, 1, 3)), cos, sin)
        for q, k in pairs
    ]

    def results(returned: Any) -> Pair:
        q, k = (as_array(tensor, dtype).transpose(0, 2, 1, 3) for tensor in returned)
        return q, k

    return rotation_call(
        workload, rotate, argument_sets, pairs[0], arithmetic="own", results=results
    )


def as_tensor(x: Array) -> Any:
    """Return a tensor that shares the memory of `x`."""
    import torch

    if x.dtype.itemsize == 2:
        dtype = torch.float16 if x.dtype == np.float16 else torch.bfloat16
        return torch.from_numpy(x.view(np.int16)).view(dtype)
    return torch.from_numpy(x)


def as_array(tensor: Any, dtype: Any) -> Array:
    """Return a tensor as an array of a dtype of the same width."""
    import torch

    if tensor.element_size() == 2:
        bits = tensor.contiguous().view(torch.int16)
        array: Array = bits.numpy().view(dtype)
    else:
        array = tensor.numpy()
    return array


def jax_jit(workload: Workload) -> Call:
    """Rotate under jax.jit, computed in float32 and rounded at the end."""
    require(workload, modules=JAX_MODULES, dtypes=_DTYPES)
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

    pairs = workload.bshd_arrays()
    argument_sets = [tuple(jnp.asarray(x.transpose(0, 2, 1, 3)) for x in pair) for pair in pairs]

    def results(returned: Any) -> Pair:
        q, k = (np.asarray(x).transpose(0, 2, 1, 3) for x in returned)
        return q, k

    return rotation_call(workload, call, argument_sets, pairs[0], results=results)
