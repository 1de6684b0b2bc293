"""Target "primitive": elementary operators."""

from __future__ import annotations

import numpy as np

from rope_cpu import RotaryEmbedding

from ..graph import FLOAT32, FLOAT64, HALF, Graph, tensor_shape
from ..nodes import PAST_KEY, PAST_VALUE, arange, token_cos_sin
from .base import Attention, Rotator, Target, block_widths, part_widths, split


class PrimitiveRotator(Rotator):
    """Rotates by products and sums of the elements of pairs."""

    def __post_init__(self) -> None:
        """Align the axes of cos and sin with those of the tensors."""
        cos_sin = token_cos_sin(self.graph, self.cos_sin)
        self._aligned = {
            name: self._align(value, f"{name}_by_head") for name, value in cos_sin.by_name().items()
        }

    def _align(self, value: str, name: str) -> str:
        layout = self.rotation_layout()
        if self.cos_sin.heads > 1:
            return self.graph.transpose(value, "bshd", layout, f"{name}/in_order")
        value = self.graph.transpose(value, "bsd", layout.replace("h", ""), f"{name}/in_order")
        return self.graph.node("Unsqueeze", [value, self.graph.ints(layout.index("h"))], name)

    def rotate_in_layout(self, x: str, heads: int | None) -> str:
        """Rotate; head h takes the frequencies of head h // (heads per frequency)."""
        tables = list(self._aligned.values())
        if self.cos_sin.heads > 1 and heads is not None:
            heads_per_frequency = heads // self.cos_sin.heads
            index = self.graph.initializer(
                f"frequencies_of_{heads}_heads", np.arange(heads) // heads_per_frequency
            )
            axis = self.rotation_layout().index("h")
            tables = [
                self.graph.node("Gather", [value, index], name, axis=axis)
                for name, value in self._aligned.items()
            ]
        with self.graph.scope("rotate"):
            y = _rotated(self.graph, self.rope, x, *tables)
        # Shape inference does not see through the Reshape at the end.
        shape = tensor_shape(self.rotation_layout(), heads or f"{x}_heads", self.rope.head_dim)
        self.graph.value_info(y, self.compute_dtype, shape)
        return y


