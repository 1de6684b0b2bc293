"""From NumPy arrays to the append kernel: norms, rotation, and writes to caches.

As in `rope_cpu.rotation.dispatch`, a fast path passes arrays to the kernel without copying them.
Where the kernel refuses them, a slow path raises the precise error, or passes contiguous copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments.arrays import (
    check_array,
    check_inputs,
    check_outputs,
    share_memory,
)
from rope_cpu.array_types import BSHD_VIEWS, DTYPE_NAMES, INTEGER_VIEWS, LAYOUT_AXES, Array
from rope_cpu.kernels import threads
from rope_cpu.kernels.append import append_kernel, append_part
from rope_cpu.kernels.compile import address_of
from rope_cpu.kernels.rotate import DONE
from rope_cpu.kernels.vectors import converts_float16
from rope_cpu.serving.batch import Batch
from rope_cpu.serving.kv_cache import (
    CACHE_ARRAYS,
    NO_SCALE,
    KVCache,
    check_cache,
    check_writeable,
)
from rope_cpu.serving.rms_norm import NO_NORMS, RMSNorm, joined
from rope_cpu.serving.slots import round_slots, slots_of_tokens

_ndarray = np.ndarray

# Empty slots, for which the kernel writes tokens in their order.
_IN_ORDER = np.empty((0, 0), np.int64)
_NORM_NAMES = ("q_norm", "k_norm", "v_norm")


# launch(cos_sin, (q, k, v, q_out), (key, value, key_scale, value_scale), slots, norms) -> bool
# q, k, v and q_out have the layout of the plan, and all others the form that the kernel takes.
# False means that nothing was written.
_Launch = Callable[[Array, tuple[Array, ...], tuple[Array, ...], Array, Array], bool]


class Rotation:
    """Cos and sin of a plan, with its pairing and layout, for the kernels of caches.

    Parameters
    ----------
    cos_sin : array of float32, (2, batch or 1, tokens, frequency heads, pairs)
        Cos and sin.
    head_dim : int
        Width of a head vector.
    interleaved : bool
        The pairing.
    blocks : tuple of int
        Widths of the blocks that pairs are formed in.
    layout : str
        Layout of q, k and v.
    subjects : pair of str
        Subjects of the error texts about the tokens and the batch rows of cos and sin.
    """

    __slots__ = ("blocks", "cos_sin", "head_dim", "interleaved", "launches", "layout", "subjects")

    def __init__(
        self,
        cos_sin: Array,
        head_dim: int,
        interleaved: bool,
        blocks: tuple[int, ...],
        layout: str,
        subjects: tuple[str, str],
    ) -> None:
        self.cos_sin = cos_sin
        self.head_dim = head_dim
        self.interleaved = interleaved
        self.blocks = blocks
        self.layout = layout
        self.subjects = subjects
        self.launches: dict[tuple[np.dtype[Any], str], _Launch] = {}

    def launch_for(self, dtype: np.dtype[Any], cache_dtype: str) -> _Launch:
        """Return the launch of the append kernel for two dtypes."""
        launch = self.launches.get((dtype, cache_dtype))
        if launch is None:
            pairing = (self.head_dim, self.interleaved, self.blocks)
            launch = _launcher(dtype, cache_dtype, *pairing, self.layout)
            self.launches[dtype, cache_dtype] = launch
        return launch


@lru_cache
def _launcher(
    dtype: np.dtype[Any],
    cache_dtype: str,
    head_dim: int,
    interleaved: bool,
    blocks: tuple[int, ...],
    layout: str,
) -> _Launch:
    """Return the launch of the append kernel for two dtypes, a pairing and a layout."""
    name = DTYPE_NAMES.get(dtype)
    if name is None or name == "float64":
        return _refuse
    if "float16" in (name, cache_dtype) and not converts_float16():
        return _refuse
    kernel = append_kernel(name, cache_dtype)
    part = address_of(append_part(name, cache_dtype, "interleaved" if interleaved else "half"))
    block_pairs = np.array(blocks, np.int64) // 2
    integers = INTEGER_VIEWS.get(name)
    to_bshd = BSHD_VIEWS.get(layout)

    def launch(
        cos_sin: Array,
        arrays: tuple[Array, ...],
        cache: tuple[Array, ...],
        slots: Array,
        norms: Array,
    ) -> bool:
        q, k, v, q_out = arrays
        key, value, key_scale, value_scale = cache
        if integers is not None:
            q = q.view(integers)
            k = k.view(integers)
            v = v.view(integers)
            q_out = q_out.view(integers)
        usable = 1 if threads.serial else threads.limit
        try:
            if to_bshd is not None:
                q = to_bshd(q)
                k = to_bshd(k)
                v = to_bshd(v)
                q_out = to_bshd(q_out)
            status: int = kernel(
                part,
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
                block_pairs,
                head_dim,
                usable,
            )
        except (TypeError, ValueError):  # another number of axes, or a read-only output
            return False
        return status == DONE

    return launch


def _refuse(
    cos_sin: Array,
    arrays: tuple[Array, ...],
    cache: tuple[Array, ...],
    slots: Array,
    norms: Array,
) -> bool:
    """Refuse all arrays: the launch of dtypes without a kernel."""
    return False


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
        check_cache(cache)
    for array in cache._given:
        if not array.flags.writeable:
            check_writeable(cache)
    slots = slots_of_tokens(slot_mapping, cache, rotation.layout)
    norms = NO_NORMS
    q_norm, k_norm, v_norm = given_norms
    if not (q_norm is k_norm is v_norm is None):
        norms = joined(_NORM_NAMES, given_norms, (cache.head_dim, cache.head_dim, cache.value_dim))
    result = np.empty_like(q) if out is None and type(q) is _ndarray else out
    # The kernel takes empty slots for `_IN_ORDER`, so they go the slow path.
    if type(q) is type(k) is type(v) is type(result) is _ndarray and slots.size:
        dtype = q.dtype
        launch = rotation.launches.get((dtype, cache._dtype_name))
        if launch is None:
            launch = rotation.launch_for(dtype, cache._dtype_name)
        # Identity is the usual case; the comparison of dtypes takes longer.
        same = dtype is k.dtype is v.dtype is result.dtype
        if not same:
            same = dtype == k.dtype == v.dtype == result.dtype
        arrays = (q, k, v, result)
        if same and launch(rotation.cos_sin, arrays, cache._arrays, slots, norms):
            return result
    return _append_copies(rotation, {"q": q, "k": k, "v": v}, cache, slots, norms, out)


def _append_copies(
    rotation: Rotation,
    inputs: dict[str, Any],
    cache: KVCache,
    slots: Array,
    norms: Array,
    out: Any,
) -> Array:
    """Validate the arguments that the fast path refused, and append contiguous copies of them."""
    _check_appended(rotation, inputs, cache, slots)
    outputs = {} if out is None else {"out": out}
    _check_append_memory(inputs, outputs, cache)
    result: Array = np.empty_like(inputs["q"]) if out is None else out
    # All copies come before the first write: a lack of memory then leaves everything untouched.
    q, k, v = (_computable(np.array(x, order="C")) for x in inputs.values())
    if slots.size:
        _launch_copies(rotation, (q, k, v, q), cache, slots, norms)
    with np.errstate(over="ignore", under="ignore"):
        result[...] = q
    return result


def _computable(x: Array) -> Array:
    """Return an array as float32 if it is float16 and the processor has no kernels for it."""
    return x.astype(np.float32) if x.dtype == np.float16 and not converts_float16() else x


def _launch_copies(
    rotation: Rotation,
    arrays: tuple[Array, ...],
    cache: KVCache,
    slots: Array,
    norms: Array,
) -> None:
    """Append contiguous arrays."""
    target: tuple[Array, ...] = cache._arrays
    cache_dtype = cache._dtype_name
    through_float32 = cache_dtype == "float16" and not converts_float16()
    if through_float32:
        # A float32 cache of the same shape, of which the new slots are rounded afterwards. NumPy's
        # rounding has the bits of a float16 kernel.
        target = (*(np.zeros(x.shape, np.float32) for x in target[:2]), *target[2:])
        cache_dtype = "float32"
    launch = rotation.launch_for(arrays[0].dtype, cache_dtype)
    if not launch(rotation.cos_sin, arrays, target, slots, norms):
        raise RuntimeError(
            f"arrays of shape {arrays[0].shape} passed their checks, but the kernel refused their "
            "copies; please report this as a fault of rope_cpu"
        )
    if through_float32:
        for rounded, computed in zip(cache._arrays[:2], target[:2], strict=True):
            round_slots(rounded.view(np.float16), computed, slots)


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
        raise ValueError(f"`q` has shape {q.shape}; it must have at least one head")
    queries_and_keys = {"q": q, "k": k}
    table_shape = rotation.cos_sin.shape[1:]
    check_inputs(queries_and_keys, layout, rotation.head_dim, table_shape, *rotation.subjects)
    if v.dtype != q.dtype:
        raise TypeError(f"`v` has dtype {v.dtype}, but `q` has {q.dtype}; they must be the same")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"`v` has shape {v.shape}, but `k` has {k.shape}; they must agree in all axes but the "
            "last"
        )
    for name, x, width in (("k", k, cache.head_dim), ("v", v, cache.value_dim)):
        if (x.shape[head_axis], x.shape[-1]) != (cache.kv_heads, width):
            raise ValueError(
                f"`{name}` has {x.shape[head_axis]} heads of {x.shape[-1]}, but `cache` has "
                f"{cache.kv_heads} heads of {width}"
            )
    batch = 1 if batch_axis is None else q.shape[batch_axis]
    if slots.shape != (batch, q.shape[token_axis]):
        tokens = f"{q.shape[token_axis]} tokens" if batch_axis is None else f"shape {q.shape}"
        raise ValueError(
            f"`slot_mapping` has {slots.size} slots of shape {slots.shape}, but `q` has {tokens}; "
            "each token needs a slot, or -1"
        )


def refuse_float64(name: str, x: Array, subject: str = "norms and caches are") -> None:
    """Raise if an array is float64. subject: of the error text, for what it is given to."""
    if x.dtype == np.float64:
        raise TypeError(
            f"`{name}` has dtype float64; {subject} computed in float32, which would lose its "
            f"digits: pass {name}.astype(np.float32)"
        )


def _check_append_memory(inputs: dict[str, Array], outputs: dict[str, Any], cache: KVCache) -> None:
    """Raise if an output or the cache shares memory with an input or with another output."""
    if outputs:
        check_outputs(outputs, {"q": inputs["q"]})
        for name in ("k", "v"):
            if share_memory(outputs["out"], inputs[name]):
                raise ValueError(
                    f"`out` shares memory with `{name}`; it must be `q` itself or share nothing "
                    "with the inputs"
                )
    check_writeable(cache)
    for cache_name, array in zip(CACHE_ARRAYS, cache._arrays, strict=True):
        for name, x in {**inputs, **outputs}.items():
            if share_memory(array, x):
                raise ValueError(
                    f"`{name}` shares memory with `cache.{cache_name}`; pass a copy of it"
                )


def rotate_normalised(
    rotation: Rotation,
    inputs: dict[str, Any],
    given_norms: dict[str, RMSNorm | None],
    outs: dict[str, Any] | None,
) -> tuple[Array, ...]:
    """Normalise and rotate one or two arrays.

    Parameters
    ----------
    rotation : Rotation
        The rotation of a plan.
    inputs, given_norms, outs : dict of str to array or RMSNorm
        The inputs, their norms, and the outputs if there are any, by argument name and in the same
        order.
    """
    names = tuple(given_norms)
    widths = (rotation.head_dim,) * len(names)
    norms = joined(names, tuple(given_norms.values()), widths)
    check_inputs(
        inputs, rotation.layout, rotation.head_dim, rotation.cos_sin.shape[1:], *rotation.subjects
    )
    for name, x in inputs.items():
        refuse_float64(name, x)
    if outs is None:
        results = tuple(np.empty_like(x) for x in inputs.values())
    else:
        check_outputs(outs, inputs)
        results = tuple(outs.values())
    # An array without heads is left out: the kernel refuses it in place of q.
    filled = [index for index, x in enumerate(inputs.values()) if x.size]
    if not filled:
        return results
    xs = tuple(list(inputs.values())[index] for index in filled)
    outputs = tuple(results[index] for index in filled)
    if filled[0]:  # no queries: the first row is that of the keys, and the last means no norm
        norms = norms[[1, 2, 2]]
    if _rotate_in_order(rotation, xs, outputs, norms):
        return results
    copies = tuple(_computable(np.array(x, order="C")) for x in xs)
    if not _rotate_in_order(rotation, copies, copies, norms):
        raise RuntimeError(
            f"an array of shape {xs[0].shape} passed its checks, but the kernel refused its copy; "
            "please report this as a fault of rope_cpu"
        )
    for copy, output in zip(copies, outputs, strict=True):
        with np.errstate(over="ignore", under="ignore"):
            output[...] = copy
    return results


def _rotate_in_order(
    rotation: Rotation, xs: tuple[Array, ...], outs: tuple[Array, ...], norms: Array
) -> bool:
    """Launch the append kernel with the second output as its cache, or an empty cache.

    Tokens keep their order, and there are no values.
    """
    dtype = xs[0].dtype
    name = DTYPE_NAMES[dtype]
    head_axis = LAYOUT_AXES[rotation.layout][2]
    nothing: list[Any] = [slice(None)] * xs[0].ndim
    nothing[head_axis] = slice(0, 0)
    no_heads = xs[0][tuple(nothing)]
    k = xs[1] if len(xs) == 2 else no_heads
    k_out = outs[1] if len(xs) == 2 else outs[0][tuple(nothing)]
    launch = rotation.launch_for(dtype, name)
    key = _as_cache(k_out, rotation.layout, name)
    value = _as_cache(outs[0][tuple(nothing)], rotation.layout, name)
    cache = (key, value, NO_SCALE, NO_SCALE)
    return launch(rotation.cos_sin, (xs[0], k, no_heads, outs[0]), cache, _IN_ORDER, norms)


def _as_cache(x: Array, layout: str, dtype: str) -> Array:
    """Return an array as the kernel takes caches: bshd, 16-bit floats as integers."""
    if layout in BSHD_VIEWS:
        x = BSHD_VIEWS[layout](x)
    return x.view(INTEGER_VIEWS[dtype]) if dtype in INTEGER_VIEWS else x
