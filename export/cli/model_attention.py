"""`rope-cpu export --attention`: the attention of a model's layer, and refusals of what it is not.

All reasons for a refusal are collected, so that one run of the command shows them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
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

GRAPH_OPTIONS = ("target", "dtype", "layout", "positions", "max_positions", "opset")
CACHE_OPTIONS = ("mask", "cache", "cache_dtype")
ATTENTION_OPTIONS = ("weights", *CACHE_OPTIONS, "window", "softcap", "scale")

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


def _number(text: str) -> float | None:
    return None if text == "none" else float(text)


def _whole_number(text: str) -> int | None:
    return None if text == "none" else int(text)


def _none(text: str) -> None:
    if text != "none":
        raise ValueError


# Parts of a model's attention that --set can leave out, which are fields of `Attention`.
OPTIONAL_PARTS = ("sinks", "qk_norm", "v_norm", "chunk", "query_scale", "clip", "other")

# Names for --set: the values that they take, for error texts, and the function that reads one.
DEPARTURES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "window": ("a number of keys or none", _whole_number),
    "softcap": ("a number or none", _number),
    "scale": ("a number, or none for head_dim^-½", _number),
}
DEPARTURES |= dict.fromkeys(OPTIONAL_PARTS, ("none", _none))


def export_model_attention(
    args: argparse.Namespace, config: ModelConfig
) -> tuple[onnx.ModelProto, RotaryEmbedding]:
    """Return a model of the attention of a layer, and its rotation.

    Raises UsageError with all reasons why the command cannot write it.
    """
    problems = _usage_problems(args)
    departures, departure_problems = _read_departures(args)
    problems += departure_problems
    rope = None
    try:
        rope = rope_from_config(config, args.layer_type, args.interleaved, args.layer)
    except UsageError as error:
        problems.append(str(error))
    else:
        problem = seq_len_problem(args.seq_len, rope)
        problems += [] if problem is None else [problem]
    model_facts = _with_options(config, args)
    model_own, _ = describe_layer(config, model_facts, args.layer, args.layer_type)
    problems += _agreements(departures, model_own)
    facts = _changed(model_facts, departures)
    described, model_problems = describe_layer(config, facts, args.layer, args.layer_type)
    problems += [problem for problem in model_problems if problem not in problems]
    problems += _contradictions(args, config, facts, described)
    if problems or rope is None or described is None:
        raise UsageError(_numbered(problems))
    if args.seq_len is not None:
        rope = rope.at_length(args.seq_len)
    options = (
        described.options()
        | given_options(args, GRAPH_OPTIONS)
        | given_options(args, CACHE_OPTIONS)
    )
    if args.weights is not None:
        options |= layer_weights(
            args.weights, described, config.model_type, args.layer, tuple(departures)
        )
    _print_notes(config, facts)
    metadata = model_metadata(args, config)
    if departures:
        metadata["rope_cpu.departures"] = json.dumps(departures)
    return export.export_attention(rope, **options, metadata=metadata), rope


def _numbered(problems: list[str]) -> str:
    """Return one text of all problems."""
    if len(problems) == 1:
        return problems[0]
    return " ".join(f"({number}) {text}." for number, text in enumerate(problems, 1))


def model_metadata(args: argparse.Namespace, config: ModelConfig) -> dict[str, str]:
    """Return the metadata entries for the config, and for the layer if one is chosen."""
    entries = {"rope_cpu.config": json.dumps(dict(config.source))}
    layer = {"layer": args.layer, "layer_type": args.layer_type}
    chosen = {name: value for name, value in layer.items() if value is not None}
    return entries | ({"rope_cpu.layer": json.dumps(chosen)} if chosen else {})


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


def _read_departures(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return {name: value} from all --set, and problems with them."""
    departures: dict[str, Any] = {}
    problems = []
    for text in args.set:
        name, _, value = text.partition("=")
        if name not in DEPARTURES:
            names = ", ".join(DEPARTURES)
            problems.append(f"--set is {shown(text)}; its name must be one of {names}")
            continue
        rule, read = DEPARTURES[name]
        try:
            departures[name] = read(value)
        except ValueError:
            problems.append(f"--set is {shown(text)}; the value of {name} must be {rule}")
        if name in MODEL_OPTIONS and getattr(args, name) is not None:
            problems.append(f"--set {text} and --{name} are both given; drop --{name}")
    return departures, problems


def _agreements(departures: Mapping[str, Any], described: LayerAttention | None) -> list[str]:
    """Return those of --set that say what the model has; described: the model's own attention."""
    if described is None:
        return []
    problems = []
    for name, value in departures.items():
        if name in MODEL_OPTIONS:
            agrees = _is_close(value, getattr(described, name))
        else:
            agrees = not getattr(described.facts, name)
        if agrees:
            problems.append(f"--set {name} is no departure: the model has that; drop it")
    return problems


def _changed(facts: Attention, departures: Mapping[str, Any]) -> Attention:
    """Return the facts with what --set says."""
    for name, value in departures.items():
        empty: Any = False if isinstance(getattr(facts, name), bool) else None
        facts = replace(facts, **{name: value or empty})
    return replace(facts, window_in_all_layers=True) if "window" in departures else facts


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
    described: LayerAttention | None,
) -> list[str]:
    """Return the options that contradict the model, each with the right value.

    described: None if the config does not determine the layer, on which window and scale depend.
    """
    own: dict[str, float | None] = {"softcap": facts.softcap}
    if described is not None:
        own |= {"window": described.window, "scale": described.scale}
    elif facts.scale is not None:
        own["scale"] = facts.scale
    problems = []
    for name, value in own.items():
        given = getattr(args, name)
        if given is None or _is_close(given, value):
            continue
        place = f"model type {config.model_type}"
        if name == "window" and described is not None and described.layer_type is not None:
            place = f"layers of type {described.layer_type} of {place}"
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
