"""`rope-cpu export`: the rotation of a model, or the attention of a layer, as an ONNX file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import DTYPES
from rope_cpu.cli import command_line
from rope_cpu.cli.command_line import UsageError, print_lines
from rope_cpu.export import files
from rope_cpu.export.checkpoint import exported_layer, layer_options, layer_weights
from rope_cpu.export.graph import Layout
from rope_cpu.export.options import AttentionPositions, Cache, Mask, Names, Positions
from rope_cpu.export.targets import TARGETS
from rope_cpu.models.layer import Layer
from rope_cpu.models.model import Model

GRAPH_OPTIONS = ("target", "dtype", "layout", "positions", "max_positions", "opset")
ATTENTION_GRAPH_OPTIONS = ("mask", "cache", "cache_dtype", "batch_chunks", "name_prefix", "names")

# Names for --set, fields of `Layer`: numbers, and those that take a few words alone.
_NUMBERS: dict[str, type[int] | type[float]] = {"window": int, "softcap": float, "scale": float}
_PARTS = ("sinks", "qk_norm", "v_norm", "chunk", "query_scale", "bidirectional_tokens", "other")
_WORDS: dict[str, dict[str, bool | None]] = {name: {"none": None} for name in _PARTS}
_WORDS["causal"] = {"true": True, "false": False}
_RULE = (
    f"{', '.join(_NUMBERS)} with a number above 0 or none, causal with true or false, or one of "
    f"{', '.join(_PARTS)} with none"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu export`."""
    command_line.add_config_arguments(parser)
    add = parser.add_argument
    add("--layer", type=int, metavar="N", help="index of a layer, from 0, instead of its type")
    command_line.add_pairing_arguments(parser)
    output = "file to write; large tables go to FILE.data"
    add("-o", "--output", type=Path, required=True, metavar="FILE", help=output)
    target = "operators of the graph (default: onnx; for a shared cache ort)"
    add("--target", choices=TARGETS, help=target)
    dtype = "dtype of inputs and outputs (default: float32)"
    add("--dtype", choices=DTYPES, default="float32", help=dtype)
    add("--opset", type=int, metavar="N", help="default: the lowest opset of the target")
    layout = "axes of queries and keys (default: bhsd)"
    add("--layout", choices=get_args(Layout), default="bhsd", help=layout)
    sources = sorted({*get_args(Positions), *get_args(AttentionPositions)})
    add("--positions", choices=sources, help="source of the positions")
    rows = (
        "rows of cos and sin tables (default: no tables, computed in the graph; for attention with "
        "target ort the config's max_position_embeddings)"
    )
    add("--max-positions", type=int, metavar="N", help=rows)
    length = "sequence length, for rope types that depend on it"
    add("--seq-len", type=int, metavar="N", help=length)
    add("--inverse", action="store_true", default=None, help="undo the rotation")
    add("--seed", type=int, default=0, help="seed of the validation's inputs (default: 0)")
    _add_attention_arguments(parser)


def _add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("attention", "of one layer, as its config has it").add_argument
    add("--attention", action="store_true", help="write attention with a cache and rotated keys")
    weights = (
        "model folder, safetensors file or its index, with the layer's weights; the input is then "
        "hidden states (default: inputs q, k, v, and the model's norms and sinks)"
    )
    add("--weights", type=Path, metavar="PATH", help=weights)
    departure = (
        "depart from the model on purpose, such as window=none, or say what its config does not; "
        "the file's metadata say so"
    )
    add("--set", action="append", metavar="NAME=VALUE", help=departure)
    add("--mask", choices=get_args(Mask), help="kind of mask that is an input (default: none)")
    cache = (
        "growing: each step returns a longer cache (default); shared: written in place, by default "
        "with target ort, as onnx reads the whole capacity at each step; window: likewise, of the "
        "last tokens alone"
    )
    add("--cache", choices=get_args(Cache), help=cache)
    cache_dtype = "dtype of a shared cache, with scales as inputs (default: that of --dtype)"
    add("--cache-dtype", choices=("int8",), help=cache_dtype)
    chunks = (
        "target ort: several new tokens on a shared past for a batch above 1 too; the file needs "
        "onnxruntime 1.32"
    )
    add("--batch-chunks", action="store_true", default=None, help=chunks)
    names = (
        "optimum: past_key_values.N.key, present.N.key and attention_mask, for the layer N of "
        "--layer (default: rope_cpu)"
    )
    add("--names", choices=get_args(Names), help=names)
    prefix = "beginning of all names in the graph, for layers that are to be merged"
    add("--name-prefix", metavar="PREFIX", help=prefix)


def run(args: argparse.Namespace) -> int:
    """Export, validate, write the file and print the report.

    Returns 0, or 1 if validation fails; no file is written then.
    """
    command_line.check_file(args.output)
    make_model = _export_attention if args.attention else _export_rotation
    try:
        with command_line.usage_errors():
            files.model_path(args.output, "output")
            _check_usage(args)
            model, rope = make_model(args, command_line.config_from_arguments(args))
            report = export.validate(model, rope, seed=args.seed)
    except MemoryError as error:
        raise UsageError(f"there is not enough memory for this: {error}") from error
    # The file is written before anything is printed: printing fails if the reader of a pipe quits.
    if report.passed:
        with command_line.write_errors(args.output):
            export.save(model, args.output)
    print_lines(str(report).split("\n"))
    print_lines([f"{args.output} is {'written' if report.passed else 'not written'}"])
    return 0 if report.passed else 1


