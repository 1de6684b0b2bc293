"""The options of the export: plain data, which the metadata of a file hold.

`checks` has their rules; nothing here is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .graph import FLOAT32, FLOAT64

NORM_EPSILON = 1e-6

# The value of an argument that makes its array an input of the graph.
INPUT = "input"
# The inputs that hold the scales of an int8 cache, one for each head and element of a vector.
SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """The arguments of `export_rope`, see there; once checked in plain types: dtypes are names."""

    kind: ClassVar[str] = "rope"

    target: str
    dtype: Any
    layout: str
    inputs: Sequence[str]
    num_heads: int | None
    num_kv_heads: int | None
    positions: str
    max_positions: int | None
    inverse: bool = False
    opset: Any

    @property
    def heads(self) -> dict[str, int | None]:
        """The number of heads of each input, None where the graph takes any number."""
        counts: dict[str, int | None] = dict.fromkeys(self.inputs, self.num_heads)
        if self.num_kv_heads is not None:
            counts.update(dict.fromkeys(self.inputs[1:], self.num_kv_heads))
        return counts

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of the arithmetic."""
        return FLOAT64 if self.dtype == "float64" else FLOAT32

    @property
    def tables(self) -> bool:
        """Whether cos and sin come from tables, rather than being computed in the graph."""
        return self.max_positions is not None


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The arguments of `export_attention`, see there; once checked in plain types.

    `num_kv_heads`, `v_head_dim` and `scale` are never None. qk_norm, sinks: where these arrays come
    from. hidden, output: widths of the hidden states at the input and at the output, None without
    projections.
    """

    kind: ClassVar[str] = "attention"

    # The order of the fields is that of the entries in a file's metadata.
    num_heads: int
    num_kv_heads: int
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    mask: str
    positions: str
    max_positions: int | None
    v_head_dim: int
    target: str
    dtype: Any
    layout: str
    norm_epsilon: float
    norm_offset: float
    past: bool
    cache: str
    cache_dtype: Any
    batch_chunks: bool
    opset: Any
    qk_norm: str
    sinks: str
    hidden: int | None
    output: int | None
    name_prefix: str

    @property
    def rotation(self) -> RopeOptions:
        """The options of the rotation inside.

        With positions "past" the graph has no input for positions: they continue from the length of
        the past.
        """
        return RopeOptions(
            target=self.target,
            dtype=self.dtype,
            layout="bshd",
            inputs=("q", "k"),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            positions="position_ids" if self.positions == "position_ids" else "none",
            max_positions=self.max_positions,
            opset=self.opset,
        )

    @property
    def is_shared(self) -> bool:
        """Whether the past and the present are one buffer, whose rows have lengths."""
        return self.cache == "shared"

    @property
    def cached_dtype(self) -> str:
        """The name of the dtype of past and present keys and values."""
        return str(self.dtype if self.cache_dtype is None else self.cache_dtype)

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the projections."""
        inputs = () if self.hidden is None else ("q", "k", "v")
        outputs = () if self.output is None else ("o",)
        return (*inputs, *outputs)

    def array_inputs(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of scales, norms' weights and sinks that are inputs."""
        inputs: dict[str, tuple[int, ...]] = {}
        if self.cache_dtype is not None:
            inputs["k_scale"] = (1, self.num_kv_heads, 1, head_dim)
            inputs["v_scale"] = (1, self.num_kv_heads, 1, self.v_head_dim)
        if self.qk_norm == INPUT:
            inputs |= {"q_norm_weight": (head_dim,), "k_norm_weight": (head_dim,)}
        if self.sinks == INPUT:
            inputs["sinks"] = (self.num_heads,)
        return inputs

    def sizes(self, head_dim: int) -> dict[str, tuple[int, int]]:
        """Return {name: (number of heads, width of a head)} of q, k and v."""
        return {
            "q": (self.num_heads, head_dim),
            "k": (self.num_kv_heads, head_dim),
            "v": (self.num_kv_heads, self.v_head_dim),
        }

    def weight_shapes(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of sinks, norms, projections and biases that are initializers."""
        shapes: dict[str, tuple[int, ...]] = {"sinks": (self.num_heads,)}
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
        for name, (heads, width) in self.sizes(head_dim).items():
            shapes[name] = (heads * width, self.hidden or 0)
        shapes["o"] = (self.output or 0, self.num_heads * self.v_head_dim)
        return shapes | {f"{name}_bias": shapes[name][:1] for name in "qkvo"}
