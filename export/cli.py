"""`rope-cpu export`: write a config's rotation, or its attention, as a validated ONNX file."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import DTYPES
from rope_cpu.command_line import (
    UsageError,
    add_config_arguments,
    add_pairing_arguments,
    check_file,
    config_from_arguments,
    head_counts,
    integer,
    rope_from_config,
    write_errors,
)
from rope_cpu.configs.model_config import ModelConfig

from . import attention_settings, files
from .layouts import LAYOUTS
from .options import POSITIONS
from .targets import TARGETS

ROPE_OPTIONS = ("target", "dtype", "layout", "positions", "max_positions", "opset")
ATTENTION_OPTIONS = ("mask", "window", "softcap", "scale", "normed")

# Config keys that set an option of attention, for error texts.
CONFIG_KEYS = {
    "window": ("sliding_window",),
    "softcap": ("attn_logit_softcapping",),
    "scale": ("attention_multiplier", "query_pre_attn_scalar"),
}

# Relative difference below which two settings are equal: half a unit of the six digits shown.
SETTING_TOLERANCE = 5e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu export`."""
    add_config_arguments(parser)
    add_pairing_arguments(parser)
    _add_rope_arguments(parser)
    _add_attention_arguments(parser)


def _add_rope_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write; large tables go to FILE.data",
    )
    parser.add_argument(
        "--target",
        choices=TARGETS,
        default="onnx",
        help="operators of the graph (default: onnx)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of inputs and outputs (default: float32)",
    )
    parser.add_argument(
        "--opset", type=integer, metavar="N", help="default: the lowest opset of the target"
    )
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="bhsd", help="axes of queries and keys (default: bhsd)"
    )
    parser.add_argument(
        "--positions",
        choices=sorted({*POSITIONS, *attention_settings.POSITIONS}),
        help="source of the positions",
    )
    parser.add_argument(
        "--max-positions",
        type=integer,
        metavar="N",
        help="rows of cos and sin tables (default: no tables, computed in the graph)",
    )
    parser.add_argument(
        "--seq-len",
        type=integer,
        metavar="N",
        help="sequence length, for rope types that depend on it",
    )
    parser.add_argument("--inverse", action="store_true", help="undo the rotation")
    parser.add_argument(
        "--seed", type=integer, default=0, help="seed of the validation's inputs (default: 0)"
    )


def _add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "attention", "of queries, keys and values that are already projected (and normed)"
    )
    group.add_argument(
        "--attention", action="store_true", help="write attention with a cache and rotated keys"
    )
    group.add_argument(
        "--mask",
        choices=attention_settings.MASKS,
        help="kind of mask that is an input (default: none)",
    )
    group.add_argument(
        "--window",
        type=integer,
        metavar="N",
        help="number of keys that a query attends to, its own included; 0: all keys",
    )
    group.add_argument(
        "--softcap", type=float, metavar="C", help="cap scores: C*tanh(score/C); 0: no cap"
    )
    group.add_argument(
        "--normed",
        action="store_true",
        default=None,
        help="q, k (and v) come normed, for models that norm them",
    )
    group.add_argument(
        "--scale", type=float, metavar="S", help="factor of the scores (default: 1/sqrt(head_dim))"
    )


def run(args: argparse.Namespace) -> int:
    """Export, validate, write the file and print the report.

    Returns 0, or 1 if validation fails; no file is written then.
    """
    config = config_from_arguments(args)
    rope = rope_from_config(config, args.layer_type, args.interleaved)
    check_file(args.output)
    check_seq_len(args.seq_len, rope)
    try:
        files.model_path(args.output, "output")
        if args.seq_len is not None:
            rope = rope.at_length(args.seq_len)
        model = _export_model(args, config, rope)
        report = export.validate(model, rope, seed=args.seed)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    except MemoryError as error:
        raise UsageError(f"there is not enough memory for this: {error}") from error
    # The file is written before anything is printed: printing fails if the reader of a pipe quits.
    if report.passed:
        with write_errors(args.output):
            export.save(model, args.output)
    print(report)
    print(f"{args.output} is {'written' if report.passed else 'not written'}")
    return 0 if report.passed else 1


def check_seq_len(seq_len: int | None, rope: RotaryEmbedding) -> None:
    """Raise UsageError if --seq-len is missing, or has no effect."""
    if seq_len is None and rope.spec.needs_length:
        raise UsageError(
            f"rope type {rope.rope_type!r} depends on the sequence length; give it with --seq-len"
        )
    if seq_len is not None and rope.spec.length_rule is None:
        raise UsageError(
            f"--seq-len is {shown(seq_len)}, but rope type {rope.rope_type!r} is the same at every "
            "length; drop --seq-len"
        )


