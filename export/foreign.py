"""The rotations of ONNX graphs of any origin: read from tables and angles, and made exact.

Angles are read by running the nodes around Cos and Sin: their results at known positions show which
of them are cos and sin, whatever operators lie between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime import InferenceSession

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Float64

from .graph import FLOAT32, FLOAT64, ORT_DOMAIN, Graph, onnx_type
from .nodes import cosine
from .validation.session import open_session

# Operators that rotate: the indices of their cos and sin, and the attribute of the pairing.
OPERATORS = {
    ("", "RotaryEmbedding"): (1, 2, "interleaved"),
    (ORT_DOMAIN, "RotaryEmbedding"): (2, 3, "interleaved"),
    (ORT_DOMAIN, "MRotaryEmbedding"): (2, 3, "interleaved"),
    (ORT_DOMAIN, "GroupQueryAttention"): (7, 8, "rotary_interleaved"),
}

# Products of positions and frequencies; operators that keep all elements in order; those between
# a product and cos and sin; those between the rotated elements and the input of the rotation.
PRODUCTS = ("Einsum", "MatMul", "Mul")
ORDERED = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze")
STEPS = (*ORDERED, "Add", "Concat", "Cos", "Div", "Mul", "Sin", "Slice", "Sub", "Transpose")
MOVES = (*ORDERED, "Concat", "Gather", "Neg", "Slice", "Split", "Transpose")

# The input that is, or ends with, 2 where every second element is taken: a step, or a shape.
STRIDES = {"Slice": 4, "Reshape": 1}

# Positions that are evaluated at once, a prime, so that no other axis has this size, and the shapes
# in which a product may take them.
CHUNK = 4099
SHAPES = (
    *((1, CHUNK, 1), (CHUNK, 1), (1, 1, CHUNK, 1)),
    *((1, 1, CHUNK), (CHUNK,), (1, CHUNK), (1, 1, 1, CHUNK)),
)

# Rows that a fit of frequencies reads, and the standard deviations that it may be off.
FIT_ROWS = 1 << 15
DEVIATIONS = 6

# Relative difference below which two numbers, one of them perhaps a float16, are the same.
SAME = 1e-3


class ForeignGraph:
    """The nodes and tensors of a model and its subgraphs; folder: of its external data."""

    def __init__(self, model: onnx.ModelProto, folder: str) -> None:
        self.model = model
        self.folder = folder
        inner = [graph for node in model.graph.node for graph in _inner_graphs(node)]
        self.graphs = [model.graph, *inner]
        self.nodes = [node for graph in self.graphs for node in graph.node]
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self.tensors = {x.name: x for graph in self.graphs for x in graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                self.tensors[node.output[0]] = node.attribute[0].t
        self.constant = cache(self._constant)

    def rotations(self) -> list[Rotation]:
        """Return the rotations by tables, each once, then those by angles."""
        tables = dict(self._operator_tables())
        turns = [node for node in self.nodes if node.op_type in ("Cos", "Sin")]
        products = dict.fromkeys(filter(None, map(self._product, turns)))
        angles = [AngleRotation(self, self.producers[name]) for name in products]
        by_tables = [TableRotation(self, names, *use) for names, use in tables.items()]
        return [*by_tables, *(rotation for rotation in angles if rotation.is_found)]

    def unread(self, rotations: Sequence[Rotation]) -> list[str]:
        """Return the first outputs of operators whose cos is of none of these rotations."""
        read = {name for rotation in rotations for name in rotation.results}
        found = []
        for node in self.nodes:
            cos, _, pairing = OPERATORS.get((node.domain, node.op_type), (0, 0, ""))
            name = node.input[cos] if pairing and len(node.input) > cos else ""
            above = self._tables(name)
            while name in self.producers and self.producers[name].input:
                above.append(name)
                name = self.producers[name].input[0]
            if name and read.isdisjoint(above):
                found.append(node.output[0])
        return found

    def _constant(self, name: str) -> Any:
        """Return a value that depends on no input of the graph, None for others."""
        if name in self.tensors:
            return numpy_helper.to_array(self.tensors[name], self.folder)
        node = self.producers.get(name)
        if node is None or node.op_type not in (*STEPS, *MOVES, "Constant"):
            return None
        if node.op_type == "Expand":  # operators broadcast, whatever the shape is
            return self.constant(node.input[0])
        if self.varying(node):
            return None
        return self.session([node], [], [name]).run([name], {})[0]

    def varying(self, node: onnx.NodeProto) -> list[str]:
        """Return the inputs of a node that are no constants."""
        return [name for name in node.input if name and self.constant(name) is None]

    def session(
        self, nodes: Sequence[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[str]
    ) -> InferenceSession:
        """Open some nodes as a model; what they read beside the inputs are constants."""
        made = {name for node in nodes for name in node.output} | {value.name for value in inputs}
        read = {name for node in nodes for name in node.input if name} - made
        tensors = [numpy_helper.from_array(self.constant(name), name) for name in read]
        infos = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(nodes, "part", inputs, infos, tensors)
        model = helper.make_model(graph, opset_imports=self.model.opset_import)
        model.ir_version = self.model.ir_version
        return open_session(model)

    def _operator_tables(self) -> Iterator[tuple[tuple[str, str], tuple[str, bool]]]:
        """Yield the names of cos and sin of operators, with operator and pairing."""
        for node in self.nodes:
            cos, sin, pairing = OPERATORS.get((node.domain, node.op_type), (0, 0, ""))
            if pairing and len(node.input) > sin:
                use = (node.op_type, _flag(node, pairing))
                tables = map(self._tables, (node.input[cos], node.input[sin]))
                yield from ((names, use) for names in zip(*tables, strict=False))

    def _tables(self, name: str) -> list[str]:
        """Return the names of the tensors that a value is, one for each branch of an If."""
        node = self.producers.get(name, onnx.NodeProto())
        if node.op_type == "If":
            index = list(node.output).index(name)
            branches = [attribute.g.output[index].name for attribute in node.attribute]
            return [table for branch in branches for table in self._tables(branch)]
        if node.op_type in ORDERED:
            return self._tables(node.input[0])
        return [name] if name in self.tensors else []

    def _product(self, node: onnx.NodeProto) -> str | None:
        """Return the product of positions and frequencies that a node computes from."""
        if node.op_type in PRODUCTS and self.frequencies(node):
            return str(node.output[0])
        varying = self.varying(node) if node.op_type in (*STEPS, *PRODUCTS) else []
        source = self.producers.get(varying[0]) if varying else None
        return None if source is None else self._product(source)

    def frequencies(self, product: onnx.NodeProto) -> str:
        """Return the factor of a product that is a constant of several elements, or ""."""
        names = [name for name in product.input if self.constant(name) is not None]
        return names[0] if len(names) == 1 and self.constant(names[0]).size > 1 else ""

    def steps(self, product: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return a product, and the nodes that compute from it and constants alone."""
        steps = [product]
        made = {product.output[0]}
        for node in self.nodes:
            reads_steps = node.op_type in STEPS and not made.isdisjoint(node.input)
            if reads_steps and made.issuperset(self.varying(node)):
                steps.append(node)
                made.add(node.output[0])
        return steps

    def interleaved(self, cos: str) -> bool | None:
        """Return the pairing of the elements that a cosine multiplies, None if it is not found."""
        for node in self.nodes:
            if cos in node.input:
                *_, pairing = OPERATORS.get((node.domain, node.op_type), (None,))
                if pairing:
                    return _flag(node, pairing)
                if node.op_type == "Mul":
                    return self._is_strided(next(name for name in node.input if name != cos))
                if node.op_type in MOVES:
                    return self.interleaved(node.output[0])
        return None

    def _is_strided(self, name: str) -> bool:
        """Return True if elements are every second one of an array, or were reshaped to (…, 2)."""
        node = self.producers.get(name)
        while node is not None and node.op_type in MOVES:
            for name in node.input[STRIDES.get(node.op_type, len(node.input)) :][:1]:
                stride = self.constant(name)
                if stride is not None and stride[-1] == 2:
                    return True
            node = self.producers.get(node.input[0])
        return False

    def replace(self, product: onnx.NodeProto, new: Graph) -> None:
        """Write the nodes of a builder behind a product, and remove all that nothing reads."""
        (owner,) = (graph for graph in self.graphs if product in graph.node)
        index = list(owner.node).index(product)
        for node in reversed(new.nodes):
            owner.node.insert(index + 1, node)
        for name in new.initializers.keys() - self.tensors.keys():
            self.tensors[name] = numpy_helper.from_array(new.initializers[name], name)
            self.model.graph.initializer.append(self.tensors[name])
        _remove_unread(self.model.graph)


