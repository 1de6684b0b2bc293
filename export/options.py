"""The options of the export: plain data, which the metadata of a file hold.

`checks` has their rules; nothing here is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from .graph import FLOAT32, FLOAT64, Layout

NORM_EPSILON = 1e-6

# The value of an argument that makes its array an input of the graph.
INPUT = "input"
# Kinds of masks: true for the keys of tokens, and for the keys that a query attends to.
PADDING_MASKS = ("padding", "tokens")
BOOLEAN_MASKS = (*PADDING_MASKS, "bool")

# The values of options: `checks` takes these, and no others.
TargetName = Literal["primitive", "onnx", "ort"]
Positions = Literal["position_ids", "offset", "none"]
AttentionPositions = Literal["past", "position_ids"]
AttentionLayout = Literal["bhsd", "bshd", "bsd"]
Mask = Literal["none", "padding", "bool", "float"]
Cache = Literal["growing", "shared", "window"]
Names = Literal["rope_cpu", "optimum"]  # whose names the inputs and outputs have
Int8 = Literal["int8"] | np.dtype[Any] | type[Any]
Source = Literal["none", "initializer", "input"]  # of the weights of norms, and of sinks

# Names of a whole decoder's inputs and outputs, as optimum and onnxruntime-genai have them.
OPTIMUM_NAMES = {
    "past_key": "past_key_values.{layer}.key",
    "past_value": "past_key_values.{layer}.value",
    "present_key": "present.{layer}.key",
    "present_value": "present.{layer}.value",
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
}
# The inputs that hold the scales of an int8 cache, one for each head and element of a vector.
SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """The arguments of `export_rope`, see there; once checked in plain types: dtypes are names."""

    kind: ClassVar[str] = "rope"

    target: TargetName
    dtype: Any
    layout: Layout
    inputs: Sequence[str]
    num_heads: int | None
    num_kv_heads: int | None
    positions: Positions
    max_positions: int | None
    inverse: bool = False
    opset: Any

    @property
    def rotation(self) -> RopeOptions:
        """These options, as those of an attention have the options of its rotation."""
        return self

    @property
    def heads(self) -> dict[str, int | None]:
        """The number of heads of each input, None where the graph takes any number."""
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        return {self.inputs[0]: self.num_heads, **dict.fromkeys(self.inputs[1:], kv_heads)}

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of the arithmetic."""
        return FLOAT64 if self.dtype == "float64" else FLOAT32


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The arguments of `export_attention`, see there; once checked in plain types.

    `num_kv_heads`, `v_head_dim` and `scale` are never None. qk_norm, sinks: where these arrays come
    from. hidden, output: widths of the hidden states at the input and at the output, None without
    projections.
    """

    kind: ClassVar[str] = "attention"

    # The order of the fields is that of the entries in a file's metadata, and of their checks.
    num_heads: int
    num_kv_heads: int
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    mask: Mask
    positions: AttentionPositions
    max_positions: int | None
    v_head_dim: int
    target: TargetName
    dtype: Any
    layout: AttentionLayout
    norm_epsilon: float
    norm_offset: float
    past: bool
    cache: Cache
    cache_dtype: Int8 | None
    batch_chunks: bool
    opset: Any
    qk_norm: Source
    sinks: Source
    hidden: int | None
    output: int | None
    name_prefix: str
    names: Names
    layer: int | None

    @property
    def rotation(self) -> RopeOptions:
        """The options of the rotation inside.

        With positions "past" the graph has no input for positions: they continue from the length of
        the past.
        """
        names = ("target", "dtype", "num_heads", "num_kv_heads", "max_positions", "opset")
        return RopeOptions(
            layout="bshd",
            inputs=("q", "k"),
            positions="position_ids" if self.positions == "position_ids" else "none",
            **{name: getattr(self, name) for name in names},
        )

    def name(self, value: str) -> str:
        """Return the name in the graph of an input or output."""
        return name_in_graph(value, self.name_prefix, self.names, self.layer)

    @property
    def has_token_mask(self) -> bool:
        """Whether the input attention_mask is an integer for each token, 0 for padding."""
        return self.names == "optimum"

    @property
    def follows_mask(self) -> bool:
        """Whether positions count the tokens of the mask."""
        return self.has_token_mask and not self.is_shared and self.positions == "past"

    @property
    def mask_kind(self) -> str:
        """The kind of mask that attention applies: "tokens" is that of `has_token_mask`.

        A shared cache takes its lengths from that one instead.
        """
        return "tokens" if self.has_token_mask and not self.is_shared else self.mask

    @property
    def has_boolean_mask(self) -> bool:
        """Whether the mask says which keys a query attends to."""
        return self.mask_kind in BOOLEAN_MASKS

    @property
    def has_padding(self) -> bool:
        """Whether the mask says which keys are padding."""
        return self.mask_kind in PADDING_MASKS

    @property
    def is_shared(self) -> bool:
        """Whether the past and the present are one buffer, whose rows have lengths."""
        return self.cache != "growing"

    @property
    def keeps_window(self) -> bool:
        """Whether that buffer keeps the last tokens alone, those of the window among them."""
        return self.cache == "window"

    @property
    def cached_dtype(self) -> str:
        """The name of the dtype of past and present keys and values."""
        return str(self.dtype if self.cache_dtype is None else self.cache_dtype)

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

    def array_shapes(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of projections, biases, norms and sinks that are initializers."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.hidden is not None:
            sizes = self.sizes(head_dim).items()
            shapes |= {f"{name}_weight": (n * width, self.hidden) for name, (n, width) in sizes}
        if self.output is not None:
            shapes["o_weight"] = (self.output, self.num_heads * self.v_head_dim)
        shapes |= {f"{name[0]}_bias": shape[:1] for name, shape in shapes.items()}
        if self.qk_norm == "initializer":
            shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
        if self.sinks == "initializer":
            shapes["sinks"] = (self.num_heads,)
        return shapes


def name_in_graph(value: str, prefix: str, names: str, layer: int | None) -> str:
    """Return the name in the graph of an input or output; the last three are options."""
    if names == "optimum" and value in OPTIMUM_NAMES:
        return OPTIMUM_NAMES[value].format(layer=layer)
    return f"{prefix}{value}"
