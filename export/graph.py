"""A small builder of ONNX graphs: nodes, initializers, inputs and outputs, all with readable names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray
from onnx import helper

from .layouts import four_axes, permutation

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

DOMAIN = "rope_cpu"
ORT_DOMAIN = "com.microsoft"

Shape = Sequence[str | int]


def onnx_type(dtype: DTypeLike) -> int:
    """Return ONNX's number for a NumPy dtype."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


class Graph:
    """An ONNX graph under construction. Values are named by strings; a scope prefixes the names made inside it."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        self.initializers: dict[str, NDArray[Any]] = {}
        self._prefix = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names made inside with `name`/."""
        outer, self._prefix = self._prefix, f"{self._prefix}{name}/"
        try:
            yield
        finally:
            self._prefix = outer

    def input(self, name: str, dtype: DTypeLike, shape: Shape) -> str:
        """Declare a graph input; strings in the shape are dynamic."""
        self.inputs.append(helper.make_tensor_value_info(name, onnx_type(dtype), shape))
        return name

    def output(self, value: str, name: str, dtype: DTypeLike, shape: Shape) -> None:
        """Give `value` out under `name`: the node that makes it writes to that name."""
        for node in reversed(self.nodes):
            if value in node.output:
                break
        else:
            raise ValueError(f"`value` is {value!r}, which no node of this graph makes")
        for user in self.nodes:
            user.input[:] = [name if value == used else used for used in user.input]
        node.output[:] = [name if value == made else made for made in node.output]
        self.outputs.append(helper.make_tensor_value_info(name, onnx_type(dtype), shape))

    def node(
        self, op: str, inputs: Sequence[str], name: str, *, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node with one output, named after it; return that name."""
        return self.several(op, inputs, name, [""], domain=domain, **attributes)[0]

    def several(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        outputs: Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node with several outputs, the node's name followed by `outputs`; return their names."""
        base = f"{self._prefix}{name}"
        made = [f"{base}/{output}" if output else base for output in outputs]
        self.nodes.append(
            helper.make_node(op, list(inputs), made, name=base, domain=domain, **attributes)
        )
        return made

    def initializer(self, name: str, array: NDArray[Any]) -> str:
        """Add an initializer; return its name."""
        self.initializers[name] = array
        return name

    def ints(self, *values: int) -> str:
        """Return an int64 vector; equal ones are one initializer."""
        name = "vector_" + "_".join(str(value).replace("-", "minus") for value in values)
        return self.initializer(name, np.array(values, np.int64))

    def scalar(self, value: float, dtype: DTypeLike) -> str:
        """Return a scalar; equal ones are one initializer."""
        return self.initializer(f"scalar_{np.dtype(dtype)}_{value!r}", np.array(value, dtype))

    def cast(
        self, value: str, dtype: DTypeLike, name: str, *, source: DTypeLike | None = None
    ) -> str:
        """Return `value` in another dtype; source: the dtype it has, where that may be the same."""
        if source is not None and np.dtype(source) == np.dtype(dtype):
            return value
        return self.node("Cast", [value], name, to=onnx_type(dtype))

    def transpose(self, value: str, source: str, target: str, name: str) -> str:
        """Return `value` with its axes, a letter each, in another order."""
        if source == target:
            return value
        return self.node("Transpose", [value], name, perm=permutation(source, target))

    def value_info(self, value: str, dtype: DTypeLike, shape: Shape) -> None:
        """Say what type and shape a value has, where shape inference cannot know: outputs of onnxruntime's own ops."""
        self.infos.append(helper.make_tensor_value_info(value, onnx_type(dtype), shape))

    def size(self, value: str, axis: int, name: str) -> str:
        """Return one entry of a value's shape, an int64 vector of length 1."""
        shape = self.node("Shape", [value], f"{name}/shape")
        return self.node("Gather", [shape, self.ints(axis)], name, axis=0)

    def model(
        self,
        name: str,
        *,
        opset: int,
        doc: str,
        functions: Sequence[onnx.FunctionProto] = (),
        metadata: dict[str, str] | None = None,
    ) -> onnx.ModelProto:
        """Put the model together; nodes and initializers that no output needs are left out."""
        self._prune()
        self._apart()
        graph = helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, doc_string=doc, value_info=self.infos
        )
        foreign = sorted({node.domain for node in self.nodes} - {""})
        imports = [
            helper.make_opsetid("", opset),
            *(helper.make_opsetid(domain, 1) for domain in foreign),
        ]
        model = helper.make_model(
            graph, opset_imports=imports, functions=list(functions), producer_name=DOMAIN
        )
        # Functions came with IR 8; a newer IR than the opset's own would shut out older runtimes.
        model.ir_version = max(8, helper.find_min_ir_version_for(imports[:1]))
        helper.set_model_props(model, metadata or {})
        # Tables can be large, and protobuf copies what is put into a message: they go in last, one by one.
        read = {value for node in self.nodes for value in node.input}
        for key, array in self.initializers.items():
            if key in read:
                tensor = model.graph.initializer.add(
                    name=key, data_type=onnx_type(array.dtype), dims=array.shape
                )
                tensor.raw_data = array.tobytes()
        return model

    def _prune(self) -> None:
        needed, kept = {value.name for value in self.outputs}, []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                kept.append(node)
        self.nodes = kept[::-1]
        made = {name for node in self.nodes for name in node.output}
        self.infos = [value for value in self.infos if value.name in made]

    def _apart(self) -> None:
        made = [*self.initializers, *(name for node in self.nodes for name in node.output)]
        names = [value.name for value in self.inputs]
        for at, name in enumerate(names):
            if name in made or name in names[:at]:
                raise ValueError(
                    f"`inputs` hold {name!r}, which this graph calls another value; take another name"
                )

    def function(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], opset: int, doc: str
    ) -> onnx.FunctionProto:
        """Put the nodes together as a model-local function in a domain of ours; the tables become constants."""
        constants = [
            helper.make_node(
                "Constant", [], [key], name=key, value=onnx.numpy_helper.from_array(array, key)
            )
            for key, array in self.initializers.items()
        ]
        nodes, imports = [*constants, *self.nodes], [helper.make_opsetid("", opset)]
        return helper.make_function(
            DOMAIN, name, list(inputs), list(outputs), nodes, imports, doc_string=doc
        )


