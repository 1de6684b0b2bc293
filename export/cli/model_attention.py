"""`rope-cpu export --attention`: the attention of a model's layer, and refusals of what it is not.

All reasons for a refusal are collected, so that one run of the command shows them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.command_line import UsageError, print_lines, rope_from_config
from rope_cpu.configs.attention_facts import Attention
from rope_cpu.configs.model_config import ModelConfig

from .. import attention_settings
from ..checkpoints.layer_attention import LayerAttention, describe_layer
from ..checkpoints.layer_weights import layer_weights
from ..options import POSITIONS
from ..problems import numbered, problems_in
from .departures import changed, read_departures

GRAPH_OPTIONS = ("target", "dtype", "layout", "positions", "max_positions", "opset")
ATTENTION_GRAPH_OPTIONS = ("mask", "cache", "cache_dtype", "name_prefix")
ATTENTION_OPTIONS = ("weights", *ATTENTION_GRAPH_OPTIONS, "window", "softcap", "scale")

# Options that state a property of the model.
MODEL_OPTIONS = ("window", "softcap", "scale")

# Config keys that set these, for error texts.
CONFIG_KEYS = {
    "window": ("sliding_window",),
    "softcap": ("attn_logit_softcapping",),
    "scale": ("attention_multiplier", "query_pre_attn_scalar"),
}

# Head_dim of the layer that stands for an unknown one, which every target can express.
STAND_IN_WIDTH = 16

# Relative difference below which two settings are equal: half a unit of the six digits shown.
SETTING_TOLERANCE = 5e-6


def export_model_attention(
    args: argparse.Namespace, config: ModelConfig, problems: Sequence[str]
) -> tuple[onnx.ModelProto, RotaryEmbedding]:
    """Return a model of the attention of a layer, and its rotation.

    Raises UsageError with all reasons why the command cannot write it; problems: those that are
    known already.
    """
    departures, _ = read_departures(args.set)
    rope, rope_problems = _rotation(args, config)
    described, model_problems = _described(args, config, departures)
    weights: dict[str, Any] = {}
    weight_problems: list[str] = []
    found = [*problems, *usage_problems(args)]
    if described is not None and not model_problems:
        weights, weight_problems = _weights(args, config, described, departures)
    found += [*rope_problems, *model_problems, *weight_problems]
    if found or rope is None or described is None:
        found += graph_problems(args, rope, described)
        raise UsageError(numbered(list(dict.fromkeys(found))))
    metadata = model_metadata(args, config, departures)
    options = described.options() | _graph_options(args) | weights
    try:
        model = export.export_attention(rope, **options, metadata=metadata)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    _print_notes(config, described.facts)
    return model, rope


def _rotation(
    args: argparse.Namespace, config: ModelConfig
) -> tuple[RotaryEmbedding | None, list[str]]:
    """Return the rotation of the layer, for --seq-len, and problems with it."""
    try:
        rope = rope_from_config(config, args.layer_type, args.interleaved, args.layer)
    except UsageError as error:
        return None, [str(error)]
    problems = seq_len_problems(args.seq_len, rope)
    if problems:
        return None, problems
    return rope if args.seq_len is None else rope.at_length(args.seq_len), []


def _described(
    args: argparse.Namespace, config: ModelConfig, departures: Mapping[str, Any]
) -> tuple[LayerAttention | None, list[str]]:
    """Return the attention to write, and why it cannot be written or is not the model's."""
    own_facts = _with_options(config, args)
    own, _ = describe_layer(config, own_facts, args.layer, args.layer_type)
    facts = changed(own_facts, departures)
    described, problems = describe_layer(config, facts, args.layer, args.layer_type)
    problems += _contradictions(args, config, own_facts, own, departures)
    if own is not None and described is not None:
        problems += _agreements(departures, described, own)
    return described, problems


def _graph_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the graph that are given, as arguments of the export."""
    return given_options(args, (*GRAPH_OPTIONS, *ATTENTION_GRAPH_OPTIONS))


def graph_problems(
    args: argparse.Namespace,
    rope: RotaryEmbedding | None = None,
    described: LayerAttention | None = None,
) -> list[str]:
    """Return all reasons for which the export itself refuses these options.

    A small layer stands for one that the config does not determine.
    """
    if rope is None or described is None or None in (described.num_heads, described.num_kv_heads):
        rope = RotaryEmbedding(STAND_IN_WIDTH)
        options: dict[str, Any] = {"num_heads": 1}
    else:
        options = described.options()
    options |= _graph_options(args)
    if options["layout"] not in attention_settings.LAYOUTS:
        del options["layout"]  # a problem already
    try:
        export.export_attention(rope, **options)
    except (TypeError, ValueError) as error:
        return problems_in(error)
    return []


def _weights(
    args: argparse.Namespace,
    config: ModelConfig,
    described: LayerAttention,
    departures: Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Return the weights in the file of --weights, as arguments of the export, and problems."""
    if args.weights is None or args.layer is None:
        return {}, []
    left_out = tuple(departures)
    try:
        return layer_weights(args.weights, described, config.model_type, args.layer, left_out), []
    except ValueError as error:
        text = str(error).replace("`tensors`", "--weights")
    except OSError as error:
        text = f"cannot read {shown(str(error.filename))}: {error.strerror}"
    return {}, [text if "--weights" in text else f"--weights {args.weights}: {text}"]


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


