"""A small builder of ONNX graphs: nodes, initializers, inputs and outputs with readable names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray
from onnx import helper

from rope_cpu import __version__
from rope_cpu.arguments.errors import ArgumentError, Finding

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

DOMAIN = "rope_cpu"
ORT_DOMAIN = "com.microsoft"

# Most elements of an initializer that shape inference reads; shapes and axes have a few.
SMALL_SIZE = 16

# Axis orders of queries and keys, with one letter for each axis. "bsd" is the packed layout
# (batch, seq, heads·head_dim) of a projection's output.
Layout = Literal["bhsd", "bshd", "sbhd", "thd", "bsd"]
# Dynamic dimensions have the names that optimum gives them, which some readers of models look for.
BATCH = "batch_size"
SEQUENCE = "sequence_length"
PAST = "past_sequence_length"
TOTAL = f"{PAST} + {SEQUENCE}"
# Of a shared cache: rows of the buffer, and tokens of the longest row with its padding.
CAPACITY = "capacity"
TOTAL_OF_ROWS = "total_sequence_length"
DIM_NAMES: dict[str, str | int] = {"b": BATCH, "s": SEQUENCE, "t": "tokens"}

Shape = Sequence[str | int]


def onnx_type(dtype: DTypeLike) -> int:
    """Return ONNX's number for a NumPy dtype."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


