"""Cos and sin in hand: the call that rotates arrays with them, quick where all is well, explicit where it is not."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import _check, _machine, _threads
from rope_cpu._check import Array
from rope_cpu._compile import DONE, LOOK_CLOSER
from rope_cpu._kernels import ALONE, LAYOUTS, TRUSTED, rotation

# What each dtype is computed in.
REAL_OF = {dtype: "float64" if name == "float64" else "float32" for dtype, name in _check.FORMAT_OF.items()}


class Rotation:
    """Rotates arrays by the cos and sin that a subclass provides for each real dtype."""

    __slots__ = ("_blocks", "_form", "_head_dim", "_layout", "_pairing", "_prepared", "_table_shape")

    def __init__(
        self, layout: str, head_dim: int, blocks: tuple[int, ...], interleaved: bool, shape: tuple[int, ...]
    ) -> None:
        """Describe the arrays; shape: (batch or 1, seq, frequency heads, pairs) of cos and sin."""
        self._layout, self._head_dim, self._table_shape = layout, head_dim, shape
        self._pairing = "interleaved" if interleaved else "half"
        self._form = _form(layout, head_dim, blocks)
        self._prepared: dict[Any, tuple[Any, ...]] = {}

    def _cos_sin(self, real: str) -> tuple[Array, Array]:
        """Return cos and sin as float32 or float64 arrays of the table shape."""
        raise NotImplementedError

    def __call__(self, q: Array, k: Array, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        """Rotate queries and keys; see RotaryEmbedding.__call__ for the arguments."""
        try:
            cos, sin, kernel, views = self._prepared[q.dtype]
            out_q, out_k = (np.empty_like(q), np.empty_like(k)) if out is None else out
            threads = 1
            if q.size > _threads.SERIAL_ELEMENTS:
                threads, kernel = self._parallel(q, kernel)
            if views is None:
                status = kernel(q, k, out_q, out_k, cos, sin, self._form, 0, threads)
            else:
                status = kernel(*views(q, k, out_q, out_k), cos, sin, self._form, 0, threads)
        except (AttributeError, KeyError, TypeError, ValueError):
            status = LOOK_CLOSER  # which finds out what was wrong and says it in the words of the argument
        if status != DONE:
            outs = None if out is None else dict(zip(("out[0]", "out[1]"), _check.out_pair(out), strict=True))
            out_q, out_k = self._look_closer({"q": q, "k": k}, outs)
        return out_q, out_k

    def rotate(self, x: Array, out: Array | None = None) -> Array:
        """Rotate one array; see RotaryEmbedding.rotate for the arguments."""
        try:
            cos, sin, kernel, views = self._prepared[x.dtype]
            result = np.empty_like(x) if out is None else out
            threads = 1
            if x.size > _threads.SERIAL_ELEMENTS:
                threads, kernel = self._parallel(x, kernel)
            if views is None:
                status = kernel(x, x, result, result, cos, sin, self._form, ALONE, threads)
            else:
                x_view, _, out_view, _ = views(x, x, result, result)
                status = kernel(x_view, x_view, out_view, out_view, cos, sin, self._form, ALONE, threads)
        except (AttributeError, KeyError, TypeError, ValueError):
            status = LOOK_CLOSER
        if status != DONE:
            (result,) = self._look_closer({"x": x}, None if out is None else {"out": out})
        return result

    def _prepare(self, dtype: np.dtype[Any]) -> None:
        """Get cos, sin and the kernel for one dtype ready."""
        narrow, packed = dtype.itemsize == 2, self._layout == "thd"
        views = None if not (narrow or packed) else _VIEWS[narrow, packed]
        kernel = rotation(_check.FORMAT_OF[dtype], self._pairing, False)
        self._prepared[dtype] = (*self._cos_sin(REAL_OF[dtype]), kernel, views)

    def _parallel(self, x: Array, serial: Any) -> tuple[int, Any]:
        """Return how many threads to use on a large array, and the kernel for that."""
        threads = _threads.usable()
        return threads, serial if threads == 1 else rotation(_check.FORMAT_OF[x.dtype], self._pairing, True)

    def _look_closer(self, xs: dict[str, Any], outs: dict[str, Any] | None) -> tuple[Array, ...]:
        """Say what is wrong with the arguments, or rotate copies where the kernel cannot take them as they are."""
        _check.rotated(xs, self._layout, self._head_dim, self._table_shape)
        if outs is not None:
            _check.outputs(outs, xs)
        results = tuple(np.empty_like(x, subok=False) for x in xs.values()) if outs is None else tuple(outs.values())
        given = [(x, out) for x, out in zip(xs.values(), results, strict=True) if x.size]
        sources = [x if _contiguous(x) else np.ascontiguousarray(x) for x, _ in given]
        targets = [out if _contiguous(out) else np.empty(out.shape, out.dtype) for _, out in given]
        if given:
            self._rotate_checked(sources, targets)
        for (_, out), target in zip(given, targets, strict=True):
            if out is not target:
                out[...] = target
        return results

    def _rotate_checked(self, sources: list[Array], targets: list[Array]) -> None:
        """Rotate one or two arrays that need no further check."""
        x, flags = sources[0], TRUSTED if len(sources) == 2 else TRUSTED | ALONE
        if x.dtype not in self._prepared:
            self._prepare(x.dtype)
        cos, sin, kernel, views = self._prepared[x.dtype]
        threads, kernel = self._parallel(x, kernel)
        arrays = sources[0], sources[-1], targets[0], targets[-1]
        if kernel(*(views(*arrays) if views else arrays), cos, sin, self._form, flags, threads) != DONE:
            shown = [(array.shape, array.strides) for array in arrays]
            raise RuntimeError(f"arrays passed their checks, but the kernel refused them: {shown}")


@cache
def _form(layout: str, head_dim: int, blocks: tuple[int, ...]) -> NDArray[np.int64]:
    """Return what the kernel must know of the arrays; see `_kernels.rotation`."""
    pairs = [width // 2 for width in blocks]
    form = np.array([LAYOUTS[layout], head_dim, _machine.last_level_cache(), *pairs], np.int64)
    form.flags.writeable = False
    return form


def _contiguous(x: Array) -> bool:
    """Tell whether head vectors lie in memory without gaps."""
    return x.strides[-1] == x.itemsize


def _one_dtype(*xs: Array) -> None:
    """Raise unless all arrays share a dtype: as uint16 views, float16 and bfloat16 would pass for one another."""
    dtype = xs[0].dtype
    for x in xs[1:]:
        if x.dtype is not dtype and x.dtype != dtype:
            raise TypeError


def _narrow(q: Array, k: Array, out_q: Array, out_k: Array) -> tuple[Array, ...]:
    _one_dtype(q, k, out_q, out_k)
    bits = np.uint16
    return q.view(bits), k.view(bits), out_q.view(bits), out_k.view(bits)


def _packed(q: Array, k: Array, out_q: Array, out_k: Array) -> tuple[Array, ...]:
    return q[None], k[None], out_q[None], out_k[None]


def _narrow_packed(q: Array, k: Array, out_q: Array, out_k: Array) -> tuple[Array, ...]:
    return _packed(*_narrow(q, k, out_q, out_k))


# How the kernel sees arrays, by (16-bit dtype, packed layout): 4-D, and 16-bit elements as integers.
_VIEWS = {(True, False): _narrow, (False, True): _packed, (True, True): _narrow_packed}