def relayout(graph: Graph, x: str, source: str, target: str, heads: int | None, width: int) -> str:
    """Return queries, keys or values in another layout; heads: their number, which layout bsd needs."""
    if source == target:
        return x
    if source == "bsd":
        x = graph.node("Reshape", [x, graph.ints(0, 0, heads or 0, width)], "split_heads")
    elif source == "thd":
        x = graph.node("Unsqueeze", [x, graph.ints(2)], "as_bhsd")
    x = graph.transpose(x, four_axes(source), four_axes(target), f"to_{four_axes(target)}")
    if target == "bsd":
        return graph.node("Reshape", [x, graph.ints(0, 0, (heads or 0) * width)], "merge_heads")
    return graph.node("Squeeze", [x, graph.ints(2)], "as_thd") if target == "thd" else x


def rms_norm(graph: Graph, x: str, name: str, weight: NDArray[Any], epsilon: float) -> str:
    """Divide the last axis by the root of its mean square, and multiply by `weight`.

    Of elementary ops, ReduceSum among them: it reads alike in every opset, and runs in every dtype.
    """
    square = graph.node("Mul", [x, x], "norm/square")
    total = graph.node("ReduceSum", [square, graph.ints(-1)], "norm/sum", keepdims=1)
    mean = graph.node("Mul", [total, graph.scalar(1 / weight.size, weight.dtype)], "norm/mean")
    shifted = graph.node("Add", [mean, graph.scalar(epsilon, weight.dtype)], "norm/with_epsilon")
    unit = graph.node("Div", [x, graph.node("Sqrt", [shifted], "norm/root")], "norm/unit")
    return graph.node("Mul", [unit, graph.initializer(f"{name}_norm", np.asarray(weight))], "norm")