def _inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs within a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
            for inner in attribute.g.node:
                yield from _inner_graphs(inner)


def _flag(node: onnx.NodeProto, name: str) -> bool:
    """Return an attribute that is 0 or 1, by default 0."""
    return any(attribute.name == name and attribute.i == 1 for attribute in node.attribute)


def _remove_unread(graph: onnx.GraphProto) -> None:
    """Remove the nodes and initializers of a graph that none of its results depends on."""
    read = {value.name for value in (*graph.input, *graph.output)}
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if read.isdisjoint(node.output):
            del graph.node[index]
        else:
            inner = [x for within in _inner_graphs(node) for x in within.node]
            read.update(name for reader in (node, *inner) for name in reader.input)
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in read:
            del graph.initializer[index]


class TableRotation:
    """A rotation by tables of cos and sin, each (rows, pairs); source: the operator with them."""

    def __init__(
        self, graph: ForeignGraph, names: tuple[str, str], source: str, interleaved: bool
    ) -> None:
        self.graph = graph
        self.names = names
        self.results: Sequence[str] = names
        self.source = source
        self.interleaved = interleaved
        tables = [graph.constant(name) for name in names]
        self.tables = np.stack([table.reshape(-1, table.shape[-1]) for table in tables])
        self.dtype = self.tables.dtype
        self.rows = self.tables.shape[1]
        self.inv_freq, self.slope_error = fitted(self.tables)

    def values(self, start: int) -> NDArray[Any]:
        """Return cos and sin (2, positions, pairs), of at most CHUNK positions."""
        return self.tables[:, start : start + CHUNK]

    def replace(self, rope: RotaryEmbedding) -> None:
        """Write the exact cos and sin of a rotation, at the same dtype."""
        exact = rope.cos_sin(np.arange(self.rows), np.float64)
        for name, table in zip(self.names, exact, strict=True):
            tensor = self.graph.tensors[name]
            new = table.astype(self.dtype).reshape(tensor.dims)
            tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))


