"""`rope-cpu export --attention`: the attention of a model's layer, and refusals of what it is not.

All reasons for a refusal are collected, so that one run of the command shows them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments.texts import shown
from rope_cpu.command_line import UsageError, rope_from_config
from rope_cpu.configs.attention_facts import Attention
from rope_cpu.configs.model_config import ModelConfig

from .. import attention_settings
from ..checkpoints.layer_attention import LayerAttention, describe_layer
from ..checkpoints.layer_weights import layer_weights
from ..options import POSITIONS
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

# Relative difference below which two settings are equal: half a unit of the six digits shown.
SETTING_TOLERANCE = 5e-6


def export_model_attention(
    args: argparse.Namespace, config: ModelConfig
) -> tuple[onnx.ModelProto, RotaryEmbedding]:
    """Return a model of the attention of a layer, and its rotation.

    Raises UsageError with all reasons why the command cannot write it.
    """
    departures, problems = read_departures(args.set)
    problems += _usage_problems(args)
    rope, rope_problems = _rotation(args, config)
    described, model_problems = _described(args, config, departures)
    problems += rope_problems
    problems += [problem for problem in model_problems if problem not in rope_problems]
    if rope is None or described is None:
        raise UsageError(_numbered(problems))
    options = described.options()
    options |= given_options(args, (*GRAPH_OPTIONS, *ATTENTION_GRAPH_OPTIONS))
    options["metadata"] = model_metadata(args, config, departures)
    if problems:
        options["layout"] = attention_settings.LAYOUTS[0]  # another one is a problem already
        raise UsageError(_numbered([*problems, *_export_problems(rope, options)]))
    if args.weights is not None:
        options |= _weights(args, config, described, departures)
    _print_notes(config, described.facts)
    return export.export_attention(rope, **options), rope


def _rotation(
    args: argparse.Namespace, config: ModelConfig
) -> tuple[RotaryEmbedding | None, list[str]]:
    """Return the rotation of the layer, for --seq-len, and problems with it."""
    try:
        rope = rope_from_config(config, args.layer_type, args.interleaved, args.layer)
    except UsageError as error:
        return None, [str(error)]
    problem = seq_len_problem(args.seq_len, rope)
    if problem is not None:
        return None, [problem]
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


def _export_problems(rope: RotaryEmbedding, options: Mapping[str, Any]) -> list[str]:
    """Return the reason for which the export itself refuses these options, if it does."""
    try:
        export.export_attention(rope, **options)
    except (TypeError, ValueError) as error:
        return [str(error)]
    return []


def _weights(
    args: argparse.Namespace,
    config: ModelConfig,
    described: LayerAttention,
    departures: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the weights in the file of --weights, as arguments of the export."""
    left_out = tuple(departures)
    try:
        return layer_weights(args.weights, described, config.model_type, args.layer, left_out)
    except ValueError as error:
        text = str(error).replace("`tensors`", "--weights")
    except OSError as error:
        text = f"cannot read {shown(str(error.filename))}: {error.strerror}"
    raise UsageError(text if "--weights" in text else f"--weights {args.weights}: {text}")


def _numbered(problems: list[str]) -> str:
    """Return one text of all problems."""
    if len(problems) == 1:
        return problems[0]
    return ". ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))


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


def seq_len_problem(seq_len: int | None, rope: RotaryEmbedding) -> str | None:
    """Return the text of a problem if --seq-len is missing, or has no effect."""
    if seq_len is None and rope.spec.needs_length:
        return (
            f"rope type {rope.rope_type!r} depends on the sequence length; give it with --seq-len"
        )
    if seq_len is not None and rope.spec.length_rule is None:
        return (
            f"--seq-len is {shown(seq_len)}, but rope type {rope.rope_type!r} is the same at every "
            "length; drop --seq-len"
        )
    return None


def _usage_problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.inverse:
        problems.append("--inverse and --attention are both given; attention rotates forward")
    layouts = attention_settings.LAYOUTS
    if args.layout not in layouts:
        problems.append(
            f"--layout is {args.layout}; with --attention it is one of {', '.join(layouts)}"
        )
    if args.weights is not None and args.layer is None:
        problems.append("--weights needs the index of a layer; give --layer")
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
        place = f"model type {config.model_type}"
        if name == "window" and own is not None and own.layer_type is not None:
            place = f"layers of type {own.layer_type} of {place}"
        problems.append(
            f"--{name} is {given:g}, but {_model_value(config, name, value)} in {place}; drop it "
            f"or give --{name} {value or 0:.6g}, or depart from the model with --set "
            f"{name}={given or 'none'}"
        )
    return problems


def _is_close(a: float | None, b: float | None) -> bool:
    """Return True for settings that are equal to the digits shown; None is 0."""
    return math.isclose(a or 0, b or 0, rel_tol=SETTING_TOLERANCE)


def _model_value(config: ModelConfig, name: str, value: float | None) -> str:
    """Return the value of a property of the model, with the config key of a value, as text."""
    if not value:
        return f"there is no {name}"
    keys = [key for key in CONFIG_KEYS[name] if config.values.get(key)]
    source = f" ({keys[0]} {config.values[keys[0]]})" if keys else ""
    return f"it is {value:.6g}{source}"


def _print_notes(config: ModelConfig, facts: Attention) -> None:
    """Print the assumptions for an unknown model type, and advice on layers that share keys."""
    if not config.is_known:
        print(assumptions(config, facts))
    if facts.shared_layers:
        print(
            f"num_kv_shared_layers is {facts.shared_layers}: the last {facts.shared_layers} layers "
            "take an earlier one's k and v; feed those"
        )


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
