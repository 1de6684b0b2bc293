"""The same rotation in torch and JAX, as models there do it: on (batch, heads, seq, head_dim), by given cos and sin."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.array_types import Array

from ..workload import Pair, Workload
from .base import Binding, UnavailableError

# The functions of transformers that rotate in each pairing; both take cos and sin as wide as the head.
_MODELS = {False: "llama", True: "cohere"}


def _tensor(x: Array) -> Any:
    """Return a tensor that shares the memory of `x`."""
    import torch

    if x.dtype.itemsize == 2:
        kind = torch.float16 if x.dtype == np.float16 else torch.bfloat16
        return torch.from_numpy(x.view(np.int16)).view(kind)
    return torch.from_numpy(x)


def _array(tensor: Any, dtype: Any) -> Array:
    import torch

    if tensor.element_size() == 2:
        return tensor.contiguous().view(torch.int16).numpy().view(dtype)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]


def _transformers(workload: Workload, compiled: bool) -> Binding:
    import torch

    torch.set_num_threads(rope_cpu.get_num_threads())
    torch.set_grad_enabled(False)
    model = _MODELS[workload.rope.interleaved]
    rotate = import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    if compiled:
        torch.compiler.reset()  # else the ninth shape of a process would silently run uncompiled
        rotate = torch.compile(rotate, dynamic=False)
    pairs = replace(workload, aligned=True).bshd_arrays()  # where torch's own tensors start
    dtype = pairs[0][0].dtype
    # A model casts cos and sin to the dtype of its activations once a step.
    cos, sin = (_tensor(table.astype(dtype)) for table in workload.wide_cos_sin())
    sets = [(*(_tensor(x.transpose(0, 2, 1, 3)) for x in pair), cos, sin) for pair in pairs]

    def results(returned: Any) -> Pair:
        q, k = (_array(tensor, dtype).transpose(0, 2, 1, 3) for tensor in returned)
        return q, k

    return Binding(rotate, sets, pairs[0], results=results)


def torch_eager(workload: Workload) -> Binding:
    """Bind transformers' apply_rotary_pos_emb."""
    return _transformers(workload, compiled=False)


def torch_compiled(workload: Workload) -> Binding:
    """Bind transformers' apply_rotary_pos_emb under torch.compile."""
    return _transformers(workload, compiled=True)


def jax_jit(workload: Workload) -> Binding:
    """Bind the rotation under jax.jit, computed in float32 and rounded at the end."""
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

    both = jax.jit(lambda q, k: (rotate(q), rotate(k)))

    def call(q: Any, k: Any) -> Any:
        rotated = both(q, k)
        rotated[1].block_until_ready()
        return rotated

    pairs = workload.bshd_arrays()
    sets = [tuple(jnp.asarray(x.transpose(0, 2, 1, 3)) for x in pair) for pair in pairs]

    def results(returned: Any) -> Pair:
        q, k = (np.asarray(x).transpose(0, 2, 1, 3) for x in returned)
        return q, k

    return Binding(call, sets, pairs[0], results=results)
