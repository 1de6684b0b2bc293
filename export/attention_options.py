"""What was asked of export_attention: checked once, written into the metadata, read back by `validate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from rope_cpu.export.options import METADATA_KEY, RopeOptions, is_rotary
from rope_cpu.export.weights import Float64
from rope_cpu.validation.scalars import boolean, one_of, real_number, whole_number

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding

LAYOUTS = ("bhsd", "bshd", "bsd")
MASKS = ("none", "padding", "bool", "float")
POSITIONS = ("past", "position_ids")
NORM_EPSILON = 1e-6

# Axis order that each target's attention works in.
CORE_LAYOUTS = {"primitive": "bshd", "onnx": "bhsd", "ort": "bshd"}

GROUP_QUERY = "com.microsoft GroupQueryAttention"


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The arguments of `export_attention` in plain types; see there. rope: of the rotation inside."""

    rope: RopeOptions
    layout: str
    v_head_dim: int
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    mask: str
    past: bool
    qk_norm: bool
    epsilon: float
    hidden: int | None
    output: int | None

    @classmethod
    def checked(
        cls,
        rope: RotaryEmbedding,
        weights: Mapping[str, Float64],
        norms: Mapping[str, Float64],
        *,
        num_heads: int,
        num_kv_heads: int | None,
        target: str,
        dtype: DTypeLike,
        layout: str,
        causal: bool,
        window: int | None,
        softcap: float | None,
        scale: float | None,
        mask: str,
        norm_epsilon: float,
        past: bool,
        positions: str,
        max_positions: int | None,
        v_head_dim: int | None,
        opset: int | None,
    ) -> AttentionOptions:
        """Check the arguments of `export_attention`; raise what they, the target and the rotary do not allow."""
        heads = whole_number("num_heads", num_heads)
        kv_heads = heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads)
        if heads % kv_heads:
            raise ValueError(f"`num_heads` is {heads}, not a multiple of `num_kv_heads`, {kv_heads}")
        is_rotary(rope)
        given = one_of("positions", positions, POSITIONS) == "position_ids"
        if not given and rope.axes > 1 and not rope.spec.shared_id:
            raise ValueError(f"`positions` is {positions!r}; with {rope.axes} axes each token needs its coordinates")
        inner = RopeOptions.checked(
            rope,
            target=target,
            dtype=dtype,
            layout=CORE_LAYOUTS[one_of("target", target, tuple(CORE_LAYOUTS))],
            inputs=("q", "k"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            positions="position_ids" if given else "none",
            position_dtype=np.int64,
            max_positions=max_positions,
            table_inputs=False,
            inverse=False,
            opset=opset,
        )
        outer = one_of("layout", layout, LAYOUTS)
        options = cls(
            rope=inner,
            layout="bsd" if weights else outer,
            v_head_dim=rope.head_dim if v_head_dim is None else whole_number("v_head_dim", v_head_dim),
            causal=boolean("causal", causal),
            window=None if window is None else whole_number("window", window),
            softcap=None if softcap is None else real_number("softcap", softcap),
            scale=rope.head_dim**-0.5 if scale is None else real_number("scale", scale),
            mask=one_of("mask", mask, MASKS),
            past=boolean("past", past),
            qk_norm=bool(norms),
            epsilon=real_number("norm_epsilon", norm_epsilon),
            hidden=weights["q"].shape[1] if weights else None,
            output=weights["o"].shape[0] if "o" in weights else None,
        )
        if weights and outer == "bshd":  # "bhsd" is what stands there unless said, and says nothing
            raise ValueError(f"`layout` is {outer!r}, but `weights` are given: hidden states are (batch, seq, in)")
        options._fit(rope)
        options._fit_arrays(rope.head_dim, weights, norms)
        return options

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.rope.heads[0] or 0

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.rope.heads[1] or 0

    def _fit(self, rope: RotaryEmbedding) -> None:
        if self.window is not None and not self.causal:
            raise ValueError(f"`window` is {self.window}, which counts the keys up to a query; it needs `causal`")
        if self.rope.target == "ort":
            self._fit_group_query(rope)

    def _fit_group_query(self, rope: RotaryEmbedding) -> None:
        """Refuse what GroupQueryAttention would do silently wrong, or not at all."""
        spec, pairs = rope.spec, rope.rotary_dim // 2
        refusals = {
            f"`positions` is 'position_ids', but {GROUP_QUERY} reads the first id of a prompt only and counts on from "
            "it": self.rope.positions == "position_ids",
            f"`causal` is False, but {GROUP_QUERY} is causal": not self.causal,
            f"`max_positions` is None, but {GROUP_QUERY} looks angles up in tables itself": not self.rope.tables,
            f"the rotary has blocks {list(rope.blocks)}, but {GROUP_QUERY} pairs over one": len(rope.blocks) > 1,
            f"the rotary has {rope.axes} axes, but {GROUP_QUERY} knows one position a token": rope.axes > 1
            and not spec.shared_id,
            f"`head_dim` is {rope.head_dim}, but {GROUP_QUERY} rotates multiples of 16 only": rope.head_dim % 16 != 0,
            f"`rotary_dim` is {2 * pairs}, but {GROUP_QUERY} wants tables of a multiple of 8 columns": pairs % 8 != 0,
            f"`v_head_dim` is {self.v_head_dim}, but {GROUP_QUERY} knows head_dim only": self.v_head_dim
            != rope.head_dim,
        }
        for why, refused in refusals.items():
            if refused:
                raise ValueError(f"{why}; targets 'onnx' and 'primitive' can express it")

    def _fit_arrays(self, head_dim: int, weights: Mapping[str, Float64], norms: Mapping[str, Float64]) -> None:
        """Raise unless the shapes of weights and norms are those that these options call for."""
        if not norms and self.epsilon != NORM_EPSILON:
            raise ValueError(f"`norm_epsilon` is {self.epsilon}, but there is no `qk_norm` to add it in")
        widths = {"q": self.heads * head_dim, "k": self.kv_heads * head_dim, "v": self.kv_heads * self.v_head_dim}
        shapes: dict[str, tuple[int, ...]] = {name: (width, self.hidden or 0) for name, width in widths.items()}
        shapes["o"] = self.output or 0, self.heads * self.v_head_dim
        shapes |= {f"{name}_bias": shape[:1] for name, shape in list(shapes.items())}
        for name, array in weights.items():
            if array.shape != shapes[name]:
                raise ValueError(f"`weights[{name!r}]` has shape {array.shape}; it must be {shapes[name]}")
        for name, array in norms.items():
            if array.shape != (head_dim,):
                raise ValueError(f"`qk_norm` of {name} has shape {array.shape}; it must be ({head_dim},)")

    def metadata(self) -> dict[str, str]:
        """Return the entry that `read` understands."""
        said = asdict(self) | {"kind": "attention", "target": self.rope.target}
        return {METADATA_KEY: json.dumps(said | {"dtype": self.rope.dtype, "opset": self.rope.opset})}

    @classmethod
    def read(cls, **said: Any) -> AttentionOptions:
        """Return the options that metadata speaks of."""
        listed = said.pop("rope").items()
        inner: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in listed}
        for repeated in ("target", "dtype", "opset"):
            said.pop(repeated)
        return cls(rope=RopeOptions(**inner), **said)