class Graph:
    """An ONNX graph under construction.

    Values are identified by their names, which no other value and no other node may have. A scope
    prefixes the names of the nodes added inside it.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        self.initializers: dict[str, NDArray[Any]] = {}
        self._names: set[str] = set()  # of nodes, their outputs, and initializers
        self._prefix = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes added inside with `name`/."""
        outer = self._prefix
        self._prefix = f"{outer}{name}/"
        try:
            yield
        finally:
            self._prefix = outer

    def input(self, name: str, dtype: DTypeLike, shape: Shape) -> str:
        """Declare a graph input; strings in the shape name dynamic dimensions."""
        self.inputs.append(helper.make_tensor_value_info(name, onnx_type(dtype), shape))
        return name

    def output(self, value: str, name: str, dtype: DTypeLike, shape: Shape) -> None:
        """Declare `value` as the graph output `name`; every node then uses the new name for it."""
        self._claim({name} - {value})
        for node in self.nodes:
            for names in (node.input, node.output):
                if value in names:
                    names[:] = [name if old == value else old for old in names]
        self.outputs.append(helper.make_tensor_value_info(name, onnx_type(dtype), shape))

    def node(
        self, op: str, inputs: Sequence[str], name: str, *, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node with one output, which has the node's name; return that name."""
        return self.multi_output_node(op, inputs, name, [""], domain=domain, **attributes)[0]

    def multi_output_node(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        outputs: Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node with several outputs; return their names.

        outputs: suffixes of the outputs' names, which begin with the node's name; "" adds nothing.
        Empty names of inputs omit these; at the end they are left out, as older runtimes want it.
        """
        given = list(inputs)
        while given and not given[-1]:
            given.pop()
        node_name = f"{self._prefix}{name}"
        values = [f"{node_name}/{output}" if output else node_name for output in outputs]
        self._claim({node_name, *values})
        node = helper.make_node(op, given, values, name=node_name, domain=domain, **attributes)
        self.nodes.append(node)
        return values

    def initializer(self, name: str, array: NDArray[Any]) -> str:
        """Add an initializer, or find the equal one of this name; return its name."""
        known = self.initializers.get(name)
        if known is None or known.dtype != array.dtype or not np.array_equal(known, array):
            self._claim({name})
            self.initializers[name] = array
        return name

    def ints(self, *values: int) -> str:
        """Return an int64 vector; equal vectors share one initializer."""
        name = "vector_" + "_".join(str(value).replace("-", "minus") for value in values)
        return self.initializer(name, np.array(values, np.int64))

    def scalar(self, value: float, dtype: DTypeLike) -> str:
        """Return a scalar; equal scalars share one initializer."""
        return self.initializer(f"scalar_{np.dtype(dtype)}_{value!r}", np.array(value, dtype))

    def cast(
        self, value: str, dtype: DTypeLike, name: str, *, source: DTypeLike | None = None
    ) -> str:
        """Return `value` in another dtype.

        source: its present dtype, if known; no node is added where the two are equal.
        """
        if source is not None and np.dtype(source) == np.dtype(dtype):
            return value
        return self.node("Cast", [value], name, to=onnx_type(dtype))

    def transpose(self, value: str, source: str, target: str, name: str) -> str:
        """Return `value` with its axes reordered from layout `source` to layout `target`."""
        if source == target:
            return value
        return self.node("Transpose", [value], name, perm=permutation(source, target))

    def value_info(self, value: str, dtype: DTypeLike, shape: Shape) -> None:
        """Declare the dtype and shape of a value.

        Outputs of onnxruntime's own operators need it: shape inference does not know them.
        """
        self.infos.append(helper.make_tensor_value_info(value, onnx_type(dtype), shape))

    def size(self, value: str, axis: int, name: str) -> str:
        """Return the size of one axis of a value, an int64 vector of length 1."""
        shape = self.node("Shape", [value], f"{name}/shape")
        return self.node("Gather", [shape, self.ints(axis)], name, axis=0)

    def _claim(self, names: set[str]) -> None:
        """Note names of nodes and values; raise ValueError if one of them is taken."""
        for name in names & self._names:
            raise ArgumentError("name", name, "be no name of another node or value of the graph")
        self._names |= names

    def model(
        self,
        name: str,
        *,
        opset: int,
        doc: str,
        descriptions: Mapping[str, str],
        metadata: dict[str, str] | None = None,
    ) -> onnx.ModelProto:
        """Return the model, without the nodes and initializers that no output depends on.

        descriptions: doc strings of inputs and outputs, by name.
        """
        self._remove_unused_nodes()
        self._check_input_names()
        for value in (*self.inputs, *self.outputs):
            value.doc_string = descriptions[value.name]
        graph = helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, doc_string=doc, value_info=self.infos
        )
        onnx_opset = helper.make_opsetid("", opset)
        other_domains = sorted({node.domain for node in self.nodes} - {""})
        other_opsets = [helper.make_opsetid(domain, 1) for domain in other_domains]
        model = helper.make_model(
            graph,
            opset_imports=[onnx_opset, *other_opsets],
            producer_name=DOMAIN,
            producer_version=__version__,
            doc_string=doc,
        )
        # A newer IR version than the opset's own would shut out older runtimes.
        model.ir_version = helper.find_min_ir_version_for([onnx_opset])
        helper.set_model_props(model, metadata or {})
        model.graph.value_info.extend(self._inferred_infos(model))
        self._add_initializers(model)
        return model

    def _inferred_infos(self, model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
        """Return the inferred dtypes and shapes of the values that have none yet.

        model: without initializers. The large ones, weights and tables, are declared alone, as
        inference would copy them.
        """
        typed = onnx.ModelProto()
        typed.CopyFrom(model)
        for name, array in self.initializers.items():
            if array.size <= SMALL_SIZE:
                typed.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
            else:
                info = helper.make_tensor_value_info(name, onnx_type(array.dtype), array.shape)
                typed.graph.input.append(info)
        inferred = onnx.shape_inference.infer_shapes(typed, data_prop=True)
        declared = {value.name for value in self.infos}
        infos = [value for value in inferred.graph.value_info if value.name not in declared]
        for value in infos:
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param.startswith("unk__"):  # a name that says nothing
                    size.ClearField("dim_param")
        return infos

    def _remove_unused_nodes(self) -> None:
        """Keep the nodes that the outputs depend on, in order, and the value infos of those."""
        needed = {value.name for value in self.outputs}
        used: list[onnx.NodeProto] = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                used.append(node)
        self.nodes = used[::-1]
        node_outputs = {name for node in self.nodes for name in node.output}
        self.infos = [value for value in self.infos if value.name in node_outputs]

    def _check_input_names(self) -> None:
        """Raise ValueError where an input has the name of another value."""
        outputs = (name for node in self.nodes for name in node.output)
        names = [*self.initializers, *outputs, *(value.name for value in self.inputs)]
        for value in self.inputs:
            if names.count(value.name) > 1:
                finding = Finding.holds(f"{value.name!r}, the name of another value in this graph")
                raise ArgumentError("inputs", finding, "hold names of their own")

    def _add_initializers(self, model: onnx.ModelProto) -> None:
        """Add the initializers that a node reads.

        They are added to the finished model one by one: tables can be large, and protobuf copies
        every message that is put into another.
        """
        node_inputs = {value for node in self.nodes for value in node.input}
        for name, array in self.initializers.items():
            if name in node_inputs:
                tensor = model.graph.initializer.add(
                    name=name, data_type=onnx_type(array.dtype), dims=array.shape
                )
                tensor.raw_data = array.tobytes()


def four_axes(layout: str) -> str:
    """Return the layout of four axes in which tensors of `layout` are rotated.

    A "thd" token becomes a batch row with one token: RotaryEmbedding refuses sequences longer than
    its table, and packed tokens may be more than the table has rows.
    """
    return {"thd": "bhsd", "bsd": "bshd"}.get(layout, layout)


def permutation(source: str, target: str) -> tuple[int, ...]:
    """Return the permutation with which a Transpose brings layout `source` into layout `target`."""
    return tuple(source.index(axis) for axis in target)


def tensor_shape(layout: str, heads: str | int, width: int) -> list[str | int]:
    """Return the declared shape of a tensor; strings name dynamic dimensions."""
    sizes = DIM_NAMES | {"h": heads, "d": width}
    if layout == "bsd":
        sizes["d"] = int(heads) * width
    return [sizes[axis] for axis in layout]


def relayout(graph: Graph, x: str, source: str, target: str, heads: int | None, width: int) -> str:
    """Return queries, keys or values in another layout.

    heads: number of heads, required where `source` or `target` is bsd. width: of one head.
    """
    if source == target:
        return x
    if source == "bsd":
        x = graph.node("Reshape", [x, graph.ints(0, 0, heads or 0, width)], "split_heads")
    elif source == "thd":
        x = graph.node("Unsqueeze", [x, graph.ints(2)], "as_bhsd")
    x = graph.transpose(x, four_axes(source), four_axes(target), f"to_{four_axes(target)}")
    if target == "bsd":
        return graph.node("Reshape", [x, graph.ints(0, 0, (heads or 0) * width)], "merge_heads")
    if target == "thd":
        return graph.node("Squeeze", [x, graph.ints(2)], "as_thd")
    return x
