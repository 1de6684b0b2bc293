"""Steps of a server into its cache: by rope_cpu, by a plan and NumPy, and by torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu import KVCache
from rope_cpu.array_types import Array

from .frameworks import as_array, as_tensor
from .measure import UnavailableError
from .server_workloads import EPS, ROPE, Move, Step, by_slot
from .timing import Call
from .workload import repeated_for_pairs

_INT8_MOST = np.float32(127)


def append(step: Step) -> Call:
    """Norm, rotate and write by one call of `append`."""
    plan = _plan(step)
    norms = step.norms
    batch = step.batch

    def run(q: Array, k: Array, v: Array, cache: KVCache, out: Array) -> Array:
        return plan.append(q, k, v, cache, batch, out=out, **norms)

    q, k, v = step.projections()
    cache = step.cache()
    return _step_call(step, run, (q, k, v, cache, np.empty_like(q)), cache)


def plan_alone(step: Step) -> Call:
    """Rotate q and k and write nothing: the least that a step of this library can take."""
    plan = _plan(step)
    q, k, _ = step.projections()
    outs = (np.empty_like(q), np.empty_like(k))
    return Call(plan, [(q, k, outs)])


def plan_and_numpy(step: Step) -> Call:
    """Norm in NumPy, rotate by a plan, and write to the slots in NumPy."""
    plan = _plan(step)
    slots = step.batch.slot_mapping
    q_weight, k_weight = step.weights

    def run(q: Array, k: Array, v: Array, cache: KVCache, outs: tuple[Array, Array]) -> Array:
        if step.normed:
            q = _normed(q, q_weight)
            k = _normed(k, k_weight)
        q_rot, k_rot = plan(q, k, out=outs)
        _write(cache.key, cache.key_scale, slots, k_rot)
        _write(cache.value, cache.value_scale, slots, v)
        return q_rot

    q, k, v = step.projections()
    cache = step.cache()
    return _step_call(step, run, (q, k, v, cache, (np.empty_like(q), np.empty_like(k))), cache)


def torch_eager(step: Step) -> Call:
    """Norm, rotate and write by torch."""
    return _torch_step(step, compiled=False)


def torch_compiled(step: Step) -> Call:
    """Norm, rotate and write by torch under torch.compile."""
    return _torch_step(step, compiled=True)


def rotate_cached(move: Move) -> Call:
    """Rotate the keys of a cache in place."""
    plan = ROPE.shift_plan(move.delta, layout="thd")
    slots = move.slots()
    cache = move.cache()

    def run(cache: KVCache, slots: Array) -> Array:
        plan.rotate_cached(cache, slots)
        return by_slot(cache.key)

    return _move_call(move, run, (cache, slots), by_slot(cache.key))


def rotate_contiguous(move: Move) -> Call:
    """Rotate as many contiguous keys in place."""
    plan = ROPE.shift_plan(move.delta, layout="thd")
    keys = move.contiguous_keys()

    def run(keys: Array) -> Array:
        return plan.rotate(keys, out=keys)

    return _move_call(move, run, (keys,), keys)


def gather_and_numpy(move: Move) -> Call:
    """Gather cached keys, rotate them in NumPy, and scatter them."""
    cos, sin = _wide_cos_sin(np.array([move.delta]))
    slots = move.slots()
    keys = by_slot(move.cache().key)

    def run(keys: Array, slots: Array) -> Array:
        x = keys[slots].astype(np.float32)
        half = x.shape[-1] // 2
        swapped = np.concatenate([-x[..., half:], x[..., :half]], -1)
        keys[slots] = x * cos + swapped * sin
        return keys

    return _move_call(move, run, (keys, slots), keys)


def _plan(step: Step) -> rope_cpu.RotaryPlan:
    return ROPE.plan(step.batch.cache_position, layout="thd")


def _step_call(
    step: Step, run: Callable[..., Any], arguments: tuple[Any, ...], cache: KVCache
) -> Call:
    """Return a call whose queries and cache are compared with the reference."""

    def error(returned: Any) -> float:
        q = returned if isinstance(returned, np.ndarray) else as_array(returned, np.float32)
        return step.error(q, cache)

    return Call(run, [arguments], step.bytes_accessed, error)


def _move_call(
    move: Move,
    run: Callable[..., Any],
    arguments: tuple[Any, ...],
    keys: Array,
) -> Call:
    """Return a call whose keys, moved in place, are compared with the reference."""
    before = keys.copy()

    def error(returned: Any) -> float:
        return move.error(before, keys)

    return Call(run, [arguments], move.bytes_accessed, error)


def _normed(x: Array, weight: Array) -> Array:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean + np.float32(EPS)) * weight
    return normed


def _write(cached: Array, scale: Array | None, slots: Array, x: Array) -> None:
    """Write vectors to slots of a cache, rounded to its dtype."""
    if scale is not None:
        largest = np.abs(x).max(axis=-1)
        by_slot(scale)[slots] = largest / _INT8_MOST
        x = np.rint(x * (_INT8_MOST / largest)[..., None])
    by_slot(cached)[slots] = x


def _wide_cos_sin(ids: Array) -> tuple[Array, Array]:
    """Return cos and sin, (tokens, 1, head_dim) each, for whole head vectors."""
    cos, sin = (repeated_for_pairs(table, interleaved=False) for table in ROPE.cos_sin(ids))
    return cos[:, None], sin[:, None]


def _torch(compiled: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Set torch up, and return a function as it is or compiled."""
    if find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    import torch

    torch.set_num_threads(rope_cpu.get_num_threads())
    torch.set_grad_enabled(False)
    if not compiled:
        return function
    torch.compiler.reset()  # else the ninth shape of a process would silently run uncompiled
    compiled_function: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled_function


def _torch_step(step: Step, compiled: bool) -> Call:
    run = _torch(compiled, _torch_append(step.normed))
    q, k, v = step.projections()
    cache = step.cache()
    tables = tuple(as_tensor(table) for table in _wide_cos_sin(step.batch.cache_position))
    weights = tuple(as_tensor(weight) for weight in step.weights)
    stored = ((cache.key, cache.key_scale), (cache.value, cache.value_scale))
    caches = tuple(
        (as_tensor(by_slot(x)), None if scale is None else as_tensor(by_slot(scale)))
        for x, scale in stored
    )
    slots = as_tensor(step.batch.slot_mapping.copy())
    projections = tuple(as_tensor(x) for x in (q, k, v))
    return _step_call(step, run, (*projections, tables, weights, slots, caches), cache)


def _torch_append(normed: bool) -> Callable[..., Any]:
    """Return the step on tensors: it writes to the cache, and returns the rotated queries."""

    def norm(x: Any, weight: Any) -> Any:
        import torch

        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight

    def write(cached: Any, slots: Any, x: Any) -> None:
        values, scale = cached
        if scale is not None:
            largest = x.abs().amax(-1)
            scale.index_copy_(0, slots, largest / 127)
            x = (x * (127 / largest)[..., None]).round()
        values.index_copy_(0, slots, x.to(values.dtype))

    def run(q: Any, k: Any, v: Any, tables: Any, weights: Any, slots: Any, caches: Any) -> Any:
        if normed:
            q = norm(q, weights[0])
            k = norm(k, weights[1])
        write(caches[0], slots, _torch_rotated(k, *tables))
        write(caches[1], slots, v)
        return _torch_rotated(q, *tables)

    return run


def _torch_rotated(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + swapped * sin
