"""The rotations of ONNX graphs of any origin: read from tables and angles, and made exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Float64, Int64

from .graph import FLOAT32, FLOAT64, ORT_DOMAIN, Graph, onnx_type
from .nodes import cosine

# Operators that rotate: the indices of their cos and sin, and the attribute of the pairing.
OPERATORS = {
    ("", "RotaryEmbedding"): (1, 2, "interleaved"),
    (ORT_DOMAIN, "RotaryEmbedding"): (2, 3, "interleaved"),
    (ORT_DOMAIN, "MRotaryEmbedding"): (2, 3, "interleaved"),
    (ORT_DOMAIN, "GroupQueryAttention"): (7, 8, "rotary_interleaved"),
}

# Operators that keep or repeat the elements of their first input; products of positions and
# frequencies; operators between the rotated elements and the input of the rotation.
KEEPING = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
PRODUCTS = ("Einsum", "MatMul", "Mul")
MOVING = (*KEEPING, "Concat", "Gather", "Neg", "Slice", "Split")

# The input that is, or ends with, 2 where every second element is taken: a step, or a shape.
STRIDES = {"Slice": 4, "Reshape": 1}

NO_NODE = onnx.NodeProto()


class Turn(NamedTuple):
    """A node that computes cos or sin of the product of position and tensor, the frequencies.

    before, between: the nodes from tensor to product and from product to node.
    after: the values with the elements of the result, each with the nodes to it.
    """

    node: onnx.NodeProto
    product: onnx.NodeProto
    position: str
    tensor: str
    before: Sequence[onnx.NodeProto]
    between: Sequence[onnx.NodeProto]
    after: dict[str, list[onnx.NodeProto]]


class ForeignGraph:
    """The nodes and tensors of a model and its subgraphs; folder: of its external data."""

    def __init__(self, model: onnx.ModelProto, folder: str) -> None:
        self.model = model
        self.folder = folder
        inner = [a.g for node in model.graph.node for a in node.attribute if a.HasField("g")]
        self.graphs = [model.graph, *inner]
        self.nodes = [node for graph in self.graphs for node in graph.node]
        self.producers = {name: node for node in self.nodes for name in node.output}
        self.tensors = {x.name: x for graph in self.graphs for x in graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                self.tensors[node.output[0]] = node.attribute[0].t

    def rotations(self) -> list[Rotation]:
        """Return the rotations: each pair of tables, and each tensor of frequencies, is one.

        Raises ValueError if there are none, or if an operator has none of these.
        """
        by_tensor: dict[str, list[Turn]] = {}
        for turn in self._turns():
            by_tensor.setdefault(turn.tensor, []).append(turn)
        computed = {name for turns in by_tensor.values() for turn in turns for name in turn.after}
        found: dict[Any, Rotation] = {
            tensor: AngleRotation(self, turns) for tensor, turns in by_tensor.items()
        }
        for node in self.nodes:
            cos, sin, pairing = OPERATORS.get((node.domain, node.op_type), (0, 0, ""))
            rotates = node.op_type != "GroupQueryAttention" or _flag(node, "do_rotary")
            if pairing and rotates and computed.isdisjoint(node.input):
                tables = [self._tables(name) for name in node.input[cos : sin + 1]]
                pairs = list(zip(*tables, strict=False))
                for pair in pairs:
                    found[pair] = TableRotation(self, pair, node.op_type, _flag(node, pairing))
                if not pairs:
                    raise ValueError(f"no rotation is found in the operator of {node.output[0]}")
        if not found:
            raise ValueError(
                "no rotation is found: no operator has tables of cos and sin, and no "
                "Cos and Sin are of positions times constant frequencies"
            )
        return list(found.values())

    def array(self, name: str) -> NDArray[Any]:
        """Return the values of a tensor."""
        return numpy_helper.to_array(self.tensors[name], self.folder)

    def _tables(self, name: str) -> list[str]:
        """Return the names of the tensors that a value is, one for each branch of an If."""
        name, _ = self._source(name)
        node = self.producers.get(name, NO_NODE)
        if node.op_type == "If":
            index = list(node.output).index(name)
            branches = [attribute.g.output[index].name for attribute in node.attribute]
            return [table for branch in branches for table in self._tables(branch)]
        return [name] if name in self.tensors else []

    def _source(self, name: str) -> tuple[str, list[onnx.NodeProto]]:
        """Return the value whose elements a value has, and the nodes between."""
        path: list[onnx.NodeProto] = []
        while self._keeps(node := self.producers.get(name, NO_NODE)):
            path.insert(0, node)
            name = node.input[0]
        return name, path

    def _keeps(self, node: onnx.NodeProto) -> bool:
        """Return True if a node keeps the elements of its first input, perhaps among constants."""
        if node.op_type == "Concat":
            return len({self._source(x)[0] for x in node.input} - self.tensors.keys()) == 1
        return node.op_type in KEEPING

    def factor(self, node: onnx.NodeProto) -> Any:
        """Return the positive number by which a node multiplies elements, 0 for other nodes."""
        if node.op_type != "Mul":
            return int(self._keeps(node))
        names = [self._source(name)[0] for name in node.input]
        arrays = [self.array(name) for name in names if name in self.tensors]
        return next((x.ravel() for x in arrays if x.size == 1 and x > 0), 0)

    def _turns(self) -> Iterator[Turn]:
        """Yield the nodes that compute cos and sin of positions times constant frequencies."""
        for node in self.nodes:
            angle, between = self._source(node.input[0] if node.op_type in ("Cos", "Sin") else "")
            product = self.producers.get(angle, NO_NODE)
            names = product.input if product.op_type in PRODUCTS else ()
            for position, name in permutations(names, 2):
                tensor, before = self._source(name)
                dims = self.tensors[tensor].dims if tensor in self.tensors else [1]
                if max(dims, default=1) == np.prod(dims) > 1:
                    after = self._after(node)
                    yield Turn(node, product, position, tensor, before, between, after)

    def _after(self, node: onnx.NodeProto) -> dict[str, list[onnx.NodeProto]]:
        """Return the values that have the elements of a result, with the nodes to each."""
        after: dict[str, list[onnx.NodeProto]] = {node.output[0]: []}
        for reader in self.nodes:
            read = [name for name in reader.input if name in after]
            if read and self.factor(reader):
                after[reader.output[0]] = [*after[read[0]], reader]
        return after

    def computed(self, nodes: Sequence[onnx.NodeProto], values: NDArray[Any]) -> NDArray[Any]:
        """Return elements after nodes that keep or multiply them, in the dtypes of the graph."""
        for node in nodes:
            values = values * self.factor(node)
            if node.op_type == "Cast":
                values = values.astype(helper.tensor_dtype_to_np_dtype(node.attribute[0].i))
        return values

    def is_interleaved(self, node: onnx.NodeProto) -> bool:
        """Return True if an operator pairs so, or a product is with every second element."""
        *_, pairing = OPERATORS.get((node.domain, node.op_type), ("",))
        strided = node.op_type == "Mul" and any(map(self._is_strided, node.input))
        return strided or _flag(node, pairing)

    def _is_strided(self, name: str) -> bool:
        """Return True if elements are every second one of an array, or were reshaped to (…, 2)."""
        node = self.producers.get(name, NO_NODE)
        if node.op_type not in MOVING:
            return False
        start = STRIDES.get(node.op_type, len(node.input))
        strides = [self.array(x) for x in node.input[start : start + 1] if x in self.tensors]
        return any(x.ravel()[-1] == 2 for x in strides) or self._is_strided(node.input[0])

    def insert(self, node: onnx.NodeProto, new: Graph) -> onnx.GraphProto:
        """Insert the nodes and initializers of a builder before a node; return the graph of it."""
        owner: onnx.GraphProto = next(graph for graph in self.graphs if node in graph.node)
        for index, inserted in enumerate(new.nodes, list(owner.node).index(node)):
            owner.node.insert(index, inserted)
        for name in new.initializers.keys() - self.tensors.keys():
            self.tensors[name] = numpy_helper.from_array(new.initializers[name], name)
            self.model.graph.initializer.append(self.tensors[name])
        return owner

    def widen(self, node: onnx.NodeProto, names: dict[str, str]) -> None:
        """Let a node read other values, of float64, and compute in it."""
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute if node.op_type == "Cast" else ():
            attribute.i = onnx_type(FLOAT64)
        for infos in (graph.value_info for graph in self.graphs):
            for info in [info for info in infos if info.name in node.output]:
                infos.remove(info)


def _flag(node: onnx.NodeProto, name: str) -> bool:
    """Return an attribute that is 0 or 1, by default 0."""
    return any(attribute.name == name and attribute.i == 1 for attribute in node.attribute)


class TableRotation:
    """A rotation by tables of cos and sin, each (rows, pairs); source: the operator with them."""

    def __init__(
        self, graph: ForeignGraph, names: tuple[str, str], source: str, interleaved: bool
    ) -> None:
        self.graph = graph
        self.names = names
        self.source = source
        self.interleaved = interleaved
        tables = [graph.array(name) for name in names]
        self.tables = np.stack([table.reshape(-1, table.shape[-1]) for table in tables])
        self.rows = self.tables.shape[1]
        if self.rows < 2 or not np.isfinite(self.tables).all():
            raise ValueError(f"{', '.join(names)} must be finite, at two positions or more")
        self.inv_freq = fitted(self.tables)

    def values(self, ids: Int64) -> NDArray[Any]:
        """Return cos and sin (2, positions, pairs)."""
        return self.tables[:, ids]

    def replace(self, rope: RotaryEmbedding) -> None:
        """Write the exact cos and sin of a rotation, at the same dtype."""
        exact = rope.cos_sin(np.arange(self.rows), np.float64)
        for name, table in zip(self.names, exact, strict=True):
            tensor = self.graph.tensors[name]
            new = table.astype(self.tables.dtype).reshape(tensor.dims)
            tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))


def fitted(tables: NDArray[Any]) -> Float64:
    """Return the frequencies of tables, from the angles of rows 1, 2, 4, …, unwrapped one by one.

    Products of these rows and frequencies have no rounding, in whatever dtype they were computed.
    """
    inv_freq = np.zeros(tables.shape[2])
    for power in range((tables.shape[1] - 1).bit_length()):
        row = 2**power
        cos, sin = tables[:, row].astype(np.float64)
        rest = np.arctan2(sin, cos) - row * inv_freq
        inv_freq += (np.remainder(rest + np.pi, 2 * np.pi) - np.pi) / row
    return inv_freq


class AngleRotation:
    """A rotation by angles that the graph computes from a product with frequencies.

    Its cos and sin are those of NumPy in the dtypes of the graph, as the rounding of the product
    outweighs all else. They go through the nodes around the sine.
    """

    source = "Cos and Sin"
    rows = None

    def __init__(self, graph: ForeignGraph, turns: Sequence[Turn]) -> None:
        self.graph = graph
        self.turns = turns
        self.names = (turns[0].tensor,)
        self.inv_freq = graph.computed(turns[0].before, graph.array(turns[0].tensor).ravel())
        self.angle_dtype = graph.computed(turns[0].between, self.inv_freq).dtype
        results = {name for turn in turns for name in turn.after}
        readers = [node for node in graph.nodes if not results.isdisjoint(node.input)]
        self.interleaved = any(map(graph.is_interleaved, readers))

    def values(self, ids: Int64) -> NDArray[Any]:
        """Return cos and sin (2, positions, pairs)."""
        angle = np.multiply.outer(ids.astype(self.inv_freq.dtype), self.inv_freq)
        angle = self.graph.computed(self.turns[0].between, angle)
        *_, after = self.turns[0].after.values()
        return np.stack([self.graph.computed(after, x) for x in (np.cos(angle), np.sin(angle))])

    def replace(self, rope: RotaryEmbedding) -> None:
        """Compute the product and cos and sin of a rotation in float64, with a cast of these."""
        for turn in self.turns:
            new = Graph()
            shape = self.graph.tensors[turn.tensor].dims
            exact = new.initializer(f"{turn.tensor}/exact", rope.inv_freq.reshape(shape))
            position = f"{turn.product.output[0]}/exact/position"
            if turn.position in turn.product.input:  # not yet replaced with another turn
                new.cast(turn.position, FLOAT64, position)
            self.graph.insert(turn.product, new)
            names = {turn.tensor: exact, turn.position: position}
            for node in (*turn.before, turn.product, *turn.between):
                self.graph.widen(node, names)
            if "Cos" in {turn.node.op_type for turn in self.turns}:
                self._compute(turn, rope.attention_factor)

    def _compute(self, turn: Turn, factor: float) -> None:
        """Compute cos or sin in float64, times the attention factor, and cast it."""
        (angle,) = turn.node.input
        (name,) = turn.node.output
        new = Graph()
        with new.scope(f"{name}/exact"):
            is_cos = turn.node.op_type == "Cos"
            value = cosine(new, angle, FLOAT32) if is_cos else new.node("Sin", [angle], "sin")
            value = new.node("Mul", [value, new.scalar(factor, FLOAT64)], "factor")
            new.cast(value, self.angle_dtype, "cast")
        new.nodes[-1].output[0] = name
        self.graph.insert(turn.node, new).node.remove(turn.node)
        for node in (node for path in turn.after.values() for node in path):
            if node.op_type == "Mul":
                node.op_type = "Identity"
                node.input[:] = [name for name in node.input if name in turn.after]


Rotation = TableRotation | AngleRotation
