"""`RotaryEmbedding`: its constructors, its properties, and the rotation of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rope_cpu.arguments import position_ids as check_ids
from rope_cpu.arguments import scalars
from rope_cpu.arguments.arrays import check_array, check_dtype, check_layout, check_out_tables
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import COMPUTE_DTYPES, LAYOUT_AXES, Array, Float64
from rope_cpu.configs import reader
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.frequencies import axes as axes_
from rope_cpu.frequencies import generators as generators_
from rope_cpu.frequencies import scaling as scaling_
from rope_cpu.frequencies import spec as specs
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.rotation.cos_sin import Angles
from rope_cpu.rotation.dispatch import Pairing
from rope_cpu.rotation.plan import RotaryPlan


class RotaryEmbedding:
    """One rotary position embedding: immutable, without a table of positions, safe to share between threads."""

    __slots__ = ("_angles", "_columns", "_consecutive", "_pairing", "_rows", "_spec")
    _spec: RopeSpec
    _angles: Angles
    _rows: int  # sequences with frequencies of their own
    _columns: int  # pairs of all heads with frequencies of their own
    _consecutive: bool  # whether ids may be left out
    _pairing: Pairing

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the names of arguments before Python does, which would not know what is meant."""
        scalars.refuse_other_names(cls.__name__, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        head_dim: int,
        *,
        rope_theta: float | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        angle_dtype: str = "float64",
    ) -> None:
        """Make a rotary embedding for text: one axis, frequencies rope_theta^(−2i/rotary_dim), scaled by `scaling`.

        head_dim: width of a head vector in elements. rotary_dim: how many of its leading elements are rotated; where it
            is not given, all, or the section's partial_rotary_factor of them. Frequencies are computed for rotary_dim
            (for the share itself where that is odd, and one element more is rotated).
        rope_theta: the base; 10000 where it is given neither here nor in `scaling`.
        interleaved: pairs are (2i, 2i+1), "GPT-J", rather than (i, i+n), "NeoX" and `rotate_half`.
        scaling: a dict in Hugging Face form, {"rope_type": "llama3", "factor": 8.0, …}; it may hold rope_theta too.
        max_position_embeddings: tokens; dynamic needs it, and others where the section leaves a value to follow from
            it. It may stand in the section instead. Types with no use for it check it and go without: every config
            says it.
        angle_dtype: "float64" is exact; "float32" repeats the float32 arithmetic of transformers, step by step.

        Raises TypeError or ValueError for odd or too wide rotary_dim, unknown rope types, unknown or missing keys and
        values that make no rotation, naming argument, value and rule.
        Source: RoFormer, arXiv:2104.09864; for scaling see `rope_cpu.frequencies.rope_types`.
        """
        self._of(
            scaling_.scaled(
                head_dim,
                rope_theta=rope_theta,
                rotary_dim=rotary_dim,
                interleaved=interleaved,
                scaling=scaling,
                max_position_embeddings=max_position_embeddings,
                angle_dtype=angle_dtype,
            )
        )

    @classmethod
    def from_spec(cls, spec: RopeSpec) -> Self:
        """Return the rotary embedding of a spec; every constructor ends here.

        Raises TypeError for anything else.
        """
        if (
            type(spec) is not RopeSpec
        ):  # a subclass might not check itself, and kernels rely on that
            raise TypeError(f"`spec` is {shown(spec)}; it must be a RopeSpec")
        rope = cls.__new__(cls)
        rope._of(spec)
        return rope

    @classmethod
    def from_config(
        cls,
        config: str | PathLike[str] | Mapping[str, Any] | ModelConfig,
        *,
        layer_type: str | None = None,
        layer: int | None = None,
        interleaved: bool | None = None,
        angle_dtype: str = "float64",
    ) -> Self:
        """Return the rotary embedding that a Hugging Face config describes, or refuse it with the reason.

        config: path of a config.json, a folder with one, or a dict; with the old keys (`rope_scaling`, `rope_theta` at
            the top level) or the new one (`rope_parameters`, flat or nested by layer type). The language model inside a
            multimodal config is followed; give `config["vision_config"]` for its vision part; for what is read of
            vision and diffusers configs see `rope_cpu.configs.vision`. With latent attention (MLA) head_dim is the
            width of the rotated part, qk_rope_head_dim.
        layer_type: which layers, where they differ ("full_attention", "sliding_attention", …).
        layer: which layer, counted from 0, in place of its type. Neither: all layers that are rotated.
        interleaved: the pairing; None takes it from the model type. Where a model reads neighbours and writes halves
            (DeepSeek-V3), it is True: the same rotation, whose result the model has permuted.
        angle_dtype: "float64" is exact; "float32" repeats the float32 arithmetic of transformers, step by step.

        Raises ValueError or TypeError where the file does not determine one rotation: unknown rope types, unknown or
        missing keys of the rope section, an unknown model type without `interleaved`, no rotation at all.
        Source: the configuration classes and modelling code of transformers 5.23, and of models with code of their own.
        """
        return cls.from_spec(reader.read(config).spec(layer_type, layer, interleaved, angle_dtype))

    @classmethod
    def from_inv_freq(
        cls,
        inv_freq: ArrayLike,
        *,
        head_dim: int | None = None,
        attention_factor: float = 1.0,
        interleaved: bool = False,
        blocks: int | Sequence[int] = 1,
    ) -> Self:
        """Return the rotary embedding of a frequency matrix: the primitive of every other constructor.

        inv_freq: (pairs,), (axes, pairs) or (axes, heads, pairs), radians per unit of position.
        head_dim: width of a head vector, 2·pairs unless more elements follow that are copied.
        attention_factor: factor on cos and sin.
        interleaved: pairs are (2i, 2i+1) rather than (i, i+n).
        blocks: the rotated part is this many equal contiguous blocks, or blocks of these widths in elements, each
            paired within itself.

        Raises ValueError or TypeError where shapes, widths or values do not fit, naming argument, value and rule.
        """
        spec = specs.from_inv_freq(
            inv_freq,
            head_dim=head_dim,
            attention_factor=attention_factor,
            interleaved=interleaved,
            blocks=blocks,
        )
        return cls.from_spec(spec)

    @classmethod
    def axial(
        cls,
        head_dim: int,
        axes: int = 2,
        *,
        rope_theta: float | Sequence[float] = 10000.0,
        interleaved: bool = False,
        axis_dims: Sequence[int] | None = None,
        span: str = "axis",
    ) -> Self:
        """Return a rotary embedding for positions of several coordinates, each of which rotates pairs of its own.

        head_dim: width of a head vector in elements; those past the sum of axis_dims are copied.
        axes: number of coordinates.
        rope_theta: base of the frequencies base^(−2i/width), one for all axes or one for each.
        axis_dims: even widths in elements, None for equal shares.
        span: "axis" pairs within the contiguous block of each axis, with frequencies base^(−2i/block); "head" pairs
            (i, i + n) across the head, of which axes own runs. For interleaved pairs the two are the same.

        Raises TypeError or ValueError where widths do not fit, naming argument, value and rule.
        Source: Su, kexue.fm/archives/8397 (span "axis"); Qwen2-VL's vision tower in transformers (span "head").
        """
        return cls.from_spec(
            axes_.axial(
                head_dim,
                axes,
                rope_theta=rope_theta,
                interleaved=interleaved,
                axis_dims=axis_dims,
                span=span,
            )
        )

    @classmethod
    def mrope(
        cls,
        head_dim: int,
        mrope_section: Sequence[int],
        *,
        rope_theta: float,
        mrope_interleaved: bool = False,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return M-RoPE: the frequencies of one axis, shared out among time, height and width.

        head_dim: width of a head vector in elements; the first 2·sum(mrope_section) are rotated.
        mrope_section: pairs for time, height and width, or for any other number of axes.
        rope_theta: base of the frequencies.
        mrope_interleaved: False gives each axis one run of pairs (Qwen2-VL), True every third pair (Qwen3-VL).
        interleaved: pairs are (2i, 2i+1) rather than (i, i+n).
        scaling: a dict in Hugging Face form, or None; it may repeat rope_theta, mrope_section and mrope_interleaved.
            Where it depends on the sequence length, it holds max_position_embeddings as well, and the rotary embedding
            needs `at_length`, like that of one axis.

        Raises TypeError or ValueError where sections do not fit, naming argument, value and rule.
        Source: Qwen2-VL, arXiv:2409.12191; Qwen3-VL in transformers.
        """
        return cls.from_spec(
            axes_.mrope(
                head_dim,
                mrope_section,
                rope_theta=rope_theta,
                mrope_interleaved=mrope_interleaved,
                interleaved=interleaved,
                scaling=scaling,
            )
        )

    @classmethod
    def from_generators(
        cls, generators: ArrayLike, *, tolerance: float | None = None
    ) -> tuple[Self, Float64]:
        """Return the rotary embedding and the orthogonal basis Q of position p ↦ expm(Σ p_k B_k).

        generators: (axes, head_dim, head_dim), real, each antisymmetric, all commuting; a single
            (head_dim, head_dim) is one axis. Entries are radians per unit of position.
        tolerance: the largest B + Bᵀ that is taken for rounding, in radians per unit of position;
            the antisymmetric part (B - Bᵀ) / 2 is used. None: 64·head_dim·ε·max(|B|, 1), which
            covers the error of a matrix logarithm, with the ε of the dtype (16-bit floats: that of
            float32, and two units in the last place of the largest entry). Give it for generators
            that were computed or stored more coarsely than their dtype, as float32 values cast to
            float64. Rounding of 64·head_dim·2^-52·max|B| is allowed at any tolerance, also 0.
            Commutators may reach √head_dim·(t₀·‖B₁‖ + t₁·‖B₀‖), with the tolerances t: the change
            of B₀·B₁ - B₁·B₀ by entries that are off by t/2. What couples different planes, and is
            left out, may reach head_dim·t.

        Pairs are half-split. Q is (head_dim, head_dim) float64, and
        Q · rotate(Qᵀx, p) = expm(Σ p_k B_k) · x. Fold it into a projection once, rotate(QᵀW·x);
        scores of queries and keys need no more, since Q cancels in them. Planes that no generator
        rotates get frequency 0; an odd head_dim leaves its last direction unrotated.

        Raises TypeError or ValueError naming the matrices that are not square, finite,
        antisymmetric or do not commute, by how much, and how much they may.
        Source: Su, kexue.fm/archives/8397, for expm; the simultaneous normal form of commuting
        normal matrices.
        """
        spec, basis = generators_.solve(generators, tolerance)
        return cls.from_spec(spec), basis

    def _of(self, spec: RopeSpec) -> None:
        self._spec, self._angles = spec, Angles.of(spec)
        self._pairing = Pairing(spec.head_dim, spec.interleaved, spec.blocks)
        self._rows = len(spec.inv_freq)
        self._columns = spec.inv_freq.shape[2] * spec.pairs
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
        """Return the rotary embedding for a sequence length in tokens, or for one length per batch row.

        One length, also in a list, serves any batch. Returns itself where length plays no part. It is a pure function
        of each sequence's own length; transformers takes the longest sequence of a batch, and what it did before. A key
        rotated for one length and a query rotated for another do not match: where a growing sequence comes to other
        frequencies (dynamic: with every token past the original length; dynamic_powers: at each doubling; longrope:
        once, past it), re-rotate its cached keys: `old.rotate(keys, inverse=True)`, then `new.rotate(keys)`. Compare
        `inv_freq` and `attention_factor` to see whether they changed: rotary embeddings of two lengths are not equal.

        Raises TypeError or ValueError where a length is no integer of at least 1.
        """
        lengths = scalars.lengths("seq_len", seq_len)
        if self._spec.length_rule is None:
            return self
        return type(self).from_spec(self._spec.at_length(lengths))

    def cos_sin(
        self,
        position_ids: ArrayLike,
        dtype: DTypeLike = np.float32,
        *,
        out: tuple[Array, Array] | None = None,
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
        wanted, axes, rows = check_dtype(dtype), self.axes, self._rows
        ids = check_ids.position_array("position_ids", position_ids)
        check_ids.check_coordinates("position_ids", ids, axes)
        scalars.check_shape_size("position_ids", ids.shape, ids.size // axes, self._columns)
        check_ids.check_range("position_ids", ids)
        if rows == 1:
            shape = ids.shape[:-1] if axes > 1 else ids.shape
            positions = ids.astype(np.float64, order="C").reshape(1, -1, axes)
        else:
            positions = check_ids.parse_position_ids(
                "position_ids", ids, axes, None, rows, self._columns
            )
            shape = (rows, positions.shape[1])
        heads = self._spec.inv_freq.shape[2]
        shape = (*shape, heads, self._spec.pairs) if heads > 1 else (*shape, self._spec.pairs)
        if out is None:
            outs = np.empty(shape, wanted), np.empty(shape, wanted)
        else:
            outs = check_out_tables(out, shape, wanted)
        self._angles.write(positions, "rotate", *outs)
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

        x: float32, float64, float16 or bfloat16, axes as in `layout`: "bshd" (batch, seq, heads, head_dim), "bhsd",
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
        layout, mode = check_layout(layout), _mode(inverse)
        positions = self._positions("x", x, position_ids, offset, layout)
        return RotaryPlan(
            self._angles, self._pairing, positions, layout, mode, COMPUTE_DTYPES[x.dtype]
        ).rotate(x, out)

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
        layout, mode = check_layout(layout), _mode(inverse)
        positions = self._positions("q", q, position_ids, offset, layout)
        return RotaryPlan(
            self._angles, self._pairing, positions, layout, mode, COMPUTE_DTYPES[q.dtype]
        )(q, k, out)

    def plan(
        self, position_ids: ArrayLike, *, layout: str = "bshd", inverse: bool = False
    ) -> RotaryPlan:
        """Compute cos and sin of a step's positions once, for every layer and every dtype.

        position_ids, layout, inverse: as in `rotate`. Ids (seq,) serve any batch.

        Raises TypeError or ValueError as `rotate` does.
        """
        positions = self._given("position_ids", position_ids, check_layout(layout))
        return RotaryPlan(self._angles, self._pairing, positions, layout, _mode(inverse))

    def shift(
        self,
        keys: Array,
        delta: int | float | ArrayLike,
        *,
        layout: str = "bshd",
        out: Array | None = None,
    ) -> Array:
        """Move rotated keys by `delta` positions: the angle delta·F, the factor 1 (llama.cpp's K-shift).

        keys: as `x` in `rotate`. delta: tokens, one number for all, or like position_ids one per token; with several
        axes a trailing axis of coordinates, (axes,) for all tokens (M-RoPE: or a number). layout, out: as in `rotate`.

        Returns the keys as they would be, had they been rotated at their new positions.
        Raises TypeError or ValueError as `rotate` does.
        """
        keys = check_array("keys", keys, check_layout(layout))
        tokens = keys.shape[LAYOUT_AXES[layout][1]]
        moved = check_ids.parse_delta(delta, tokens, self.axes, self._spec.shared_id)
        positions = self._given("delta", moved, layout)
        plan = RotaryPlan(
            self._angles, self._pairing, positions, layout, "shift", COMPUTE_DTYPES[keys.dtype]
        )
        return plan.rotate(keys, out)

    def __repr__(self) -> str:
        length = "" if self._spec.lengths is None else f", lengths={self._spec.lengths}"
        return (
            f"RotaryEmbedding(head_dim={self.head_dim}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}, "
            f"rope_type={shown(self.rope_type)}, axes={self.axes}, attention_factor={self.attention_factor:.6g}, "
            f"wavelengths={self._wavelengths()}{length})"
        )

    def __eq__(self, other: object) -> bool:
        return self._spec == other._spec if isinstance(other, RotaryEmbedding) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_spec, (self._spec,)

    def _wavelengths(self) -> str:
        frequencies = np.abs(self._spec.inv_freq[self._spec.inv_freq != 0])
        if not frequencies.size:
            return "none"
        return f"{2 * np.pi / frequencies.max():.4g}…{2 * np.pi / frequencies.min():.4g}"

    def _positions(
        self, name: str, x: Array, ids: ArrayLike | None, offset: int | ArrayLike, layout: str
    ) -> Float64:
        """Return the positions of an array's tokens, checked."""
        x = check_array(name, x, layout)
        if ids is not None:
            if type(offset) is not int or offset != 0:
                raise ValueError(
                    f"`offset` is {shown(offset)} and `position_ids` are given as well; give one of them"
                )
            return self._given("position_ids", ids, layout)
        if layout == "thd" or not self._consecutive:
            self._spec.check_length()
            check_ids.refuse_missing_ids(self.axes, layout)
        return check_ids.positions_from_offset(
            name, offset, x.shape, layout, self._rows, self._columns
        )

    def _given(self, name: str, ids: ArrayLike, layout: str) -> Float64:
        """Return positions that were given, checked."""
        self._spec.check_length()
        return check_ids.parse_position_ids(name, ids, self.axes, layout, self._rows, self._columns)


def _mode(inverse: bool) -> str:
    if inverse is False:
        return "rotate"
    return "inverse" if scalars.boolean("inverse", inverse) else "rotate"