def _check_usage(args: argparse.Namespace) -> None:
    """Raise ArgumentError for an option of attention without --attention, and the reverse."""
    names = ("inverse",) if args.attention else (*ATTENTION_GRAPH_OPTIONS, "weights", "set")
    for name in _given(args, names):
        place = "with" if args.attention else "without"
        raise ArgumentError(name, Finding("is given"), f"be left out {place} --attention")


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the options of these names that are given."""
    options = {name: getattr(args, name) for name in names}
    return {name: value for name, value in options.items() if value is not None}


def _export_rotation(
    args: argparse.Namespace, config: Model
) -> tuple[onnx.ModelProto, RotaryEmbedding]:
    """Return a model of the rotation alone, and the rotation."""
    rope = _rotation(args, config)
    heads, kv_heads = config.heads(args.layer_type, args.layer)
    model = export.export_rope(
        rope,
        num_heads=heads,
        num_kv_heads=kv_heads,
        metadata=_metadata(args, config, {}),
        **_given(args, (*GRAPH_OPTIONS, "inverse")),
    )
    return model, rope


def _export_attention(
    args: argparse.Namespace, config: Model
) -> tuple[onnx.ModelProto, RotaryEmbedding]:
    """Return a model of the attention of a layer, and its rotation."""
    departures = _departures(args.set or [])
    facts = _changed(config, departures)
    has_mask = args.mask in ("bool", "float")
    if facts.bidirectional_tokens is not None and not facts.causal and not has_mask:
        raise UsageError("--set causal=false needs a mask of these tokens; give --mask bool")
    layer = exported_layer(config, facts, args.layer, args.layer_type, departures)
    options = layer_options(layer)
    if args.weights is not None:
        if args.layer is not None:
            config.at("layer", args.layer, own_keys=True)
        options |= layer_weights(layer, args.weights, departures)
    if args.names == "optimum":
        options["layer"] = args.layer
    options |= _graph_options(args, config)
    rope = _rotation(args, config)
    metadata = _metadata(args, config, departures)
    return export.export_attention(rope, **options, metadata=metadata), rope


def _rotation(args: argparse.Namespace, config: Model) -> RotaryEmbedding:
    """Return the rotation of the layer, for --seq-len, which must have an effect."""
    rope = RotaryEmbedding.from_config(
        config, layer_type=args.layer_type, layer=args.layer, interleaved=args.interleaved
    )
    needed = rope.spec.needs_length
    if needed and args.seq_len is None:
        rule = f"be given, as rope type {rope.rope_type!r} depends on it: {rope.spec.length_ranges}"
        raise ArgumentError("seq_len", None, rule)
    if not needed and args.seq_len is not None:
        rule = f"be left out: rope type {rope.rope_type!r} is the same at every length"
        raise ArgumentError("seq_len", args.seq_len, rule)
    return rope.at_length(args.seq_len) if needed else rope


def _graph_options(args: argparse.Namespace, config: Model) -> dict[str, Any]:
    """Return the options of the graph, as arguments of `export_attention`.

    An operator that rotates looks cos and sin up in tables, which have a row for each position of
    the model by default.
    """
    target = "onnx" if args.cache in (None, "growing") else "ort"
    options = {"target": target} | _given(args, (*GRAPH_OPTIONS, *ATTENTION_GRAPH_OPTIONS))
    needs_tables = TARGETS[options["target"]].attention_rotates
    if needs_tables and "max_position_embeddings" in config.values:
        options.setdefault("max_positions", config.maximum_length)
    return options


def _metadata(
    args: argparse.Namespace, config: Model, departures: Mapping[str, Any]
) -> dict[str, str]:
    """Return the metadata entries for the config, for a layer that is chosen, and for --set.

    The last two begin with --name-prefix, since merged models may not differ in an entry.
    """
    own = {"layer": _given(args, ("layer", "layer_type")), "departures": departures}
    prefix = args.name_prefix or ""
    entries = {f"{prefix}rope_cpu.{key}": json.dumps(value) for key, value in own.items() if value}
    return {"rope_cpu.config": json.dumps(dict(config.source))} | entries


def _departures(settings: Sequence[str]) -> dict[str, Any]:
    """Return {name: value} from the values of all --set; raise UsageError if one is wrong."""
    departures: dict[str, Any] = {}
    for text in settings:
        name, _, value = text.partition("=")
        if name in departures:
            raise UsageError(f"--set {name} is given twice; give it once")
        try:
            departures[name] = _setting(name, value)
        except (KeyError, ValueError):
            raise UsageError(f"--set is {shown(text)}; it must be {_RULE}") from None
    return departures


def _setting(name: str, text: str) -> Any:
    """Return the value of a --set; raise KeyError or ValueError if it breaks its rule."""
    if name in _WORDS:
        return _WORDS[name][text]
    number = None if text == "none" else _NUMBERS[name](text)
    if number is not None and not number > 0:
        raise ValueError(text)
    return number


def _changed(config: Model, departures: Mapping[str, Any]) -> Layer:
    """Return the facts of a model's attention, changed by --set.

    Raises UsageError for a part that is left out, but that a known model does not have.
    """
    facts = config.attention
    for name, value in departures.items():
        field = "has_sinks" if name == "sinks" else name
        own = getattr(facts, field)
        if config.unknown_type is None and not own and value is None:
            raise UsageError(f"--set {name} is none, but the model has no {name}; drop it")
        if value is None and isinstance(own, bool):
            value = False
        facts = replace(facts, **{field: value})
    return replace(facts, window_in_all_layers=True) if "window" in departures else facts
