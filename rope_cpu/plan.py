"""A plan: cos and sin of the current tokens, computed once for every layer, and the one call that rotates by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import machine
from rope_cpu.kernels import threads
from rope_cpu.kernels.rotate import DONE, rotation
from rope_cpu.kernels.vectors import converts_float16
from rope_cpu.validation import arrays as check
from rope_cpu.validation.arrays import Array
from rope_cpu.validation.scalars import Float64

if TYPE_CHECKING:
    from rope_cpu.rotary import RotaryEmbedding

# What each dtype is computed in, and what kernels see 16-bit floats as.
REAL_OF = {dtype: "float64" if name == "float64" else "float32" for dtype, name in check.FORMAT_OF.items()}
_BITS = {"float16": np.int16, "bfloat16": np.uint16}
# How kernels see a layout: as (batch, tokens, heads, head_dim). None: as it is.
ARRANGED: dict[str, Callable[[Array], Array] | None] = {
    "bshd": None,
    "bhsd": lambda x: x.transpose(0, 2, 1, 3),
    "sbhd": lambda x: x.transpose(1, 0, 2, 3),
    "thd": lambda x: x[None],
}

# A call (q, k, q_out, k_out, arrays) that rotates q, and k if arrays is 2, as they stand; where that cannot be it
# returns False, having written nothing.
Launch = Callable[[Array, Array, Array, Array, int], bool]
_ndarray = np.ndarray


@cache
def kernel_of(dtype: np.dtype[Any], interleaved: bool) -> tuple[Any, type | None] | None:
    """Return the kernel that rotates a dtype, and what it sees 16-bit floats as; None where there is no kernel."""
    name = check.FORMAT_OF.get(dtype)
    if name is None or (name == "float16" and not converts_float16()):
        return None
    return rotation(name, "interleaved" if interleaved else "half"), _BITS.get(name)


def _launcher(
    kernel: Any, bits: type | None, layout: str, cos: Array, sin: Array, form: NDArray[np.int64], kept: bool
) -> Launch:
    """Return the call that rotates arrays by cos and sin; kept: some elements of a head are not rotated, but copied.

    The kernel checks shapes, strides and shared memory. What has another dtype or rank, or cannot be written, Numba
    refuses with a TypeError, or NumPy with a ValueError where it is transposed.
    """
    arranged, usable = ARRANGED[layout], threads.usable

    def launch(q: Array, k: Array, q_out: Array, k_out: Array, arrays: int) -> bool:
        x, y, x_out, y_out = q, k, q_out, k_out
        if bits is not None:
            same = q.dtype is k.dtype is q_out.dtype is k_out.dtype  # the usual case; comparing takes longer
            if not same and not q.dtype == k.dtype == q_out.dtype == k_out.dtype:
                return False
            x, y = q.view(bits), k.view(bits)
            x_out, y_out = x if q_out is q else q_out.view(bits), y if k_out is k else k_out.view(bits)
        try:
            if arranged is not None:
                x, y, x_out, y_out = arranged(x), arranged(y), arranged(x_out), arranged(y_out)
            if kernel(x, y, x_out, y_out, cos, sin, form, arrays, usable()) != DONE:
                return False
        except (TypeError, ValueError):
            return False
        if kept:
            rest = slice(2 * cos.shape[3], None)
            x_out[..., rest], y_out[..., rest] = x[..., rest], y[..., rest]
        return True

    return launch


def form(head_dim: int, blocks: Sequence[int]) -> NDArray[np.int64]:
    """Return what kernels take besides arrays: head_dim, the bytes of the last cache, and the pairs of each block.

    blocks: widths in elements.
    """
    return np.array([head_dim, machine.last_level_cache(), *(width // 2 for width in blocks)], np.int64)


class Rotation:
    """Rotates arrays of one layout by the cos and sin that a subclass provides."""

    __slots__ = ("_form", "_head_dim", "_interleaved", "_layout", "_ready", "_shape")

    def __init__(
        self, layout: str, head_dim: int, form: NDArray[np.int64], interleaved: bool, shape: tuple[int, ...]
    ) -> None:
        """Take what is rotated, see `form`, and the (batch or 1, seq, frequency heads, pairs) of cos and sin."""
        self._layout, self._head_dim, self._form, self._interleaved = layout, head_dim, form, interleaved
        self._shape = shape
        self._ready: dict[np.dtype[Any], Launch] = {}

    def _cos_sin(self, real: str) -> tuple[Array, Array]:
        """Return cos and sin as float32 or float64 arrays."""
        raise NotImplementedError

    def _name(self) -> str:
        """Return what `rotate` calls its array in error texts."""
        return "x"

    def _given_for(self) -> tuple[str, str]:
        """Return what there are cos and sin for by token, and by batch row, in error texts."""
        return ("positions are given for",) * 2

    def __call__(self, q: Array, k: Array, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        """Rotate queries and keys; see RotaryEmbedding.__call__ for the arguments."""
        results = (np.empty_like(q), np.empty_like(k)) if out is None and type(q) is type(k) is _ndarray else out
        if type(results) is tuple and len(results) == 2:
            q_out, k_out = results
            if type(q) is type(k) is type(q_out) is type(k_out) is _ndarray:
                launch = self._ready.get(q.dtype) or self._prepare(q.dtype)
                if launch(q, k, q_out, k_out, 2):
                    return results
        outs = None if out is None else dict(zip(("out[0]", "out[1]"), check.out_pair(out), strict=True))
        first, second = self._rotate_copies({"q": q, "k": k}, outs)
        return first, second

    def rotate(self, x: Array, out: Array | None = None) -> Array:
        """Rotate one array; see RotaryEmbedding.rotate for the arguments."""
        result = np.empty_like(x) if out is None and type(x) is _ndarray else out
        if type(x) is type(result) is _ndarray:
            launch = self._ready.get(x.dtype) or self._prepare(x.dtype)
            if launch(x, x, result, result, 1):
                return result
        (result,) = self._rotate_copies({self._name(): x}, None if out is None else {"out": out})
        return result

    def _prepare(self, dtype: np.dtype[Any]) -> Launch:
        """Return, and keep, the call that rotates a dtype."""
        kernel = kernel_of(dtype, self._interleaved)
        if kernel is None:
            return lambda *arrays: False
        kept = 2 * self._shape[3] != self._head_dim
        launch = _launcher(*kernel, self._layout, *self._cos_sin(REAL_OF[dtype]), self._form, kept)
        self._ready[dtype] = launch
        return launch

    def _rotate_copies(self, xs: dict[str, Any], outs: dict[str, Any] | None) -> tuple[Array, ...]:
        """Say what is wrong with the arguments, or rotate copies where the kernel cannot take them as they are."""
        check.rotated(xs, self._layout, self._head_dim, self._shape, *self._given_for())
        if outs is not None:
            check.outputs(outs, xs)
        results = tuple(np.empty_like(x) for x in xs.values()) if outs is None else tuple(outs.values())
        # Where float16 has no kernel, that of float32 and NumPy's rounding give the same bits.
        dtypes = [np.float32 if kernel_of(x.dtype, self._interleaved) is None else x.dtype for x in xs.values()]
        copies = [np.array(x, dtype, order="C") for x, dtype in zip(xs.values(), dtypes, strict=True)]
        for copy, result in zip(copies, results, strict=True):
            if copy.size and not self._prepare(copy.dtype)(copy, copy, copy, copy, 1):
                raise RuntimeError(f"an array of shape {copy.shape} passed its checks, but the kernel refused its copy")
            with np.errstate(over="ignore", under="ignore"):
                result[...] = copy
        return results


class RotaryPlan(Rotation):
    """Cos and sin of the current tokens, for every layer, dtype and number of heads; made by `RotaryEmbedding.plan`.

    A plan is immutable, and several threads may use it at a time.
    """

    __slots__ = ("_mode", "_positions", "_rotary", "_tables")

    def __init__(
        self, rotary: RotaryEmbedding, positions: Float64, layout: str, mode: str, real: str = "float32"
    ) -> None:
        """Compute cos and sin in a real dtype; those in the other follow when they are first needed."""
        cos, sin = rotary._angles.tables(positions, mode, real)
        spec = rotary._spec
        super().__init__(layout, spec.head_dim, rotary._form, spec.interleaved, cos.shape)
        self._rotary, self._positions, self._mode, self._tables = rotary, positions, mode, {real: (cos, sin)}

    def _name(self) -> str:
        return "keys" if self._mode == "shift" else "x"

    def _given_for(self) -> tuple[str, str]:
        given = "`delta` is given for" if self._mode == "shift" else "positions are given for"
        of_lengths = len(self._positions) < self._shape[0]
        return given, "lengths are given for" if of_lengths else given

    def _cos_sin(self, real: str) -> tuple[Array, Array]:
        tables = self._tables.get(real)
        if tables is None:
            tables = self._tables[real] = self._rotary._angles.tables(self._positions, self._mode, real)
        return tables

    def __repr__(self) -> str:
        batch, seq, _, _ = self._shape
        return f"RotaryPlan(batch={batch}, seq={seq}, layout={self._layout!r}, {self._mode}, {self._rotary!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RotaryPlan, (self._rotary, self._positions, self._layout, self._mode)
