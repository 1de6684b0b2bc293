"""export_attention: rotated attention with a cache, as an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rope_cpu.export.attend import ATTEND, Attending
from rope_cpu.export.attention_options import CORE_LAYOUTS, AttentionOptions
from rope_cpu.export.describe import described, entries
from rope_cpu.export.graph import Graph
from rope_cpu.export.masks import lengths_of
from rope_cpu.export.positions import rotator_of, sizes_of
from rope_cpu.export.rope import shape_of
from rope_cpu.export.rotate import Rotator
from rope_cpu.export.targets import core_of
from rope_cpu.export.tensors import relayout, rms_norm
from rope_cpu.export.weights import norms_of, weights_of

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding


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
    present_value. Keys are cached rotated. Prompt, chunks and single steps give what one pass over all tokens gives,
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
    arrays, norms = weights_of(weights), norms_of(qk_norm)
    options = AttentionOptions.checked(
        rope,
        arrays,
        norms,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        target=target,
        dtype=dtype,
        layout=layout,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        mask=mask,
        norm_epsilon=norm_epsilon,
        past=past,
        positions=positions,
        max_positions=max_positions,
        v_head_dim=v_head_dim,
        opset=opset,
    )
    said = entries(rope, options.metadata(), metadata, tables=options.rope.tables)
    return _Builder(rope, options, arrays, norms).model(said)


class _Builder:
    """Puts the pieces of one attention model together."""

    def __init__(
        self,
        rope: RotaryEmbedding,
        options: AttentionOptions,
        weights: dict[str, NDArray[Any]],
        norms: dict[str, NDArray[Any]],
    ) -> None:
        self.graph, self.rope, self.options = Graph(), rope, options
        self.weights, self.norms = weights, norms
        self.dtype = np.dtype(options.rope.dtype)
        self.core = core_of(self.dtype)
        self.inner = CORE_LAYOUTS[options.rope.target]
        self.heads = {"q": options.heads, "k": options.kv_heads, "v": options.kv_heads}
        self.widths = {"q": rope.head_dim, "k": rope.head_dim, "v": options.v_head_dim}

    def model(self, metadata: dict[str, str]) -> onnx.ModelProto:
        """Build the model."""
        graph, options = self.graph, self.options
        given = self._inputs()
        sizes = sizes_of(graph, given[0], options.layout)
        past = self._past()
        lengths = lengths_of(graph, sizes[1], past[0] if past else None)
        rotator = rotator_of(graph, self.rope, options.rope, sizes, lengths.past)
        wide = [self._to_core(name) for name in given]
        # One input is the hidden states, which queries, keys and values are all projected from.
        sources = wide * 3 if len(wide) == 1 else wide
        tensors = [self._ready(name, x, rotator) for name, x in zip("qkv", sources, strict=True)]
        with graph.scope("attention"):
            cached = (self._to_core(past[0]), self._to_core(past[1])) if past else None
            attending = Attending(graph, options, rotator, lengths, cached)
            y, keys, values = ATTEND[options.rope.target](attending, *tensors)
        self._outputs(y, keys, values)
        return graph.model(
            "rotary_attention",
            opset=options.rope.opset,
            doc=f"Attention with rotated queries and keys. {described(self.rope)}",
            functions=rotator.functions(options.rope.opset),
            metadata=metadata,
        )

    def _inputs(self) -> list[str]:
        """Declare and return q, k and v, or the hidden states."""
        layout = self.options.layout
        if self.options.hidden is not None:
            return [self.graph.input("hidden", self.dtype, ["batch", "sequence", self.options.hidden])]
        return [
            self.graph.input(name, self.dtype, shape_of(layout, name, self.heads[name], self.widths[name]))
            for name in "qkv"
        ]

    def _past(self) -> list[str]:
        """Declare and return past keys and values, where there are any."""
        named = (("past_key", self.widths["k"]), ("past_value", self.widths["v"])) if self.options.past else ()
        shape = "batch", self.options.kv_heads, "past_length"
        return [self.graph.input(name, self.dtype, [*shape, width]) for name, width in named]

    def _to_core(self, value: str) -> str:
        return value if self.dtype == self.core else self.graph.cast(value, self.core, f"{value}_{self.core}")

    def _ready(self, name: str, x: str, rotator: Rotator) -> str:
        """Return q, k or v in the inner layout and the core's dtype: projected, normed and rotated as each needs."""
        graph, heads, width, projected = self.graph, self.heads[name], self.widths[name], name in self.weights
        with graph.scope(name):
            x = self._projected(x, name) if projected else x
            x = relayout(graph, x, self.options.layout, self.inner, heads, width)
            if name in self.norms:
                x = rms_norm(graph, x, name, self.norms[name].astype(self.core), self.options.epsilon)
            if name == "v":
                return self._as_cached(x, name) if projected else x
            if self.options.rope.target == "ort":
                return x
            return self._as_cached(rotator.rotate(x, heads), name)

    def _as_cached(self, x: str, name: str) -> str:
        """Round keys and values as the cache does: later steps find them rounded, so this one uses them so."""
        if name == "q" or self.dtype == self.core:
            return x
        return self.graph.cast(self.graph.cast(x, self.dtype, "as_cached"), self.core, "from_cached")

    def _projected(self, x: str, name: str) -> str:
        """Apply a projection: x · Wᵀ + b."""
        weight = self.graph.table(f"{name}_weight", self.weights[name].T.astype(self.dtype))
        y = self.graph.node("MatMul", [x, self._to_core(weight)], f"{name}_projected")
        if f"{name}_bias" not in self.weights:
            return y
        bias = self.graph.table(f"{name}_bias", self.weights[f"{name}_bias"].astype(self.dtype))
        return self.graph.node("Add", [y, self._to_core(bias)], f"{name}_with_bias")

    def _outputs(self, y: str, keys: str, values: str) -> None:
        graph, options = self.graph, self.options
        heads, width = options.heads, options.v_head_dim
        if options.output is not None:
            with graph.scope("output"):
                merged = relayout(graph, y, self.inner, "bsd", heads, width)
                y = self._projected(merged, "o")
            shape: list[str | int] = ["batch", "sequence", options.output]
        else:
            with graph.scope("output"):
                y = relayout(graph, y, self.inner, options.layout, heads, width)
            shape = shape_of(options.layout, "q", heads, width)
        graph.output(self._narrow(y, "attention"), "attention", self.dtype, shape)
        if options.past:
            for value, name, wide in ((keys, "present_key", "k"), (values, "present_value", "v")):
                shape = ["batch", options.kv_heads, "total_length", self.widths[wide]]
                graph.output(self._narrow(value, name), name, self.dtype, shape)

    def _narrow(self, value: str, name: str) -> str:
        return value if self.dtype == self.core else self.graph.cast(value, self.dtype, f"{name}/to_{self.dtype}")
