"""Cos and sin in hand: the call that rotates arrays with them, quick where all is well, explicit where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import _check, _machine, _threads
from rope_cpu._check import Array
from rope_cpu._kernels.angles import cos_sin
from rope_cpu._kernels.compiler import DONE, NO_THREADS, OTHER_DTYPE
from rope_cpu._kernels.form import form_words
from rope_cpu._kernels.rotation import ALONE, FEW_ELEMENTS, FIRST, GIVEN, TRUSTED, rotation
from rope_cpu._kernels.units import rows, worth_a_thread
from rope_cpu.angles import SIGN, Angles
from rope_cpu.spec import Float64

# What each dtype is computed in.
REAL_OF = {dtype: "float64" if name == "float64" else "float32" for dtype, name in _check.FORMAT_OF.items()}

# What a dtype is rotated with: the kernel, and what it takes as a whole: cos and sin (or what they are computed from on
# the way), and what it is told of the form of arrays.
Prepared = tuple[Callable[..., int], Array, Array, NDArray[np.int64]]
_NOTHING = np.empty(0, np.int64)
_NOT_READY: Prepared = (lambda *_: OTHER_DTYPE), _NOTHING, _NOTHING, _NOTHING


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
            form = self._forms[dtype] = self._words(dtype, (0, 0))
        return rotation(dtype.itemsize, False).call, cos, sin, form

    def prepared_at(self, dtype: np.dtype[Any], angles: Angles, mode: str) -> Prepared:
        """Return what also computes cos and sin on the way; mode: an operation."""
        cos_sin_at = cos_sin(REAL_OF[dtype], angles.kind).address
        form = self._words(dtype, (cos_sin_at, SIGN[mode]))
        return rotation(dtype.itemsize, True).call, angles.parts, angles.factors[mode], form

    def _words(self, dtype: np.dtype[Any], angles: tuple[int, int]) -> NDArray[np.int64]:
        kind, in_use = (_check.FORMAT_OF[dtype], self.pairing), _threads.IN_USE.ctypes.data
        work, above, worth = rows(*kind).address, _machine.last_level_cache(), worth_a_thread(*kind)
        return form_words(work, dtype, self.layout, self.head_dim, above, in_use, self.pairs, angles, worth)


class Rotation:
    """Rotates arrays by the cos and sin that a subclass provides for each real dtype."""

    __slots__ = ("_frame", "_prepared", "_ready", "_table_shape")

    _ready: Prepared  # for the dtype that was rotated last

    def __init__(self, frame: Frame, table_shape: tuple[int, ...]) -> None:
        """Take what is rotated, and the (batch or 1, seq, frequency heads, pairs) of cos and sin."""
        self._frame, self._table_shape, self._ready = frame, table_shape, _NOT_READY
        self._prepared: dict[np.dtype[Any], Prepared] = {}

    def _cos_sin(self, real: str) -> tuple[Array, Array]:
        """Return cos and sin as float32 or float64 arrays of the table shape."""
        raise NotImplementedError

    def _name(self) -> str:
        """Return what `rotate` calls its array in error texts."""
        return "x"

    def _given_for(self) -> tuple[str, str]:
        """Return what there are cos and sin for by token, and by batch row, in error texts."""
        return ("positions are given for",) * 2

    def __call__(self, q: Array, k: Array, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        """Rotate queries and keys; see RotaryEmbedding.__call__ for the arguments."""
        # What can be is left to compiled code, and the usual way is the shortest: Python is a third of a token's time.
        try:
            pair = (np.empty_like(q), np.empty_like(k)) if out is None else out
            ready = self._ready
            status = ready[0](q, k, pair, ready, 0)
            if status == DONE or (status == OTHER_DTYPE and self._changed_dtype(q, k, pair, 0)):
                return pair
        except (AttributeError, KeyError, TypeError, ValueError):
            pass  # what is wrong is found out below, and said in the words of the argument
        if out is not None and type(out) is not tuple:
            return self(q, k, _check.out_pair(out))
        outs = None if out is None else dict(zip(("out[0]", "out[1]"), _check.out_pair(out), strict=True))
        first, second = self._look_closer({"q": q, "k": k}, outs)
        return first, second

    def rotate(self, x: Array, out: Array | None = None) -> Array:
        """Rotate one array; see RotaryEmbedding.rotate for the arguments."""
        try:
            result = np.empty_like(x) if out is None else out
            ready = self._ready
            status = ready[0](x, x, result, ready, ALONE)
            if status == DONE or (status == OTHER_DTYPE and self._changed_dtype(x, x, result, ALONE)):
                return result
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        (result,) = self._look_closer({self._name(): x}, None if out is None else {"out": out})
        return result

    def _changed_dtype(self, q: Array, k: Array, out: Any, flags: int) -> bool:
        """Rotate what may be of another dtype than before; tell whether that was done."""
        if type(q) is not np.ndarray:
            return False
        ready = self._prepare(q.dtype)
        if ready[0](q, k, out, ready, flags) != DONE:
            return False
        self._ready = ready
        return True

    def _prepare(self, dtype: np.dtype[Any]) -> Prepared:
        """Return cos, sin and the kernel for one of the dtypes."""
        prepared = self._prepared.get(dtype)
        if prepared is None:
            prepared = self._prepared[dtype] = self._frame.prepared(dtype, *self._cos_sin(REAL_OF[dtype]))
        return prepared

    def _look_closer(self, xs: dict[str, Any], outs: dict[str, Any] | None) -> tuple[Array, ...]:
        """Say what is wrong with the arguments, or rotate copies where the kernel cannot take them as they are."""
        _check.rotated(xs, self._frame.layout, self._frame.head_dim, self._table_shape, *self._given_for())
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
        _threads.pool()  # if it was that which the kernel missed
        self._ready = ready = self._prepare(x.dtype)
        arrays = [np.asarray(array) for array in (sources[0], sources[-1], *targets)]
        out = arrays[2] if len(targets) == 1 else tuple(arrays[2:])
        if ready[0](*arrays[:2], out, ready, flags) != DONE:
            shown = [(array.shape, array.strides) for array in arrays]
            raise RuntimeError(f"arrays passed their checks, but the kernel refused them: {shown}")


class OnTheWay:
    """Rotates the few tokens of a decode step: kernels compute their cos and sin and do not keep them."""

    __slots__ = ("_angles", "_frames", "_prepared", "ready")

    def __init__(self, frames: dict[str, Frame], angles: Angles) -> None:
        """Take frames by layout, and what cos and sin are computed from."""
        self._frames, self._angles = frames, angles
        self._prepared: dict[tuple[str, str, np.dtype[Any]], Prepared] = {}
        # For each layout, for the dtype that was rotated last: what rotates consecutive tokens, and what undoes it.
        self.ready: tuple[dict[str, Prepared], dict[str, Prepared]] = ({}, {})

    def follow(self, q: Any, k: Any, out: Any, offset: Any, layout: Any, inverse: Any, flags: int = 0) -> Any | None:
        """Rotate q and k, or with ALONE q, from position `offset` on; return `out`, or None where that cannot be."""
        if isinstance(offset, np.integer):
            offset = int(offset)  # an element of an array of lengths
        if type(offset) is not int or type(layout) is not str or type(inverse) is not bool:
            return None
        ready = self.ready[inverse].get(layout)
        if ready is None or out is None:
            ready = (ready or self._keep(layout, inverse, q.dtype)) if _are_few(q) else None
        if ready is None:
            return None
        try:
            if out is None:
                out = np.empty_like(q) if flags else (np.empty_like(q), np.empty_like(k))
            status = ready[0](q, k, out, ready, offset * FIRST + flags)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return None  # what was wrong is found out elsewhere
        if status == DONE:
            return out
        if status == NO_THREADS:
            _threads.pool()
        else:
            ready = self._keep(layout, inverse, q.dtype) if status == OTHER_DTYPE and _are_few(q) else None
        return out if ready and ready[0](q, k, out, ready, offset * FIRST + flags) == DONE else None

    def at(self, q: Array, k: Any, out: Any, positions: Float64, layout: str, mode: str, flags: int = 0) -> Any | None:
        """Rotate q and k, or with ALONE q, at positions; return `out`, or None where that cannot be.

        q: checked. positions: as `Angles.tables` takes them. mode: an operation.
        """
        if not _are_few(q):
            return None
        ready = *self._prepare(layout, mode, q.dtype), positions
        try:
            if out is None:
                out = np.empty_like(q) if flags else (np.empty_like(q), np.empty_like(k))
            status = ready[0](q, k, out, ready, GIVEN + flags)
            if status == NO_THREADS:
                _threads.pool()
                status = ready[0](q, k, out, ready, GIVEN + flags)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None  # as above
        return out if status == DONE else None

    def _keep(self, layout: str, inverse: bool, dtype: np.dtype[Any]) -> Prepared | None:
        """Return what rotates consecutive tokens of a dtype, and keep it ready; None where there is none."""
        if layout not in self._frames or layout == "thd" or dtype not in _check.FORMAT_OF:
            return None  # packed tokens share no order
        prepared = self.ready[inverse][layout] = self._prepare(layout, "inverse" if inverse else "rotate", dtype)
        return prepared

    def _prepare(self, layout: str, mode: str, dtype: np.dtype[Any]) -> Prepared:
        """Return what rotates one of the dtypes."""
        prepared = self._prepared.get((layout, mode, dtype))
        if prepared is None:
            prepared = self._frames[layout].prepared_at(dtype, self._angles, mode)
            self._prepared[layout, mode, dtype] = prepared
        return prepared


def _are_few(x: Any) -> bool:
    """Tell whether kernels might rotate an array on the way: others must not make one be compiled."""
    return type(x) is np.ndarray and x.size <= FEW_ELEMENTS


def _contiguous(x: Array) -> bool:
    """Tell whether head vectors lie in memory without gaps."""
    return x.strides[-1] == x.itemsize
