"""What was asked of export_attention, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import boolean, choice, real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64

from .masks import SHAPES
from .options import RopeOptions, check_counted
from .targets import TARGETS
from .targets.base import AttentionSettings

LAYOUTS = ("bhsd", "bshd", "bsd")
MASKS = ("none", *SHAPES)
POSITIONS = ("past", "position_ids")
NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(AttentionSettings):
    """The arguments of `export_attention`, validated and in plain types; see there.

    qk_norm: whether q and k are normed. hidden, output: widths of the hidden states that come in and that go out, None
    where there are no projections.
    """

    kind: ClassVar[str] = "attention"

    target: str
    dtype: Any
    layout: str
    norm_epsilon: float
    past: bool
    opset: Any
    qk_norm: bool
    hidden: int | None
    output: int | None

    def __post_init__(self) -> None:
        heads = whole_number("num_heads", self.num_heads, 1, limits.HEADS)
        kv_heads = whole_number("num_kv_heads", self.num_kv_heads, 1, limits.HEADS)
        if heads % kv_heads:
            raise ValueError(
                f"`num_heads` is {heads}, not a multiple of `num_kv_heads`, {kv_heads}"
            )
        plain = {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "positions": choice("positions", self.positions, POSITIONS),
            "layout": self._layout(),
            "dtype": self.rotation.dtype,
            "max_positions": self.rotation.max_positions,
            "opset": self.rotation.opset,
            "v_head_dim": whole_number("v_head_dim", self.v_head_dim, 1, limits.HEAD_DIM),
            "causal": boolean("causal", self.causal),
            "window": None if self.window is None else whole_number("window", self.window),
            "softcap": None if self.softcap is None else real_number("softcap", self.softcap),
            "scale": real_number("scale", self.scale),
            "mask": choice("mask", self.mask, MASKS),
            "past": boolean("past", self.past),
            "norm_epsilon": real_number("norm_epsilon", self.norm_epsilon),
            "qk_norm": boolean("qk_norm", self.qk_norm),
            "hidden": _width("hidden", self.hidden),
            "output": _width("output", self.output),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        for name in ("softcap", "scale", "norm_epsilon"):
            value = plain[name]
            if (
                value is not None and not 2.0**-126 <= value < 2.0**62
            ):  # float32 holds it, and what it divides
                raise ValueError(
                    f"`{name}` is {shown(value)}; it must be at least 2^-126 and below 2^62"
                )
        if self.window is not None and not self.causal:
            raise ValueError(
                f"`window` is {self.window}, which counts the keys up to a query; it needs `causal`"
            )
        if not self.qk_norm and self.norm_epsilon != NORM_EPSILON:
            raise ValueError(
                f"`norm_epsilon` is {self.norm_epsilon}, but there is no `qk_norm` to add it in"
            )

    @cached_property
    def rotation(self) -> RopeOptions:
        """The options of the rotation inside, whose positions are counted in the graph unless they are inputs."""
        return RopeOptions(
            target=choice("target", self.target, tuple(TARGETS)),
            dtype=self.dtype,
            layout=TARGETS[self.target].attention_layout,
            inputs=("q", "k"),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            positions="position_ids" if self.positions == "position_ids" else "none",
            max_positions=self.max_positions,
            opset=self.opset,
        )

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of what is projected."""
        return (
            *("qkv" if self.hidden is not None else ""),
            *("o" if self.output is not None else ""),
        )

    def _layout(self) -> str:
        """Return the layout of what comes in and goes out; hidden states have one of their own."""
        layout = choice("layout", self.layout, LAYOUTS)
        if self.hidden is None:
            return layout
        if layout == "bshd":  # the default, "bhsd", may stand for what was not given
            raise ValueError(
                f"`layout` is {shown(layout)}, but `weights` are given: hidden states are (batch, seq, in)"
            )
        return "bsd"

    def check_rope(self, rope: RotaryEmbedding) -> None:
        """Raise where these options or their target cannot express attention with this rotation."""
        check_counted(rope, self.positions)
        self.rotation.check_rope(rope)
        for why, refused in TARGETS[self.target].cannot_attend(rope, self).items():
            if refused:
                raise ValueError(f"{why}; targets 'onnx' and 'primitive' can express it")

    def check_arrays(self, head_dim: int, arrays: Mapping[str, Float64]) -> None:
        """Raise unless the shapes of weights and norms are those that these options call for."""
        shapes: dict[str, tuple[int, ...]] = {
            name: (heads * width, self.hidden or 0)
            for name, (heads, width) in self.sizes(head_dim).items()
        }
        shapes["o"] = self.output or 0, self.num_heads * self.v_head_dim
        shapes |= {f"{name}_bias": shape[:1] for name, shape in list(shapes.items())}
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
        for name, array in arrays.items():
            if array.shape != shapes[name]:
                argument = (
                    f"`qk_norm` of {name[0]}"
                    if name.endswith("_norm")
                    else f"`weights[{shown(name)}]`"
                )
                raise ValueError(f"{argument} has shape {array.shape}; it must be {shapes[name]}")


def _width(name: str, value: int | None) -> int | None:
    """Return the width of hidden states, or None where there are none."""
    return None if value is None else whole_number(name, value, 1, limits.HIDDEN_SIZE)
