"""Cos and sin in hand: the call that rotates arrays with them, quick where all is well, explicit where it is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import _check, _machine, _threads
from rope_cpu._angles import circles
from rope_cpu._check import Array
from rope_cpu._compile import DONE, LOOK_CLOSER, Kernel, address
from rope_cpu._kernels import ALONE, TRUSTED, numbers, quick_rotation, rows

# What each dtype is computed in.
REAL_OF = {dtype: "float64" if name == "float64" else "float32" for dtype, name in _check.FORMAT_OF.items()}


# What a dtype is rotated with: cos and sin (or what they are computed from on the way), the kernel, and what it is told
# of the form of arrays.
Prepared = tuple[Array, Array, Kernel, NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Frame:
    """What is rotated: the layout and width of arrays, which elements are pairs, and the pairs of each block."""

    layout: str
    head_dim: int
    pairing: str
    pairs: tuple[int, ...]
    _forms: dict[Any, NDArray[np.int64]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, layout: str, head_dim: int, blocks: tuple[int, ...], interleaved: bool) -> Frame:
        """Return the frame of a checked layout; blocks: widths in elements."""
        return cls(layout, head_dim, "interleaved" if interleaved else "half", tuple(width // 2 for width in blocks))

    def prepared(self, dtype: np.dtype[Any], cos: Array, sin: Array) -> Prepared:
        """Return what rotates arrays of a dtype by cos and sin."""
        form = self._forms.get(dtype)
        if form is None:
            form = self._forms[dtype] = self._numbers(dtype, (0, 0))
        return cos, sin, quick_rotation(dtype.itemsize, False), form

    def prepared_at(self, dtype: np.dtype[Any], turns: Array, factor: Array, sign: int, single: bool) -> Prepared:
        """Return what also computes cos and sin on the way; arguments as in `angles.tables`."""
        circles_at = address(circles(REAL_OF[dtype], single))
        form = self._numbers(dtype, (circles_at, sign))
        return turns, factor, quick_rotation(dtype.itemsize, True), form

    def _numbers(self, dtype: np.dtype[Any], angles: tuple[int, int]) -> NDArray[np.int64]:
        work, above = address(rows(_check.FORMAT_OF[dtype], self.pairing)), _machine.last_level_cache()
        return numbers(work, self.layout, self.head_dim, above, self.pairs, angles)


class Rotation:
    """Rotates arrays by the cos and sin that a subclass provides for each real dtype."""

    __slots__ = ("_flags", "_frame", "_prepared", "_table_shape")

    def __init__(
        self, frame: Frame, table_shape: tuple[int, ...], prepared: dict[Any, Prepared], flags: int = 0
    ) -> None:
        """Take what is rotated, the (batch or 1, seq, frequency heads, pairs) of cos and sin, and what is ready."""
        self._frame, self._table_shape, self._prepared, self._flags = frame, table_shape, prepared, flags

    def _cos_sin(self, real: str) -> tuple[Array, Array]:
        """Return cos and sin as float32 or float64 arrays of the table shape."""
        raise NotImplementedError

    def _name(self) -> str:
        """Return what `rotate` calls its array in error texts."""
        return "x"

    def _rows_are(self) -> str:
        """Return what cos and sin have a row for, in error texts."""
        return "positions are given for"

    def __call__(self, q: Array, k: Array, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        """Rotate queries and keys; see RotaryEmbedding.__call__ for the arguments."""
        status = LOOK_CLOSER
        try:
            cos, sin, kernel, form = self._prepared[q.dtype]
            if out is None:
                out_q, out_k = np.empty_like(q), np.empty_like(k)
            else:
                out_q, out_k = out if type(out) is tuple and len(out) == 2 else _check.out_pair(out)
            pool = _threads.pool() if q.size > _threads.SERIAL_ELEMENTS else 0
            status = kernel(q, k, out_q, out_k, cos, sin, form, self._flags, pool)
        except (AttributeError, KeyError, TypeError, ValueError):
            pass  # what was wrong is found out below, and said in the words of the argument
        if status != DONE:
            outs = None if out is None else dict(zip(("out[0]", "out[1]"), _check.out_pair(out), strict=True))
            out_q, out_k = self._look_closer({"q": q, "k": k}, outs)
        return out_q, out_k

    def rotate(self, x: Array, out: Array | None = None) -> Array:
        """Rotate one array; see RotaryEmbedding.rotate for the arguments."""
        status = LOOK_CLOSER
        try:
            cos, sin, kernel, form = self._prepared[x.dtype]
            result = np.empty_like(x) if out is None else out
            pool = _threads.pool() if x.size > _threads.SERIAL_ELEMENTS else 0
            status = kernel(x, x, result, result, cos, sin, form, self._flags + ALONE, pool)
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        if status != DONE:
            (result,) = self._look_closer({self._name(): x}, None if out is None else {"out": out})
        return result

    def _prepare(self, dtype: np.dtype[Any]) -> None:
        """Get cos, sin and the kernel for one dtype ready."""
        self._prepared[dtype] = self._frame.prepared(dtype, *self._cos_sin(REAL_OF[dtype]))

    def _look_closer(self, xs: dict[str, Any], outs: dict[str, Any] | None) -> tuple[Array, ...]:
        """Say what is wrong with the arguments, or rotate copies where the kernel cannot take them as they are."""
        _check.rotated(xs, self._frame.layout, self._frame.head_dim, self._table_shape, self._rows_are())
        if outs is not None:
            _check.outputs(outs, xs)
        results = tuple(np.empty_like(x) for x in xs.values()) if outs is None else tuple(outs.values())
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
        cos, sin, kernel, form = self._prepared[x.dtype]
        arrays = [np.asarray(array) for array in (sources[0], sources[-1], targets[0], targets[-1])]
        if kernel(*arrays, cos, sin, form, flags, _threads.pool()) != DONE:
            shown = [(array.shape, array.strides) for array in arrays]
            raise RuntimeError(f"arrays passed their checks, but the kernel refused them: {shown}")


def _contiguous(x: Array) -> bool:
    """Tell whether head vectors lie in memory without gaps."""
    return x.strides[-1] == x.itemsize
