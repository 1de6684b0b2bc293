"""`rope-cpu export --attention`: the attention of a model's layer, as its config describes it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.command_line import UsageError, print_lines, rope_from_config
from rope_cpu.configs.attention_facts import Attention
from rope_cpu.configs.model_config import ModelConfig

from .. import attention_settings
from ..checkpoints.layer_attention import LayerAttention, describe_layer
from ..checkpoints.layer_weights import layer_weights
from ..options import POSITIONS
from ..targets import TARGETS
from .departures import changed, read_departures

GRAPH_OPTIONS = ("target", "dtype", "layout", "positions", "max_positions", "opset")
ATTENTION_GRAPH_OPTIONS = ("mask", "cache", "cache_dtype", "name_prefix")
ATTENTION_OPTIONS = ("weights", *ATTENTION_GRAPH_OPTIONS)


def export_model_attention(
    args: argparse.Namespace, config: ModelConfig
) -> tuple[onnx.ModelProto, RotaryEmbedding]:
    """Return a model of the attention of a layer, and its rotation."""
    _check_usage(args)
    departures = read_departures(args.set)
    facts = changed(config.attention, departures)
    described = describe_layer(config, facts, args.layer, args.layer_type)
    rope = rotation(args, config)
    options = described.options() | _graph_options(args, config)
    if args.weights is not None:
        options |= _weights(args, config, described, departures)
    metadata = model_metadata(args, config, departures)
    model = export.export_attention(rope, **options, metadata=metadata)
    _print_notes(config, facts)
    return model, rope


def _check_usage(args: argparse.Namespace) -> None:
    """Raise UsageError for options that are wrong with --attention, whatever the model."""
    if args.inverse:
        raise UsageError(
            "--inverse and --attention are both given; attention rotates forward; drop --inverse"
        )
    layouts = attention_settings.LAYOUTS
    if args.layout not in layouts:
        raise UsageError(
            f"--layout is {args.layout}; with --attention it is one of {', '.join(layouts)}"
        )
    if args.weights is not None and args.layer is None:
        raise UsageError("--weights needs the index of a layer; give --layer")
    if args.weights is not None and args.layout == "bshd":
        raise UsageError(
            "--layout is bshd, but with --weights the input is hidden states (batch, seq, in); "
            "drop --layout"
        )


def rotation(args: argparse.Namespace, config: ModelConfig) -> RotaryEmbedding:
    """Return the rotation of the layer, for --seq-len.

    Raises UsageError if --seq-len is missing or has no effect.
    """
    rope = rope_from_config(config, args.layer_type, args.interleaved, args.layer)
    if args.seq_len is None:
        if rope.spec.needs_length:
            raise UsageError(
                f"rope type {rope.rope_type!r} depends on the sequence length; give it with "
                "--seq-len"
            )
        return rope
    if rope.spec.length_rule is None:
        raise UsageError(
            f"--seq-len is {shown(args.seq_len)}, but rope type {rope.rope_type!r} is the same at "
            "every length; drop --seq-len"
        )
    return rope.at_length(args.seq_len)


def _graph_options(args: argparse.Namespace, config: ModelConfig) -> dict[str, Any]:
    """Return the options of the graph, as arguments of the export.

    An operator that rotates looks cos and sin up in tables, which have a row for each position of
    the model by default.
    """
    options = given_options(args, (*GRAPH_OPTIONS, *ATTENTION_GRAPH_OPTIONS))
    key = "max_position_embeddings"
    needs_tables = TARGETS[args.target].attention_rotates
    if needs_tables and args.max_positions is None and key in config.values:
        options["max_positions"] = whole_number(key, config.values[key], 1, limits.TABLE)
    return options


def _weights(
    args: argparse.Namespace,
    config: ModelConfig,
    described: LayerAttention,
    departures: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the weights in the file of --weights, as arguments of the export."""
    try:
        return layer_weights(
            args.weights, described, config.model_type, args.layer, tuple(departures)
        )
    except ValueError as error:
        text = str(error)
    except OSError as error:
        text = f"cannot read {shown(str(error.filename))}: {error.strerror}"
    raise UsageError(f"--weights {args.weights}: {text}")


def model_metadata(
    args: argparse.Namespace, config: ModelConfig, departures: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the metadata entries for the config, for a layer that is chosen, and for --set.

    The last two begin with --name-prefix, since merged models may not differ in an entry.
    """
    layer = {"layer": args.layer, "layer_type": args.layer_type}
    own = {
        "layer": {name: value for name, value in layer.items() if value is not None},
        "departures": departures,
    }
    prefix = args.name_prefix or ""
    entries = {f"{prefix}rope_cpu.{key}": json.dumps(value) for key, value in own.items() if value}
    return {"rope_cpu.config": json.dumps(dict(config.source))} | entries


def given_options(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of these names that are given."""
    options = {name: getattr(args, name) for name in names}
    return {name: value for name, value in options.items() if value is not None}


def check_without_attention(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that needs --attention."""
    options = [f"--{name.replace('_', '-')}" for name in given_options(args, ATTENTION_OPTIONS)]
    if args.set:
        options.append("--set")
    if args.positions not in (None, *POSITIONS):
        options.append(f"--positions {args.positions}")
    if options:
        raise UsageError(f"{options[0]} is an option of attention; give --attention as well")


def _print_notes(config: ModelConfig, facts: Attention) -> None:
    """Print the assumptions for an unknown model type, and advice on layers that share keys."""
    if not config.is_known:
        print_lines([_assumptions(config, facts)])
    if facts.shared_layers:
        note = (
            f"num_kv_shared_layers is {facts.shared_layers}: the last {facts.shared_layers} layers "
            "take an earlier one's k and v; feed those"
        )
        print_lines([note])


def _assumptions(config: ModelConfig, facts: Attention) -> str:
    """Return the assumptions of an export for an unknown model type."""
    assumed = ["q and k are not normed", "no attention sinks, chunks or latent attention"]
    if facts.scale is None:
        assumed.append("scores scaled by head_dim^-½")
    assumed.append("causal")
    name = config.model_type
    unknown = (
        "the config has no model_type" if name is None else f"model type {shown(name)} is not known"
    )
    return f"{unknown}; assumed: {', '.join(assumed)}"
