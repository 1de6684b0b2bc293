"""Nodes that all targets share: cos and sin of positions, lengths of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.rotation.cos_sin import CosSin

from .graph import BATCH, FLOAT64, SEQUENCE, TOTAL, Graph, Shape

PAST_KEY = "past_key"
PAST_VALUE = "past_value"
MASK_INPUT = "attention_mask"
PAST_LENGTHS = "past_lengths"

# The name of a node, which onnxruntime's error shows.
_FIRST_IS_TOKEN = "attention_mask_must_be_1_in_the_column_of_the_first_new_token"

# Shape of the input for each kind of mask.
_SCORES_SHAPE: Shape = ["mask_batch", "mask_heads", SEQUENCE, TOTAL]
MASK_SHAPES: dict[str, Shape] = {
    "padding": [BATCH, TOTAL],
    "bool": _SCORES_SHAPE,
    "float": _SCORES_SHAPE,
}


@dataclass(frozen=True)
class CosSinValues:
    """Names of the values in a graph that hold cos and sin, attention factor included.

    Per token: `ids` is None; cos and sin are (batch or 1, seq, pairs), or (…, heads, pairs).
    Tables: cos and sin are (table, pairs); `ids`, (batch, seq) or (batch, seq, axes), holds the row
    of each token. With several axes `pair_axis` holds the axis that each pair rotates with.
    """

    cos: str
    sin: str
    pairs: int
    heads: int = 1
    ids: str | None = None
    pair_axis: tuple[int, ...] | None = None

    def by_name(self) -> dict[str, str]:
        """Return the values under the keys "cos" and "sin"."""
        return {"cos": self.cos, "sin": self.sin}


def length_factor(rope: RotaryEmbedding, inverse: bool) -> float:
    """Return the factor by which a rotation changes the length of a vector."""
    return 1 / rope.attention_factor if inverse else rope.attention_factor


def cos_sin_tables(
    rope: RotaryEmbedding, rows: int, inverse: bool, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return cos and sin of positions 0 … rows − 1, the same on every axis: (2, rows, pairs).

    Each value is rounded once to `dtype`.
    """
    positions = np.arange(rows, dtype=np.float64).reshape(1, rows, 1)
    operation = "inverse" if inverse else "rotate"
    table = CosSin.from_spec(rope.spec).table(positions, operation, str(dtype))
    return table.reshape(2, rows, -1)


def computed_cos_sin(
    graph: Graph, rope: RotaryEmbedding, ids: str, inverse: bool, dtype: np.dtype[Any]
) -> CosSinValues:
    """Compute cos and sin in the graph.

    ids: (batch or 1, seq), with several axes (batch or 1, seq, axes), int64.

    The product of position and frequency is float64 and off by its rounding, |p·ω|·2^-53. With
    angle_dtype float32, product and results are float32, as in transformers; cos and sin are
    computed in float64 and then rounded.
    """
    _, axes, heads, pairs = rope.spec.inv_freq.shape
    angle_dtype = np.dtype(rope.spec.angle_dtype)
    frequencies = rope.spec.inv_freq[0].reshape(axes, heads * pairs).astype(angle_dtype)
    inv_freq = graph.initializer("inv_freq", frequencies)
    with graph.scope("angles"):
        position = graph.cast(ids, angle_dtype, "position")
        if axes == 1:
            position = graph.node("Unsqueeze", [position, graph.ints(-1)], "position_column")
            angle = graph.node("Mul", [position, inv_freq], "position_times_inv_freq")
        else:
            angle = graph.node("MatMul", [position, inv_freq], "position_times_inv_freq")
        if heads > 1:
            angle = graph.node("Reshape", [angle, graph.ints(0, 0, heads, pairs)], "by_head")
        angle = graph.cast(angle, FLOAT64, "angle")
        factor = length_factor(rope, inverse)
        cos = cosine(graph, angle, dtype)
        cos = _scaled(graph, cos, factor, "cos", angle_dtype, dtype)
        sin = graph.node("Sin", [angle], "sin")
        sin = _scaled(graph, sin, -factor if inverse else factor, "sin", angle_dtype, dtype)
    return CosSinValues(cos, sin, pairs, heads)