def rounding(dtype: np.dtype[Any]) -> float:
    """Return the largest error of rounding a value below 1."""
    return float(ml_dtypes.finfo(dtype).eps) / 4


def fitted(tables: NDArray[Any]) -> tuple[Float64, float]:
    """Return the frequencies of tables, and how much angles by them may be off by position.

    The angles of rows 1, 2, 4, … are unwrapped one by one; least squares over all rows follow.
    """

    def rest(row: Any, inv_freq: Float64 | float) -> Float64:
        cos, sin = tables[:, row].astype(np.float64)
        difference = np.arctan2(sin, cos) - np.multiply.outer(row, inv_freq)
        angle: Float64 = np.remainder(difference + np.pi, 2 * np.pi) - np.pi
        return angle

    rows = tables.shape[1]
    inv_freq = rest(1, 0.0)
    for power in range(1, (rows - 1).bit_length()):
        inv_freq = inv_freq + rest(2**power, inv_freq) / 2**power
    row = np.arange(0, rows, 1 + rows // FIT_ROWS)
    weight = row / float(row @ row)
    error = DEVIATIONS * rounding(tables.dtype) * float(np.linalg.norm(weight))
    return inv_freq + weight @ rest(row, inv_freq), error


class AngleRotation:
    """A rotation by angles that the graph computes from a product with frequencies.

    ends: the results that other nodes read, and their dtypes. is_found: False where no cos and sin
    are among these.
    """

    source = "Cos and Sin"
    rows = None
    slope_error = 0.0

    def __init__(self, graph: ForeignGraph, product: onnx.NodeProto) -> None:
        self.graph = graph
        self.steps = graph.steps(product)
        self.names = (graph.frequencies(product),)
        frequencies = graph.constant(self.names[0])
        self.inv_freq: Float64 = frequencies.ravel().astype(np.float64)
        (self.input,) = graph.varying(product)
        self.input_dtype = frequencies.dtype
        self.results = [node.output[0] for node in self.steps]
        read = {value.name for value in graph.model.graph.output}
        for node in graph.nodes:
            read.update(() if node.output[0] in self.results else node.input)
        ends = [name for name in self.results if name in read]
        feed = helper.make_tensor_value_info(self.input, onnx_type(self.input_dtype), None)
        self.session = graph.session(self.steps, [feed], ends)
        self.is_found = any(self._find_cos_and_sin(shape, ends) for shape in SHAPES)

    def _find_cos_and_sin(self, shape: tuple[int, ...], ends: list[str]) -> bool:
        """Look for cos and sin at positions of a shape; return True if they are there."""
        pairs = len(self.inv_freq)
        self.shape = shape
        with suppress(Exception):  # onnxruntime's errors have no common class
            results = dict(zip(ends, self._run(0, ends), strict=True))
            self.cos = next(x for x, y in results.items() if y[0, 0] and np.ptp(y[0]) == 0)
            cos = results[self.cos]
            self.sin = next(
                x for x, y in results.items() if not y[0].any() and y.max() <= cos.max()
            )
            self.ends = {name: result.dtype for name, result in results.items()}
            self.dtype = cos.dtype
            is_twice = cos.shape[1] == 2 * pairs and bool((cos[:, ::2] == cos[:, 1::2]).all())
            self.columns = slice(None, None, 2) if is_twice else slice(pairs)
            self.interleaved = is_twice or self.graph.interleaved(self.cos)
            return bool(cos.shape[1] % pairs == 0)
        return False

    def _run(self, start: int, names: Sequence[str]) -> list[NDArray[Any]]:
        """Return results for CHUNK positions, each (positions, columns)."""
        ids = np.arange(start, start + CHUNK).reshape(self.shape).astype(self.input_dtype)
        results = self.session.run(names, {self.input: ids})
        return [np.moveaxis(x, x.shape.index(CHUNK), 0).reshape(CHUNK, -1) for x in results]

    def values(self, start: int) -> NDArray[Any]:
        """Return cos and sin (2, positions, pairs) of CHUNK positions."""
        return np.stack(self._run(start, [self.cos, self.sin]))[:, :, self.columns]

    def replace(self, rope: RotaryEmbedding) -> None:
        """Write the steps for a rotation, in float64, with a cast of each result."""
        builder = Graph()
        product = self.steps[0]
        position = builder.cast(self.input, FLOAT64, f"{product.output[0]}/exact/position")
        names = {self.input: position, "": ""}
        for node in self.steps:
            name = node.output[0]
            with builder.scope(f"{name}/exact"):
                for constant in set(node.input) - set(names):
                    value = self._exact(node, constant, rope)
                    names[constant] = builder.initializer(f"{name}/exact/{constant}", value)
                names[name] = _exact_step(builder, node, [names[x] for x in node.input])
            if name in self.ends:
                kind = onnx_type(self.ends[name])
                builder.nodes.append(helper.make_node("Cast", [names[name]], [name], to=kind))
                node.output[0] = f"{name}/inexact"
        self.graph.replace(product, builder)

    def _exact(self, node: onnx.NodeProto, name: str, rope: RotaryEmbedding) -> Any:
        """Return the constant input of a step, as float64 where it is a float."""
        value = self.graph.constant(name)
        if name == self.names[0]:
            return rope.inv_freq.reshape(value.shape)
        if node.op_type == "Mul" and value.size == 1:
            factor = self.values(0)[0, 0, 0]
            if np.isclose(float(value.item()), factor, rtol=SAME):
                return np.full(value.shape, rope.attention_factor)
        return value if value.dtype.kind in "iub" else value.astype(np.float64)


def _exact_step(builder: Graph, node: onnx.NodeProto, inputs: list[str]) -> str:
    """Add a step in float64; return its result."""
    if node.op_type == "Cast":
        return inputs[0]
    if node.op_type == "Cos":
        return cosine(builder, inputs[0], FLOAT32)
    result = builder.node(node.op_type, inputs, "step")
    builder.nodes[-1].attribute.extend(node.attribute)
    return result


Rotation = TableRotation | AngleRotation
