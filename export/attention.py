"""export_attention: rotated attention with a cache, as an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.validation.scalars import one_of, whole_number

from .attention_options import LAYOUTS, POSITIONS, AttentionOptions
from .graph import Graph, compute_dtype_of, relayout, rms_norm
from .masks import INPUT, SHAPES, lengths_of
from .metadata import described, entries
from .options import RopeOptions, is_rotary_embedding
from .positions import inputs_of, rotator_of, sizes_of
from .rope import shape_of
from .targets import TARGETS
from .targets.base import Attending, Rotator
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
    is_rotary_embedding(rope)
    heads = whole_number("num_heads", num_heads)
    kv_heads = heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads)
    if heads % kv_heads:
        raise ValueError(f"`num_heads` is {heads}, not a multiple of `num_kv_heads`, {kv_heads}")
    given = one_of("positions", positions, POSITIONS) == "position_ids"
    if not given and rope.axes > 1 and not rope.spec.shared_id:
        raise ValueError(f"`positions` is {positions!r}; with {rope.axes} axes each token needs its coordinates")
    arrays, norms = weights_of(weights), norms_of(qk_norm)
    # "bhsd" is what stands there unless given, and says nothing.
    if arrays and one_of("layout", layout, LAYOUTS) == "bshd":
        raise ValueError(f"`layout` is {layout!r}, but `weights` are given: hidden states are (batch, seq, in)")
    inner = RopeOptions(
        target=target,
        dtype=dtype,
        layout=TARGETS[one_of("target", target, tuple(TARGETS))].attention_layout,
        inputs=("q", "k"),
        heads=(heads, kv_heads),
        positions="position_ids" if given else "none",
        position_dtype=np.int64,
        max_positions=max_positions,
        table_inputs=False,
        inverse=False,
        opset=opset,
    )
    options = AttentionOptions(
        rope=inner,
        layout="bsd" if arrays else layout,
        v_head_dim=rope.head_dim if v_head_dim is None else v_head_dim,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=rope.head_dim**-0.5 if scale is None else scale,
        mask=mask,
        past=past,
        qk_norm=bool(norms),
        epsilon=norm_epsilon,
        hidden=arrays["q"].shape[1] if arrays else None,
        output=arrays["o"].shape[0] if "o" in arrays else None,
    )
    options.check_rope(rope)
    options.check_arrays(rope.head_dim, arrays, norms)
    told = entries(rope, options.metadata(), metadata, tables=inner.tables)
    return _Builder(rope, options, arrays, norms).model(told)


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
        self.dtype, self.target = np.dtype(options.rope.dtype), TARGETS[options.rope.target]
        self.compute_dtype = compute_dtype_of(self.dtype)
        self.heads = {"q": options.heads, "k": options.kv_heads, "v": options.kv_heads}
        self.widths = {"q": rope.head_dim, "k": rope.head_dim, "v": options.v_head_dim}

    def model(self, metadata: dict[str, str]) -> onnx.ModelProto:
        """Return the model."""
        graph, options = self.graph, self.options
        given, past = self._inputs()
        sizes = sizes_of(graph, given[0], options.layout)
        lengths = lengths_of(graph, sizes[1], past[0] if past else None)
        rotator = rotator_of(graph, self.rope, options.rope, sizes, lengths.past)
        wide = [self._widened(name) for name in given]
        # One input is the hidden states, which queries, keys and values are all projected from.
        sources = wide * 3 if len(wide) == 1 else wide
        tensors = [self._ready(name, x, rotator) for name, x in zip("qkv", sources, strict=True)]
        with graph.scope("attention"):
            attending = Attending(
                graph=graph,
                rotator=rotator,
                lengths=lengths,
                past=(self._widened(past[0]), self._widened(past[1])) if past else None,
                heads=options.heads,
                kv_heads=options.kv_heads,
                v_head_dim=options.v_head_dim,
                causal=options.causal,
                window=options.window,
                softcap=options.softcap,
                scale=options.scale,
                mask=options.mask,
                mask_dtype=self.dtype,
            )
            y, keys, values = self.target.attend(attending, *tensors)
        self._outputs(y, keys, values)
        return graph.model(
            "rotary_attention",
            opset=options.rope.opset,
            doc=f"Attention with rotated queries and keys. {described(self.rope)}",
            functions=rotator.functions(options.rope.opset),
            metadata=metadata,
        )

    def _inputs(self) -> tuple[list[str], list[str]]:
        """Declare every input; return q, k and v, or the hidden states, and past keys and values, or nothing."""
        graph, options = self.graph, self.options
        if options.hidden is not None:
            shapes: dict[str, list[str | int]] = {"hidden": ["batch", "sequence", options.hidden]}
        else:
            shapes = {name: shape_of(options.layout, name, self.heads[name], self.widths[name]) for name in "qkv"}
        past = (("past_key", self.widths["k"]), ("past_value", self.widths["v"])) if options.past else ()
        cached: dict[str, list[str | int]] = {n: ["batch", options.kv_heads, "past_length", w] for n, w in past}
        for name, shape in (shapes | cached).items():
            graph.input(name, self.dtype, shape)
        for declared in inputs_of(self.rope, options.rope):
            graph.input(*declared)
        if options.mask != "none":
            graph.input(INPUT, self.dtype if options.mask == "float" else np.bool_, SHAPES[options.mask])
        return list(shapes), list(cached)

    def _widened(self, value: str) -> str:
        """Return a value in the compute dtype."""
        if self.dtype == self.compute_dtype:
            return value
        return self.graph.cast(value, self.compute_dtype, f"{value}_{self.compute_dtype}")

    def _ready(self, name: str, x: str, rotator: Rotator) -> str:
        """Return q, k or v as attention takes them: projected, normed, rotated and laid out as each needs."""
        graph, heads, width, projected = self.graph, self.heads[name], self.widths[name], name in self.weights
        with graph.scope(name):
            x = self._projected(x, name) if projected else x
            x = relayout(graph, x, self.options.layout, self.target.attention_layout, heads, width)
            if name in self.norms:
                x = rms_norm(graph, x, name, self.norms[name].astype(self.compute_dtype), self.options.epsilon)
            if name == "v":
                return self._as_cached(x, name) if projected else x
            if self.target.attention_rotates:
                return x
            return self._as_cached(rotator.rotate(x, heads), name)

    def _as_cached(self, x: str, name: str) -> str:
        """Round keys and values as the cache does: later steps find them rounded, so this one uses them so."""
        if name == "q" or self.dtype == self.compute_dtype:
            return x
        return self.graph.cast(self.graph.cast(x, self.dtype, "as_cached"), self.compute_dtype, "from_cached")

    def _projected(self, x: str, name: str) -> str:
        """Apply a projection: x · Wᵀ + b."""
        weight = self.graph.initializer(f"{name}_weight", self.weights[name].T.astype(self.dtype))
        y = self.graph.node("MatMul", [x, self._widened(weight)], f"{name}_projected")
        if f"{name}_bias" not in self.weights:
            return y
        bias = self.graph.initializer(f"{name}_bias", self.weights[f"{name}_bias"].astype(self.dtype))
        return self.graph.node("Add", [y, self._widened(bias)], f"{name}_with_bias")

    def _outputs(self, y: str, keys: str, values: str) -> None:
        graph, options = self.graph, self.options
        heads, width = options.heads, options.v_head_dim
        if options.output is not None:
            with graph.scope("output"):
                merged = relayout(graph, y, self.target.attention_layout, "bsd", heads, width)
                y = self._projected(merged, "o")
            shape: list[str | int] = ["batch", "sequence", options.output]
        else:
            with graph.scope("output"):
                y = relayout(graph, y, self.target.attention_layout, options.layout, heads, width)
            shape = shape_of(options.layout, "q", heads, width)
        graph.output(self._narrow(y, "attention"), "attention", self.dtype, shape)
        if options.past:
            for value, name, wide in ((keys, "present_key", "k"), (values, "present_value", "v")):
                shape = ["batch", options.kv_heads, "total_length", self.widths[wide]]
                graph.output(self._narrow(value, name), name, self.dtype, shape)

    def _narrow(self, value: str, name: str) -> str:
        return (
            value if self.dtype == self.compute_dtype else self.graph.cast(value, self.dtype, f"{name}/to_{self.dtype}")
        )