def cosine(graph: Graph, angle: str, dtype: np.dtype[Any]) -> str:
    """Return the cosine; for float32 as 1 - 2·sin²(angle/2), so that older runtimes load the file.

    onnxruntime has had Sin in float64 for long, but Cos only since 1.29. The detour adds some
    roundings of 2^-53: nothing for float32, but too much for float64.
    """
    if dtype == FLOAT64:
        return graph.node("Cos", [angle], "cos")
    half = graph.node("Mul", [angle, graph.scalar(0.5, FLOAT64)], "half_angle")
    sine = graph.node("Sin", [half], "sin_of_half")
    square = graph.node("Mul", [sine, sine], "sin_of_half/squared")
    twice = graph.node("Mul", [square, graph.scalar(2.0, FLOAT64)], "sin_of_half/squared_twice")
    return graph.node("Sub", [graph.scalar(1.0, FLOAT64), twice], "cos")


def _scaled(
    graph: Graph,
    value: str,
    factor: float,
    name: str,
    angle_dtype: np.dtype[Any],
    dtype: np.dtype[Any],
) -> str:
    """Return a float64 value rounded to `angle_dtype`, times `factor`, in `dtype`."""
    value = graph.cast(value, angle_dtype, f"{name}_float32", source=FLOAT64)
    if factor != 1:
        value = graph.node("Mul", [value, graph.scalar(factor, angle_dtype)], f"{name}_factor")
    return graph.cast(value, dtype, f"{name}_{dtype}", source=angle_dtype)


def arange(graph: Graph, size: str, name: str) -> str:
    """Return 0, 1, 2, … size − 1, an int64 vector; size: an int64 vector of length 1."""
    zero = graph.scalar(0, np.int64)
    one = graph.scalar(1, np.int64)
    end = graph.node("Squeeze", [size, graph.ints(0)], f"{name}/end")
    return graph.node("Range", [zero, end, one], f"{name}/count")


def token_cos_sin(graph: Graph, values: CosSinValues) -> CosSinValues:
    """Return cos and sin per token, looked up where `values` are tables.

    A row outside the table fails at run time. Gather counts negative indices from the end, so they
    are replaced by the table's length, which fails too.
    """
    if values.ids is None:
        return values
    with graph.scope("lookup"):
        length = graph.size(values.cos, 0, "table_length")
        negative = graph.node("Less", [values.ids, graph.ints(0)], "is_negative")
        ids = graph.node("Where", [negative, length, values.ids], "row")
        cos = _table_rows(graph, values.cos, ids, values.pair_axis, "cos")
        sin = _table_rows(graph, values.sin, ids, values.pair_axis, "sin")
    return replace(values, cos=cos, sin=sin, ids=None, pair_axis=None)


def _table_rows(
    graph: Graph, table: str, ids: str, pair_axis: tuple[int, ...] | None, name: str
) -> str:
    """Return the table's row for each token.

    With several axes a token has one row per axis; each pair comes from the row of its own axis.
    """
    if pair_axis is None:
        return graph.node("Gather", [table, ids], name, axis=0)
    first, *others = sorted(set(pair_axis))
    result = _axis_row(graph, table, ids, first, name)
    for axis in others:
        row = _axis_row(graph, table, ids, axis, name)
        owned = graph.initializer(f"pairs_of_axis_{axis}", np.array(pair_axis) == axis)
        result = graph.node("Where", [owned, row, result], f"{name}/to_axis_{axis}")
    return result


def _axis_row(graph: Graph, table: str, ids: str, axis: int, name: str) -> str:
    """Return the table's row for each token's coordinate on one axis."""
    axis_index = graph.scalar(axis, np.int64)
    row = graph.node("Gather", [ids, axis_index], f"{name}/row_of_axis_{axis}", axis=-1)
    return graph.node("Gather", [table, row], f"{name}/by_axis_{axis}", axis=0)


@dataclass(frozen=True)
class SharedCache:
    """The lengths of the rows of a cache, whose keys and values are inputs of the graph.

    past, total: number of tokens of each row before and after the new ones, int64 (batch,).
    """

    past: str
    total: str


