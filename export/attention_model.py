"""export_attention: rotated attention with a cache, as an ONNX model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
import onnx.compose
from numpy.typing import ArrayLike

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import finite_array, real_array
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Dtype, Float64

from . import nodes
from .checks import check_rope, checked_options
from .graph import (
    BATCH,
    CAPACITY,
    PAST,
    SEQUENCE,
    TOTAL,
    TOTAL_OF_ROWS,
    Graph,
    four_axes,
    relayout,
    tensor_shape,
)
from .metadata import attention_descriptions, attention_text, model_metadata, rotation_text
from .options import (
    INPUT,
    NORM_EPSILON,
    OPTIMUM_NAMES,
    SCALES,
    AttentionLayout,
    AttentionOptions,
    AttentionPositions,
    Cache,
    Int8,
    Mask,
    Names,
    Source,
    TargetName,
)
from .rope_model import (
    batch_and_sequence,
    build_rotator,
    declare_positions,
    of_axes,
    position_values,
)
from .targets import TARGETS
from .targets.base import Rotator

INT32_MAX = 2**31 - 1  # GroupQueryAttention's lengths are int32

# {initializer: the argument that it is from}.
ARGUMENTS = {
    **{f"{name}_weight": f"weights[{name!r}]" for name in "qkvo"},
    **{f"{name}_bias": f"weights['{name}_bias']" for name in "qkvo"},
    "q_norm": "qk_norm[0]",
    "k_norm": "qk_norm[1]",
    "sinks": "sinks",
}


def export_attention(
    rope: RotaryEmbedding,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    target: TargetName = "onnx",
    dtype: Dtype = np.float32,
    layout: AttentionLayout = "bhsd",
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Mask = "none",
    qk_norm: tuple[ArrayLike, ArrayLike] | str | None = None,
    norm_epsilon: float = NORM_EPSILON,
    norm_offset: float = 0.0,
    sinks: ArrayLike | str | None = None,
    past: bool = True,
    cache: Cache = "growing",
    cache_dtype: Int8 | None = None,
    batch_chunks: bool = False,
    positions: AttentionPositions = "past",
    max_positions: int | None = None,
    weights: Mapping[str, ArrayLike] | None = None,
    v_head_dim: int | None = None,
    opset: int | None = None,
    name_prefix: str = "",
    names: Names = "rope_cpu",
    layer: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """Return an ONNX model of attention with rotated queries and keys.

    Inputs are q, k, v (or hidden), and past_key, past_value (batch, kv_heads, past, head_dim);
    outputs are attention, present_key, present_value. Cached keys are rotated. If attention is
    causal, prefill, chunks and single steps give the results of one pass over all tokens.

    With cache "shared" past and present are buffers (batch, kv_heads, capacity, head_dim), and
    an input past_lengths, int64 (batch,), says how many tokens each row has. New tokens are
    written behind them; `bind` binds one buffer as both, and no step copies it.

    Parameters
    ----------
    rope : RotaryEmbedding
        The rotation, of one sequence length.
    num_heads, num_kv_heads : int
        Heads of queries, and of keys and values (grouped-query attention). By default
        num_kv_heads is num_heads.
    target : {"onnx", "primitive", "ort"}
        "onnx": Attention and RotaryEmbedding, opset 23. "primitive": operators of opset 14; the
        only target in float64. "ort": com.microsoft GroupQueryAttention. That one needs `causal`, a
        head_dim that is a multiple of 8, and a v_head_dim equal to head_dim; several new tokens on
        a growing past need a batch of 1. It rotates too where it has `max_positions`, positions
        "past", and a head_dim and a rotary_dim that are multiples of 16; elsewhere q and k are
        rotated before it.
    dtype : dtype
        Dtype of inputs and outputs: float32, float16, bfloat16 or float64. float16 and bfloat16 are
        computed in float32.
    layout : {"bhsd", "bshd", "bsd"}
        Axes of q, k, v and the result; "bsd" is (batch, seq, heads·head_dim). Not
        together with `weights`: hidden states are (batch, seq, in).
    causal : bool
        Whether a query attends only to keys at or before its own position.
    window : int, optional
        Number of keys to which a query attends, its own included. Needs `causal`.
    softcap : float, optional
        Caps the scores: softcap·tanh(score/softcap).
    scale : float, optional
        Factor of the scores, head_dim^-½ by default.
    mask : {"none", "padding", "bool", "float"}
        "padding": an input attention_mask, bool (batch, total), true: attend. "bool", "float":
        (batch or 1, heads or 1, seq, total), true: attend, or added to the scores. A query without
        any key gives zeros.
    qk_norm : pair of array_like or "input", optional
        Weights (head_dim,) of the RMS norms of q and of k before the rotation. "input": they are
        inputs of the graph, q_norm_weight and k_norm_weight, in the dtype of q.
    norm_epsilon : float
        Added to the mean square in these norms.
    norm_offset : float
        Added to their weights: 1 for Gemma, whose checkpoints hold the difference from 1.
    sinks : array_like or "input", optional
        Attention sinks (num_heads,): for each head a score without a value, which takes its share
        of the softmax (gpt-oss). Neither scale nor softcap is applied to it. "input": an input
        of the graph, sinks, in the dtype of q.
    past : bool
        Whether there are past and present keys and values.
    cache : {"growing", "shared", "window"}
        "growing": each step allocates a longer present. "shared": see above; attention is causal
        and has no mask. past_lengths + seq above the capacity fails when the model runs. Numbers
        beyond a row's tokens must be finite, except with target "ort". Target "onnx" is of
        opset 24 then, and on onnxruntime's CPU attends to the whole capacity; "ort" takes float32,
        or a cache in int8. "window", target "ort" only: as "shared", but the buffers keep the
        last tokens alone, so that a capacity of `window` is enough, and past_lengths + seq is
        limited by `max_positions`. Padding in a prompt longer than the capacity is an error that
        nothing finds, and so is a smaller past_lengths after tokens beyond it.
    cache_dtype : dtype, optional
        int8: a shared cache of whole numbers, target "ort" only. Inputs k_scale and v_scale,
        float32 (1, kv_heads, 1, head_dim), hold the size of a unit; larger vectors are clipped.
    batch_chunks : bool
        Whether target "ort" takes several new tokens on a shared past for a batch above 1. The file
        needs onnxruntime 1.32 then. Other targets always do.
    positions : {"past", "position_ids"}
        "past": tokens are numbered on from the past. "position_ids": an input, as in `export_rope`.
    max_positions : int, optional
        Rows of the cos and sin tables. None: computed in the graph, as in `export_rope`.
    weights : mapping of str to array_like, optional
        Projections as in torch.nn.Linear, (out, in): q, k, v and perhaps o; biases (out,): q_bias,
        k_bias, v_bias, o_bias. The input is then hidden (batch, seq, in) and the output
        (batch, seq, out).
    v_head_dim : int, optional
        Width of a value vector, head_dim by default.
    opset : int, optional
        Opset of the model; by default the lowest that the target supports. From 25 on a window is
        an attribute of target "onnx", unless there are sinks or padding: onnxruntime loads that
        since 1.32.
    name_prefix : str
        Prefix of all names in the graph, inputs and outputs included, and of the metadata keys, so
        that `merge` joins layers: "layers.0." for example.
    names : {"rope_cpu", "optimum"}
        "optimum": names of a whole decoder that optimum and onnxruntime-genai know, which take no
        prefix: past_key_values.N.key and .value, present.N.key and .value of layer N, position_ids,
        and attention_mask, int64 (batch, tokens of past and of this step), 0 for padding. Positions
        "past" are then numbers of tokens before a token, padding not counted. With cache "shared"
        the mask stands in place of past_lengths: a row has as many tokens as the mask has ones in
        the columns before the new tokens; padding behind them is overwritten, and a mask with
        padding in the column of the first new token fails when the model runs.
    layer : int, optional
        The index N of these names, from 0.
    metadata : mapping of str to str, optional
        Further metadata entries of the model. Keys that the export itself writes are refused.

    Returns
    -------
    onnx.ModelProto
        The model; its metadata hold the options, which `validate` reads.

    Raises
    ------
    TypeError, ValueError
        Before anything is built, if an argument is invalid or the target cannot express the
        attention. The text names the targets that can.

    References
    ----------
    https://onnx.ai/onnx/operators/onnx__Attention.html

    onnxruntime, docs/ContribOperators.md, com.microsoft.GroupQueryAttention

    Examples
    --------
    >>> from rope_cpu import RotaryEmbedding, export
    >>> rope = RotaryEmbedding(16)
    >>> model = export.export_attention(rope, num_heads=4, num_kv_heads=2, max_positions=32)
    >>> [value.name for value in model.graph.input]
    ['q', 'k', 'v', 'past_key', 'past_value']
    >>> [value.name for value in model.graph.output]
    ['attention', 'present_key', 'present_value']
    """
    check_rope(rope)
    arrays = _arrays(weights, qk_norm, sinks)
    # Weights of other than two axes are refused with the shapes.
    given = AttentionOptions(
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=rope.head_dim**-0.5 if scale is None else scale,
        mask=mask,
        positions=positions,
        max_positions=max_positions,
        v_head_dim=rope.head_dim if v_head_dim is None else v_head_dim,
        target=target,
        dtype=dtype,
        layout=layout,
        norm_epsilon=norm_epsilon,
        norm_offset=norm_offset,
        past=past,
        cache=cache,
        cache_dtype=cache_dtype,
        batch_chunks=batch_chunks,
        opset=opset,
        qk_norm=_source_of(qk_norm),
        sinks=_source_of(sinks),
        hidden=math.prod(arrays["q_weight"].shape[1:]) if weights is not None else None,
        output=math.prod(arrays["o_weight"].shape[:1]) if "o_weight" in arrays else None,
        name_prefix=name_prefix,
        names=names,
        layer=layer,
    )
    options = checked_options(given, rope)
    if options.hidden is not None:
        options = replace(options, layout="bsd")  # hidden states are (batch, seq, width)
    _check_shapes(arrays, options.array_shapes(rope.head_dim))
    builder = _ModelBuilder(rope, options, arrays)
    return builder.build(model_metadata(rope, options, metadata))


def _rename(model: onnx.ModelProto, names: dict[str, str]) -> None:
    """Give values of a model other names, {old: new}."""
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)


def _source_of(argument: object) -> Source:
    """Return the source of an array: no array, an array, or "input"."""
    if argument is None:
        return "none"
    return "input" if isinstance(argument, str) and argument == INPUT else "initializer"


def _arrays(
    weights: Mapping[str, ArrayLike] | None,
    qk_norm: tuple[ArrayLike, ArrayLike] | str | None,
    sinks: ArrayLike | str | None,
) -> dict[str, Float64]:
    """Return the arrays that become initializers, by the names of these."""
    arrays: dict[str, ArrayLike] = {}
    if weights is not None:
        arrays |= _named_weights(weights)
    if _source_of(qk_norm) == "initializer":
        if not isinstance(qk_norm, tuple | list):
            rule = "be a pair of arrays, q and k, or 'input'"
            raise ArgumentTypeError("qk_norm", Finding.type_of(qk_norm), rule)
        if len(qk_norm) != 2:
            finding = Finding(f"holds {len(qk_norm)} arrays")
            raise ArgumentError("qk_norm", finding, "hold two, for q and k")
        arrays |= {"q_norm": qk_norm[0], "k_norm": qk_norm[1]}
    if sinks is not None and _source_of(sinks) == "initializer":
        arrays["sinks"] = finite_array("sinks", sinks)
    return {
        name: real_array(ARGUMENTS[name], array).astype(np.float64, copy=False)
        for name, array in arrays.items()
    }


def _named_weights(weights: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
    """Return projections and biases by the names of their initializers."""
    if not isinstance(weights, Mapping):
        rule = "be a mapping of names to arrays"
        raise ArgumentTypeError("weights", Finding.type_of(weights), rule)
    needed = {"q", "k", "v"}
    known = {"o", *needed} | {f"{name}_bias" for name in "qkvo" if name in weights}
    if not needed <= weights.keys() <= known:
        rule = (
            "hold q, k and v, and may also hold q_bias, k_bias, v_bias, o and, together with o, "
            "o_bias"
        )
        raise ArgumentError("weights", Finding.holds(shown(list(weights))), rule)
    return {name if "_" in name else f"{name}_weight": x for name, x in weights.items()}


def _check_shapes(arrays: Mapping[str, Float64], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless weights, norms and sinks have the shapes that the options need."""
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise ArgumentError(ARGUMENTS[name], Finding.shape_of(array), f"be {shapes[name]}")


