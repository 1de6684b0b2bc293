"""`RotaryEmbedding`: its constructors, its properties, and the rotation of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import scalars
from rope_cpu.arguments.arrays import check_array, check_dtype, check_layout
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.position_ids import (
    check_coordinates,
    parse_delta,
    parse_position_ids,
    position_array,
    positions_from_offset,
    refuse_missing_ids,
    tokens_of_sequences,
)
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import COMPUTE_DTYPES, Array, Dtype, Float64, Intp, Layout
from rope_cpu.frequencies.axes import Span, axial, mrope
from rope_cpu.frequencies.generators import solve
from rope_cpu.frequencies.scaling import scaled
from rope_cpu.frequencies.spec import AngleDtype, RopeSpec, from_inv_freq
from rope_cpu.launch.rotate import HeadLayout
from rope_cpu.models import reader
from rope_cpu.models.model import Model
from rope_cpu.rotation.cos_sin import CosSin, check_rerotation, rows_of_lengths
from rope_cpu.rotation.plan import RotaryPlan


@dataclass(slots=True, init=False, repr=False, eq=False)
class RotaryEmbedding:
    """A rotary position embedding.

    Pair i of a head vector is rotated by the angle position · inv_freq[i], in radians, and scaled
    by the attention factor. The object is immutable, holds no table of positions, has no maximum
    length, and may be shared between threads. The other constructors are `from_config`,
    `from_gguf`, `from_inv_freq`, `axial`, `mrope`, `from_generators` and `from_spec`.

    Parameters
    ----------
    head_dim : int
        Width of a head vector in elements.
    rope_theta : float, optional
        Base of the frequencies rope_theta^(−2i/rotary_dim). By default that of `scaling`, or 10000.
    rotary_dim : int, optional
        Number of leading elements that are rotated; the others are copied. By default the
        `partial_rotary_factor` of `scaling` times head_dim, or head_dim. Frequencies are computed
        for rotary_dim. If the share is odd, say 19, frequencies are computed for 19 and 20 elements
        are rotated, as in transformers.
    interleaved : bool, default False
        The pairing. True: pairs are (2i, 2i+1), as in GPT-J. False: pairs are (i, i+n) with
        n = rotary_dim / 2, as in GPT-NeoX and `rotate_half`.
    scaling : mapping, optional
        Rope parameters in Hugging Face form, such as {"rope_type": "llama3", "factor": 8.0, …}.
        It may hold rope_theta as well.
    max_position_embeddings : int, optional
        Length in tokens. The rope type "dynamic" needs it, and others need it if `scaling` leaves
        a value to be derived from it. It may also be a key of `scaling`. Rope types that do not
        use it only validate it, because every config holds it.
    angle_dtype : {"float64", "float32"}
        "float64" is exact. "float32" repeats the float32 arithmetic of transformers step by step.

    Raises
    ------
    TypeError, ValueError
        If rotary_dim is odd or too wide, if the rope type or a key of `scaling` is unknown or
        missing, or if the values do not define a rotation. The message names the argument, its
        value and the rule.

    References
    ----------
    RoFormer, arXiv:2104.09864. For the rope types see `rope_cpu.frequencies.rope_types`.

    Examples
    --------
    >>> import numpy as np, rope_cpu
    >>> rope = rope_cpu.RotaryEmbedding(128, rope_theta=500000.0)
    >>> q = np.ones((1, 7, 32, 128), np.float32)  # (batch, seq, heads, head_dim)
    >>> k = np.ones((1, 7, 8, 128), np.float32)
    >>> q_rot, k_rot = rope(q, k)
    >>> q_rot.shape, k_rot.shape
    ((1, 7, 32, 128), (1, 7, 8, 128))
    """

    _spec: RopeSpec  # a row for each of the different frequencies
    _cos_sin: CosSin  # of the same rows
    _lengths: tuple[int, ...] | None
    _row_of_sequence: Intp
    _sequences: int  # those with lengths of their own
    _table_width: int  # pairs of all heads with frequencies of their own
    _takes_offset: bool  # kept, as computing it takes 3 % of a call for one token
    _heads: HeadLayout

    def __init__(
        self,
        head_dim: int,
        *,
        rope_theta: float | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        angle_dtype: AngleDtype = "float64",
    ) -> None:
        length = max_position_embeddings
        self._set_spec(
            scaled(head_dim, rope_theta, rotary_dim, interleaved, scaling, length, angle_dtype)
        )

    @classmethod
    def from_spec(cls, spec: RopeSpec) -> Self:
        """Return the rotary embedding of a spec. Every other constructor ends here.

        Parameters
        ----------
        spec : RopeSpec
            Frequencies, attention factor and pairing.

        Raises
        ------
        TypeError
            If `spec` is not a RopeSpec.

        Examples
        --------
        >>> import rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding(64)
        >>> rope_cpu.RotaryEmbedding.from_spec(rope.spec) == rope
        True
        """
        if type(spec) is not RopeSpec:  # kernels rely on checks that a subclass may lack
            rule = "be a RopeSpec, such as `spec` of a rotary embedding"
            raise ArgumentTypeError("spec", spec, rule)
        rope = cls.__new__(cls)
        rope._set_spec(spec)
        return rope

    @classmethod
    def from_config(
        cls,
        config: str | PathLike[str] | Mapping[str, Any] | Model,
        *,
        layer_type: str | None = None,
        layer: int | None = None,
        part: Literal["indexer"] | None = None,
        interleaved: bool | None = None,
        angle_dtype: AngleDtype = "float64",
    ) -> Self:
        """Return the rotary embedding that a Hugging Face config describes.

        Parameters
        ----------
        config : str, path, mapping or Model
            A config.json, a folder with one, or its content as a dict: with the old keys
            (`rope_scaling`, and `rope_theta` at the top level) or the new one (`rope_parameters`,
            flat or nested by layer type). Of a multimodal config the language model is read; pass
            `config["vision_config"]` for the vision part. `rope_cpu.models.vision` and
            docs/configs.md describe the support of vision and diffusers configs. With latent
            attention (MLA), head_dim is the width of the rotated part, qk_rope_head_dim.
        layer_type : str, optional
            The layers' type, if layers differ: "full_attention", "sliding_attention", ….
        layer : int, optional
            A layer, counted from 0, instead of a type. By default all layers that are rotated.
        part : {"indexer"}, optional
            Rotate the heads of the indexer that chooses the keys of sparse attention (DeepSeek
            V3.2, GLM-5, …), `index_head_dim` wide: it may pair otherwise than the attention, and
            rotate another part of a head. A Hadamard transform after it leaves scores as they are.
        interleaved : bool, optional
            The pairing; by default that of the model type. DeepSeek-V3 rotates pairs (2i, 2i+1)
            but stores all first elements before all second ones: it is read as True. Scores are
            equal; only the order of the elements differs. It holds for the weights as transformers
            loads them. For a few model types it reorders the rows of q and k then, and published
            weights have pairs (2i, 2i+1); `rope-cpu show` says so.
        angle_dtype : {"float64", "float32"}
            "float64" is exact. "float32" repeats the float32 arithmetic of transformers.

        Raises
        ------
        TypeError, ValueError
            If the file does not determine one rotation: an unknown rope type, an unknown or missing
            key of the rope parameters, an unknown model type without `interleaved`, or no rotation
            at all.

        References
        ----------
        Configuration classes and modelling code of transformers 5.24, and of models with code of
        their own.

        Examples
        --------
        >>> import rope_cpu
        >>> config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
        >>> rope = rope_cpu.RotaryEmbedding.from_config(config)
        >>> rope.head_dim, rope.interleaved
        (128, False)
        """
        model = reader.read(config)
        return cls.from_spec(model.spec(layer_type, layer, interleaved, angle_dtype, part))

    @classmethod
    def from_gguf(
        cls,
        path: str | PathLike[str],
        *,
        layer_type: str | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the rotary embedding of a GGUF file, as llama.cpp rotates.

        Only the header is read: the metadata and the tensors `rope_freqs`, `rope_factors_short` and
        `rope_factors_long`. The pairing follows from the architecture. For Llama and its relatives
        it is the other one than in the same model's config.json: pairs are (2i, 2i+1), since the
        converter to GGUF reorders the rows of q and k. Use it with weights from the same file.
        Two pairs of Qwen3-VL turn with the time, as in transformers; llama.cpp does not turn them
        for text.

        Parameters
        ----------
        path : str or path
            A file of GGUF version 2 or 3, little-endian, or the first one of a split model.
        layer_type : str, optional
            "full_attention" or "sliding_attention", if layers with a sliding window have a
            rotation of their own.
        overrides : mapping, optional
            Metadata that replace those of the file, without the name of the architecture, as the
            flags of llama.cpp do: {"rope.freq_base": 1e6} for `--rope-freq-base 1000000`. Further
            keys are "rope.scaling.type" for `--rope-scaling`, "rope.scaling.factor" for
            `--rope-scale` and 1 / `--rope-freq-scale`, "rope.scaling.original_context_length" for
            `--yarn-orig-ctx`, and "rope.scaling.yarn_ext_factor", "…yarn_attn_factor",
            "…yarn_beta_slow" and "…yarn_beta_fast". Where layers with a window have a scaling of
            their own, the rotation is that of `layer_type="full_attention"` alone.

        Raises
        ------
        TypeError
            If `path` is no path, or `overrides` no mapping.
        ValueError
            If the file is damaged, if its architecture is unknown or does not rotate, if the code
            of llama.cpp and not the file determines the frequencies or the unrotated layers, or if
            llama.cpp does not use a key of a rotation that the file or `overrides` has. The message
            names the file.
        OSError
            If the file cannot be read.

        References
        ----------
        docs/gguf.md of ggml-org/ggml; `llama_model_rope_type` and the graphs of llama.cpp b10256.

        Examples
        --------
        A file with two keys, written by hand; real ones come from a converter.

        >>> import pathlib, struct, rope_cpu
        >>> def text(value):
        ...     return struct.pack("<Q", len(value)) + value
        >>> header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 2)  # version 3, no tensor, two keys
        >>> name = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
        >>> width = text(b"llama.attention.key_length") + struct.pack("<II", 4, 128)
        >>> size = pathlib.Path("model.gguf").write_bytes(header + name + width)
        >>> rope = rope_cpu.RotaryEmbedding.from_gguf("model.gguf")
        >>> rope.head_dim, rope.interleaved
        (128, True)
        >>> scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
        >>> rope = rope_cpu.RotaryEmbedding.from_gguf("model.gguf", overrides=scaling)
        >>> rope.inv_freq.max().item()
        0.25
        """
        if not isinstance(path, str | PathLike):
            raise ArgumentTypeError("path", Finding.type_of(path), "be a path")
        from rope_cpu.models.gguf import parse

        return cls.from_spec(parse(path, overrides).spec(layer_type))

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
        """Return the rotary embedding of given frequencies.

        Parameters
        ----------
        inv_freq : array of float, (pairs,), (axes, pairs) or (axes, heads, pairs)
            Radians per unit of position.
        head_dim : int, optional
            Width of a head vector in elements, by default 2·pairs; elements past those are copied.
        attention_factor : float, default 1.0
            Factor on cos and sin.
        interleaved : bool, default False
            Whether pairs are (2i, 2i+1) rather than (i, i+n).
        blocks : int or sequence of int, default 1
            Number of equal contiguous blocks of the rotated part, or the widths of blocks in
            elements. Pairs are formed within each block.

        Raises
        ------
        TypeError, ValueError
            If shapes, widths or values do not fit. The message names argument, value and rule.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding.from_inv_freq(np.array([1.0, 0.1]), head_dim=6)
        >>> rope.rotary_dim, rope.inv_freq
        (4, array([1. , 0.1]))
        """
        spec = from_inv_freq(inv_freq, head_dim, attention_factor, interleaved, blocks)
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
        span: Span = "axis",
    ) -> Self:
        """Return a rotary embedding for positions of several coordinates.

        Each coordinate rotates pairs of its own.

        Parameters
        ----------
        head_dim : int
            Width of a head vector in elements; those past the sum of axis_dims are copied.
        axes : int, default 2
            Number of coordinates.
        rope_theta : float or sequence of float
            Base of the frequencies base^(−2i/width), one for all axes or one for each.
        interleaved : bool, default False
            Whether pairs are (2i, 2i+1) rather than (i, i+n).
        axis_dims : sequence of int, optional
            Even widths in elements; equal shares by default.
        span : {"axis", "head"}
            "axis" pairs within the contiguous block of each axis, with the frequencies
            base^(−2i/block). "head" pairs (i, i + n) across the head, and each axis owns a run of
            pairs. For interleaved pairs the two are the same.

        Raises
        ------
        TypeError, ValueError
            If widths do not fit. The message names argument, value and rule.

        References
        ----------
        Span "axis": Su, kexue.fm/archives/8397. Span "head": the vision tower of Qwen2-VL in
        transformers.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding.axial(64)
        >>> ids = rope_cpu.positions.grid((2, 3))  # rows and columns of 6 patches
        >>> rope.rotate(np.ones((1, 6, 4, 64), np.float32), ids).shape
        (1, 6, 4, 64)
        """
        return cls.from_spec(axial(head_dim, axes, rope_theta, interleaved, axis_dims, span))

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
        """Return M-RoPE: the pairs of a text embedding, divided among time, height and width.

        Parameters
        ----------
        head_dim : int
            Width of a head vector in elements; the first 2·sum(mrope_section) are rotated.
        mrope_section : sequence of int
            Pairs for time, height and width, or for any other number of axes.
        rope_theta : float
            Base of the frequencies.
        mrope_interleaved : bool, default False
            False gives each axis one run of pairs (Qwen2-VL). True gives the axes pairs in turn
            (Qwen3-VL).
        interleaved : bool, default False
            Whether pairs are (2i, 2i+1) rather than (i, i+n).
        scaling : mapping, optional
            Rope parameters in Hugging Face form. They may repeat rope_theta, mrope_section and
            mrope_interleaved. If they depend on the sequence length, they hold
            max_position_embeddings as well, and the rotary embedding needs `at_length`.

        Raises
        ------
        TypeError, ValueError
            If sections do not fit. The message names argument, value and rule.

        References
        ----------
        Qwen2-VL, arXiv:2409.12191; Qwen3-VL in transformers.

        Examples
        --------
        >>> import rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding.mrope(128, (16, 24, 24), rope_theta=1000000.0)
        >>> rope.axes, rope.inv_freq.shape
        (3, (3, 64))
        """
        spec = mrope(head_dim, mrope_section, rope_theta, mrope_interleaved, interleaved, scaling)
        return cls.from_spec(spec)

    @classmethod
    def from_generators(
        cls, generators: ArrayLike, *, tolerance: float | None = None
    ) -> tuple[Self, Float64]:
        """Return the rotary embedding and the basis of the rotation p ↦ expm(Σ p_k B_k).

        Pairs are half-split. With the basis Q, Q · rotate(Qᵀx, p) = expm(Σ p_k B_k) · x. Fold Q
        into a projection once, rotate(QᵀW·x); scores of queries and keys need no more, because Q
        cancels in them. Planes that no generator rotates get the frequency 0. An odd head_dim
        leaves its last direction unrotated.

        Parameters
        ----------
        generators : array of float, (axes, head_dim, head_dim) or (head_dim, head_dim)
            Antisymmetric matrices that commute, in radians per unit of position.
        tolerance : float, optional
            The largest |B + Bᵀ| that counts as rounding, in radians per unit of position; the
            antisymmetric part (B − Bᵀ) / 2 is used. By default 64·head_dim·ε·max(|B|, 1), which
            covers the error of a matrix logarithm. ε is that of the dtype; for 16-bit floats it is
            that of float32, and two units in the last place of the largest entry are allowed as
            well. Pass a tolerance for generators that were computed or stored more coarsely than
            their dtype, such as float32 values cast to float64. At every tolerance, also at 0,
            rounding of 64·head_dim·2^-52·max|B| is allowed.

        Returns
        -------
        rope : RotaryEmbedding
        basis : float64 array, (head_dim, head_dim)
            The orthogonal matrix Q.

        Raises
        ------
        TypeError, ValueError
            If matrices are not square, finite or antisymmetric, or do not commute. The text names
            them, the excess and the tolerance.

        Notes
        -----
        The coupling of different planes, which is dropped, may reach head_dim·t with the tolerance
        t. Generators that do not commute couple them by more.

        References
        ----------
        Su, kexue.fm/archives/8397, for expm; the simultaneous normal form of commuting normal
        matrices.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> rope, basis = rope_cpu.RotaryEmbedding.from_generators([[0.0, -0.5], [0.5, 0.0]])
        >>> np.abs(rope.inv_freq)
        array([0.5])
        """
        spec, basis = solve(generators, tolerance)
        return cls.from_spec(spec), basis

    def _set_spec(self, spec: RopeSpec) -> None:
        self._set_rows(spec, CosSin.from_spec(spec), range(len(spec.inv_freq)), spec.lengths)

    def _set_rows(
        self,
        spec: RopeSpec,
        cos_sin: CosSin,
        row_of_sequence: Sequence[int],
        lengths: tuple[int, ...] | None,
    ) -> None:
        """Set all fields from different frequencies and the row of them that each sequence has."""
        self._spec = spec
        self._cos_sin = cos_sin
        self._lengths = lengths
        self._row_of_sequence = np.array(row_of_sequence, np.intp)
        self._sequences = len(row_of_sequence)
        self._heads = HeadLayout(spec.head_dim, spec.interleaved, spec.blocks)
        self._table_width = spec.frequency_heads * spec.pairs
        self._takes_offset = not spec.needs_length and (spec.axes == 1 or spec.shared_id)

    @property
    def spec(self) -> RopeSpec:
        """The description of this rotation as data, with a row for each sequence."""
        if self._lengths == self._spec.lengths:
            return self._spec
        return replace(
            self._spec,
            inv_freq=self._spec.inv_freq[self._row_of_sequence],
            attention_factor=self._spec.attention_factor[self._row_of_sequence],
            lengths=self._lengths,
        )

    @property
    def inv_freq(self) -> Float64:
        """The frequencies, which define this rotation: float64, radians per unit of position.

        The shape is (pairs,), (axes, pairs) or (axes, heads, pairs). If sequences have lengths of
        their own (`at_length` of several), an axis of batch rows comes first.
        """
        omega = self._spec.inv_freq
        _, axes, heads, _ = omega.shape
        if self._sequences == 1:
            omega = omega[self._row_of_sequence[0]]
        elif len(omega) < self._sequences:
            omega = omega[self._row_of_sequence]
        if heads == 1:
            omega = omega[..., 0, :]
            if axes == 1:
                omega = omega[..., 0, :]
        return omega

    @property
    def attention_factor(self) -> float:
        """The factor on cos and sin; each of several lengths has its own, and this is the first."""
        return float(self._spec.attention_factor[self._row_of_sequence[0]])

    @property
    def head_dim(self) -> int:
        """Width of a head vector in elements."""
        return self._spec.head_dim

    @property
    def rotary_dim(self) -> int:
        """Number of leading elements of a head vector that are rotated."""
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
        """Return the rotary embedding for a sequence length.

        Parameters
        ----------
        seq_len : int, or sequence or array of int, (sequences,)
            Length in tokens, or one length for each sequence: each batch row, or each packed
            sequence (`plan` with `cu_seqlens`). In an array, 0 is a sequence without tokens, and an
            empty one is as [0]. A single length, or a list with one, works for every number of
            sequences.

        Returns
        -------
        rope : RotaryEmbedding
            The same object if the frequencies do not depend on the length.

        Raises
        ------
        TypeError, ValueError
            If a length is not an integer of at least 1, or of at least 0 in an array.

        Notes
        -----
        A server may call this at every step: where frequencies were computed before, as the two
        sets of "longrope" are after its first steps, it takes about as long as `plan`.

        The result depends on the length of each sequence alone. (transformers takes the longest
        sequence of a batch, and depends on earlier calls.) A key rotated for one length does not
        match a query rotated for another. The frequencies change with every token past the original
        length for "dynamic", at each doubling for "dynamic_powers", and once, at the original
        length, for "longrope". At a change, re-rotate the cached keys with `rerotate_plan`. With
        "dynamic" this is the whole cache at every token past the original length. Compare
        `inv_freq` and `attention_factor` to detect a change: `==` is False for embeddings of
        different lengths.

        Examples
        --------
        >>> import rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding(
        ...     64, scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=2048
        ... )
        >>> rope.at_length(4096).inv_freq[-1] < rope.at_length(2048).inv_freq[-1]
        np.True_
        """
        lengths = scalars.lengths("seq_len", seq_len)
        rule = self._spec.length_rule
        if rule is None:
            return self
        spec, cos_sin, row_of_sequence = rows_of_lengths(self._spec, rule, lengths)
        rope = type(self).__new__(type(self))
        rope._set_rows(spec, cos_sin, row_of_sequence, tuple(lengths))
        return rope

    def cos_sin(
        self,
        position_ids: ArrayLike,
        dtype: Dtype = np.float32,
    ) -> tuple[Array, Array]:
        """Return cos and sin of positions, times the attention factor.

        Parameters
        ----------
        position_ids : array of int, float32 or float64
            Positions, of any shape. With several axes the last axis holds the coordinates. After
            `at_length` with several lengths: (seq,) or (rows, seq).
        dtype : dtype, default float32
            float32, float64, float16 or bfloat16. Results of bfloat16 below 2^-126 are zero.

        Returns
        -------
        cos, sin : array
            Of shape position_ids.shape (without the axis of coordinates) + (pairs,). With
            frequencies per head, the last axes are (heads, pairs). After `at_length` with several
            lengths, the shape is (rows, seq, pairs). Values are exact and rounded once. If the
            frequencies depend on the length and `at_length` was not called, they are those of the
            original length.

        Raises
        ------
        TypeError, ValueError
            For other dtypes, and for positions that are not finite or beyond ±2^53.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> cos, sin = rope_cpu.RotaryEmbedding(64).cos_sin([0, 10**9])
        >>> cos.shape, cos[0, :3]
        ((2, 32), array([1., 1., 1.], dtype=float32))
        """
        wanted = check_dtype(dtype)
        axes = self.axes
        ids = position_array("position_ids", position_ids)
        check_coordinates("position_ids", ids, axes)
        scalars.check_table_size("position_ids", ids, ids.size // axes, self._table_width)
        rows = self._sequences
        shape = ids.shape[:-1] if axes > 1 else ids.shape
        if rows == 1:  # of any shape
            ids = ids.reshape(-1, axes) if axes > 1 else ids.reshape(-1)
        positions = parse_position_ids("position_ids", ids, axes, None, rows, self._table_width)
        if rows > 1:
            shape = (rows, positions.shape[1])
        _, _, heads, pairs = self._spec.inv_freq.shape
        shape = (*shape, heads, pairs) if heads > 1 else (*shape, pairs)
        table = self._cos_sin_of_rows().rounded_table(positions, "rotate", wanted)
        return table[0].reshape(shape), table[1].reshape(shape)

    def rotate(
        self,
        x: Array,
        position_ids: ArrayLike | None = None,
        *,
        offset: int | ArrayLike = 0,
        layout: Layout = "bshd",
        inverse: bool = False,
        out: Array | None = None,
    ) -> Array:
        """Rotate one array.

        Parameters
        ----------
        x : array of float32, float64, float16 or bfloat16
            Queries or keys, with axes as in `layout` and any strides.
        position_ids : array of int, float32 or float64, (seq,) or (batch, seq), optional
            Positions. For layout thd: (tokens,), and required. With several axes, one more trailing
            axis holds the coordinates. By default offset, offset + 1, …: for embeddings with one
            axis, and for M-RoPE, where all coordinates of a text token are equal. Other embeddings
            with several axes need position_ids.
        offset : int or array of int, (batch,), default 0
            Position of the first token, of either sign; not together with position_ids.
        layout : {"bshd", "bhsd", "sbhd", "thd"}
            Axes of x: b batch, s seq, h heads, d head_dim, t packed tokens.
        inverse : bool, default False
            Whether to undo the rotation: rotate by the negative angle and divide by the attention
            factor.
        out : array, optional
            Output: `x` itself (in place), or memory that shares no element with x. A new array by
            default.

        Returns
        -------
        x_rot : array
            An array of the shape and dtype of x; `out` if it is given. It is computed in float32
            (float64 for float64) and rounded once. Results of bfloat16 below 2^-126 become zero.
            Elements past rotary_dim are copied.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or if the frequencies depend on a length that is not given
            (`at_length`). Nothing is written then.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding(64)
        >>> x = np.ones((2, 1, 8, 64), np.float32)  # one new token of two sequences
        >>> x_rot = rope.rotate(x, offset=[17, 4])
        >>> np.allclose(rope.rotate(x_rot, offset=[17, 4], inverse=True), x)
        True
        """
        plan = self._call_plan("x", x, position_ids, offset, layout, inverse)
        return plan.rotate(x, out)

    def __call__(
        self,
        q: Array,
        k: Array,
        position_ids: ArrayLike | None = None,
        *,
        offset: int | ArrayLike = 0,
        layout: Layout = "bshd",
        inverse: bool = False,
        out: tuple[Array, Array] | None = None,
    ) -> tuple[Array, Array]:
        """Rotate queries and keys of the same tokens.

        Parameters
        ----------
        q, k : array of float32, float64, float16 or bfloat16
            Queries and keys of one dtype, with axes as in `layout` and any strides. They may differ
            in their number of heads (grouped-query attention).
        position_ids, offset, layout, inverse
            As in `rotate`.
        out : pair of arrays, optional
            Outputs for q and for k: the very same arrays (in place), or memory that shares no
            element with the inputs. Views of one packed buffer may be used. New arrays by default.

        Returns
        -------
        q_rot, k_rot : array
            Arrays of the shapes and the dtype of q and k; those of `out` if it is given.

        Raises
        ------
        TypeError, ValueError
            As in `rotate`.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding(64)
        >>> q = np.ones((1, 3, 8, 64), np.float32)
        >>> k = np.ones((1, 3, 2, 64), np.float32)
        >>> q_rot, k_rot = rope(q, k, offset=100)
        >>> q_rot.shape, k_rot.shape
        ((1, 3, 8, 64), (1, 3, 2, 64))
        """
        plan = self._call_plan("q", q, position_ids, offset, layout, inverse)
        return plan(q, k, out)

    def plan(
        self,
        position_ids: ArrayLike,
        *,
        layout: Layout = "bshd",
        inverse: bool = False,
        cu_seqlens: ArrayLike | None = None,
    ) -> RotaryPlan:
        """Compute cos and sin of a step's positions once, for every layer and every dtype.

        Parameters
        ----------
        position_ids, layout, inverse
            As in `rotate`. Position ids (seq,) serve every batch size.
        cu_seqlens : array of int, (sequences + 1,), optional
            For layout thd: 0, then the end in tokens of each packed sequence. Required after
            `at_length` with several lengths, one for each sequence. Otherwise it changes nothing,
            and is only checked.

        Returns
        -------
        plan : RotaryPlan
            Called with q and k of each layer.

        Raises
        ------
        TypeError, ValueError
            As in `rotate`; if `cu_seqlens` does not start at 0, decreases, does not end at the
            number of tokens, or has another number of sequences than lengths were given for.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> plan = rope_cpu.RotaryEmbedding(64).plan([41])  # one decoding step
        >>> for layer in range(4):
        ...     q = np.ones((1, 1, 8, 64), np.float32)
        ...     k = np.ones((1, 1, 2, 64), np.float32)
        ...     q_rot, k_rot = plan(q, k)

        Two packed sequences, each with the frequencies of its own length:

        >>> rope = rope_cpu.RotaryEmbedding(
        ...     64, scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=2048
        ... )
        >>> rope = rope.at_length([4096, 3])
        >>> rope.plan([4095, 0, 1, 2], layout="thd", cu_seqlens=[0, 1, 4])
        RotaryPlan(batch=1, seq=4, layout='thd', rotate, head_dim=64, rotary_dim=64, \
interleaved=False)
        """
        return self._plan(
            self._cos_sin,
            self._row_of_sequence,
            position_ids,
            check_layout(layout),
            _operation(inverse),
            cu_seqlens,
        )

    def shift(
        self,
        keys: Array,
        delta: int | float | ArrayLike,
        *,
        layout: Layout = "bshd",
        out: Array | None = None,
    ) -> Array:
        """Move rotated keys by `delta` positions.

        This rotates by delta · inv_freq, without the attention factor, which the keys have
        already. llama.cpp calls it the K-shift. `shift_plan` does it for the keys of every layer.

        Parameters
        ----------
        keys : array of float32, float64, float16 or bfloat16
            Rotated keys, with axes as in `layout` and any strides.
        delta : int, float or array
            Tokens to move by: one number for all, or one for each token like position_ids. With
            several axes a trailing axis holds the coordinates, (axes,) for all tokens; M-RoPE takes
            a number, too.
        layout, out
            As in `rotate`.

        Returns
        -------
        keys_rot : array
            The keys as if they had been rotated at their new positions.

        Raises
        ------
        TypeError, ValueError
            As in `rotate`.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding(64)
        >>> keys = np.ones((1, 4, 2, 64), np.float32)
        >>> moved = rope.shift(rope.rotate(keys, offset=10), -10)
        >>> np.allclose(moved, rope.rotate(keys), atol=1e-6)
        True
        """
        keys = check_array("keys", keys, check_layout(layout))
        return self._shift_plan(delta, layout, COMPUTE_DTYPES[keys.dtype]).rotate(keys, out)

    def shift_plan(self, delta: int | float | ArrayLike, *, layout: Layout = "bshd") -> RotaryPlan:
        """Compute cos and sin of a move by `delta` positions once, for the keys of every layer.

        Parameters
        ----------
        delta : int, float or array
            As in `shift`: one number for any number of tokens, or one for each token. For packed
            sequences (layout thd): np.repeat(deltas, lengths).
        layout : {"bshd", "bhsd", "sbhd", "thd"}
            Axes of the keys.

        Returns
        -------
        plan : RotaryPlan
            Rotates by delta · inv_freq, without the attention factor.

        Raises
        ------
        TypeError, ValueError
            As in `rotate`.

        Notes
        -----
        Keys in a 16-bit dtype are rounded at every move.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> rope = rope_cpu.RotaryEmbedding(64)
        >>> moves = rope.shift_plan(-10)
        >>> moves
        RotaryPlan(batch=1, seq=any, layout='bshd', shift, head_dim=64, rotary_dim=64, \
interleaved=False)
        >>> keys = rope.rotate(np.ones((1, 4, 2, 64), np.float32), offset=10)
        >>> np.array_equal(moves.rotate(keys), rope.shift(keys, -10))
        True
        """
        return self._shift_plan(delta, check_layout(layout), "float32")

    def rerotate_plan(
        self,
        old: RotaryEmbedding,
        position_ids: ArrayLike,
        *,
        layout: Layout = "bshd",
        cu_seqlens: ArrayLike | None = None,
    ) -> RotaryPlan:
        """Plan the change of rotated keys from another rotary embedding's rotation to this one's.

        The angle is position · (inv_freq − old.inv_freq), and the factor is the quotient of the
        attention factors. So cached keys are read and rounded once, not twice as by the inverse of
        `old` and a new rotation. The keys of a sequence need it where its frequencies change:
        "longrope" at the original length, "dynamic_powers" at each doubling, "dynamic" at every
        token.

        Parameters
        ----------
        old : RotaryEmbedding
            The rotation that the keys have. It may differ from this one in its frequencies and its
            attention factor. Frequencies that depend on the length need `at_length`, here as well.
        position_ids, layout, cu_seqlens
            As in `plan`; the positions that the keys were rotated at.

        Returns
        -------
        plan : RotaryPlan

        Raises
        ------
        TypeError, ValueError
            As in `plan`; if the two embeddings differ in head_dim, rotary_dim, pairing, blocks,
            axes, heads of the frequencies or number of lengths, or if either has float32 angles.

        Notes
        -----
        The keys are not those of a new prefill with this embedding, but in the first layer: in
        others they are projections of hidden states, which depend on the frequencies of the layers
        below.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> old = rope_cpu.RotaryEmbedding(64)
        >>> new = rope_cpu.RotaryEmbedding(64, rope_theta=500000.0)
        >>> moves = new.rerotate_plan(old, np.arange(4))
        >>> moves
        RotaryPlan(batch=1, seq=4, layout='bshd', rerotate, head_dim=64, rotary_dim=64, \
interleaved=False)
        >>> keys = np.ones((1, 4, 2, 64), np.float32)
        >>> np.allclose(moves.rotate(old.rotate(keys)), new.rotate(keys), atol=1e-6)
        True
        """
        if not isinstance(old, RotaryEmbedding):
            raise ArgumentTypeError("old", old, "be a RotaryEmbedding")
        check_rerotation(self._spec, old._spec)
        cos_sin = self._cos_sin_of_rows().from_rotation_of(old._cos_sin_of_rows())
        each_row = np.arange(len(cos_sin.frequencies))
        check_layout(layout)
        return self._plan(cos_sin, each_row, position_ids, layout, "rerotate", cu_seqlens)

    def _plan(
        self,
        cos_sin: CosSin,
        row_of_sequence: Intp,
        ids: ArrayLike,
        layout: str,
        operation: str,
        cu_seqlens: ArrayLike | None,
    ) -> RotaryPlan:
        """Return the plan of given positions.

        row_of_sequence: index of the row in `cos_sin` for each batch row or packed sequence.
        """
        self._spec.check_length()
        rows = len(row_of_sequence)
        packed = False
        if cu_seqlens is None:
            positions = parse_position_ids(
                "position_ids", ids, self.axes, layout, rows, self._table_width
            )
            if rows > 1:
                cos_sin = cos_sin.of_rows(row_of_sequence)
        else:
            # Frequencies by token, in two parts and for each axis, are larger than cos and sin.
            packed = len(cos_sin.frequencies) > 1
            columns = cos_sin.frequencies[0].size if packed else self._table_width
            positions = parse_position_ids("position_ids", ids, self.axes, layout, 1, columns)
            tokens = positions.shape[1]
            counts = tokens_of_sequences(cu_seqlens, layout, tokens, rows)
            if packed:
                cos_sin = cos_sin.of_rows(np.repeat(row_of_sequence, counts))
        table_of = partial(cos_sin.packed_table if packed else cos_sin.table, positions, operation)
        return RotaryPlan(table_of, self._heads, layout, operation)

    def _shift_plan(
        self, delta: int | float | ArrayLike, layout: str, compute_dtype: str
    ) -> RotaryPlan:
        """Return the plan of a shift, with cos and sin in a compute dtype."""
        deltas, is_uniform = parse_delta(delta, self.axes, self._spec.shared_id)
        positions = self._checked_positions("delta", deltas, layout)
        cos_sin = self._cos_sin_of_rows()
        table = cos_sin.uniform_table if is_uniform else cos_sin.table
        table_of = partial(table, positions, "shift")
        return RotaryPlan(table_of, self._heads, layout, "shift", compute_dtype)

    def __repr__(self) -> str:
        length = "" if self._lengths is None else f", lengths={self._lengths}"
        return (
            f"RotaryEmbedding(head_dim={self.head_dim}, rotary_dim={self.rotary_dim}, "
            f"interleaved={self.interleaved}, rope_type={shown(self.rope_type)}, "
            f"axes={self.axes}, attention_factor={self.attention_factor:.6g}, "
            f"wavelengths={self._wavelengths()}{length})"
        )

    def __eq__(self, other: object) -> bool:
        return self.spec == other.spec if isinstance(other, RotaryEmbedding) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_spec, (self.spec,)

    def _wavelengths(self) -> str:
        """Return the shortest and the longest wavelength, in tokens, as text."""
        frequencies = np.abs(self._spec.inv_freq[self._spec.inv_freq != 0])
        if not frequencies.size:
            return "none"
        return f"{2 * np.pi / frequencies.max():.4g}…{2 * np.pi / frequencies.min():.4g}"

    def _call_plan(
        self,
        name: str,
        x: Array,
        ids: ArrayLike | None,
        offset: int | ArrayLike,
        layout: str,
        inverse: bool,
    ) -> RotaryPlan:
        """Return the plan of one call, with cos and sin in the compute dtype of its array."""
        layout = check_layout(layout)
        operation = _operation(inverse)
        x = check_array(name, x, layout)
        if ids is None:
            if layout == "thd" or not self._takes_offset:
                self._spec.check_length()
                refuse_missing_ids(self.axes, layout)
            rows = self._sequences
            positions = positions_from_offset(name, offset, x, layout, rows, self._table_width)
        elif type(offset) is int and offset == 0:
            positions = self._checked_positions("position_ids", ids, layout)
        else:
            raise ArgumentError("offset", offset, "be left out where `position_ids` are given")
        table_of = partial(self._cos_sin_of_rows().table, positions, operation)
        return RotaryPlan(table_of, self._heads, layout, operation, COMPUTE_DTYPES[x.dtype])

    def _cos_sin_of_rows(self) -> CosSin:
        """Return cos and sin by batch row, if sequences have lengths of their own."""
        if self._sequences == 1:
            return self._cos_sin
        return self._cos_sin.of_rows(self._row_of_sequence)

    def _checked_positions(self, name: str, ids: ArrayLike, layout: str) -> Float64:
        """Return given positions, checked, as float64 (batch or 1, seq, axes)."""
        self._spec.check_length()
        return parse_position_ids(name, ids, self.axes, layout, self._sequences, self._table_width)


def _operation(inverse: bool) -> str:
    """Return the name of the operation, "rotate" or "inverse"."""
    if inverse is False:  # the usual case; the check takes longer
        return "rotate"
    return "inverse" if scalars.boolean("inverse", inverse) else "rotate"