def _export_model(
    args: argparse.Namespace, config: ModelConfig, rope: RotaryEmbedding
) -> onnx.ModelProto:
    heads, kv_heads = head_counts(config, args.layer_type)
    options = {
        **_given_options(args, ROPE_OPTIONS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "metadata": {"rope_cpu.config": json.dumps(dict(config.source))},
    }
    settings = _given_options(args, ATTENTION_OPTIONS)
    if args.attention:
        return _export_attention(args, config, rope, options, settings)
    attention_only = [f"--{name}" for name in settings]
    if args.positions not in (None, *POSITIONS):
        attention_only.insert(0, f"--positions {args.positions}")
    if attention_only:
        raise UsageError(f"{attention_only[0]} is an option of attention; give --attention as well")
    return export.export_rope(rope, **options, inverse=args.inverse)


def _export_attention(
    args: argparse.Namespace,
    config: ModelConfig,
    rope: RotaryEmbedding,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> onnx.ModelProto:
    """Export attention; settings: the options of attention that are given, by name."""
    if args.inverse:
        raise UsageError("--inverse and --attention are both given; attention rotates forward")
    layouts = attention_settings.LAYOUTS
    if args.layout not in layouts:
        raise UsageError(
            f"--layout is {args.layout}; with --attention it is one of {', '.join(layouts)}"
        )
    check_expressible(config, settings)
    check_norms(config, settings)
    check_values(config, rope, settings)
    if not config.is_known:
        print(assumptions(config, settings))
    shared_layers = config.attention.shared_layers
    if shared_layers:
        print(
            f"num_kv_shared_layers is {shared_layers}: the last {shared_layers} layers take an "
            "earlier one's k and v; feed those"
        )
    arguments = {name: value for name, value in settings.items() if name != "normed"}
    for name in ("window", "softcap"):
        if arguments.get(name) == 0:  # 0 stands for none
            del arguments[name]
    return export.export_attention(rope, **options, **arguments, causal=config.attention.causal)


def _given_options(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options that are given, by name."""
    options = {name: getattr(args, name) for name in names}
    return {name: value for name, value in options.items() if value is not None}


def check_expressible(config: ModelConfig, settings: Mapping[str, Any]) -> None:
    """Raise UsageError if the model's attention has a part that cannot be exported."""
    facts = config.attention
    parts = []
    if facts.latent:
        parts.append(
            "latent attention (kv_lora_rank), of which only a part of each head is rotated"
        )
    if facts.sinks:
        parts.append("attention sinks")
    if facts.qk_norm == "after":
        parts.append("norms of q and k after the rotation")
    if facts.chunk:
        parts.append(f"chunks of {facts.chunk} tokens (attention_chunk_size)")
    if facts.query_scale:
        parts.append(f"queries scaled by their position ({facts.query_scale})")
    if facts.other:
        parts.append(f"an attention of its own: {facts.other}")
    if facts.window and not facts.causal and settings.get("window") != 0:
        parts.append(f"a window of {facts.window} on both sides (--window 0 is for layers without)")
    if parts:
        raise UsageError(
            f"the config has {parts[0]}: --attention cannot write it "
            f"(model type {config.model_type})"
        )


def check_norms(config: ModelConfig, settings: Mapping[str, Any]) -> None:
    """Raise UsageError unless --normed is given exactly if the model norms q and k."""
    facts = config.attention
    normed = "normed" in settings
    if facts.v_norm or facts.qk_norm:
        if not normed:
            vectors = "q, k and v" if facts.v_norm else "q and k"
            raise UsageError(
                f"model type {config.model_type} norms {vectors} before the rotation; give "
                "--normed, and feed them normed"
            )
    elif normed and config.is_known:
        raise UsageError(
            f"--normed is given, but model type {config.model_type} does not norm q and k"
        )


def check_values(config: ModelConfig, rope: RotaryEmbedding, settings: Mapping[str, Any]) -> None:
    """Raise UsageError unless window, softcap and scale are those of the model.

    Some layers of a model may have no window, so that 0 is right too; softcap and scale are the
    same in all layers.
    """
    facts = config.attention
    if facts.window is not None and settings.get("window") not in (0, facts.window):
        raise UsageError(
            f"{_source_of_value(config, 'window')}; give --window {facts.window}, or --window 0 "
            "for layers without"
        )
    scale = None if facts.scale == rope.head_dim**-0.5 else facts.scale
    for option, value in {"softcap": facts.softcap, "scale": scale}.items():
        setting = settings.get(option, math.nan)
        if value is not None and not math.isclose(setting, value, rel_tol=SETTING_TOLERANCE):
            raise UsageError(f"{_source_of_value(config, option)}; give --{option} {value:.6g}")


def _source_of_value(config: ModelConfig, option: str) -> str:
    """Return where a model's window, softcap or scale comes from, for an error text."""
    for key in CONFIG_KEYS[option]:
        if config.values.get(key):
            return f"the model has {key} {config.values[key]}"
    return f"model type {config.model_type} has its own {option}"


def assumptions(config: ModelConfig, settings: Mapping[str, Any]) -> str:
    """Return the assumptions of an export for an unknown model type.

    settings: the options of attention that are given, by name.
    """
    assumed = []
    if "normed" not in settings:
        assumed.append("q and k are not normed")
    assumed.append("no attention sinks, chunks or latent attention")
    if "scale" not in settings:
        assumed.append("scores scaled by head_dim^-½")
    assumed.append("causal")
    name = config.model_type
    unknown = (
        "the config has no model_type" if name is None else f"model type {shown(name)} is not known"
    )
    return f"{unknown}; assumed: {', '.join(assumed)}"
