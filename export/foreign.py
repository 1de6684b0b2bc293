"""The rotations of ONNX graphs of any origin: read from tables and angles, and made exact."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import onnx.inliner
from onnx import ModelProto, NodeProto, helper, numpy_helper

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Array, Float64

from .graph import FLOAT32, FLOAT64, ORT_DOMAIN, Graph, onnx_type
from .nodes import cosine

# Operators that rotate: the index of their cos, which that of sin follows.
OPERATORS = {
    ("", "RotaryEmbedding"): 1,
    (ORT_DOMAIN, "RotaryEmbedding"): 2,
    (ORT_DOMAIN, "MRotaryEmbedding"): 2,
    (ORT_DOMAIN, "GroupQueryAttention"): 7,
}

# Operators that keep or repeat elements, and those that change them from frequencies to cos and
# sin, in this order: products with positions, functions of angles, and factors of the results.
KEEPING = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
PRODUCTS = ("Einsum", "MatMul", "Mul")
SINES = ("Cos", "Sin")
CHANGING = (PRODUCTS, SINES, ("Mul",))

# Operators between the rotated elements and the input of the rotation, and the input that is, or
# ends with, 2 where every second element is taken: a step, or a shape.
MOVING = (*KEEPING, "Concat", "Gather", "Neg", "Slice", "Split")
STRIDES = {"Slice": 4, "Reshape": 1}

# Operators that keep the elements of their last input, or choose among those of the last two.
SELECTING = ("Cast", "Identity", "Where")

# Most nodes with all functions inlined. Functions that each call the next one twice double them at
# every level.
INLINED_NODES = 1_000_000


class Link(NamedTuple):
    """The node that makes a value, from a source.

    stage: the number of products and sines up to the value, at most 2, index of `CHANGING`.
    """

    node: NodeProto
    source: str
    stage: int


# The values that have the elements of a tensor, nearest first; the tensor itself has no link.
Flow = dict[str, Link]


class GraphRotation(NamedTuple):
    """A rotation of a graph.

    names: of its tables, or of its frequencies. source: the operators.
    rows: of the tables, 0 for computed angles.
    values: cos and sin (2, positions, pairs) of positions, in the dtypes of the graph.
    replace: makes cos and sin those of another rotation, exactly.
    """

    names: tuple[str, ...]
    source: str
    interleaved: bool
    inv_freq: Array
    rows: int
    values: Callable[[Array], Array]
    replace: Callable[[RotaryEmbedding], None]


class ForeignGraph:
    """The graph of a model; folder: of its external data."""

    def __init__(self, model: ModelProto, folder: str) -> None:
        self.graph = model.graph
        self.folder = folder
        self.tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.readers: dict[str, list[NodeProto]] = {}
        # Values that have elements of inputs, and {value: the table of which it has rows}.
        self.positions = {value.name for value in model.graph.input}
        self.rows: dict[str, str] = {}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                self.tensors[node.output[0]] = node.attribute[0].t
            for name in set(node.input):
                self.readers.setdefault(name, []).append(node)
            if node.input and node.output:
                self._trace(node)

    def rotations(self) -> list[GraphRotation]:
        """Return the rotations: each tensor of frequencies, and each pair of tables, is one.

        Raises ValueError if there are none, or if an operator has none of these.
        """
        found: dict[tuple[str, ...], GraphRotation] = {}
        computed: set[str] = set()
        for name, tensor in self.tensors.items():
            if max(tensor.dims, default=1) == np.prod(tensor.dims) > 1:
                flow = self._flow(name)
                sines = [value for value in flow if flow[value].node.op_type in SINES]
                if sines:
                    found[(name,)] = self._computed(name, flow, sines)
                    computed.update(flow)
        for node in self.graph.node:
            index = OPERATORS.get((node.domain, node.op_type), 0)
            names = tuple(self.rows.get(name) or name for name in node.input[index : index + 2])
            rotates = index and (node.op_type != "GroupQueryAttention" or _flag(node, "do_rotary"))
            if rotates and names not in found and computed.isdisjoint(names):
                found[names] = self._tabulated(names, node)
        if not found:
            raise ValueError("no rotation is found, by tables or by Cos and Sin")
        return list(found.values())

    def _trace(self, node: NodeProto) -> None:
        """Note an output that has elements of an input, or rows of a table at such positions.

        A sum is no such position: it may be a row of another rotation in the same table.
        """
        first = node.input[0]
        tables = {self.rows.get(name, "") for name in node.input[-2:]}
        is_lookup = node.op_type == "Gather" and all(axis.i == 0 for axis in node.attribute)
        if is_lookup and first in self.tensors and node.input[1] in self.positions:
            self.rows[node.output[0]] = first
        elif node.op_type in MOVING and first in self.positions:
            self.positions.add(node.output[0])
        elif node.op_type in SELECTING and len(tables) == 1:
            self.rows[node.output[0]] = tables.pop()

    def _array(self, name: str) -> Array:
        """Return the values of a tensor."""
        return numpy_helper.to_array(self.tensors[name], self.folder)

    def _tabulated(self, names: tuple[str, ...], node: NodeProto) -> GraphRotation:
        """Return the rotation of an operator by tables of cos and sin, each (rows, pairs).

        Raises ValueError if they are no tensors, not finite, or have no row of position 1.
        """
        if not self.tensors.keys() >= set(names):
            raise ValueError(f"no rotation is found in the operator of {node.output[0]}")
        arrays = [self._array(name) for name in names]
        tables = np.stack([array.reshape(-1, array.shape[-1]) for array in arrays])
        rows = tables.shape[1]
        if rows < 2 or not np.isfinite(tables).all():
            raise ValueError(f"{', '.join(names)} must be finite, at two positions or more")

        def replace(rope: RotaryEmbedding) -> None:
            for name, exact in zip(names, rope.cos_sin(np.arange(rows), FLOAT64), strict=True):
                tensor = self.tensors[name]
                exact = exact.astype(tables.dtype).reshape(tensor.dims)
                tensor.CopyFrom(numpy_helper.from_array(exact, tensor.name))

        interleaved = _flag(node, "interleaved")
        values = partial(tables.take, axis=1)
        return GraphRotation(
            names, node.op_type, interleaved, fitted(tables), rows, values, replace
        )

    def _flow(self, name: str) -> Flow:
        """Return the values that have the elements of a tensor.

        Where branches rejoin, the first counts: each value is visited once.
        """
        flow: Flow = {}
        sources = deque([name])
        while sources:
            source = sources.popleft()
            stage = flow[source].stage if source in flow else 0
            for node in self.readers.get(source, []):
                value = node.output[0]
                if value != name and value not in flow and self._continues(stage, node, source):
                    changes = node.op_type in (*PRODUCTS, *SINES)
                    flow[value] = Link(node, source, min(stage + changes, 2))
                    sources.append(value)
        return flow

    def _continues(self, stage: int, node: NodeProto, name: str) -> bool:
        """Return True if a node that reads a value is the next between frequencies and sines."""
        if stage == 2 and node.op_type in MOVING:
            return True
        if node.op_type == "Concat":
            return all(other == name or other in self.tensors for other in node.input)
        if node.op_type in KEEPING:
            return bool(node.input[0] == name)
        return node.op_type in CHANGING[stage] and bool(stage < 2 or self._factor(node) > 0)

    def _factor(self, node: NodeProto) -> Any:
        """Return the number by which a node multiplies all elements, 0 if there is none."""
        arrays = [self._array(name) for name in node.input if name in self.tensors]
        return next((array.ravel() for array in arrays if array.size == 1), 0)

    def _computed(self, name: str, flow: Flow, sines: list[str]) -> GraphRotation:
        """Return the rotation by angles that the graph computes from a product with frequencies.

        Its cos and sin are those of NumPy, as the rounding of the product outweighs all else.
        """
        to_angles = _path(flow, flow[sines[0]].source)
        inv_freq = self._values(name, to_angles, np.ones(1))[0]
        strided = self._strided()
        readers = [node for value in (name, *flow) for node in self.readers.get(value, [])]
        interleaved = any(_flag(node, "interleaved") or strided & {*node.input} for node in readers)
        values = partial(self._values, name, _path(flow, next(reversed(flow))))
        replace = partial(self._widen, name, flow, sines)
        return GraphRotation((name,), "Cos and Sin", interleaved, inv_freq, 0, values, replace)

    def _values(self, name: str, path: list[NodeProto], ids: Array) -> Array:
        """Return the elements after nodes: angles of positions, and then both cos and sin."""
        values = self._array(name).ravel()
        for node in path:
            if node.op_type == "Cast":
                values = values.astype(helper.tensor_dtype_to_np_dtype(node.attribute[0].i))
            elif node.op_type in SINES:
                values = np.stack([np.cos(values), np.sin(values)])
            elif node.op_type in PRODUCTS:
                values = values * (self._factor(node) or ids.astype(values.dtype)[:, None])
        return values

    def _strided(self) -> set[str]:
        """Return the values that are every second element of an array, or were made (…, 2)."""
        found: set[str] = set()
        for node in self.graph.node:
            index = STRIDES.get(node.op_type, len(node.input))
            names = [name for name in node.input[index : index + 1] if name in self.tensors]
            ends = [self._array(name).ravel()[-1:] for name in names]
            is_moved = node.op_type in MOVING and node.input[0] in found
            if is_moved or any(2 in end for end in ends):
                found.update(node.output)
        return found

    def _widen(self, name: str, flow: Flow, sines: list[str], rope: RotaryEmbedding) -> None:
        """Compute angles, cos and sin in float64, and cast these to the dtype of the graph."""
        dtype = self._values(name, _path(flow, flow[sines[0]].source), np.ones(1)).dtype
        nodes: dict[str, NodeProto] = {}
        for value in sines:
            while value not in nodes and value != name:
                nodes[value] = flow[value].node
                value = flow[value].source
        for info in [info for info in self.graph.value_info if info.name in nodes]:
            self.graph.value_info.remove(info)
        for output, node in nodes.items():
            new = Graph()
            exact = new.initializer(f"{name}/exact", rope.inv_freq.reshape(self.tensors[name].dims))
            node.input[:] = [exact if x == name else x for x in node.input]
            with new.scope(f"{output}/exact"):
                _widen_node(node, new, dtype)
            self._insert(node, new)

    def _insert(self, node: NodeProto, new: Graph) -> None:
        """Insert the nodes and initializers of a builder before a node."""
        for index, inserted in enumerate(new.nodes, list(self.graph.node).index(node)):
            self.graph.node.insert(index, inserted)
        for name in new.initializers.keys() - self.tensors.keys():
            self.tensors[name] = numpy_helper.from_array(new.initializers[name], name)
            self.graph.initializer.append(self.tensors[name])


def inlined(model: ModelProto) -> ModelProto:
    """Return a model without functions of its own.

    Raises ValueError if these would make too many nodes of it.
    """
    bodies = {(each.domain, each.name, each.overload): each.node for each in model.functions}

    @cache
    def size(*function: str) -> int:
        return count(bodies[function]) if function in bodies else 1

    def count(nodes: Iterable[NodeProto]) -> int:
        total = 0
        for node in nodes:
            total += size(node.domain, node.op_type, node.overload)
            graphs = [graph for each in node.attribute for graph in (each.g, *each.graphs)]
            total += sum(count(graph.node) for graph in graphs)
        return total

    if not bodies:
        return model
    nodes = count(model.graph.node)
    if nodes > INLINED_NODES:
        raise ValueError(f"its functions make {nodes} nodes, more than {INLINED_NODES}")
    return onnx.inliner.inline_local_functions(model)


def _path(flow: Flow, value: str) -> list[NodeProto]:
    """Return the nodes to a value, in order."""
    nodes = []
    while value in flow:
        nodes.append(flow[value].node)
        value = flow[value].source
    return nodes[::-1]


def _widen_node(node: NodeProto, new: Graph, dtype: np.dtype[Any]) -> None:
    """Let a node compute in float64 what new nodes before it do not; cos and sin get a dtype."""
    if node.op_type == "Cast":
        node.attribute[0].i = onnx_type(FLOAT64)
    elif node.op_type in PRODUCTS:
        node.input[:] = [new.cast(name, FLOAT64, name) for name in node.input]
    elif node.op_type in SINES:
        (angle,) = node.input
        is_cos = node.op_type == "Cos"
        value = cosine(new, angle, FLOAT32) if is_cos else new.node("Sin", [angle], "sin")
        node.CopyFrom(helper.make_node("Cast", [value], node.output, to=onnx_type(dtype)))


def _flag(node: NodeProto, end: str) -> bool:
    """Return an attribute that is 0 or 1, by default 0; end: of its name."""
    return any(attribute.name.endswith(end) and attribute.i == 1 for attribute in node.attribute)


def fitted(tables: Array) -> Float64:
    """Return the frequencies of tables, from the angles of rows 1, 2, 4, …, unwrapped one by one.

    Products of these rows and frequencies have no rounding, in whatever dtype they were computed.
    """
    inv_freq = np.zeros(tables.shape[2])
    for row in 2 ** np.arange((tables.shape[1] - 1).bit_length()):
        cos, sin = tables[:, row].astype(np.float64)
        rest = np.arctan2(sin, cos) - row * inv_freq
        inv_freq += (np.remainder(rest + np.pi, 2 * np.pi) - np.pi) / row
    return inv_freq