@dataclass(frozen=True)
class Lengths:
    """Numbers of new tokens, of tokens in the past, and of both, as int64 vectors of length 1.

    With a shared cache, `past` is (batch,), and `total` that of the longest row.
    """

    sequence: str
    past: str | None
    total: str
    shared: SharedCache | None = None


def masked_lengths(graph: Graph, sequence: str) -> str:
    """Return the number of tokens in each row of a shared cache, (batch,), from the token mask.

    They are the ones in the columns before the new tokens. Padding may lie behind the tokens of a
    row: a mask that has it before them, or more columns than tokens, fails when the graph runs.
    """
    columns = graph.size(MASK_INPUT, 1, "mask_columns")
    before = graph.node("Sub", [columns, sequence], "mask_columns/before")
    sizes = graph.node("Concat", [before, sequence], "mask_columns/parts", axis=0)
    past, new = graph.multi_output_node(
        "Split", [MASK_INPUT, sizes], "attention_mask", ["past", "new"], axis=1
    )
    count = graph.node("ReduceSum", [past, graph.ints(1)], "ones_in_past", keepdims=0)
    first = graph.node("Slice", [new, graph.ints(0), graph.ints(1), graph.ints(1)], "first_is_one")
    is_padding = graph.node("Sub", [graph.scalar(1, np.int64), first], "first_is_padding")
    index = graph.node("ReduceSum", [is_padding, graph.ints(1)], "padding_index", keepdims=0)
    zero = graph.node("Gather", [graph.ints(0), index], _FIRST_IS_TOKEN)
    return graph.node("Add", [count, zero], "past_lengths_of_mask")


def masked_ids(graph: Graph, lengths: Lengths) -> str:
    """Return the position of each new token, (batch, seq): the number of ones before it."""
    # reverse=0 is the default, but onnx2torch takes 1 for it.
    count = graph.node("CumSum", [MASK_INPUT, graph.scalar(1, np.int64)], "ones", reverse=0)
    before = graph.node("Sub", [count, graph.scalar(1, np.int64)], "ones_before")
    ids = graph.node("Max", [before, graph.scalar(0, np.int64)], "ids_of_all")
    if lengths.past is not None:
        part = [lengths.past, graph.ints(np.iinfo(np.int64).max), graph.ints(1)]
        ids = graph.node("Slice", [ids, *part], "ids_of_new")
    # A mask of too few columns fails here, where 0 keeps the size of the batch.
    shape = graph.node("Mul", [lengths.sequence, graph.ints(0, 1)], "ids_shape")
    return graph.node("Reshape", [ids, shape], "ids")


def shared_cache_lengths(
    graph: Graph, batch: str, sequence: str, past: str, positions: int | None
) -> Lengths:
    """Return the lengths of the rows of a shared cache, checked when the graph runs.

    past: numbers of tokens in the rows. positions: the most tokens of a row; None: the capacity.

    ONNX has no operator that fails on purpose. Gather fails outside its data, and onnxruntime's
    error holds the name of the node.
    """
    # One length for many rows would broadcast; reshaped to the batch, it fails instead.
    past = graph.node("Reshape", [past, batch], "past_lengths_are_one_for_each_row")
    graph.value_info(past, np.int64, [BATCH])
    unchecked = graph.node("Add", [past, sequence], "total_length_by_row/unchecked")
    limit = "capacity" if positions is None else "positions"
    most = graph.size(PAST_KEY, 2, limit) if positions is None else graph.ints(positions)
    is_beyond = graph.node("Greater", [unchecked, most], f"is_beyond_{limit}")
    is_negative = graph.node("Less", [past, graph.ints(0)], "is_negative")
    is_wrong = graph.node("Or", [is_beyond, is_negative], "is_outside_cache")
    index = graph.cast(is_wrong, np.int64, "is_outside_cache/index")
    name = f"past_lengths_must_be_0_or_more_and_with_the_new_tokens_at_most_the_{limit}"
    zero = graph.node("Gather", [graph.ints(0), index], name)
    past = graph.node("Add", [past, zero], "past_length_by_row")
    total = graph.node("Add", [past, sequence], "total_length_by_row")
    longest = graph.node("ReduceMax", [total], "total_length", keepdims=1)
    return Lengths(sequence, past, longest, SharedCache(past, total))
