"""The launches of the append kernels: norms, rotation, and writes to caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments.arrays import check_array, check_outputs, refuse_shared
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import check_type
from rope_cpu.array_types import DTYPE_NAMES, LAYOUT_AXES, Array, CacheKind
from rope_cpu.caches.batch import Batch
from rope_cpu.caches.kv_cache import CACHE_ARRAYS, NO_SCALE, KVCache, check_writeable
from rope_cpu.caches.rms_norm import NO_NORMS, RMSNorm, joined
from rope_cpu.caches.slots import HEADS_FIRST, slots_of_tokens
from rope_cpu.kernels import threads
from rope_cpu.kernels.append import append_kernel, append_part
from rope_cpu.launch.results import LARGE, new_like
from rope_cpu.launch.rotate import (
    HeadLayout,
    Rotation,
    kernel_view,
    launch_copies,
    numbers_of,
    refuse,
    results_for,
)

_ndarray = np.ndarray

# Empty slots, for which the kernel writes tokens in their order.
_IN_ORDER = np.empty((0, 0), np.int64)
_NORM_NAMES = ("q_norm", "k_norm", "v_norm")

Arrays = tuple[Array, ...]

# launch(cos_sin, (q, k, v, q_out), (key, value, key_scale, value_scale), slots, norms) -> bool
# q, k, v and q_out have the layout of the plan, and all others the form that the kernel takes.
# False means that nothing was written.
_Launch = Callable[[Array, Arrays, Arrays, Array, Array], bool]


def _launch_for(rotation: Rotation, dtype: np.dtype[Any], kind: CacheKind) -> _Launch:
    """Return the launch of a rotation for a dtype and a kind of cache, which it then keeps."""
    launch = _launcher(dtype, kind, rotation.heads, rotation.layout)
    rotation.launches[dtype, kind] = launch
    return launch


@lru_cache
def _launcher(dtype: np.dtype[Any], kind: CacheKind, heads: HeadLayout, layout: str) -> _Launch:
    """Return the launch of the append kernel for a dtype, a kind of cache and a layout."""
    name = DTYPE_NAMES.get(dtype)
    if name is None or name == "float64":
        return refuse
    kernel = append_kernel(name, kind)
    numbers = numbers_of(append_part(name, kind, heads.pairing), heads)
    view = kernel_view(name, layout)

    def launch(cos_sin: Array, arrays: Arrays, cache: Arrays, slots: Array, norms: Array) -> bool:
        # Written out: to unpack tuples in the call and to map `view` would take 0.2 µs more.
        q, k, v, q_out = arrays
        key, value, key_scale, value_scale = cache
        usable = 1 if threads.serial else threads.limit
        try:
            if view is not None:
                q = view(q)
                k = view(k)
                v = view(v)
                q_out = view(q_out)
            done: bool = kernel(
                numbers,
                q,
                k,
                v,
                q_out,
                key,
                value,
                key_scale,
                value_scale,
                slots,
                cos_sin,
                norms,
                usable,
            )
        except (TypeError, ValueError):  # another number of axes, or a read-only output
            return False
        return done

    return launch


def append(
    rotation: Rotation,
    q: Array,
    k: Array,
    v: Array,
    cache: KVCache,
    slot_mapping: Batch | ArrayLike,
    given_norms: tuple[RMSNorm | None, ...],
    out: Array | None,
) -> Array:
    """Write q to `out`, and k and v to their slots; see `RotaryPlan.append`."""
    if type(cache) is not KVCache:
        check_type("cache", cache, KVCache)
    for array in cache._caller_arrays:
        if not array.flags.writeable:
            check_writeable(cache)
    slots = slots_of_tokens(slot_mapping, cache, rotation.layout)
    norms = NO_NORMS
    q_norm, k_norm, v_norm = given_norms
    if not (q_norm is k_norm is v_norm is None):
        norms = joined(_NORM_NAMES, given_norms, (cache.head_dim, cache.head_dim, cache.value_dim))
    result = out
    if out is None and type(q) is _ndarray:
        result = np.empty_like(q) if q.nbytes < LARGE else new_like(q)
    # The kernel takes empty slots for `_IN_ORDER`, so they go the slow path.
    if type(q) is type(k) is type(v) is type(result) is _ndarray and slots.size:
        dtype = q.dtype
        launch = rotation.launches.get((dtype, cache._kind))
        if launch is None:
            launch = _launch_for(rotation, dtype, cache._kind)
        # Identity is the usual case; the comparison of dtypes takes longer.
        same = dtype is k.dtype is v.dtype is result.dtype
        if not same:
            same = dtype == k.dtype == v.dtype == result.dtype
        arrays = (q, k, v, result)
        if same and launch(rotation.cos_sin, arrays, cache._kernel_arrays, slots, norms):
            return result
    return _append_copies(rotation, {"q": q, "k": k, "v": v}, cache, slots, norms, out)


def _append_copies(
    rotation: Rotation, inputs: dict[str, Any], cache: KVCache, slots: Array, norms: Array, out: Any
) -> Array:
    """Validate the arguments that the fast path refused, and append contiguous copies of them."""
    _check_appended(rotation, inputs, cache, slots)
    outputs = {} if out is None else {"out": out}
    _check_append_memory(inputs, outputs, cache)
    result: Array = new_like(inputs["q"]) if out is None else out

    def launch(copies: list[Array]) -> bool:
        q, k, v = copies
        if not slots.size:
            return True
        kernel = _launch_for(rotation, q.dtype, cache._kind)
        return kernel(rotation.cos_sin, (q, k, v, q), cache._kernel_arrays, slots, norms)

    launch_copies(inputs.values(), (result,), launch)
    return result


def _check_appended(
    rotation: Rotation, inputs: dict[str, Any], cache: KVCache, slots: Array
) -> None:
    """Raise unless q, k and v fit the plan, the cache and the slots."""
    layout = rotation.layout
    for name, x in inputs.items():
        refuse_float64(name, check_array(name, x, layout))
    q, k, v = inputs.values()
    batch_axis, token_axis, head_axis = LAYOUT_AXES[layout]
    if q.shape[head_axis] == 0:
        raise ArgumentError("q", Finding.shape_of(q), "have at least one head")
    rotation.check({"q": q, "k": k})
    if v.dtype != q.dtype:
        raise ArgumentTypeError("v", Finding.dtype_of(v), f"have that of `q`, {q.dtype}")
    if v.shape[:-1] != k.shape[:-1]:
        rule = f"be that of `k`, {k.shape}, in all axes but the last"
        raise ArgumentError("v", Finding.shape_of(v), rule)
    for name, x, width in (("k", k, cache.head_dim), ("v", v, cache.value_dim)):
        if (x.shape[head_axis], x.shape[-1]) != (cache.kv_heads, width):
            finding = Finding(f"has {x.shape[head_axis]} heads of {x.shape[-1]}")
            rule = f"have those of `cache`, {cache.kv_heads} heads of {width}"
            remedy = HEADS_FIRST if x.shape[head_axis] == cache.page_size else ""
            raise ArgumentError(name, finding, rule, remedy)
    batch = 1 if batch_axis is None else q.shape[batch_axis]
    if slots.shape != (batch, q.shape[token_axis]):
        finding = Finding(f"has {slots.size} slots, but `q` has shape {q.shape}")
        raise ArgumentError("slot_mapping", finding, "have a slot for each token, or -1")


def refuse_float64(name: str, x: Array, subject: str = "norms and caches are") -> None:
    """Raise if an array is float64. subject: of the error text, for what it is given to."""
    if x.dtype == np.float64:
        rule = f"have at most the digits of float32, in which {subject} computed"
        remedy = f"pass {name}.astype(np.float32)"
        raise ArgumentTypeError(name, Finding.dtype_of(x), rule, remedy)


def _check_append_memory(inputs: dict[str, Array], outputs: dict[str, Any], cache: KVCache) -> None:
    """Raise if an output or the cache shares memory with an input or with another output."""
    if outputs:
        check_outputs(outputs, inputs)
    check_writeable(cache)
    cached = {
        f"cache.{name}": x for name, x in zip(CACHE_ARRAYS, cache._kernel_arrays, strict=True)
    }
    for name, x in {**inputs, **outputs}.items():
        refuse_shared(name, x, cached, "share none with it", "pass a copy")


def rotate_normalised(
    rotation: Rotation,
    inputs: dict[str, Any],
    given_norms: dict[str, RMSNorm | None],
    outs: dict[str, Any] | None,
) -> Arrays:
    """Normalise and rotate one or two arrays.

    inputs, given_norms, outs: the inputs, their norms, and the outputs if there are any, by
    argument name and in the same order.
    """
    names = tuple(given_norms)
    widths = (rotation.heads.head_dim,) * len(names)
    norms = joined(names, tuple(given_norms.values()), widths)
    rotation.check(inputs)
    for name, x in inputs.items():
        refuse_float64(name, x)
    results = results_for(inputs, outs)
    # An array without heads is left out: the kernel refuses it in place of q.
    xs = [x for x in inputs.values() if x.size]
    outputs = [y for y in results if y.size]
    if not xs:
        return results
    if not results[0].size:  # the first row is that of the keys, and the last means no norm
        norms = norms[[1, 2, 2]]
    if not _rotate_in_order(rotation, xs, outputs, norms):
        launch_copies(xs, outputs, lambda copies: _rotate_in_order(rotation, copies, copies, norms))
    return results


def _rotate_in_order(
    rotation: Rotation, xs: Sequence[Array], outs: Sequence[Array], norms: Array
) -> bool:
    """Launch the append kernel with the second output as its cache, or an empty cache.

    Tokens keep their order, and there are no values.
    """
    dtype = xs[0].dtype
    name = DTYPE_NAMES[dtype]
    no_heads: list[Any] = [slice(None)] * xs[0].ndim
    no_heads[LAYOUT_AXES[rotation.layout][2]] = slice(0, 0)
    v = xs[0][tuple(no_heads)]
    value = outs[0][tuple(no_heads)]
    k = xs[1] if len(xs) == 2 else v
    key = outs[1] if len(xs) == 2 else value
    view = kernel_view(name, rotation.layout)
    if view is not None:
        key = view(key)
        value = view(value)
    launch = _launch_for(rotation, dtype, CacheKind(name, name))
    cache = (key, value, NO_SCALE, NO_SCALE)
    return launch(rotation.cos_sin, (xs[0], k, v, outs[0]), cache, _IN_ORDER, norms)
