"""`RotaryPlan`: the cos and sin of a step's tokens, computed once for every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments.arrays import check_inputs, named_pair, serves_any_tokens
from rope_cpu.array_types import COMPUTE_DTYPES, Array
from rope_cpu.caches.batch import Batch
from rope_cpu.caches.kv_cache import KVCache
from rope_cpu.caches.rms_norm import RMSNorm
from rope_cpu.caches.slots import slots_of_keys
from rope_cpu.launch.append import append, rotate_normalised
from rope_cpu.launch.results import LARGE, new_like
from rope_cpu.launch.rotate import (
    HeadLayout,
    Launch,
    Rotation,
    launch_copies,
    launcher,
    results_for,
    rotate_cached,
)

_ndarray = np.ndarray
_empty_like = np.empty_like


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
        "_compute_dtype",
        "_cos_sin",
        "_heads",
        "_launches",
        "_layout",
        "_operation",
        "_rotation",
        "_table_of",
    )

    def __init__(
        self,
        table_of: Callable[[str], Array],
        heads: HeadLayout,
        layout: str,
        operation: str,
        compute_dtype: str = "float32",
    ) -> None:
        self._table_of = table_of  # returns cos and sin in a compute dtype, as launches take them
        self._heads = heads
        self._layout = layout
        self._operation = operation
        self._compute_dtype = compute_dtype
        self._cos_sin = table_of(compute_dtype)
        self._launches: dict[np.dtype[Any], tuple[Launch, Array]] = {}
        self._rotation: Rotation | None = None  # made when it is first needed

    def __call__(
        self,
        q: Array,
        k: Array,
        out: tuple[Array, Array] | None = None,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
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
        q_norm, k_norm : RMSNorm, optional
            Norms of q and of k, before the rotation. float64 has none. With any norm, elements that
            are not rotated are written as `append` writes them: bfloat16 below 2^-126 becomes zero.

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
        if q_norm is not None or k_norm is not None:
            norms = {"q_norm": q_norm, "k_norm": k_norm}
            rotation = self._rotation or self._float32_rotation()
            q_rot, k_rot = rotate_normalised(rotation, {"q": q, "k": k}, norms, named_pair(out))
            return q_rot, k_rot
        if out is None and type(q) is type(k) is _ndarray:
            # Named here, since a call of `new_like` alone takes 0.1 µs.
            new = _empty_like if q.nbytes < LARGE else new_like
            results: Any = (new(q), new(k))
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
        q_rot, k_rot = self._rotate_copies({"q": q, "k": k}, named_pair(out))
        return q_rot, k_rot

    def rotate(self, x: Array, out: Array | None = None, *, norm: RMSNorm | None = None) -> Array:
        """Rotate one array.

        Parameters
        ----------
        x : array of float32, float64, float16 or bfloat16
            Queries or keys in the layout of the plan, with any strides.
        out : array, optional
            Output: `x` itself (in place), or memory that shares no element with it. A new array by
            default.
        norm : RMSNorm, optional
            Norm of x, before the rotation. float64 has none.

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
        if norm is not None:
            outs = None if out is None else {"out": out}
            rotation = self._rotation or self._float32_rotation()
            return rotate_normalised(rotation, {"x": x}, {"norm": norm}, outs)[0]
        result = out
        if out is None and type(x) is _ndarray:
            result = np.empty_like(x) if x.nbytes < LARGE else new_like(x)
        if type(x) is type(result) is _ndarray:
            launch, cos_sin = self._launches.get(x.dtype) or self._launch(x.dtype)
            same = result is x or result.dtype == x.dtype
            if same and launch(cos_sin, x, x, result, result, 1):
                return result
        name = "keys" if self._operation == "shift" else "x"
        (result,) = self._rotate_copies({name: x}, None if out is None else {"out": out})
        return result

    def append(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: KVCache,
        slot_mapping: Batch | ArrayLike,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        v_norm: RMSNorm | None = None,
        out: Array | None = None,
    ) -> Array:
        """Rotate queries, and write rotated keys and values to a cache, in one pass.

        The results have the bits of separate steps in float32 with one rounding at the end,
        whatever the threads, the layout and the pages. bfloat16 below 2^-126 becomes zero, in
        values and in elements that are not rotated, too.

        Parameters
        ----------
        q, k, v : array of float32, float16 or bfloat16
            Queries, keys and values in the layout of the plan and of one dtype, with any strides:
            views of a packed projection, for example. Values may have another width.
        cache : KVCache
            Its heads and widths are those of k and v. It must share no memory with them.
        slot_mapping : Batch, or array of int
            The slot of each token, none twice. A Batch, for layout thd, is checked already.
            Integers are page · page_size + place, (tokens,) for layout thd, otherwise (batch, seq),
            and −1 for a token that is not kept.
        q_norm, k_norm, v_norm : RMSNorm, optional
            Norms before the rotation; values are normalised only.
        out : array, optional
            Output for q: `q` itself (in place), or memory that shares nothing with q, k, v and the
            cache. A new array by default.

        Returns
        -------
        q_rot : array
            The rotated queries; `out` if it is given.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. Nothing is written then. float64 is refused, because the
            kernels compute in float32; so are plans that do not come from `RotaryEmbedding.plan`,
            and plans of the inverse.
        MemoryError
            If memory is lacking. Nothing is written then.

        Notes
        -----
        Several Python threads may append to different slots of one cache. Nobody must read a slot
        while it is written.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> batch = rope_cpu.Batch(seq_lens=[2], query_lens=[2], page_table=[[1]], page_size=16)
        >>> plan = rope_cpu.RotaryEmbedding(64).plan(batch.cache_position, layout="thd")
        >>> cache = rope_cpu.KVCache.zeros(4, 16, 2, 64, dtype=np.float32)
        >>> q = np.ones((2, 8, 64), np.float32)
        >>> k = v = np.ones((2, 2, 64), np.float32)
        >>> q_rot = plan.append(q, k, v, cache, batch)
        >>> np.array_equal(cache.key[1, :2], plan.rotate(k))
        True
        """
        if self._operation != "rotate":
            raise ValueError(
                f"`append` needs a plan of rope.plan(position_ids), but this one is of the "
                f"operation {self._operation!r}"
            )
        rotation = self._rotation or self._float32_rotation()
        norms = (q_norm, k_norm, v_norm)
        return append(rotation, q, k, v, cache, slot_mapping, norms, out)

    def rotate_cached(self, cache: KVCache, slot_mapping: Batch | ArrayLike) -> None:
        """Rotate cached keys in place.

        This moves cached keys with a plan of `RotaryEmbedding.shift_plan`, or changes their
        rotation with one of `RotaryEmbedding.rerotate_plan`. Each call rounds the keys once.

        Parameters
        ----------
        cache : KVCache
            A cache whose keys are float32, float16 or bfloat16, of the plan's head_dim.
        slot_mapping : array of int
            The slots of the keys, page · page_size + place, in the order of the plan's tokens:
            (tokens,) for layout thd, otherwise (batch, seq); none twice, and −1 for a token that is
            left out.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. Nothing is written then. Keys in int8 are refused, because
            they would be rounded to 8 bits a second time, and those times a Hadamard matrix.

        Notes
        -----
        Full pages are written as well. Other sequences that name a page read the moved keys at
        their own positions, which no check can see: copy a shared page for the sequence whose keys
        move, in every layer, or compute these keys anew.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding(64)
        >>> cache = rope_cpu.KVCache.zeros(4, 16, 2, 64, dtype=np.float32)
        >>> cache.key[1, 1] = 1
        >>> rope.plan([[3]]).rotate_cached(cache, [[17]])
        >>> expected = rope.rotate(np.ones((1, 1, 2, 64), np.float32), [3])
        >>> np.array_equal(cache.key[1, 1], expected[0, 0])
        True
        """
        slots = slots_of_keys(cache, slot_mapping, self._layout)
        rotate_cached(self._rotation or self._float32_rotation(), cache, slots)

    def _float32_rotation(self) -> Rotation:
        """Return the rotation for the kernels of caches, and keep it."""
        self._rotation = Rotation(self._table("float32"), self._heads, self._layout, {})
        return self._rotation

    def _table(self, compute_dtype: str) -> Array:
        """Return cos and sin in a compute dtype."""
        is_ready = compute_dtype == self._compute_dtype
        return self._cos_sin if is_ready else self._table_of(compute_dtype)

    def _launch(self, dtype: np.dtype[Any]) -> tuple[Launch, Array]:
        """Return the launch of a dtype and its cos and sin, and keep them."""
        table = self._table(COMPUTE_DTYPES.get(dtype, "float32"))  # other dtypes have no kernel
        launch = launcher(dtype, self._heads, self._layout)
        self._launches[dtype] = (launch, table)
        return launch, table

    def _rotate_copies(self, xs: dict[str, Any], outs: dict[str, Any] | None) -> tuple[Array, ...]:
        """Take the slow path: check all arguments, and rotate contiguous copies of the arrays.

        xs, outs: arrays by argument name.
        """
        check_inputs(xs, self._layout, self._heads.head_dim, self._cos_sin)
        results = results_for(xs, outs)

        def rotate(copies: list[Array]) -> bool:
            dtype = copies[0].dtype
            launch, cos_sin = self._launches.get(dtype) or self._launch(dtype)
            return all(launch(cos_sin, x, x, x, x, 1) for x in copies if x.size)

        launch_copies(xs.values(), results, rotate)
        return results

    def __repr__(self) -> str:
        _, batch, seq, _, pairs = self._cos_sin.shape
        return (
            f"RotaryPlan(batch={batch}, seq={'any' if serves_any_tokens(self._cos_sin) else seq}, "
            f"layout={self._layout!r}, {self._operation}, head_dim={self._heads.head_dim}, "
            f"rotary_dim={2 * pairs}, interleaved={self._heads.interleaved})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RotaryPlan, (self._table_of, self._heads, self._layout, self._operation)
