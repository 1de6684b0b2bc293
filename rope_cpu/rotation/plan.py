"""`RotaryPlan`: the cos and sin of a step's tokens, computed once for every layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from rope_cpu.arguments.arrays import check_out_pair
from rope_cpu.array_types import COMPUTE_DTYPES, Array, Float64
from rope_cpu.rotation.cos_sin import CosSin, PackedCosSin, RepeatedCosSin
from rope_cpu.rotation.dispatch import Launch, Pairing, launcher, rotate_copies

_ndarray = np.ndarray


class RotaryPlan:
    """The cos and sin of the current tokens, which rotate the queries and keys of every layer.

    `RotaryEmbedding.plan` makes plans. A plan serves every dtype, every number of heads and, for
    position ids of one row, every batch size. It is immutable, and several threads may use it at a
    time.

    Examples
    --------
    >>> import numpy as np, rope_cpu
    >>> rope = rope_cpu.RotaryEmbedding(64)
    >>> plan = rope.plan(np.arange(5))
    >>> plan
    RotaryPlan(batch=1, seq=5, layout='bshd', rotate, head_dim=64, rotary_dim=64, interleaved=False)
    >>> q = np.ones((2, 5, 8, 64), np.float32)
    >>> k = np.ones((2, 5, 2, 64), np.float32)
    >>> q_rot, k_rot = plan(q, k)
    >>> q_rot.shape, k_rot.shape
    ((2, 5, 8, 64), (2, 5, 2, 64))
    """

    __slots__ = (
        "_cos_sin",
        "_launches",
        "_layout",
        "_operation",
        "_pairing",
        "_positions",
        "_tables",
    )

    def __init__(
        self,
        cos_sin: CosSin | PackedCosSin | RepeatedCosSin,
        pairing: Pairing,
        positions: Float64,
        layout: str,
        operation: str,
        compute_dtype: str = "float32",
    ) -> None:
        # The table of the other compute dtype follows when it is first needed.
        self._cos_sin = cos_sin
        self._pairing = pairing
        self._positions = positions
        self._layout = layout
        self._operation = operation
        self._tables = {compute_dtype: cos_sin.table(positions, operation, compute_dtype)}
        self._launches: dict[np.dtype[Any], tuple[Launch, Array]] = {}

    def __call__(
        self, q: Array, k: Array, out: tuple[Array, Array] | None = None
    ) -> tuple[Array, Array]:
        """Rotate queries and keys.

        Parameters
        ----------
        q, k : array of float32, float64, float16 or bfloat16
            Queries and keys in the layout of the plan and of one dtype, with any strides. They may
            differ in their number of heads.
        out : pair of arrays, optional
            Outputs for q and for k: the very same arrays (in place), or memory that shares no
            element with the inputs. New arrays by default.

        Returns
        -------
        q_rot, k_rot : array
            Arrays of the shapes and the dtype of q and k; those of `out` if it is given.

        Raises
        ------
        TypeError, ValueError
            If an array does not fit the plan. Nothing is written then.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> plan = rope_cpu.RotaryEmbedding(2).plan([0, 1])
        >>> q = np.float32([[[[1, 0]], [[1, 0]]]])
        >>> k = np.float32([[[[0, 1]], [[0, 1]]]])
        >>> q_rot, k_rot = plan(q, k, out=(q, k))
        >>> q_rot is q
        True
        >>> q[0, 1, 0].round(3)
        array([0.54 , 0.841], dtype=float32)
        """
        if out is None and type(q) is type(k) is _ndarray:
            results: Any = (np.empty_like(q), np.empty_like(k))
        else:
            results = out
        if type(results) is tuple and len(results) == 2:
            q_out, k_out = results
            if type(q) is type(k) is type(q_out) is type(k_out) is _ndarray:
                dtype = q.dtype
                launch, cos_sin = self._launches.get(dtype) or self._launch(dtype)
                # Identity is the usual case; the comparison of dtypes takes longer.
                same = dtype is k.dtype is q_out.dtype is k_out.dtype
                if not same:
                    same = dtype == k.dtype == q_out.dtype == k_out.dtype
                if same and launch(cos_sin, q, k, q_out, k_out, 2):
                    return results
        outs = None
        if out is not None:
            q_out, k_out = check_out_pair(out)
            outs = {"out[0]": q_out, "out[1]": k_out}
        q_rot, k_rot = self._rotate_copies({"q": q, "k": k}, outs)
        return q_rot, k_rot

    def rotate(self, x: Array, out: Array | None = None) -> Array:
        """Rotate one array.

        Parameters
        ----------
        x : array of float32, float64, float16 or bfloat16
            Queries or keys in the layout of the plan, with any strides.
        out : array, optional
            Output: `x` itself (in place), or memory that shares no element with it. A new array by
            default.

        Returns
        -------
        x_rot : array
            An array of the shape and dtype of x; `out` if it is given.

        Raises
        ------
        TypeError, ValueError
            If an array does not fit the plan. Nothing is written then.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> plan = rope_cpu.RotaryEmbedding(2).plan([0, 1])
        >>> plan.rotate(np.ones((1, 2, 1, 2)))[0, :, 0].round(3)
        array([[ 1.   ,  1.   ],
               [-0.301,  1.382]])
        """
        result = np.empty_like(x) if out is None and type(x) is _ndarray else out
        if type(x) is type(result) is _ndarray:
            launch, cos_sin = self._launches.get(x.dtype) or self._launch(x.dtype)
            same = result is x or result.dtype == x.dtype
            if same and launch(cos_sin, x, x, result, result, 1):
                return result
        name = "keys" if self._operation == "shift" else "x"
        (result,) = self._rotate_copies({name: x}, None if out is None else {"out": out})
        return result

    def _launch(self, dtype: np.dtype[Any]) -> tuple[Launch, Array]:
        """Return the launch of a dtype and its cos and sin, which are computed on first use."""
        compute_dtype = COMPUTE_DTYPES.get(dtype, "float32")  # other dtypes have no kernel
        table = self._tables.get(compute_dtype)
        if table is None:
            table = self._cos_sin.table(self._positions, self._operation, compute_dtype)
            self._tables[compute_dtype] = table
        launch = launcher(dtype, self._pairing, self._layout)
        self._launches[dtype] = (launch, table)
        return launch, table

    def _table_shape(self) -> tuple[int, ...]:
        """Return (batch or 1, seq, frequency heads, pairs)."""
        table = next(iter(self._tables.values()))
        return table.shape[1:]

    def _rotate_copies(self, xs: dict[str, Any], outs: dict[str, Any] | None) -> tuple[Array, ...]:
        """Take the slow path; xs, outs: arrays by argument name."""
        shape = self._table_shape()
        tokens = "`delta` is given for" if self._operation == "shift" else "positions are given for"
        rows = "lengths are given for" if len(self._positions) < shape[0] else tokens
        head_dim = self._pairing.head_dim
        return rotate_copies(xs, outs, self._layout, head_dim, shape, (tokens, rows), self._launch)

    def __repr__(self) -> str:
        batch, seq, _, pairs = self._table_shape()
        return (
            f"RotaryPlan(batch={batch}, seq={seq}, layout={self._layout!r}, {self._operation}, "
            f"head_dim={self._pairing.head_dim}, rotary_dim={2 * pairs}, "
            f"interleaved={self._pairing.interleaved})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self._cos_sin, self._pairing, self._positions, self._layout, self._operation)
        return RotaryPlan, arguments