def attention_only_options(args: argparse.Namespace) -> list[str]:
    """Return the options that are given, but need --attention."""
    options = [f"--{name.replace('_', '-')}" for name in given_options(args, ATTENTION_OPTIONS)]
    if args.set:
        options.insert(0, "--set")
    if args.positions not in (None, *POSITIONS):
        options.insert(0, f"--positions {args.positions}")
    return options


def seq_len_problems(seq_len: int | None, rope: RotaryEmbedding) -> list[str]:
    """Return a problem if --seq-len is missing, has no effect, or is no length."""
    if seq_len is None and rope.spec.needs_length:
        return [
            f"rope type {rope.rope_type!r} depends on the sequence length; give it with --seq-len"
        ]
    if seq_len is None:
        return []
    if rope.spec.length_rule is None:
        return [
            f"--seq-len is {shown(seq_len)}, but rope type {rope.rope_type!r} is the same at every "
            "length; drop --seq-len"
        ]
    try:
        rope.at_length(seq_len)
    except ValueError as error:
        return [str(error)]
    return []


def usage_problems(args: argparse.Namespace) -> list[str]:
    """Return problems with options that do not depend on the model."""
    _, problems = read_departures(args.set)
    if args.inverse:
        problems.append("--inverse and --attention are both given; attention rotates forward")
    layouts = attention_settings.LAYOUTS
    if args.layout not in layouts:
        problems.append(
            f"--layout is {args.layout}; with --attention it is one of {', '.join(layouts)}"
        )
    if args.weights is not None and args.layer is None:
        problems.append("--weights needs the index of a layer; give --layer")
    if args.weights is not None and args.layout == "bshd":
        problems.append(
            "--layout is bshd, but with --weights the input is hidden states (batch, seq, in); "
            "drop --layout"
        )
    return problems


def _agreements(
    departures: Mapping[str, Any], described: LayerAttention, own: LayerAttention
) -> list[str]:
    """Return those of --set that say what the model has.

    described: the attention with them. own: that of the model.
    """
    problems = []
    for name in departures:
        if name in MODEL_OPTIONS:
            agrees = _is_close(getattr(described, name), getattr(own, name))
        else:
            agrees = not getattr(own.facts, name)
        if agrees:
            problems.append(f"--set {name} is no departure: the model has that; drop it")
    return problems


def _with_options(config: ModelConfig, args: argparse.Namespace) -> Attention:
    """Return the facts of the model, with options for those that are not known.

    The window of a layer is not known if the config has one, but no layer types.
    """
    facts = config.attention
    if not config.is_known:
        for name in MODEL_OPTIONS:
            if getattr(facts, name) is None:
                unknown: dict[str, Any] = {name: getattr(args, name) or None}
                facts = replace(facts, **unknown)
    knows_window = facts.window_in_all_layers or bool(config.values.get("layer_types"))
    if not knows_window and args.window in (0, facts.window):
        facts = replace(facts, window=args.window, window_in_all_layers=True)
    return facts


def _contradictions(
    args: argparse.Namespace,
    config: ModelConfig,
    facts: Attention,
    own: LayerAttention | None,
    departures: Mapping[str, Any],
) -> list[str]:
    """Return the options that contradict the model, each with the right value.

    own: None if the config does not determine the layer, on which window and scale depend.
    """
    values: dict[str, float | None] = {"softcap": facts.softcap}
    if own is not None:
        values |= {"window": own.window, "scale": own.scale}
    elif facts.scale is not None:
        values["scale"] = facts.scale
    problems = []
    for name, value in values.items():
        given = getattr(args, name)
        if given is None:
            continue
        if name in departures:
            problems.append(f"--set {name} and --{name} are both given; drop --{name}")
            continue
        if _is_close(given, value):
            continue
        place = f"model type {cut(str(config.model_type))}"
        if name == "window" and own is not None and own.layer_type is not None:
            place = f"layers of type {cut(own.layer_type)} of {place}"
        problem = (
            f"--{name} is {given:g}, but {_model_value(config, name, value)} in {place}; drop it "
            f"or give --{name} {value or 0:.6g}"
        )
        setting = f"{name}={given or 'none'}"
        if not read_departures([setting])[1]:
            problem += f", or depart from the model with --set {setting}"
        problems.append(problem)
    return problems


def _is_close(a: float | None, b: float | None) -> bool:
    """Return True for settings that are equal to the digits shown; None is 0."""
    return math.isclose(a or 0, b or 0, rel_tol=SETTING_TOLERANCE)


def _model_value(config: ModelConfig, name: str, value: float | None) -> str:
    """Return the value of a property of the model, with the config key of a value, as text."""
    if not value:
        return f"there is no {name}"
    keys = [key for key in CONFIG_KEYS[name] if config.values.get(key)]
    source = f" ({keys[0]} {shown(config.values[keys[0]])})" if keys else ""
    return f"it is {value:.6g}{source}"


def _print_notes(config: ModelConfig, facts: Attention) -> None:
    """Print the assumptions for an unknown model type, and advice on layers that share keys."""
    if not config.is_known:
        print_lines([assumptions(config, facts)])
    if facts.shared_layers:
        note = (
            f"num_kv_shared_layers is {facts.shared_layers}: the last {facts.shared_layers} layers "
            "take an earlier one's k and v; feed those"
        )
        print_lines([note])


def assumptions(config: ModelConfig, facts: Attention) -> str:
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
