"""The rotations of ONNX graphs of any origin: read from tables and angles, and made exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
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

# The nodes from frequencies to a value that has their elements.
NodePath = tuple[NodeProto, ...]


class Rotation(NamedTuple):
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
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                self.tensors[node.output[0]] = node.attribute[0].t
            for name in set(node.input):
                self.readers.setdefault(name, []).append(node)

    def rotations(self) -> list[Rotation]:
        """Return the rotations: each tensor of frequencies, and each pair of tables, is one.

        Raises ValueError if there are none, or if an operator has none of these.
        """
        found: dict[tuple[str, ...], Rotation] = {}
        computed: set[str] = set()
        for name, tensor in self.tensors.items():
            if max(tensor.dims, default=1) == np.prod(tensor.dims) > 1:
                flow = dict(self._flow(name))
                sines = [path for path in flow.values() if path and path[-1].op_type in SINES]
                if sines:
                    found[(name,)] = self._computed(name, flow, sines)
                    computed.update(flow)
        for node in self.graph.node:
            index = OPERATORS.get((node.domain, node.op_type), 0)
            names = tuple(node.input[index : index + 2])
            rotates = index and (node.op_type != "GroupQueryAttention" or _flag(node, "do_rotary"))
            if rotates and names not in found and computed.isdisjoint(names):
                found[names] = self._tabulated(names, node)
        if not found:
            raise ValueError("no rotation is found, by tables or by Cos and Sin")
        return list(found.values())

    def _array(self, name: str) -> Array:
        """Return the values of a tensor."""
        return numpy_helper.to_array(self.tensors[name], self.folder)

    def _tabulated(self, names: tuple[str, ...], node: NodeProto) -> Rotation:
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
        return Rotation(names, node.op_type, interleaved, fitted(tables), rows, values, replace)

    def _flow(self, name: str, path: NodePath = ()) -> Iterator[tuple[str, NodePath]]:
        """Yield the values that have the elements of a tensor, each with the nodes to it."""
        yield name, path
        for node in self.readers.get(name, []):
            if self._continues(path, node, name):
                yield from self._flow(node.output[0], (*path, node))

    def _continues(self, path: NodePath, node: NodeProto, name: str) -> bool:
        """Return True if a node that reads a value is the next between frequencies and sines."""
        stage = min(sum(node.op_type in (*PRODUCTS, *SINES) for node in path), 2)
        if stage == 2 and node.op_type in MOVING:
            return True
        if node.op_type == "Concat":
            return set(node.input) <= {name, *self.tensors}
        if node.op_type in KEEPING:
            return bool(node.input[0] == name)
        return node.op_type in CHANGING[stage] and bool(stage < 2 or self._factor(node) > 0)

    def _factor(self, node: NodeProto) -> Any:
        """Return the number by which a node multiplies all elements, 0 if there is none."""
        arrays = [self._array(name) for name in node.input if name in self.tensors]
        return next((array.ravel() for array in arrays if array.size == 1), 0)

    def _computed(self, name: str, flow: dict[str, NodePath], sines: list[NodePath]) -> Rotation:
        """Return the rotation by angles that the graph computes from a product with frequencies.

        Its cos and sin are those of NumPy, as the rounding of the product outweighs all else.
        """
        inv_freq = self._values(name, sines[0][:-1], np.ones(1))[0]
        strided = self._strided()
        readers = [node for value in flow for node in self.readers.get(value, [])]
        interleaved = any(_flag(node, "interleaved") or strided & {*node.input} for node in readers)
        values = partial(self._values, name, max(flow.values(), key=len))
        replace = partial(self._widen, name, sines)
        return Rotation((name,), "Cos and Sin", interleaved, inv_freq, 0, values, replace)

    def _values(self, name: str, path: NodePath, ids: Array) -> Array:
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

    def _widen(self, name: str, sines: list[NodePath], rope: RotaryEmbedding) -> None:
        """Compute angles, cos and sin in float64, and cast these to the dtype of the graph."""
        dtype = self._values(name, sines[0][:-1], np.ones(1)).dtype
        nodes = {node.output[0]: node for path in sines for node in path}
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
