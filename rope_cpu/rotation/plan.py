"""A plan: cos and sin of the current tokens, computed once for every layer, and the one call that rotates by them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rope_cpu.arguments.arrays import check_out_pair
from rope_cpu.array_types import COMPUTE_DTYPES, Array, Float64
from rope_cpu.rotation.cos_sin import Angles
from rope_cpu.rotation.dispatch import Launch, Pairing, launcher, rotate_copies

_ndarray = np.ndarray


class RotaryPlan:
    """Cos and sin of the current tokens, for every layer, dtype and number of heads; made by `RotaryEmbedding.plan`.

    A plan is immutable, and several threads may use it at a time.
    """

    __slots__ = ("_angles", "_launches", "_layout", "_mode", "_pairing", "_positions", "_tables")

    def __init__(
        self,
        angles: Angles,
        pairing: Pairing,
        positions: Float64,
        layout: str,
        mode: str,
        real: str = "float32",
    ) -> None:
        """Compute cos and sin in a real dtype; those in the other follow when they are first needed."""
        self._angles, self._pairing, self._positions = angles, pairing, positions
        self._layout, self._mode = layout, mode
        self._tables = {real: angles.cos_sin(positions, mode, real)}
        self._launches: dict[np.dtype[Any], tuple[Launch, Array]] = {}

    def __call__(
        self, q: Array, k: Array, out: tuple[Array, Array] | None = None
    ) -> tuple[Array, Array]:
        """Rotate queries and keys; see RotaryEmbedding.__call__ for the arguments."""
        results = (
            (np.empty_like(q), np.empty_like(k))
            if out is None and type(q) is type(k) is _ndarray
            else out
        )
        if type(results) is tuple and len(results) == 2:
            q_out, k_out = results
            if type(q) is type(k) is type(q_out) is type(k_out) is _ndarray:
                dtype = q.dtype
                launch, cos_sin = self._launches.get(dtype) or self._launch(dtype)
                same = (
                    dtype is k.dtype is q_out.dtype is k_out.dtype
                )  # the usual case; comparing takes longer
                if not same:
                    same = dtype == k.dtype == q_out.dtype == k_out.dtype
                if same and launch(cos_sin, q, k, q_out, k_out, 2):
                    return results
        outs = (
            None
            if out is None
            else dict(zip(("out[0]", "out[1]"), check_out_pair(out), strict=True))
        )
        first, second = self._rotate_copies({"q": q, "k": k}, outs)
        return first, second

    def rotate(self, x: Array, out: Array | None = None) -> Array:
        """Rotate one array; see RotaryEmbedding.rotate for the arguments."""
        result = np.empty_like(x) if out is None and type(x) is _ndarray else out
        if type(x) is type(result) is _ndarray:
            launch, cos_sin = self._launches.get(x.dtype) or self._launch(x.dtype)
            same = result is x or result.dtype == x.dtype
            if same and launch(cos_sin, x, x, result, result, 1):
                return result
        name = "keys" if self._mode == "shift" else "x"
        (result,) = self._rotate_copies({name: x}, None if out is None else {"out": out})
        return result

    def _launch(self, dtype: np.dtype[Any]) -> tuple[Launch, Array]:
        """Return the call that rotates a dtype, and cos and sin for it, computed when they are first needed."""
        real = COMPUTE_DTYPES.get(dtype, "float32")  # the call for another dtype answers False
        table = self._tables.get(real)
        if table is None:
            table = self._tables[real] = self._angles.cos_sin(self._positions, self._mode, real)
        found = self._launches[dtype] = launcher(dtype, self._pairing, self._layout), table
        return found

    def _shape(self) -> tuple[int, ...]:
        """Return (batch or 1, seq, frequency heads, pairs)."""
        return next(iter(self._tables.values())).shape[1:]

    def _rotate_copies(self, xs: dict[str, Any], outs: dict[str, Any] | None) -> tuple[Array, ...]:
        shape = self._shape()
        given = "`delta` is given for" if self._mode == "shift" else "positions are given for"
        by_row = "lengths are given for" if len(self._positions) < shape[0] else given
        head_dim = self._pairing.head_dim
        return rotate_copies(xs, outs, self._layout, head_dim, shape, (given, by_row), self._launch)

    def __repr__(self) -> str:
        batch, seq, _, pairs = self._shape()
        head_dim, interleaved, _ = self._pairing
        return (
            f"RotaryPlan(batch={batch}, seq={seq}, layout={self._layout!r}, {self._mode}, head_dim={head_dim}, "
            f"rotary_dim={2 * pairs}, interleaved={interleaved})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RotaryPlan, (self._angles, self._pairing, self._positions, self._layout, self._mode)
