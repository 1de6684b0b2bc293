"""merge: layers, and graphs of the user's own between them, joined into one ONNX model."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import onnx
from onnx import helper

from rope_cpu import __version__
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import shown

from .graph import DOMAIN

_LINKS_RULE = "map inputs of later models to outputs of earlier ones"

# Names of one kind, and of which kinds no other model may have the name. Subgraphs of different
# models do not see each other, but all see the values outside of them.
_APART = {
    "node": ("node",),
    "value": ("value", "value of a subgraph"),
    "value of a subgraph": ("value",),
}

# The sizes that named dimensions of a model stand for.
_Sizes = dict[str, onnx.TensorShapeProto.Dimension]


def merge(
    models: Iterable[onnx.ModelProto], *, links: Mapping[str, str] | None = None
) -> onnx.ModelProto:
    """Return one model of several that run one after the other.

    An input that has the name of an earlier output, by itself or by `links`, is that output. Other
    inputs of one name become one input, such as attention_mask of all layers. Initializers of equal
    dtype, shape and bytes become one, under the name of the first: layers share a table of cos and
    sin. All other names must differ; `name_prefix` of `export_attention` sees to that. Dynamic
    dimensions of one name are one size; those of an input that is an output are named as there.

    Parameters
    ----------
    models : iterable of onnx.ModelProto
        From `export_attention`, or any others, in the order in which they run. They are left as
        they are. A generator keeps one of them in memory at a time.
    links : mapping of str to str, optional
        {input of a later model: output of an earlier one}. An output that a later model reads is
        no output of the merged model.

    Returns
    -------
    onnx.ModelProto
        The merged model, with the metadata of all.

    Raises
    ------
    TypeError
        If an entry of `models` is not an ONNX model, or `links` not a mapping.
    ValueError
        If models use one name for different things, or have different opsets, or different
        metadata under one key; if a link has no input, or no earlier output of its dtype and shape;
        if a model has functions of its own; or if there is no model.

    Examples
    --------
    >>> import numpy as np
    >>> from rope_cpu import RotaryEmbedding, export
    >>> weights = {name: np.ones((32, 32)) for name in "qkvo"}
    >>> layers = [
    ...     export.export_attention(RotaryEmbedding(16), num_heads=2, max_positions=64,
    ...                             weights=weights, name_prefix=f"layers.{index}.")
    ...     for index in range(2)
    ... ]
    >>> model = export.merge(layers, links={"layers.1.hidden": "layers.0.attention"})
    >>> [value.name for value in model.graph.input if "past" not in value.name]
    ['layers.0.hidden']
    """
    if links is not None and not isinstance(links, Mapping):
        raise ArgumentTypeError("links", Finding.type_of(links), "be a mapping of names to names")
    merger = _Merger(dict(links or {}))
    for index, model in enumerate(models):
        merger.add(model, f"models[{index}]")
    if not merger.model.ir_version:
        raise ArgumentError("models", Finding("is empty"), "hold a model")
    return merger.merged()


class _Merger:
    """Adds models to one; `argument` is the name of the added model in error texts.

    facts: {(subject, name): value}, what all models must agree on; of names of nodes and of values
    the model that they belong to. outputs: of all models. read: those that a later model reads.
    used: the inputs that were linked.
    """

    def __init__(self, links: dict[str, str]) -> None:
        self.links = links
        self.model = onnx.ModelProto(producer_name=DOMAIN, producer_version=__version__)
        self.model.graph.name = "merged"
        self.facts: dict[tuple[str, str], Any] = {}
        self.outputs: dict[str, onnx.ValueInfoProto] = {}
        self.read: set[str] = set()
        self.used: set[str] = set()
        self.tensors: dict[Hashable, str] = {}

    def add(self, model: onnx.ModelProto, argument: str) -> None:
        """Add a model behind those before."""
        self._add_facts(model, argument)
        graph = model.graph
        linked = dict(self._linked(graph, argument))
        sizes = self._linked_sizes(graph, linked, argument)
        for value in graph.input:
            if value.name not in linked:
                self._add_input(value, sizes, argument)
        names = linked | self._add_initializers(graph, linked, argument)
        for node in graph.node:
            self._add_node(node, names, sizes, argument)
        public = {value.name for value in (*graph.input, *graph.output)}
        made = {name for node in graph.node for name in node.output} - public
        infos = [value for value in graph.value_info if value.name in made]
        self.model.graph.value_info.extend(_sized(value, sizes) for value in infos)
        for value in graph.output:
            name = linked.get(value.name, value.name)
            self._agree("type", name, _type(value), argument)
            self.outputs[name] = _sized(value, sizes)
            self.outputs[name].name = name
            self.read.discard(name)

    def merged(self) -> onnx.ModelProto:
        """Return the merged model."""
        unused = sorted(self.links.keys() - self.used)
        if unused:
            finding = Finding.holds(f"{shown(unused[0])}, which is no input of a model")
            raise ArgumentError("links", finding, _LINKS_RULE)
        graph = self.model.graph
        for name, value in self.outputs.items():
            (graph.value_info if name in self.read else graph.output).append(value)
        for (subject, name), value in self.facts.items():
            if subject == "opset":
                self.model.opset_import.add(domain=name, version=value)
            elif subject == "metadata":
                self.model.metadata_props.add(key=name, value=value)
        return self.model

    def _add_facts(self, model: onnx.ModelProto, argument: str) -> None:
        """Add the versions and metadata of a model; raise unless it is one without functions."""
        if not isinstance(model, onnx.ModelProto):
            raise ArgumentTypeError(argument, Finding.type_of(model), "be an onnx.ModelProto")
        if model.functions:
            finding = Finding(f"has the function {shown(model.functions[0].name)}")
            remedy = "inline it: onnx.inliner.inline_local_functions"
            raise ArgumentError(argument, finding, "have operators alone", remedy)
        self.model.ir_version = max(self.model.ir_version, model.ir_version)
        for opset in model.opset_import:
            domain = "" if opset.domain == "ai.onnx" else opset.domain
            self._agree("opset", domain, opset.version, argument)
        for entry in model.metadata_props:
            self._agree("metadata", entry.key, entry.value, argument)

    def _linked(self, graph: onnx.GraphProto, argument: str) -> Iterator[tuple[str, str]]:
        """Yield the inputs that are outputs of earlier models, each with the output."""
        for value in graph.input:
            name = self.links.get(value.name, value.name)
            if name in self.outputs:
                self._agree("type", name, _type(value), argument)
                self.used.add(value.name)
                self.read.add(name)
                yield value.name, name
            elif value.name in self.links:
                finding = Finding.holds(f"{shown(name)}, which is no output before {argument}")
                raise ArgumentError("links", finding, _LINKS_RULE)

    def _linked_sizes(
        self, graph: onnx.GraphProto, linked: Mapping[str, str], argument: str
    ) -> _Sizes:
        """Return the sizes of outputs that named dimensions of linked inputs stand for.

        Raises ValueError where the shapes of an input and of its output contradict each other.
        """
        sizes: _Sizes = {}
        for value in graph.input:
            known = self.outputs.get(linked.get(value.name, ""))
            if known is None or not (_has_shape(value) and _has_shape(known)):
                continue
            dims = value.type.tensor_type.shape.dim
            known_dims = known.type.tensor_type.shape.dim
            for size, known_size in zip(dims, known_dims, strict=False):
                if size.dim_param and known_size.WhichOneof("value"):
                    sizes.setdefault(size.dim_param, known_size)
            sized = _sized(value, sizes).type.tensor_type.shape.dim
            pairs = zip(sized, known_dims, strict=False)
            numbers = [pair for pair in pairs if pair[0].HasField("dim_value")]
            named = {known_size.dim_param: size for size, known_size in numbers}
            named.pop("", None)
            for output in self.outputs.values():  # dimensions of one name are one size
                _set_sizes(output, named)
            if len(dims) != len(known_dims) or any(map(_differ, sized, known_dims)):
                finding = Finding(f"has input {shown(helper.printable_value_info(value))}")
                rule = f"have the shape before it, {shown(helper.printable_value_info(known))}"
                raise ArgumentError(argument, finding, rule)
            for size, known_size in numbers:  # other inputs that are this output must agree
                known_size.CopyFrom(size)
        return sizes

    def _add_input(self, value: onnx.ValueInfoProto, sizes: _Sizes, argument: str) -> None:
        """Add an input, or check that one of its name is the same."""
        if ("input", value.name) not in self.facts:
            self._claim("value", value.name, argument)
            self.model.graph.input.append(_sized(value, sizes))
        self._agree("input", value.name, helper.printable_value_info(value), argument)

    def _add_initializers(
        self, graph: onnx.GraphProto, linked: Mapping[str, str], argument: str
    ) -> dict[str, str]:
        """Return the names of initializers in the merged model; a link replaces a default."""
        for sparse in graph.sparse_initializer:
            if sparse.values.name not in linked:
                self._claim("value", sparse.values.name, argument)
                self.model.graph.sparse_initializer.append(sparse)
        public = {value.name for value in (*graph.input, *graph.output)}
        names = {}
        for tensor in graph.initializer:
            if tensor.name not in linked:
                is_own = tensor.name in public or not tensor.raw_data
                content = (argument, tensor.name) if is_own else _content(tensor)
                names[tensor.name] = self._add_initializer(tensor, content, argument)
        return names

    def _add_initializer(self, tensor: onnx.TensorProto, content: Hashable, argument: str) -> str:
        """Return the name that an initializer has in the merged model; content: its key."""
        if content not in self.tensors:
            self._claim("value", tensor.name, argument)
            self.tensors[content] = tensor.name
            self.model.graph.initializer.append(tensor)
        return self.tensors[content]

    def _add_node(
        self, node: onnx.NodeProto, names: Mapping[str, str], sizes: _Sizes, argument: str
    ) -> None:
        """Add a node that reads values under the names of the merged model."""
        self._claim("node", node.name, argument)
        for name in node.output:
            self._claim("value", name, argument)
        for name in _subgraph_values(node):
            self._claim("value of a subgraph", name, argument)
        added = self.model.graph.node.add()
        added.CopyFrom(node)
        _rename(added, names, sizes)

    def _claim(self, subject: str, name: str, argument: str) -> None:
        """Note the owner of a name; raise ValueError if that is an earlier model."""
        for other in _APART[subject]:
            owner = self.facts.get((other, name), argument)
            if name and owner != argument:
                finding = Finding(f"has the {subject} {shown(name)}, as {owner} has")
                remedy = "give the layers different name_prefix"
                raise ArgumentError(argument, finding, "have names of its own", remedy)
        self.facts.setdefault((subject, name), argument)

    def _agree(self, subject: str, name: str, value: Any, argument: str) -> None:
        """Note a fact of all models; raise ValueError if an earlier model says otherwise."""
        known = self.facts.setdefault((subject, name), value)
        if value != known:
            finding = Finding(f"has {subject} {shown(name)}: {shown(value)}")
            raise ArgumentError(argument, finding, f"have that before it, {shown(known)}")


def _type(value: onnx.ValueInfoProto) -> str:
    """Return the name of the dtype of a tensor, or the text of another type."""
    if value.type.HasField("tensor_type"):
        return str(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type))
    return str(value.type)


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


def _differ(size: onnx.TensorShapeProto.Dimension, other: onnx.TensorShapeProto.Dimension) -> bool:
    """Return True if two sizes are numbers and differ."""
    are_numbers = size.HasField("dim_value") and other.HasField("dim_value")
    return bool(are_numbers and size.dim_value != other.dim_value)


def _sized(value: onnx.ValueInfoProto, sizes: _Sizes) -> onnx.ValueInfoProto:
    """Return a copy of a value info with the sizes that its named dimensions stand for.

    A copy, as a value info keeps in memory the whole model that it is part of.
    """
    copy = deepcopy(value)
    _set_sizes(copy, sizes)
    return copy


def _set_sizes(value: onnx.ValueInfoProto, sizes: _Sizes) -> None:
    for size in value.type.tensor_type.shape.dim:
        if size.dim_param in sizes:
            size.CopyFrom(sizes[size.dim_param])


def _content(tensor: onnx.TensorProto) -> Hashable:
    """Return a key that tensors of equal dtype, shape and bytes share.

    A digest, because every access to `raw_data` copies it.
    """
    return tensor.data_type, tuple(tensor.dims), hashlib.sha256(tensor.raw_data).digest()


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node has itself."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _subgraph_values(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of all values that subgraphs of a node make."""
    for graph in _subgraphs(node):
        yield from (value.name for value in (*graph.input, *graph.initializer))
        yield from (sparse.values.name for sparse in graph.sparse_initializer)
        for inner in graph.node:
            yield from inner.output
            yield from _subgraph_values(inner)


def _rename(node: onnx.NodeProto, names: Mapping[str, str], sizes: _Sizes) -> None:
    """Rename the values that a node reads, and the sizes in it, also those in subgraphs."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for graph in _subgraphs(node):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _set_sizes(value, sizes)
        for inner in graph.node:
            _rename(inner, names, sizes)
