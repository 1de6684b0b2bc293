"""What was asked of export_attention: validated, written into the metadata, read back by `validate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rope_cpu import RotaryEmbedding
from rope_cpu.validation.scalars import boolean, one_of, real_number, whole_number

from .masks import SHAPES
from .options import METADATA_KEY, RopeOptions, with_tuples
from .targets import TARGETS
from .weights import Float64

LAYOUTS = ("bhsd", "bshd", "bsd")
MASKS = ("none", *SHAPES)
POSITIONS = ("past", "position_ids")
NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The arguments of `export_attention`, validated and in plain types; see there. rope: of the rotation inside.

    hidden, output: widths of the hidden states that come in and that go out, None where there are no projections.
    """

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

    def __post_init__(self) -> None:
        plain = {
            "layout": one_of("layout", self.layout, LAYOUTS),
            "v_head_dim": whole_number("v_head_dim", self.v_head_dim),
            "causal": boolean("causal", self.causal),
            "window": None if self.window is None else whole_number("window", self.window),
            "softcap": None if self.softcap is None else real_number("softcap", self.softcap),
            "scale": real_number("scale", self.scale),
            "mask": one_of("mask", self.mask, MASKS),
            "past": boolean("past", self.past),
            "epsilon": real_number("norm_epsilon", self.epsilon),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.window is not None and not self.causal:
            raise ValueError(f"`window` is {self.window}, which counts the keys up to a query; it needs `causal`")
        if not self.qk_norm and self.epsilon != NORM_EPSILON:
            raise ValueError(f"`norm_epsilon` is {self.epsilon}, but there is no `qk_norm` to add it in")

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.rope.heads[0] or 0

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.rope.heads[1] or 0

    def check_rope(self, rope: RotaryEmbedding) -> None:
        """Raise where these options or their target cannot express attention with this rotation."""
        self.rope.check_rope(rope)
        settings = {"causal": self.causal, "tables": self.rope.tables, "v_head_dim": self.v_head_dim}
        reasons = TARGETS[self.rope.target].cannot_attend(rope, positions=self.rope.positions, **settings)
        for why, refused in reasons.items():
            if refused:
                raise ValueError(f"{why}; targets 'onnx' and 'primitive' can express it")

    def check_arrays(self, head_dim: int, weights: Mapping[str, Float64], norms: Mapping[str, Float64]) -> None:
        """Raise unless the shapes of weights and norms are those that these options call for."""
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
        own = {key: value for key, value in said.items() if key not in ("target", "dtype", "opset")}
        return cls(**own | {"rope": RopeOptions(**with_tuples(said["rope"]))})
