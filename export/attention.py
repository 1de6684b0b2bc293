"""export_attention: rotated attention with a cache, as an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rope_cpu.export.attend import ATTEND, Attending
from rope_cpu.export.attention_options import (
    CORE_LAYOUTS,
    AttentionOptions,
    checked_norm,
    checked_weights,
)
from rope_cpu.export.describe import described, facts
from rope_cpu.export.graph import Graph
from rope_cpu.export.layouts import LAYOUTS
from rope_cpu.export.masks import lengths_of
from rope_cpu.export.positions import rotator_of
from rope_cpu.export.rope import shape_of
from rope_cpu.export.targets import core_of
from rope_cpu.export.tensors import relayout, rms_norm

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
    present_value. Keys are cached rotated. Prompt, chunks and single steps give what one pass over all tokens gives.

    num_heads, num_kv_heads: of queries, and of keys and values (grouped-query attention); None: as many.
    target: "onnx" (Attention and RotaryEmbedding, opset 23), "primitive" (ops of opset 13; the only one in float64) or
        "ort" (com.microsoft GroupQueryAttention, which rotates too; several new tokens on a past need a batch of 1).
    dtype: of inputs and outputs; float16 and bfloat16 are computed in float32.
    layout: of q, k, v and the result: "bhsd", "bshd" or "bsd" (batch, seq, heads·head_dim).
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
    asked = {name: value for name, value in locals().items() if name not in ("rope", "metadata")}
    options, arrays, norms = _checked(rope, asked)
    return _Builder(rope, options, arrays, norms).model(facts(rope) | options.metadata() | dict(metadata or {}))


def _checked(
    rope: RotaryEmbedding, asked: dict[str, Any]
) -> tuple[AttentionOptions, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return the options, the weights of projections and those of norms, all checked."""
    weights, qk_norm = asked["weights"], asked["qk_norm"]
    if weights is not None and "q" not in weights:
        raise ValueError(f"`weights` holds {sorted(weights)}; it must hold q, k and v")
    rotation = {name: asked.pop(name) for name in ("target", "dtype", "max_positions", "opset")}
    options = AttentionOptions.checked(rope, rotation, **asked)
    arrays = checked_weights(weights, rope, options.heads, options.kv_heads, options.v_head_dim)
    return options, arrays, checked_norm(qk_norm, rope.head_dim)


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
        axes = LAYOUTS[options.layout].axes
        first = next(iter(given.values()))
        sizes = (
            graph.size(first, axes.index("batch"), "batch_size"),
            graph.size(first, axes.index("sequence"), "sequence_length"),
        )
        past, outer_past = self._past()
        lengths = lengths_of(graph, sizes[1], outer_past[0] if outer_past else None)
        rotator = rotator_of(graph, self.rope, options.rope, sizes, lengths.past)
        tensors = {name: self._ready(name, given, rotator) for name in "qkv"}
        with graph.scope("attention"):
            attending = Attending(graph, options, rotator, lengths, past)
            y, keys, values = ATTEND[options.rope.target](attending, *tensors.values())
        self._outputs(y, keys, values)
        return graph.model(
            "rotary_attention",
            opset=options.rope.opset,
            doc=f"Attention with rotated queries and keys. {described(self.rope)}",
            functions=rotator.functions(options.rope.opset) if options.rope.target != "ort" else [],
            metadata=metadata,
        )

    def _inputs(self) -> dict[str, str]:
        """Declare the inputs; hidden states are projected later."""
        layout = self.options.layout
        if self.options.hidden is not None:
            return {"hidden": self.graph.input("hidden", self.dtype, ["batch", "sequence", self.options.hidden])}
        return {
            name: self.graph.input(name, self.dtype, shape_of(layout, name, self.heads[name], self.widths[name]))
            for name in "qkv"
        }

    def _past(self) -> tuple[tuple[str, str] | None, tuple[str, str] | None]:
        """Declare past keys and values; return them in the core's dtype, and as they come."""
        if not self.options.past:
            return None, None
        names = []
        for name, width in (("past_key", self.widths["k"]), ("past_value", self.widths["v"])):
            names.append(self.graph.input(name, self.dtype, ["batch", self.options.kv_heads, "past_length", width]))
        wide = names if self.dtype == self.core else [self.graph.cast(n, self.core, f"{n}_{self.core}") for n in names]
        return (wide[0], wide[1]), (names[0], names[1])

    def _ready(self, name: str, given: dict[str, str], rotator: Any) -> str:
        """Return q, k or v in the inner layout and the core's dtype: projected, normed and rotated as each needs."""
        graph, heads, width = self.graph, self.heads[name], self.widths[name]
        with graph.scope(name):
            x = self._projected(given["hidden"], name) if "hidden" in given else self._wide(given[name])
            x = relayout(graph, x, self.options.layout, self.inner, heads, width)
            if name in self.norms:
                x = rms_norm(graph, x, name, self.norms[name].astype(self.core), self.options.epsilon)
            if name == "v":
                return self._as_cached(x, name) if "hidden" in given else x
            if self.options.rope.target == "ort":
                return x
            return self._as_cached(rotator.rotate(x, heads), name)

    def _as_cached(self, x: str, name: str) -> str:
        """Round keys and values as the cache does: later steps find them rounded, so this one uses them so."""
        if name == "q" or self.dtype == self.core:
            return x
        return self.graph.cast(self.graph.cast(x, self.dtype, "as_cached"), self.core, "from_cached")

    def _wide(self, x: str) -> str:
        return x if self.dtype == self.core else self.graph.cast(x, self.core, f"to_{self.core}")

    def _projected(self, x: str, name: str) -> str:
        """Apply a projection: x · Wᵀ + b."""
        weight = self.graph.table(f"{name}_weight", self.weights[name].T.astype(self.dtype))
        y = self.graph.node("MatMul", [self._once_wide(x), self._wide_weight(weight)], f"{name}_projected")
        if f"{name}_bias" not in self.weights:
            return y
        bias = self.graph.table(f"{name}_bias", self.weights[f"{name}_bias"].astype(self.dtype))
        return self.graph.node("Add", [y, self._wide_weight(bias)], f"{name}_with_bias")

    def _once_wide(self, x: str) -> str:
        return x if self.dtype == self.core or x != "hidden" else self.graph.cast(x, self.core, "hidden_wide")

    def _wide_weight(self, name: str) -> str:
        return name if self.dtype == self.core else self.graph.cast(name, self.core, f"{name}_wide")

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