class _ModelBuilder:
    """Builds one attention model; arrays: weights, norms and sinks by name."""

    def __init__(
        self, rope: RotaryEmbedding, options: AttentionOptions, arrays: dict[str, Float64]
    ) -> None:
        self.rope = rope
        self.options = options
        self.arrays = arrays
        self.graph = Graph()
        self.target = TARGETS[options.target]
        self.sizes = options.sizes(rope.head_dim)
        self.dtype = options.dtype
        self.rotation = replace(options.rotation, layout=self.target.attention_layout)
        self.compute_dtype = self.rotation.compute_dtype

    def build(self, metadata: dict[str, str]) -> onnx.ModelProto:
        """Return the model."""
        graph = self.graph
        options = self.options
        names = self._declare_inputs()
        sizes = batch_and_sequence(graph, names[0], options.layout)
        lengths = self._lengths(*sizes)
        ids = self._positions(sizes, lengths)
        rotator = build_rotator(graph, self.rope, self.rotation, sizes, ids)
        inputs = {name: self._to_compute_dtype(name) for name in names}
        if options.hidden is not None:
            inputs = dict.fromkeys("qkv", inputs["hidden"])
        q, k, v = (self._attention_input(name, x, rotator) for name, x in inputs.items())
        with graph.scope("attention"):
            past = None
            if options.past and not options.is_shared:
                past_key = self._to_compute_dtype(nodes.PAST_KEY)
                past = (past_key, self._to_compute_dtype(nodes.PAST_VALUE))
            bias = self._to_compute_dtype(nodes.MASK_INPUT) if options.mask == "float" else None
            attention = self.target.attention(
                graph, options, rotator, lengths, past, bias, self._sinks()
            )
            result, keys, values = attention.attend(q, k, v)
        self._declare_outputs(result, keys, values)
        model = graph.model(
            "rotary_attention",
            opset=options.opset,
            doc=f"{attention_text(options)} {rotation_text(self.rope)}",
            descriptions=attention_descriptions(options),
            metadata=metadata,
        )
        if options.name_prefix:
            onnx.compose.add_prefix(model, options.name_prefix, inplace=True)
        prefixed = {f"{options.name_prefix}{name}": options.name(name) for name in OPTIMUM_NAMES}
        _rename(model, prefixed)
        return model

    def _lengths(self, batch: str, sequence: str) -> nodes.Lengths:
        """Return the lengths of past and present, from the past or from the rows' own lengths."""
        options = self.options
        if not options.past:
            return nodes.Lengths(sequence, None, sequence)
        if not options.is_shared:
            length = self.graph.size(nodes.PAST_KEY, 2, "past_length")
            total = self.graph.node("Add", [length, sequence], "total_length")
            return nodes.Lengths(sequence, length, total)
        past = nodes.PAST_LENGTHS
        if options.has_token_mask:
            past = nodes.masked_lengths(self.graph, sequence)
        positions = (options.max_positions or INT32_MAX) if options.keeps_window else None
        return nodes.shared_cache_lengths(self.graph, batch, sequence, past, positions)

    def _positions(self, sizes: tuple[str, str], lengths: nodes.Lengths) -> str:
        """Return the position ids of the new tokens."""
        if self.options.follows_mask:
            return of_axes(self.graph, self.rope, nodes.masked_ids(self.graph, lengths))
        return position_values(self.graph, self.rope, self.rotation, sizes, lengths.past)

    def _declare_inputs(self) -> list[str]:
        """Declare all inputs; return the names of q, k and v, or of the hidden states instead."""
        graph = self.graph
        options = self.options
        shapes = {name: tensor_shape(options.layout, *size) for name, size in self.sizes.items()}
        if options.hidden is not None:
            shapes = {"hidden": [BATCH, SEQUENCE, options.hidden]}
        for name, shape in shapes.items():
            graph.input(name, self.dtype, shape)
        if options.past:
            length = CAPACITY if options.is_shared else PAST
            graph.input(nodes.PAST_KEY, options.cached_dtype, self._cache_shape("k", length))
            graph.input(nodes.PAST_VALUE, options.cached_dtype, self._cache_shape("v", length))
        if options.has_token_mask:
            columns = TOTAL_OF_ROWS if options.is_shared else TOTAL
            graph.input(nodes.MASK_INPUT, np.int64, [BATCH, columns])
        elif options.is_shared:
            graph.input(nodes.PAST_LENGTHS, np.int64, [BATCH])
        declare_positions(graph, self.rope, self.rotation)
        if options.mask != "none":
            mask_dtype = self.dtype if options.mask == "float" else np.bool_
            graph.input(nodes.MASK_INPUT, mask_dtype, nodes.MASK_SHAPES[options.mask])
        for name, array_shape in options.array_inputs(self.rope.head_dim).items():
            dtype = np.float32 if name in SCALES else self.dtype
            graph.input(name, dtype, array_shape)
        return list(shapes)

    def _cache_shape(self, name: str, length: str) -> list[str | int]:
        heads, width = self.sizes[name]
        return [BATCH, heads, length, width]

    def _to_compute_dtype(self, value: str) -> str:
        name = f"{value}_{self.compute_dtype}"
        return self.graph.cast(value, self.compute_dtype, name, source=self.dtype)

    def _attention_input(self, name: str, x: str, rotator: Rotator) -> str:
        """Return q, k or v in the target's layout: projected, normed, rotated.

        Keys and values are rounded to the cache's dtype, unless they come in that dtype; the
        operator itself rounds those of an int8 cache.
        """
        graph = self.graph
        heads, width = self.sizes[name]
        is_projected = self.options.hidden is not None
        with graph.scope(name):
            if is_projected:
                x = self._project(x, name)
            layout: str = self.options.layout
            attention_layout = self.target.attention_layout
            if self.options.qk_norm != "none" and name != "v":
                by_head = four_axes(attention_layout)
                x = relayout(graph, x, layout, by_head, heads, width)
                x = self._norm(x, name)
                layout = by_head
            x = relayout(graph, x, layout, attention_layout, heads, width)
            if name == "v":
                is_rounded = is_projected and self.options.cache_dtype is None
                return self._round_as_cached(x) if is_rounded else x
            if self.target.attention_rotates:
                return x
            rotated = rotator.rotate(x, heads)
            return self._round_as_cached(rotated) if name == "k" else rotated

    def _norm(self, x: str, name: str) -> str:
        """Apply the norm of q or k: divide by the root of the mean square, times the weights."""
        graph = self.graph
        dtype = self.compute_dtype
        offset = self.options.norm_offset
        if self.options.qk_norm == INPUT:
            weight = self._to_compute_dtype(f"{name}_norm_weight")
            if offset:
                weight = graph.node("Add", [weight, graph.scalar(offset, dtype)], "norm/weight")
        else:
            array = self.arrays[f"{name}_norm"] + offset
            weight = graph.initializer(f"{name}_norm", array.astype(dtype))
        # ReduceMean has another form in other opsets; onnxruntime runs ReduceSum in every dtype.
        square = graph.node("Mul", [x, x], "norm/square")
        total = graph.node("ReduceSum", [square, graph.ints(-1)], "norm/sum", keepdims=1)
        mean = graph.node("Mul", [total, graph.scalar(1 / self.rope.head_dim, dtype)], "norm/mean")
        epsilon = graph.scalar(self.options.norm_epsilon, dtype)
        shifted = graph.node("Add", [mean, epsilon], "norm/with_epsilon")
        root = graph.node("Sqrt", [shifted], "norm/root")
        unit = graph.node("Div", [x, root], "norm/unit")
        return graph.node("Mul", [unit, weight], "norm")

    def _sinks(self) -> str | None:
        """Return the sinks (heads,) in the compute dtype, None without them."""
        if "sinks" in self.arrays:
            array = self.arrays["sinks"].astype(self.compute_dtype)
            return self.graph.initializer("sinks", array)
        return self._to_compute_dtype("sinks") if self.options.sinks == INPUT else None

    def _round_as_cached(self, x: str) -> str:
        """Round keys or values to the cache's dtype: later steps read them so rounded."""
        rounded = self.graph.cast(x, self.dtype, "as_cached", source=self.compute_dtype)
        return self.graph.cast(rounded, self.compute_dtype, "from_cached", source=self.dtype)

    def _project(self, x: str, name: str) -> str:
        """Apply a projection: x · Wᵀ + b."""
        graph = self.graph
        weight = self.arrays[f"{name}_weight"].T.astype(self.dtype)
        matrix = self._to_compute_dtype(graph.initializer(f"{name}_weight", weight))
        y = graph.node("MatMul", [x, matrix], f"{name}_projected")
        if f"{name}_bias" not in self.arrays:
            return y
        bias = self.arrays[f"{name}_bias"].astype(self.dtype)
        addend = self._to_compute_dtype(graph.initializer(f"{name}_bias", bias))
        return graph.node("Add", [y, addend], f"{name}_with_bias")

    def _declare_outputs(self, result: str, keys: str, values: str) -> None:
        graph = self.graph
        options = self.options
        size = (options.num_heads, options.v_head_dim)
        shape = tensor_shape(options.layout, *size)
        with graph.scope("output"):
            y = relayout(graph, result, self.target.attention_layout, options.layout, *size)
            if options.output is not None:
                y = self._project(y, "o")
                shape = [BATCH, SEQUENCE, options.output]
        graph.output(self._to_dtype(y, "attention"), "attention", self.dtype, shape)
        if not options.past:
            return
        length = CAPACITY if options.is_shared else TOTAL
        for value, name, kind in ((keys, "present_key", "k"), (values, "present_value", "v")):
            present = value if options.is_shared else self._to_dtype(value, name)
            graph.output(present, name, options.cached_dtype, self._cache_shape(kind, length))

    def _to_dtype(self, value: str, name: str) -> str:
        """Return an output in the dtype of the model."""
        cast_name = f"{name}/to_{self.dtype}"
        return self.graph.cast(value, self.dtype, cast_name, source=self.compute_dtype)
