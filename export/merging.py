"""merge: layers, and graphs of the user's own between them, joined into one ONNX model."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import onnx
from onnx import helper

from rope_cpu import __version__
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import shown

from .graph import DOMAIN

_LINKS_RULE = "map inputs of later models to outputs of earlier ones"


def merge(
    models: Iterable[onnx.ModelProto], *, links: Mapping[str, str] | None = None
) -> onnx.ModelProto:
    """Return one model of several that run one after the other.

    An input that has the name of an earlier output, by itself or by `links`, is that output. Other
    inputs of one name become one input, such as attention_mask of all layers. Initializers of equal
    dtype, shape and bytes become one, under the name of the first: layers share a table of cos and
    sin. All other names must differ; `name_prefix` of `export_attention` sees to that.

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
        metadata under one key; if a link has no input, or no earlier output of its dtype; if a
        model has functions of its own; or if there is no model.

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
    the model that they belong to.
    """

    def __init__(self, links: dict[str, str]) -> None:
        self.links = links
        self.model = onnx.ModelProto(producer_name=DOMAIN, producer_version=__version__)
        self.model.graph.name = "merged"
        self.facts: dict[tuple[str, str], Any] = {}
        self.outputs: dict[str, onnx.ValueInfoProto] = {}
        self.linked: dict[str, str] = {}
        self.tensors: dict[Hashable, str] = {}

    def add(self, model: onnx.ModelProto, argument: str) -> None:
        """Add a model behind those before."""
        if not isinstance(model, onnx.ModelProto):
            raise ArgumentTypeError(argument, Finding.type_of(model), "be an onnx.ModelProto")
        if model.functions:
            finding = Finding(f"has the function {shown(model.functions[0].name)}")
            remedy = "inline it: onnx.inliner.inline_local_functions"
            raise ArgumentError(argument, finding, "have operators alone", remedy)
        self.model.ir_version = max(self.model.ir_version, model.ir_version)
        for opset in model.opset_import:
            self._agree("opset", opset.domain, opset.version, argument)
        for entry in model.metadata_props:
            self._agree("metadata", entry.key, entry.value, argument)
        graph = model.graph
        renamed = {value.name: self._add_input(value, argument) for value in graph.input}
        for tensor in graph.initializer:
            renamed[tensor.name] = self._add_initializer(tensor, argument)
        for node in graph.node:
            self._claim("node", node.name, argument)
            for name in node.output:
                self._claim("value", name, argument)
            added = self.model.graph.node.add()
            added.CopyFrom(node)
            _rename([added], renamed)
        for value in graph.output:
            self._agree("dtype", value.name, _dtype(value), argument)
            # A copy, as a value info keeps in memory the whole model that it is part of.
            self.outputs[value.name] = deepcopy(value)
        self.model.graph.value_info.extend(graph.value_info)

    def merged(self) -> onnx.ModelProto:
        """Return the merged model."""
        unused = sorted(self.links.keys() - self.linked.keys())
        if unused:
            finding = Finding.holds(f"{shown(unused[0])}, which is no input of a model")
            raise ArgumentError("links", finding, _LINKS_RULE)
        graph = self.model.graph
        inner = set(self.linked.values())
        for name, value in self.outputs.items():
            (graph.value_info if name in inner else graph.output).append(value)
        for (subject, name), value in self.facts.items():
            if subject == "opset":
                self.model.opset_import.add(domain=name, version=value)
            elif subject == "metadata":
                self.model.metadata_props.add(key=name, value=value)
        return self.model

    def _add_input(self, value: onnx.ValueInfoProto, argument: str) -> str:
        """Return the name that an input has in the merged model."""
        name = self.links.get(value.name, value.name)
        if name in self.outputs:
            self._agree("dtype", name, _dtype(value), argument)
            self.linked[value.name] = name
            return name
        if value.name in self.links:
            finding = Finding.holds(f"{shown(name)}, which is no output before {argument}")
            raise ArgumentError("links", finding, _LINKS_RULE)
        if ("input", name) not in self.facts:
            self._claim("value", name, argument)
            self.model.graph.input.append(value)
        self._agree("input", name, helper.printable_value_info(value), argument)
        return name

    def _add_initializer(self, tensor: onnx.TensorProto, argument: str) -> str:
        """Return the name that an initializer has in the merged model."""
        content = _content(tensor)
        if content not in self.tensors:
            self._claim("value", tensor.name, argument)
            self.tensors[content] = tensor.name
            self.model.graph.initializer.append(tensor)
        return self.tensors[content]

    def _claim(self, subject: str, name: str, argument: str) -> None:
        """Note the owner of a name; raise ValueError if that is an earlier model."""
        owner = self.facts.setdefault((subject, name), argument)
        if name and owner != argument:
            finding = Finding(f"has the {subject} {shown(name)}, as {owner} has")
            remedy = "give the layers different name_prefix"
            raise ArgumentError(argument, finding, "have names of its own", remedy)

    def _agree(self, subject: str, name: str, value: Any, argument: str) -> None:
        """Note a fact of all models; raise ValueError if an earlier model says otherwise."""
        known = self.facts.setdefault((subject, name), value)
        if value != known:
            finding = Finding(f"has {subject} {shown(name)}: {shown(value)}")
            raise ArgumentError(argument, finding, f"have that before it, {shown(known)}")


def _dtype(value: onnx.ValueInfoProto) -> str:
    """Return the name of the dtype of an input or output."""
    return str(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type))


def _content(tensor: onnx.TensorProto) -> Hashable:
    """Return a key that tensors of equal dtype, shape and bytes share.

    A digest, because every access to `raw_data` copies it. Tensors whose numbers are elsewhere
    have a key of their own.
    """
    if not tensor.raw_data:
        return tensor.name
    return tensor.data_type, tuple(tensor.dims), hashlib.sha256(tensor.raw_data).digest()


def _rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename the values that nodes read, also those in subgraphs."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _rename(graph.node, names)
