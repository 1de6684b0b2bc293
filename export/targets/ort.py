"""Target "ort": the com.microsoft operators of onnxruntime.

RotaryEmbedding, MRotaryEmbedding and GroupQueryAttention.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.frequencies.axes import mrope_pair_axis

from ..graph import BATCH, CAPACITY, FLOAT32, ORT_DOMAIN, SEQUENCE, TOTAL, Shape, relayout
from ..nodes import PAST_KEY, PAST_VALUE, CosSinValues, arange, token_cos_sin
from ..options import SCALES, AttentionOptions
from .base import Attention, OperatorRotator, Target

ATTENTION_OP = "com.microsoft GroupQueryAttention"


class OrtRotator(OperatorRotator):
    """Rotates by com.microsoft RotaryEmbedding, or by MRotaryEmbedding where that fits the axes.

    Both only look up in tables (table, pairs). Cos and sin per token become such a table, with one
    row per token.
    """

    @cached_property
    def _mrope(self) -> dict[str, Any] | None:
        """The attributes of MRotaryEmbedding, None where it cannot assign the pairs to the axes."""
        pair_axis = self.cos_sin.pair_axis
        if pair_axis is None or self.rope.axes != 3 or len(self.rope.blocks) > 1:
            return None
        sections = np.bincount(pair_axis, minlength=3).tolist()
        for layout, interleaved in enumerate((False, True)):
            with suppress(ValueError):  # some sections cannot be interleaved
                if mrope_pair_axis(sections, interleaved) == pair_axis:
                    return {"mrope_section": sections, "mrope_layout": layout}
        return None

    def takes_partial(self, heads: int | None) -> bool:
        """Return True if the operator can rotate the leading elements of a head vector alone.

        onnxruntime refuses that at run time unless it knows the number of heads.
        """
        return heads is not None or self.rope.rotary_dim == self.rope.head_dim

    def tables(self, cos_sin: CosSinValues, name: str) -> list[str]:
        """Return ids and tables."""
        if cos_sin.ids is not None and self._mrope is not None:
            ids = self.expanded(cos_sin.ids, "position_ids_by_batch", self.rope.axes)
            # In this layout, "a" is the axis of coordinates.
            by_axis = self.graph.transpose(ids, "bsa", "abs", "position_ids_by_axis")
            return [by_axis, cos_sin.cos, cos_sin.sin]
        if cos_sin.ids is not None and cos_sin.pair_axis is None:
            ids = self.expanded(cos_sin.ids, "position_ids_by_batch")
            return [ids, cos_sin.cos, cos_sin.sin]
        per_token = token_cos_sin(self.graph, cos_sin)
        ids = self._token_rows
        tables = [
            self._token_table(value, f"{name}/{function}", per_token.pairs)
            for function, value in per_token.by_name().items()
        ]
        return [ids, *tables]

    def _token_table(self, value: str, name: str, pairs: int) -> str:
        """Return cos or sin per token as a table with one row per token."""
        graph = self.graph
        value = self.expanded(value, f"{name}_by_batch", pairs)
        # More batch rows in cos and sin than in x would be ignored. Reshaped to [batch, 0, 0],
        # where 0 keeps a size, they fail.
        shape = graph.node("Mul", [self.batch, graph.ints(1, 0, 0)], f"{name}_exact/shape")
        value = graph.node("Reshape", [value, shape], f"{name}_exact")
        value = graph.node("Reshape", [value, graph.ints(-1, pairs)], f"{name}_rows")
        # The operator needs a table of at least `sequence` rows even where the batch is empty.
        more = graph.node("Concat", [self.sequence, graph.ints(pairs)], f"{name}_rows/more", axis=0)
        zeros = graph.node("Expand", [graph.scalar(0.0, self.compute_dtype), more], f"{name}_zeros")
        return graph.node("Concat", [value, zeros], f"{name}_table", axis=0)

    @cached_property
    def _token_rows(self) -> str:
        """Return the table row of each token (batch, seq): batch row · seq + token."""
        graph = self.graph
        row = arange(graph, self.batch, "batch_row")
        token = arange(graph, self.sequence, "token")
        column = graph.node("Unsqueeze", [row, graph.ints(1)], "batch_row/column")
        first = graph.node("Mul", [column, self.sequence], "batch_row/first")
        return graph.node("Add", [first, token], "every_row")

    def operator(
        self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any
    ) -> str:
        """Add the operator and declare its output, which shape inference does not know."""
        op = "RotaryEmbedding"
        if self._mrope is not None:
            op = "MRotaryEmbedding"
            attributes |= self._mrope
        attributes["interleaved"] = int(self.rope.interleaved)
        y = self.graph.node(op, [x, *tables], name, domain=ORT_DOMAIN, **attributes)
        self.graph.value_info(y, self.compute_dtype, shape)
        return y


def operator_rotates(rope: RotaryEmbedding, options: AttentionOptions) -> bool:
    """Return True if GroupQueryAttention itself can rotate queries and keys.

    It looks cos and sin up in tables, at positions that continue from the past: of position_ids it
    reads the first of a prompt only, and it counts padding too. Its vectors have one block, of a
    multiple of 16 elements.
    """
    continues = options.positions == "past" and not options.follows_mask
    one_block = len(rope.blocks) == 1
    whole_16 = rope.head_dim % 16 == 0 and rope.rotary_dim % 16 == 0
    return continues and options.max_positions is not None and one_block and whole_16


class OrtAttention(Attention):
    """Writes com.microsoft GroupQueryAttention, which rotates too where it can."""

    @staticmethod
    def check(rope: RotaryEmbedding, options: AttentionOptions) -> None:
        """Raise ValueError where GroupQueryAttention would be wrong or would not run."""
        if not options.causal:
            raise ArgumentError("causal", False, f"be True for {ATTENTION_OP}")
        if rope.head_dim % 8:
            rule = f"be a multiple of 8 for {ATTENTION_OP}"
            raise ArgumentError("head_dim", rope.head_dim, rule)
        if options.v_head_dim != rope.head_dim:
            rule = f"be `head_dim`, {rope.head_dim}, for {ATTENTION_OP}"
            raise ArgumentError("v_head_dim", options.v_head_dim, rule)
        if options.is_shared and options.cached_dtype not in (str(FLOAT32), "int8"):
            rule = (
                f"be float32 unless `cache_dtype` is 'int8': {ATTENTION_OP} would convert the "
                "whole shared cache to float32 at every step"
            )
            raise ArgumentError("dtype", options.dtype, rule)
        if options.batch_chunks and not options.is_shared:
            rule = f"be left out with target {options.target!r} and `cache` 'growing'"
            raise ArgumentError("batch_chunks", True, rule, "or give `cache`='shared'")
        if options.batch_chunks and not runtime_takes_query_lengths():
            rule = (
                f"be False, as the GroupQueryAttention of onnxruntime {onnxruntime.__version__} "
                "takes several new tokens on a past for a batch of 1 only"
            )
            raise ArgumentError("batch_chunks", True, rule, "or install onnxruntime 1.32")

    def attend(self, q: str, k: str, v: str) -> tuple[str, str, str]:
        """Return the result, and present keys and values."""
        graph = self.graph
        options = self.options
        kv_heads = options.num_kv_heads
        rotates = operator_rotates(self.rotator.rope, options)
        if not rotates:
            with graph.scope("q"):
                q = self.rotator.rotate(q, options.num_heads)
            with graph.scope("k"):
                k = self.rotator.rotate(k, kv_heads)
        # All masks are one bias; there is none without an input mask.
        causal = self.causal_mask() if options.mask_kind != "none" else None
        bias = self.masked_bias(self.boolean_mask(causal))
        total = graph.cast(self.lengths.total, np.int32, "total_length_int32")
        last = self._last_indices(total)
        total = graph.node("Squeeze", [total, graph.ints(0)], "total_length_scalar")
        is_shared = self.lengths.shared is not None
        past = (PAST_KEY, PAST_VALUE) if is_shared else self.past or ("", "")
        cos_sin = self.rotator.cos_sin
        tables = [cos_sin.cos, cos_sin.sin] if rotates else ["", ""]
        inputs = [q, k, v, *past, last, total, *tables, "", bias or "", *self._further_inputs()]
        y, keys, values = graph.multi_output_node(
            "GroupQueryAttention",
            inputs,
            "attend",
            ["", "present_key", "present_value"],
            domain=ORT_DOMAIN,
            **_attributes(options),
            do_rotary=int(rotates),
            rotary_interleaved=int(rotates and self.rotator.rope.interleaved),
        )
        shape: Shape = [BATCH, SEQUENCE, options.num_heads * self.head_dim]
        graph.value_info(y, self.compute_dtype, shape)
        shape = [BATCH, kv_heads, CAPACITY if is_shared else TOTAL, self.head_dim]
        for value in (keys, values):
            graph.value_info(value, options.cache_dtype or self.compute_dtype, shape)
        if bias is not None:
            y = self._zero_without_keys(y, bias)
        return y, keys, values

    def _last_indices(self, total: str) -> str:
        """Return the index of the last key of each row, int32; total: as int32."""
        graph = self.graph
        shared = self.lengths.shared
        one = graph.scalar(1, np.int32)
        if shared is None:
            last = graph.node("Sub", [total, one], "last_index")
            return graph.node("Expand", [last, self.rotator.batch], "last_index_by_row")
        total = graph.cast(shared.total, np.int32, "total_length_by_row_int32")
        return graph.node("Sub", [total, one], "last_index")

    def _further_inputs(self) -> list[str]:
        """Return the inputs after the bias: sinks, scales of the cache, numbers of new tokens."""
        graph = self.graph
        scales = ["", ""] if self.options.cache_dtype is None else SCALES
        inputs = [self.sinks or "", *scales]
        if self.options.batch_chunks:
            count = graph.cast(self.lengths.sequence, np.int32, "sequence_length_int32")
            lengths = graph.node("Expand", [count, self.rotator.batch], "query_lengths")
            inputs += ["", "", lengths]  # no q_norm_weight, k_norm_weight
        return inputs

    def _zero_without_keys(self, y: str, bias: str) -> str:
        """Return y (batch, seq, heads·width), with zeros for queries that attend to no key.

        GroupQueryAttention may return NaN there.
        """
        graph = self.graph
        heads = self.options.num_heads
        dtype = self.compute_dtype
        has_key = graph.node("Greater", [bias, graph.scalar(-np.inf, dtype)], "has_key")
        ones = graph.cast(has_key, dtype, "has_key/count")
        count = graph.node("ReduceSum", [ones, graph.ints(-1)], "key_count")
        has_any = graph.node("Greater", [count, graph.scalar(0.0, dtype)], "has_any_key")
        has_any = graph.transpose(has_any, "bhsd", "bshd", "has_any_key/order")
        y = relayout(graph, y, "bsd", "bshd", heads, self.head_dim)
        y = graph.node("Where", [has_any, y, graph.scalar(0.0, dtype)], "attention_of_any_key")
        return relayout(graph, y, "bshd", "bsd", heads, self.head_dim)


def _attributes(options: AttentionOptions) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "num_heads": options.num_heads,
        "kv_num_heads": options.num_kv_heads,
        "scale": options.scale,
    }
    if options.softcap is not None:
        attributes["softcap"] = options.softcap
    if options.window is not None:
        attributes["local_window_size"] = options.window
    if options.keeps_window:
        attributes["sliding_window_cache"] = 1
    if options.cache_dtype is not None:
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        attributes["kv_cache_bit_width"] = 8
    return attributes


@cache
def runtime_takes_query_lengths() -> bool:
    """Return True if the installed onnxruntime takes several new tokens on a past for a batch.

    Its GroupQueryAttention has the input query_seqlens then, since 1.32.
    """
    schemas = onnxruntime_pybind11_state.get_all_operator_schema()
    inputs = [schema.inputs for schema in schemas if schema.name == "GroupQueryAttention"]
    return any(value.name == "query_seqlens" for values in inputs for value in values)


ORT = Target(
    name="ort",
    op="com.microsoft RotaryEmbedding",
    opsets=(14, 24),
    rotator=OrtRotator,
    attention=OrtAttention,
    attention_layout="bsd",
    attention_rotates=True,
    takes_chunks=False,
)
