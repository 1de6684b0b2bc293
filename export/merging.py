"""merge: layers, and graphs of the user's own between them, joined into one ONNX model."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import onnx
from onnx import helper

from rope_cpu import __version__
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import shown

from .graph import DOMAIN

_LINKS_RULE = "map inputs of later models to outputs of earlier ones"

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
        if a model has functions of its own, subgraphs (If, Loop, Scan) or sparse initializers; or
        if there is no model.

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

    facts: {(subject, name): value}, what all models must agree on. owners: {(subject, name): the
    model that a node or a value belongs to}. outputs: of all models. read: those that a later model
    reads. used: the inputs that were linked. tensors: {content: name} of initializers.
    """

    def __init__(self, links: dict[str, str]) -> None:
        self.links = links
        self.model = onnx.ModelProto(producer_name=DOMAIN, producer_version=__version__)
        self.model.graph.name = "merged"
        self.facts: dict[tuple[str, str], Any] = {}
        self.owners: dict[tuple[str, str], str] = {}
        self.outputs: dict[str, onnx.ValueInfoProto] = {}
        self.read: set[str] = set()
        self.used: set[str] = set()
        self.tensors: dict[Hashable, str] = {}

    def add(self, model: onnx.ModelProto, argument: str) -> None:
        """Add a model behind those before."""
        _check_operators(model, argument)
        self._add_facts(model, argument)
        own = model.graph
        part = onnx.GraphProto(  # a copy without the tensors
            node=own.node, input=own.input, output=own.output, value_info=own.value_info
        )
        linked = dict(self._linked(part, argument))
        self._unify_sizes(part, linked, argument)
        for value, given in zip(part.input, own.input, strict=True):
            if value.name not in linked:
                self._add_input(value, helper.printable_value_info(given), argument)
        names = linked | self._add_initializers(own, linked, argument)
        for node in part.node:
            self._claim("node", node.name, argument)
            for name in node.output:
                self._claim("value", name, argument)
            node.input[:] = [names.get(name, name) for name in node.input]
        public = {value.name for value in (*part.input, *part.output)}
        made = {name for node in part.node for name in node.output} - public
        graph = self.model.graph
        graph.node.extend(part.node)
        graph.value_info.extend(value for value in part.value_info if value.name in made)
        for value in part.output:
            value.name = linked.get(value.name, value.name)
            self.outputs[value.name] = value
            self.read.discard(value.name)

    def merged(self) -> onnx.ModelProto:
        """Return the merged model."""
        unused = sorted(self.links.keys() - self.used)
        if unused:
            finding = Finding.holds(f"{shown(unused[0])}, which is no input of a model")
            raise ArgumentError("links", finding, _LINKS_RULE)
        graph = self.model.graph
        for name, value in self.outputs.items():
            (graph.value_info if name in self.read else graph.output).append(value)
        return self.model

    def _add_facts(self, model: onnx.ModelProto, argument: str) -> None:
        """Add the versions and metadata of a model."""
        self.model.ir_version = max(self.model.ir_version, model.ir_version)
        for opset in model.opset_import:
            domain = "" if opset.domain == "ai.onnx" else opset.domain
            if self._is_new("opset", domain, opset.version, argument):
                self.model.opset_import.add(domain=domain, version=opset.version)
        for entry in model.metadata_props:
            if self._is_new("metadata", entry.key, entry.value, argument):
                self.model.metadata_props.append(entry)

    def _linked(self, graph: onnx.GraphProto, argument: str) -> Iterator[tuple[str, str]]:
        """Yield the inputs that are outputs of earlier models, each with the output."""
        for value in graph.input:
            name = self.links.get(value.name, value.name)
            if name in self.outputs:
                self.used.add(value.name)
                self.read.add(name)
                yield value.name, name
            elif value.name in self.links:
                finding = Finding.holds(f"{shown(name)}, which is no output before {argument}")
                raise ArgumentError("links", finding, _LINKS_RULE)

    def _unify_sizes(
        self, graph: onnx.GraphProto, linked: Mapping[str, str], argument: str
    ) -> None:
        """Give named dimensions of linked inputs the sizes of the outputs, in the whole graph.

        Raises ValueError where an input and its output contradict each other.
        """
        sizes: _Sizes = {}
        for value in graph.input:
            if value.name not in linked:
                continue
            known = self.outputs[linked[value.name]]
            fits = _type(value) == _type(known) and self._has_sizes_of(known, value, sizes)
            if not fits:
                finding = Finding(f"has input {shown(helper.printable_value_info(value))}")
                rule = f"have that before it, {shown(helper.printable_value_info(known))}"
                raise ArgumentError(argument, finding, rule)
        for value in (*graph.input, *graph.output, *graph.value_info):
            _set_sizes(value, sizes)

    def _has_sizes_of(
        self, known: onnx.ValueInfoProto, value: onnx.ValueInfoProto, sizes: _Sizes
    ) -> bool:
        """Return True if a linked input can have the shape of its output; add to the sizes."""
        if not (_has_shape(value) and _has_shape(known)):
            return True
        dims = value.type.tensor_type.shape.dim
        known_dims = known.type.tensor_type.shape.dim
        fits = len(dims) == len(known_dims)
        for size, known_size in zip(dims, known_dims, strict=False):
            if size.dim_param and known_size.WhichOneof("value"):
                size.CopyFrom(sizes.setdefault(size.dim_param, known_size))
            if size.HasField("dim_value") and known_size.dim_param:
                named = {known_size.dim_param: size}
                for output in self.outputs.values():  # dimensions of one name are one size
                    _set_sizes(output, named)
            if size.HasField("dim_value") and not known_size.WhichOneof("value"):
                known_size.CopyFrom(size)  # other inputs that are this output must agree
            if size.HasField("dim_value") and known_size.HasField("dim_value"):
                fits = fits and size.dim_value == known_size.dim_value
        return fits

    def _add_input(self, value: onnx.ValueInfoProto, text: str, argument: str) -> None:
        """Add an input, unless it is there, and the same by its text before links rename sizes."""
        if self._is_new("input", value.name, text, argument):
            self._claim("value", value.name, argument)
            self.model.graph.input.append(value)

    def _add_initializers(
        self, graph: onnx.GraphProto, linked: Mapping[str, str], argument: str
    ) -> dict[str, str]:
        """Return the names of initializers in the merged model; a link replaces a default."""
        public = {value.name for value in (*graph.input, *graph.output)}
        names = {}
        for tensor in graph.initializer:
            if tensor.name in linked:
                continue
            is_own = tensor.name in public or not tensor.raw_data
            content = (argument, tensor.name) if is_own else _content(tensor)
            if content not in self.tensors:
                self._claim("value", tensor.name, argument)
                self.tensors[content] = tensor.name
                self.model.graph.initializer.append(tensor)
            names[tensor.name] = self.tensors[content]
        return names

    def _claim(self, subject: str, name: str, argument: str) -> None:
        """Note the owner of a name; raise ValueError if that is an earlier model."""
        owner = self.owners.setdefault((subject, name), argument)
        if name and owner != argument:
            finding = Finding(f"has the {subject} {shown(name)}, as {owner} has")
            remedy = "give the layers different name_prefix"
            raise ArgumentError(argument, finding, "have names of its own", remedy)

    def _is_new(self, subject: str, name: str, value: Any, argument: str) -> bool:
        """Return True for the first model with a fact; raise ValueError if one has another."""
        key = (subject, name)
        is_new = key not in self.facts
        known = self.facts.setdefault(key, value)
        if value != known:
            finding = Finding(f"has {subject} {shown(name)}: {shown(value)}")
            raise ArgumentError(argument, finding, f"have that before it, {shown(known)}")
        return is_new


