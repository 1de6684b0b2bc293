"""export_attention: rotated attention with a cache, as an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Float64

from .attention_options import AttentionOptions
from .graph import Graph, relayout, rms_norm
from .graph_inputs import inputs_of, rotator_of, sizes_of
from .layouts import shape_of
from .masks import INPUT, SHAPES, lengths_of
from .metadata import described, entries
from .options import is_rotary_embedding, options_given
from .targets import TARGETS
from .targets.base import Attention, Rotator
from .weights import norms_of, weights_of


def export_attention(
    rope: RotaryEmbedding,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    target: str = "onnx",
    dtype: DTypeLike = np.float32,
    layout: str = "bhsd",
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: str = "none",
    qk_norm: tuple[ArrayLike, ArrayLike] | None = None,
    norm_epsilon: float = 1e-6,
    past: bool = True,
    positions: str = "past",
    max_positions: int | None = None,
    weights: Mapping[str, ArrayLike] | None = None,
    v_head_dim: int | None = None,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """Return an ONNX model of attention with rotated queries and keys.

    Inputs q, k, v (or hidden), past_key, past_value (batch, kv_heads, past, head_dim); outputs attention, present_key,
    present_value. Keys are cached rotated. Prefill, chunks and single steps give what one pass over all tokens gives,
    where attention is causal.

    num_heads, num_kv_heads: of queries, and of keys and values (grouped-query attention); None: as many.
    target: "onnx" (Attention and RotaryEmbedding, opset 23), "primitive" (ops of opset 13; the only one in float64) or
        "ort" (com.microsoft GroupQueryAttention, which rotates too: it needs max_positions and positions "past", is
        causal, head_dim and rotary_dim are multiples of 16, v_head_dim is head_dim; several new tokens on a past need a
        batch of 1).
    dtype: of inputs and outputs; float16 and bfloat16 are computed in float32.
    layout: of q, k, v and the result: "bhsd", "bshd" or "bsd" (batch, seq, heads·head_dim). Not together with weights.
    causal: a query attends to keys up to itself. window: to so many of them, itself included.
    softcap: c·tanh(score/c). scale: on the scores, head_dim^-½ unless given.
    mask: "none", "padding" (an input attention_mask, bool (batch, total), true: attend), "bool" or "float" ((batch or
        1, heads or 1, seq, total), true: attend, or added to the scores). A query without any key gives zeros.
    qk_norm: weights (head_dim,) of an RMS norm of q and one of k before the rotation, with `norm_epsilon`.
    past: whether there are past and present keys and values.
    positions: "past" (tokens count on from the past) or "position_ids" (an input, as in `export_rope`).
    max_positions: rows of the cos and sin tables; None: computed in the graph (as in `export_rope`).
    weights: projections as torch's Linear has them, (out, in): q, k, v, perhaps o, and q_bias, k_bias, v_bias, o_bias;
        the input is then hidden (batch, seq, in), the output (batch, seq, out).
    v_head_dim: width of a value vector, head_dim unless given. opset, metadata: as in `export_rope`.

    Raises TypeError or ValueError, before anything is built, where the target cannot express it, saying why and which
    can.

    Source: https://onnx.ai/onnx/operators/onnx__Attention.html and onnxruntime's docs/ContribOperators.md
    """
    is_rotary_embedding(rope)
    arrays = weights_of(weights) | norms_of(qk_norm)
    derived = {
        "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "v_head_dim": rope.head_dim if v_head_dim is None else v_head_dim,
        "scale": rope.head_dim**-0.5 if scale is None else scale,
        "qk_norm": qk_norm is not None,
        "hidden": arrays["q"].shape[1] if "q" in arrays else None,
        "output": arrays["o"].shape[0] if "o" in arrays else None,
    }
    options = AttentionOptions(**options_given(AttentionOptions, locals()) | derived)
    options.check_rope(rope)
    options.check_arrays(rope.head_dim, arrays)
    return _Builder(rope, options, arrays).model(entries(rope, options, metadata))


class _Builder:
    """Puts one attention model together; arrays: weights and norms by name."""

    def __init__(
        self, rope: RotaryEmbedding, options: AttentionOptions, arrays: dict[str, Float64]
    ) -> None:
        self.graph, self.rope, self.options, self.arrays = Graph(), rope, options, arrays
        self.target, self.sizes = TARGETS[options.target], options.sizes(rope.head_dim)
        self.dtype, self.compute_dtype = options.dtype, options.rotation.compute_dtype

    def model(self, metadata: dict[str, str]) -> onnx.ModelProto:
        """Return the model."""
        graph, options = self.graph, self.options
        tokens = self._inputs()
        sizes = sizes_of(graph, tokens[0], options.layout)
        lengths = lengths_of(graph, sizes[1], "past_key" if options.past else None)
        rotator = rotator_of(graph, self.rope, options.rotation, sizes, lengths.past)
        wide = {name: self._widened(name) for name in tokens}
        q, k, v = (self._ready(name, wide.get(name) or wide["hidden"], rotator) for name in "qkv")
        with graph.scope("attention"):
            past = (
                (self._widened("past_key"), self._widened("past_value")) if options.past else None
            )
            bias = self._widened(INPUT) if options.mask == "float" else None
            y, keys, values = self.target.attend(
                Attention(graph, options, rotator, lengths, past, bias), q, k, v
            )
        self._outputs(y, keys, values)
        return graph.model(
            "rotary_attention",
            opset=options.opset,
            doc=f"Attention with rotated queries and keys. {described(self.rope)}",
            functions=rotator.functions(options.opset),
            metadata=metadata,
        )

    def _inputs(self) -> list[str]:
        """Declare every input; return q, k and v, or the hidden states that all three are projected from."""
        graph, options = self.graph, self.options
        if options.hidden is not None:
            shapes: dict[str, list[str | int]] = {"hidden": ["batch", "sequence", options.hidden]}
        else:
            shapes = {name: shape_of(options.layout, *size) for name, size in self.sizes.items()}
        for name, shape in shapes.items():
            graph.input(name, self.dtype, shape)
        if options.past:
            graph.input("past_key", self.dtype, self._cache_shape("k", "past_length"))
            graph.input("past_value", self.dtype, self._cache_shape("v", "past_length"))
        for declared in inputs_of(self.rope, options.rotation):
            graph.input(*declared)
        if options.mask != "none":
            graph.input(
                INPUT, self.dtype if options.mask == "float" else np.bool_, SHAPES[options.mask]
            )
        return list(shapes)

    def _cache_shape(self, name: str, length: str) -> list[str | int]:
        heads, width = self.sizes[name]
        return ["batch", heads, length, width]

    def _widened(self, value: str) -> str:
        """Return a value in the compute dtype."""
        return self.graph.cast(
            value, self.compute_dtype, f"{value}_{self.compute_dtype}", source=self.dtype
        )

    def _ready(self, name: str, x: str, rotator: Rotator) -> str:
        """Return q, k or v as attention takes them: projected, normed, rotated and laid out as each needs."""
        graph, (heads, width), projected = self.graph, self.sizes[name], name in self.arrays
        with graph.scope(name):
            x = self._projected(x, name) if projected else x
            x = relayout(graph, x, self.options.layout, self.target.attention_layout, heads, width)
            if f"{name}_norm" in self.arrays:
                weight = self.arrays[f"{name}_norm"].astype(self.compute_dtype)
                x = rms_norm(graph, x, name, weight, self.options.norm_epsilon)
            if name == "v":
                return self._as_cached(x) if projected else x
            if self.target.attention_rotates:
                return x
            rotated = rotator.rotate(x, heads)
            return self._as_cached(rotated) if name == "k" else rotated

    def _as_cached(self, x: str) -> str:
        """Round keys and values as the cache does: later steps find them rounded, so this one uses them so."""
        rounded = self.graph.cast(x, self.dtype, "as_cached", source=self.compute_dtype)
        return self.graph.cast(rounded, self.compute_dtype, "from_cached", source=self.dtype)

    def _projected(self, x: str, name: str) -> str:
        """Apply a projection: x · Wᵀ + b."""
        weight = self.graph.initializer(f"{name}_weight", self.arrays[name].T.astype(self.dtype))
        y = self.graph.node("MatMul", [x, self._widened(weight)], f"{name}_projected")
        if f"{name}_bias" not in self.arrays:
            return y
        bias = self.graph.initializer(
            f"{name}_bias", self.arrays[f"{name}_bias"].astype(self.dtype)
        )
        return self.graph.node("Add", [y, self._widened(bias)], f"{name}_with_bias")

    def _outputs(self, y: str, keys: str, values: str) -> None:
        options, heads, width = self.options, self.options.num_heads, self.options.v_head_dim
        layout = "bsd" if "o" in self.arrays else options.layout
        with self.graph.scope("output"):
            y = relayout(self.graph, y, self.target.attention_layout, layout, heads, width)
            y = self._projected(y, "o") if "o" in self.arrays else y
        shape = shape_of(layout, heads, width)
        self._output(
            y, "attention", shape if options.output is None else [*shape[:2], options.output]
        )
        if options.past:
            self._output(keys, "present_key", self._cache_shape("k", "total_length"))
            self._output(values, "present_value", self._cache_shape("v", "total_length"))

    def _output(self, value: str, name: str, shape: list[str | int]) -> None:
        value = self.graph.cast(
            value, self.dtype, f"{name}/to_{self.dtype}", source=self.compute_dtype
        )
        self.graph.output(value, name, self.dtype, shape)
