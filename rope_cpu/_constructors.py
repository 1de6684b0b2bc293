"""How a rotary comes to be: one classmethod for each way of saying which rotation is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Self

from numpy.typing import ArrayLike

from rope_cpu import axes as axes_
from rope_cpu import config as config_
from rope_cpu import generators as generators_
from rope_cpu import scaling as scaling_
from rope_cpu import spec as specs
from rope_cpu.spec import Float64, RopeSpec


class Constructors:
    """The constructors of RotaryEmbedding, each of which makes a spec and hands it to `_of`."""

    __slots__ = ()

    def _of(self, spec: RopeSpec) -> None:
        """Become the rotary of a spec."""
        raise NotImplementedError

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
        """Make a rotary for text: one axis, frequencies rope_theta^(−2i/rotary_dim), scaled where `scaling` says so.

        head_dim: width of a head vector in elements. rotary_dim: how many of its leading elements are rotated; where it
            is not given, all, or the section's partial_rotary_factor of them. Frequencies are computed for rotary_dim
            (for the share itself where that is odd, and one element more is rotated).
        rope_theta: the base; 10000 where it is said nowhere.
        interleaved: pairs are (2i, 2i+1), "GPT-J", rather than (i, i+n), "NeoX" and `rotate_half`.
        scaling: a dict in Hugging Face form, {"rope_type": "llama3", "factor": 8.0, …}; it may hold rope_theta too.
        max_position_embeddings: tokens; dynamic needs it, and others where the section leaves a value to follow from
            it. It may stand in the section instead. Types with no use for it check it and go without: every config
            says it.
        angle_dtype: "float64" is exact; "float32" repeats the float32 arithmetic of transformers, step by step.

        Raises TypeError or ValueError for odd or too wide rotary_dim, unknown rope types, unknown or missing keys and
        values that make no rotation, naming argument, value and rule.
        Source: RoFormer, arXiv:2104.09864; for scaling see `rope_cpu.rope_types`.
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
        """Return the rotary of a spec; every constructor ends here.

        Raises TypeError for anything else.
        """
        if type(spec) is not RopeSpec:  # a subclass might not check itself, and kernels rely on that
            raise TypeError(f"`spec` is {spec!r}; it must be a RopeSpec")
        rope = cls.__new__(cls)
        rope._of(spec)
        return rope

    @classmethod
    def from_config(
        cls,
        config: str | PathLike[str] | Mapping[str, Any],
        *,
        layer_type: str | None = None,
        layer: int | None = None,
        interleaved: bool | None = None,
        angle_dtype: str = "float64",
    ) -> Self:
        """Return the rotary that a Hugging Face config describes, or refuse it with the reason.

        config: path of a config.json, a folder with one, or a dict; in the old form (`rope_scaling`, `rope_theta` at
            the top level) or the new one (`rope_parameters`, flat or nested by layer type). The language model inside a
            multimodal config is followed; give `config["vision_config"]` for its vision part; for what is read of
            vision and diffusers configs see `rope_cpu.vision.read`. With latent attention (MLA) head_dim is the width
            of the rotated part, qk_rope_head_dim.
        layer_type: which layers, where they differ ("full_attention", "sliding_attention", …).
        layer: which layer, counted from 0, in place of its type. Neither: all layers that are rotated.
        interleaved: the pairing; None takes it from the model type. Where a model reads neighbours and writes halves
            (DeepSeek-V3), it is True: the same rotation, whose result the model has permuted.
        angle_dtype: "float64" is exact; "float32" repeats the float32 arithmetic of transformers, step by step.

        Raises ValueError or TypeError where the file does not determine one rotation: unknown rope types, unknown or
        missing keys of the rope section, an unknown model type without `interleaved`, no rotation at all.
        Source: the configuration classes and modelling code of transformers 5.23, and of models with code of their own.
        """
        return cls.from_spec(
            config_.read(config, layer_type=layer_type, layer=layer, interleaved=interleaved, angle_dtype=angle_dtype)
        )

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
        """Return the rotary of a frequency matrix: the primitive that every other constructor comes down to.

        inv_freq: (pairs,), (axes, pairs) or (axes, heads, pairs), radians per unit of position.
        head_dim: width of a head vector, 2·pairs unless more elements follow that are copied.
        attention_factor: factor on cos and sin.
        interleaved: pairs are (2i, 2i+1) rather than (i, i+n).
        blocks: the rotated part is this many equal contiguous blocks, or blocks of these widths in elements, each
            paired within itself.

        Raises ValueError or TypeError where shapes, widths or values do not fit, naming argument, value and rule.
        """
        return cls.from_spec(
            specs.from_inv_freq(
                inv_freq, head_dim=head_dim, attention_factor=attention_factor, interleaved=interleaved, blocks=blocks
            )
        )

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
        """Return a rotary for positions of several coordinates, each of which turns pairs of its own.

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
            axes_.axial(head_dim, axes, rope_theta=rope_theta, interleaved=interleaved, axis_dims=axis_dims, span=span)
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
        mrope_interleaved: False gives each axis one run of pairs (Qwen2-VL), True deals them out in turn (Qwen3-VL).
        interleaved: pairs are (2i, 2i+1) rather than (i, i+n).
        scaling: a dict in Hugging Face form, or None; it may repeat rope_theta, mrope_section and mrope_interleaved.
            Where it depends on the sequence length, the rotary needs `at_length`, like that of one axis, and what is
            said elsewhere of a config, max_position_embeddings, stands in it.

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
    def from_generators(cls, generators: ArrayLike) -> tuple[Self, Float64]:
        """Return the rotary and the orthogonal basis Q of position p ↦ expm(Σ p_k B_k).

        generators: (axes, head_dim, head_dim), real, each antisymmetric, all commuting; a single (head_dim, head_dim)
            is one axis. Entries are radians per unit of position.

        The rotary has half-split pairs. Q is (head_dim, head_dim) float64, Q · rotate(Qᵀx, p) = expm(Σ p_k B_k) · x.
        Fold it into a projection once, rotate(QᵀW·x); scores of queries and keys need no more, since Q cancels in them.
        Planes that no generator turns get frequency 0; an odd head_dim leaves its last direction unrotated.

        Raises TypeError or ValueError naming the matrices that are not square, finite, antisymmetric or do not commute,
        and by how much.
        Source: Su, kexue.fm/archives/8397, for the form; the simultaneous normal form of commuting normal matrices.
        """
        spec, basis = generators_.solve(generators)
        return cls.from_spec(spec), basis