def _rotated(graph: Graph, rope: RotaryEmbedding, x: str, cos: str, sin: str) -> str:
    """Return x, of four axes, rotated by cos and sin, which broadcast against it."""
    blocks = block_widths(rope)
    parts = split(graph, x, part_widths(rope), "x")
    pairs = {name: width // 2 for name, width in blocks.items()}
    cos_parts = split(graph, cos, pairs, "cos")
    sin_parts = split(graph, sin, pairs, "sin")
    rotate = _rotate_interleaved if rope.interleaved else _rotate_half_split
    for index, name in enumerate(blocks):
        with graph.scope(name):
            parts[index] = rotate(
                graph, parts[index], cos_parts[index], sin_parts[index], pairs[name]
            )
    joined = parts[0]
    if len(parts) > 1:
        joined = graph.node("Concat", parts, "joined", axis=-1)
    # Ids of another batch size would broadcast x; reshaped to the shape of x, they fail instead.
    return graph.node("Reshape", [joined, graph.node("Shape", [x], "shape_of_x")], "y")


def _rotate_half_split(graph: Graph, x: str, cos: str, sin: str, pairs: int) -> str:
    """Rotate a block of pairs (i, i + pairs)."""
    sizes = graph.ints(pairs, pairs)
    a, b = graph.multi_output_node("Split", [x, sizes], "halves", ["a", "b"], axis=-1)
    return graph.node("Concat", _rotate_pairs(graph, a, b, cos, sin), "rotated", axis=-1)


def _rotate_interleaved(graph: Graph, x: str, cos: str, sin: str, pairs: int) -> str:
    """Rotate a block of pairs (2i, 2i + 1)."""
    last = graph.ints(-1)
    end = graph.ints(2 * pairs)
    step = graph.ints(2)
    a = graph.node("Slice", [x, graph.ints(0), end, last, step], "a")
    b = graph.node("Slice", [x, graph.ints(1), end, last, step], "b")
    a_rotated, b_rotated = _rotate_pairs(graph, a, b, cos, sin)
    a_column = graph.node("Unsqueeze", [a_rotated, last], "a_column")
    b_column = graph.node("Unsqueeze", [b_rotated, last], "b_column")
    by_pair = graph.node("Concat", [a_column, b_column], "by_pair", axis=-1)
    return graph.node("Reshape", [by_pair, graph.ints(0, 0, 0, 2 * pairs)], "rotated")


def _rotate_pairs(graph: Graph, a: str, b: str, cos: str, sin: str) -> list[str]:
    """Return the rotated first elements of the pairs, and the second ones."""
    a_cos = graph.node("Mul", [a, cos], "a_cos")
    b_sin = graph.node("Mul", [b, sin], "b_sin")
    b_cos = graph.node("Mul", [b, cos], "b_cos")
    a_sin = graph.node("Mul", [a, sin], "a_sin")
    a_rotated = graph.node("Sub", [a_cos, b_sin], "a_rotated")
    b_rotated = graph.node("Add", [b_cos, a_sin], "b_rotated")
    return [a_rotated, b_rotated]


class PrimitiveAttention(Attention):
    """Writes MatMul, Softmax, MatMul; a group of query heads shares its keys by broadcasting.

    Letters of the axes: batch, key head, group (of query heads), sequence, total length, width.
    """

    def attend(self, q: str, k: str, v: str) -> tuple[str, str, str]:
        """Return the result, and present keys and values."""
        graph = self.graph
        options = self.options
        if self.lengths.shared is not None:
            index = self._cache_index(self.lengths.shared.past)
            keys = self._written(PAST_KEY, k, index, "key")
            values = self._written(PAST_VALUE, v, index, "value")
        else:
            keys = self._with_past(k, 0, "key")
            values = self._with_past(v, 1, "value")
        queries = self._scaled_queries(q)
        columns = graph.transpose(self._attended(keys, "key"), "bktw", "bkwt", "keys_by_column")
        columns = graph.node("Unsqueeze", [columns, graph.ints(2)], "keys_of_group")
        attended = self._attended(values, "value")
        grouped_values = graph.node("Unsqueeze", [attended, graph.ints(2)], "values_of_group")
        scores = graph.node("MatMul", [queries, columns], "scores")
        if options.softcap is not None:
            tanh = graph.node("Tanh", [scores], "scores/tanh")
            cap = graph.scalar(options.softcap, self.compute_dtype)
            scores = graph.node("Mul", [tanh, cap], "scores/capped")
        weights = self._weights(scores)
        result = graph.node("MatMul", [weights, grouped_values], "weighted_values")
        result = graph.transpose(result, "bkgsw", "bskgw", "weighted_values/order")
        shape = graph.ints(0, 0, options.num_heads, options.v_head_dim)
        return graph.node("Reshape", [result, shape], "attention_by_head"), keys, values

    @property
    def _groups(self) -> tuple[int, int]:
        """The number of key heads, and of query heads that share one."""
        kv_heads = self.options.num_kv_heads
        return kv_heads, self.options.num_heads // kv_heads

    def _scaled_queries(self, q: str) -> str:
        """Return the queries, in axes bkgsw, times the scale and divided by the softcap, if any."""
        graph = self.graph
        factor = self.options.scale / (self.options.softcap or 1.0)
        # A vector, not a scalar: onnxruntime folds a scalar factor of MatMul into a float32
        # attribute, in float64 too.
        scale = graph.initializer("score_scale", np.full(self.head_dim, factor, self.compute_dtype))
        q = graph.node("Mul", [q, scale], "q_scaled")
        shape = graph.ints(0, 0, *self._groups, self.head_dim)
        q = graph.node("Reshape", [q, shape], "q_by_group")
        return graph.transpose(q, "bskgw", "bkgsw", "q_by_group/order")

    def _weights(self, scores: str) -> str:
        """Return the softmax of the scores (b, k, g, s, t); queries without any key get zeros."""
        graph = self.graph
        dtype = self.compute_dtype
        if self.bias is not None:
            scores = graph.node("Add", [scores, self._by_group(self.bias)], "scores/with_mask")
        causal = None
        if self.options.causal:
            causal = self.causal_mask()
            if self.lengths.shared is not None:  # (b, 1, s, t): an axis for the groups of heads
                causal = graph.node("Unsqueeze", [causal, graph.ints(1)], "is_near/of_groups")
        mask = self.boolean_mask(causal)
        lowest = graph.scalar(float(np.finfo(dtype).min), dtype)
        if mask is not None:
            if self.options.has_boolean_mask:
                mask = self._by_group(mask)
            scores = graph.node("Where", [mask, scores, lowest], "scores/allowed")
        if self.bias is not None:
            scores = graph.node("Max", [scores, lowest], "scores/finite")
        weights = self._softmax(scores)
        if self.options.mask_kind == "none":
            return weights
        attended = graph.node("Greater", [scores, lowest], "scores/is_any")
        zero = graph.scalar(0.0, dtype)
        return graph.node("Where", [attended, weights, zero], "weights/of_allowed")

    def _softmax(self, scores: str) -> str:
        """Return the softmax of the scores (b, k, g, s, t), in which a sink takes its share.

        The sink of a head is one more score of each query, whose weight is dropped.
        """
        graph = self.graph
        if self.sinks is None:
            return graph.node("Softmax", [scores], "weights", axis=-1)
        scores = self.with_sinks(scores, self.sinks, self._groups)
        weights = graph.node("Softmax", [scores], "weights/with_sinks", axis=-1)
        last = graph.ints(-1)
        return graph.node("Slice", [weights, graph.ints(0), last, last], "weights")

    def _by_group(self, mask: str) -> str:
        """Return a mask (batch or 1, heads or 1, seq, total) as (…, kv_heads, group, …, …)."""
        graph = self.graph
        heads = graph.ints(1, self.options.num_heads, 1, 1)
        per_head = graph.node("Expand", [mask, heads], f"{mask}/of_heads")
        heads_last = graph.transpose(per_head, "bhst", "bsth", f"{mask}/heads_last")
        shape = graph.ints(0, 0, 0, *self._groups)
        groups_last = graph.node("Reshape", [heads_last, shape], f"{mask}/groups_last")
        return graph.transpose(groups_last, "bstkg", "bkgst", f"{mask}/by_group")

    def _with_past(self, new: str, index: int, name: str) -> str:
        """Return keys or values (batch, kv_heads, total, width); index: of them in the past."""
        new = self.graph.transpose(new, "bshd", "bhsd", f"{name}_by_head")
        if self.past is None:
            return new
        return self.graph.node("Concat", [self.past[index], new], f"{name}_with_past", axis=2)

    def _cache_index(self, past: str) -> str:
        """Return the place of each new key in a shared cache, (batch, seq, kv_heads, 3).

        Its three numbers are batch row, head and position. past: tokens of each row, (batch,).
        """
        graph = self.graph
        batch = self.rotator.batch
        sequence = self.lengths.sequence
        kv_heads = self.options.num_kv_heads
        shape = graph.node(
            "Concat", [batch, sequence, graph.ints(kv_heads, 1)], "cache_index/shape", axis=0
        )
        row = arange(graph, batch, "cache_index/row")
        row = graph.node("Unsqueeze", [row, graph.ints(1, 2, 3)], "cache_index/row_column")
        head = graph.initializer("key_head_index", np.arange(kv_heads)[:, None])
        first = graph.node("Unsqueeze", [past, graph.ints(1)], "first_place")
        token = arange(graph, sequence, "cache_index/token")
        place = graph.node("Add", [first, token], "cache_index/place")
        place = graph.node("Unsqueeze", [place, graph.ints(2, 3)], "cache_index/place_column")
        columns = [
            graph.node("Expand", [value, shape], f"cache_index/{name}_of_all")
            for name, value in (("row", row), ("head", head), ("place", place))
        ]
        return graph.node("Concat", columns, "cache_index", axis=-1)

    def _written(self, cached: str, new: str, index: str, name: str) -> str:
        """Return cached keys or values with new ones written to the places of `index`."""
        new = self.as_cached(new, name)
        return self.graph.node("ScatterND", [cached, index, new], f"{name}_written")

    def _attended(self, cached: str, name: str) -> str:
        """Return the keys or values to attend to: of a shared cache, up to the longest row."""
        if self.lengths.shared is None:
            return cached
        graph = self.graph
        part = [graph.ints(0), self.lengths.total, graph.ints(2)]
        cached = graph.node("Slice", [cached, *part], f"{name}_of_rows")
        return self.from_cached(cached, name)


PRIMITIVE = Target(
    name="primitive",
    op="ops of opset 14",
    opsets=(14, 24),
    dtypes=(FLOAT32, FLOAT64, *HALF),
    rotator=PrimitiveRotator,
    attention=PrimitiveAttention,
    per_head=True,
)