def _check_operators(model: onnx.ModelProto, argument: str) -> None:
    """Raise unless an argument is a model of operators and tensors alone."""
    if not isinstance(model, onnx.ModelProto):
        raise ArgumentTypeError(argument, Finding.type_of(model), "be an onnx.ModelProto")
    if model.functions:
        finding = Finding(f"has the function {shown(model.functions[0].name)}")
        remedy = "inline it: onnx.inliner.inline_local_functions"
        raise ArgumentError(argument, finding, "have operators alone", remedy)
    for node in model.graph.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            finding = Finding(f"has the operator {shown(node.op_type)}, which has a subgraph")
            raise ArgumentError(argument, finding, "have none (If, Loop, Scan)")
    if model.graph.sparse_initializer:
        raise ArgumentError(argument, Finding("has sparse initializers"), "have dense ones alone")


def _type(value: onnx.ValueInfoProto) -> int | str:
    """Return the dtype of a tensor, or the text of another type."""
    return value.type.tensor_type.elem_type or str(value.type)


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


def _set_sizes(value: onnx.ValueInfoProto, sizes: _Sizes) -> None:
    for size in value.type.tensor_type.shape.dim:
        if size.dim_param in sizes:
            size.CopyFrom(sizes[size.dim_param])


def _content(tensor: onnx.TensorProto) -> Hashable:
    """Return a key that tensors of equal dtype, shape and bytes share.

    A digest, because every access to `raw_data` copies it.
    """
    return tensor.data_type, tuple(tensor.dims), hashlib.sha256(tensor.raw_data).digest()
