"""What users hold: a rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rope_cpu import _check
from rope_cpu import spec as specs
from rope_cpu._check import Array
from rope_cpu._constructors import Constructors
from rope_cpu.angles import Angles
from rope_cpu.plan import REAL_OF, RotaryPlan, form
from rope_cpu.spec import MAX_POSITION, Float64, RopeSpec

_FAR = int(MAX_POSITION / 2)  # from where on it matters how many tokens follow an offset


class RotaryEmbedding(Constructors):
    """One rotary position embedding: immutable, without a table of positions, safe to share between threads."""

    __slots__ = ("_angles", "_consecutive", "_form", "_spec")
    _spec: RopeSpec
    _angles: Angles
    _consecutive: bool  # whether ids may be left out
    _form: NDArray[np.int64]  # head_dim and blocks as kernels take them

    def _of(self, spec: RopeSpec) -> None:
        self._spec, self._angles = spec, Angles.of(spec)
        self._form = form(spec.head_dim, spec.blocks)
        self._consecutive = not spec.needs_length and (spec.axes == 1 or spec.shared_id)

    @property
    def spec(self) -> RopeSpec:
        """The pure description of this rotation."""
        return self._spec

    @property
    def inv_freq(self) -> Float64:
        """The definition of this rotation: float64 radians per unit of position.

        (pairs,), (axes, pairs) or (axes, heads, pairs).

        Where sequences have lengths of their own (`at_length` of several), a leading axis of batch rows comes first.
        """
        omega = self._spec.inv_freq
        rows, axes, heads, _ = omega.shape
        omega = omega if rows > 1 else omega[0]
        if heads > 1:
            return omega
        omega = omega[..., 0, :]
        return omega[..., 0, :] if axes == 1 else omega

    @property
    def attention_factor(self) -> float:
        """The factor A on cos and sin (several lengths: that of the first)."""
        return float(self._spec.attention_factor[0])

    @property
    def head_dim(self) -> int:
        """Width of a head vector in elements."""
        return self._spec.head_dim

    @property
    def rotary_dim(self) -> int:
        """How many leading elements of a head vector are rotated."""
        return self._spec.rotary_dim

    @property
    def interleaved(self) -> bool:
        """Whether pairs are (2i, 2i+1) rather than (i, i+n)."""
        return self._spec.interleaved

    @property
    def blocks(self) -> tuple[int, ...]:
        """Widths in elements of the contiguous blocks that pairs are formed in."""
        return self._spec.blocks

    @property
    def rope_type(self) -> str:
        """Name of the scaling kind, or of another source of frequencies: axial, generators."""
        return self._spec.rope_type

    @property
    def axes(self) -> int:
        """Number of position coordinates of a token."""
        return self._spec.axes

    def at_length(self, seq_len: int | Sequence[int] | NDArray[Any]) -> RotaryEmbedding:
        """Return the rotary for a sequence length in tokens, or for one length per batch row.

        One length, also in a list, serves any batch. Returns itself where length plays no part. It is a pure function
        of each sequence's own length; transformers takes the longest sequence of a batch, and what it did before. A key
        rotated for one length and a query rotated for another do not match: where a growing sequence comes to other
        frequencies (dynamic: with every token past the original length; dynamic_powers: at each doubling; longrope:
        once, past it), rotate its cached keys anew: `old.rotate(keys, inverse=True)`, then `new.rotate(keys)`. Whether
        they are others, `inv_freq` and `attention_factor` tell: rotaries of two lengths are not equal.

        Raises TypeError or ValueError where a length is no integer of at least 1.
        """
        if isinstance(seq_len, np.ndarray):
            seq_len = seq_len.tolist()
        many = [seq_len] if isinstance(seq_len, str | bytes) or not isinstance(seq_len, Sequence) else seq_len
        lengths = [specs.whole_number("seq_len", length) for length in many]
        if not lengths:
            raise ValueError("`seq_len` is empty; it must be a length, or one per batch row")
        if self._spec.length_rule is None:
            return self
        return type(self).from_spec(self._spec.at_length(lengths))

    def cos_sin(
        self, position_ids: ArrayLike, dtype: DTypeLike = np.float32, *, out: tuple[Array, Array] | None = None
    ) -> tuple[Array, Array]:
        """Return cos and sin of the positions, attention factor included, rounded once to `dtype`.

        position_ids: integers or float32/float64 of any shape; with several axes the last axis holds the coordinates.
        dtype: float32, float64, float16 or bfloat16; what is below 2^-126 is zero in bfloat16, as in rotations.
        out: a pair of arrays to write to and return, for cos and for sin; new ones cost more time than cos and sin.
        Each result has position_ids.shape (without the last axis where there are several) + (pairs,); where heads have
        frequencies of their own, + (heads, pairs). Where sequences have lengths of their own, ids are (seq,) or (rows,
        seq) and results (rows, seq, pairs). Before `at_length` it is the original length's.

        Raises TypeError or ValueError for other dtypes, non-finite positions, positions beyond ±2^53, and an `out` of
        another shape or dtype, that is read-only, or whose elements share memory.
        """
        wanted, axes, rows = _check.dtype(dtype), self.axes, self._spec.attention_factor.size
        ids = _check.numbers("position_ids", position_ids)
        _check.coordinates("position_ids", ids, axes)
        _check.position_values("position_ids", ids)
        if rows == 1:
            shape = ids.shape[:-1] if axes > 1 else ids.shape
            positions = ids.astype(np.float64, order="C").reshape(1, -1, axes)
        else:
            positions = _check.positions("position_ids", ids, axes, None, rows)
            shape = (rows, positions.shape[1])
        heads = self._spec.inv_freq.shape[2]
        shape = (*shape, heads, self._spec.pairs) if heads > 1 else (*shape, self._spec.pairs)
        outs = None if out is None else _check.out_tables(out, shape, wanted)
        kind = _check.FORMAT_OF[wanted]
        direct = outs if outs and all(table.flags.carray for table in outs) else None
        cos, sin = self._angles.tables(positions, "rotate", kind, direct)
        if outs is None:
            return cos.reshape(shape), sin.reshape(shape)
        if not direct:
            outs[0][...], outs[1][...] = cos.reshape(shape), sin.reshape(shape)
        return outs

    def rotate(
        self,
        x: Array,
        position_ids: ArrayLike | None = None,
        *,
        offset: int | ArrayLike = 0,
        layout: str = "bshd",
        inverse: bool = False,
        out: Array | None = None,
    ) -> Array:
        """Rotate one array, queries or keys.

        x: float32, float64, float16 or bfloat16, axes as `layout` says: "bshd" (batch, seq, heads, head_dim), "bhsd",
            "sbhd" or "thd" (packed tokens, heads, head_dim); any strides.
        position_ids: integers or float32/float64, (seq,) or (batch, seq), for thd (tokens,) and required; with several
            axes one more trailing axis of coordinates. None: offset + 0, 1, 2, …, for one axis and for M-RoPE, whose
            text has the same coordinate on all.
        offset: position of the first token, an int of either sign or one per batch row; not together with position_ids.
        inverse: undo the rotation: the angle −θ and the factor 1/A.
        out: where to write, `x` itself or memory that shares nothing with it; it is returned.

        Returns an array of x's shape and dtype, computed in float32 (float64 for float64) and rounded once; what of
        bfloat16 is below 2^-126 becomes zero. Elements past rotary_dim are copied.

        Raises TypeError or ValueError, before anything is written, naming argument, value and rule; ValueError also
        where frequencies depend on a length that is not given (`at_length`).
        """
        layout, mode = _check.layout(layout), _mode(inverse)
        positions = self._positions("x", x, position_ids, offset, layout)
        return RotaryPlan(self, positions, layout, mode, REAL_OF[x.dtype]).rotate(x, out)

    def __call__(
        self,
        q: Array,
        k: Array,
        position_ids: ArrayLike | None = None,
        *,
        offset: int | ArrayLike = 0,
        layout: str = "bshd",
        inverse: bool = False,
        out: tuple[Array, Array] | None = None,
    ) -> tuple[Array, Array]:
        """Rotate queries and keys of the same tokens in one go; arguments as in `rotate`.

        q, k: of one dtype; they may differ in their number of heads (grouped-query attention).
        out: a pair of arrays, for q and for k; views of one packed buffer are fine.

        Returns the pair (q_rot, k_rot). Raises as `rotate` does.
        """
        layout, mode = _check.layout(layout), _mode(inverse)
        positions = self._positions("q", q, position_ids, offset, layout)
        return RotaryPlan(self, positions, layout, mode, REAL_OF[q.dtype])(q, k, out)

    def plan(self, position_ids: ArrayLike, *, layout: str = "bshd", inverse: bool = False) -> RotaryPlan:
        """Compute cos and sin of a step's positions once, for every layer and every dtype.

        position_ids, layout, inverse: as in `rotate`. Ids (seq,) serve any batch.

        Raises TypeError or ValueError as `rotate` does.
        """
        positions = self._given("position_ids", position_ids, _check.layout(layout))
        return RotaryPlan(self, positions, layout, _mode(inverse))

    def shift(
        self, keys: Array, delta: int | float | ArrayLike, *, layout: str = "bshd", out: Array | None = None
    ) -> Array:
        """Move rotated keys by `delta` positions: the angle delta·F, the factor 1 (llama.cpp's K-shift).

        keys: as `x` in `rotate`. delta: tokens, one number for all, or like position_ids one per token; with several
        axes a trailing axis of coordinates, (axes,) for all tokens (M-RoPE: or a number). layout, out: as in `rotate`.

        Returns the keys as they would be, had they been rotated at their new positions.
        Raises TypeError or ValueError as `rotate` does.
        """
        keys = _check.array("keys", keys, _check.layout(layout))
        moved = _check.numbers("delta", delta)
        tokens = keys.shape[_check.AXES[layout][1]]
        if moved.ndim:
            _check.coordinates("delta", moved, self.axes)
        if moved.ndim == 0 and (self.axes == 1 or self._spec.shared_id):
            moved = np.full((tokens, self.axes) if self.axes > 1 else tokens, moved)
        elif moved.ndim == 1 and self.axes > 1:
            moved = np.broadcast_to(moved, (tokens, *moved.shape))
        positions = self._given("delta", moved, layout)
        return RotaryPlan(self, positions, layout, "shift", REAL_OF[keys.dtype]).rotate(keys, out)

    def __repr__(self) -> str:
        length = "" if self._spec.lengths is None else f", lengths={self._spec.lengths}"
        return (
            f"RotaryEmbedding(head_dim={self.head_dim}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}, "
            f"rope_type={self.rope_type!r}, axes={self.axes}, attention_factor={self.attention_factor:.6g}, "
            f"wavelengths={self._wavelengths()}{length})"
        )

    def __eq__(self, other: object) -> bool:
        return self._spec == other._spec if isinstance(other, RotaryEmbedding) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_spec, (self._spec,)

    def _wavelengths(self) -> str:
        turning = np.abs(self._spec.inv_freq[self._spec.inv_freq != 0])
        return f"{2 * np.pi / turning.max():.4g}…{2 * np.pi / turning.min():.4g}" if turning.size else "none"

    def _ready(self) -> None:
        if self._spec.needs_length:
            raise ValueError(
                f"rope type {self.rope_type!r} depends on the sequence length; call `at_length(seq_len)` first and "
                "rotate queries and keys with what it returns"
            )

    def _positions(self, name: str, x: Array, ids: ArrayLike | None, offset: int | ArrayLike, layout: str) -> Float64:
        """Return the positions of an array's tokens, checked."""
        x = _check.array(name, x, layout)
        if ids is not None:
            if type(offset) is not int or offset != 0:
                raise ValueError(f"`offset` is {offset!r} and `position_ids` are given as well; give one of them")
            return self._given("position_ids", ids, layout)
        if layout == "thd" or not self._consecutive:
            self._needs_ids(layout)
        seq = x.shape[_check.AXES[layout][1]]
        if type(offset) is int and abs(offset) < _FAR:
            return np.arange(offset, offset + seq, dtype=np.float64).reshape(1, seq, 1)
        rows = _check.offsets(offset, x.shape[1 if layout == "sbhd" else 0], seq)
        return rows.reshape(-1, 1, 1) + np.arange(seq, dtype=np.float64)[:, None]

    def _given(self, name: str, ids: ArrayLike, layout: str) -> Float64:
        """Return positions that were given, checked."""
        self._ready()
        return _check.positions(name, ids, self.axes, layout, self._spec.attention_factor.size)

    def _needs_ids(self, layout: str) -> None:
        """Raise the reason why position_ids cannot be left out."""
        self._ready()
        if layout == "thd":
            raise ValueError(
                "`position_ids` is None; packed tokens (layout thd) need them, as sequences share no order"
            )
        raise ValueError(f"`position_ids` is None; with {self.axes} axes each token needs its coordinates")


def _mode(inverse: bool) -> str:
    if inverse is False:
        return "rotate"
    return "inverse" if specs.boolean("inverse", inverse) else "rotate"
