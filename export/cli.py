"""`rope-cpu export`: write a config's rotation, or its attention, as an ONNX file that has been validated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments.texts import shown
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

from . import attention_options, files
from .layouts import LAYOUTS
from .options import POSITIONS
from .targets import TARGETS

# Options of attention, and the keys of a config that call for them.
ATTENTION_ONLY = ("mask", "window", "softcap", "scale", "normed")
CONFIG_KEYS = {
    "window": ("sliding_window",),
    "softcap": ("attn_logit_softcapping",),
    "scale": ("attention_multiplier", "query_pre_attn_scalar"),
}
DTYPES = tuple(str(dtype) for dtype in TARGETS["primitive"].dtypes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `rope-cpu export`."""
    add_config_arguments(parser)
    add_pairing_arguments(parser)
    add = parser.add_argument
    add(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="where to write; tables may go to FILE.data",
    )
    add(
        "--target",
        choices=TARGETS,
        default="onnx",
        help="what the graph is made of (default: onnx)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of inputs and outputs (default: float32)",
    )
    add(
        "--opset",
        type=integer,
        metavar="N",
        help="default: the lowest that the target can be written in",
    )
    add(
        "--layout", choices=LAYOUTS, default="bhsd", help="axes of queries and keys (default: bhsd)"
    )
    add(
        "--positions",
        choices=sorted({*POSITIONS, *attention_options.POSITIONS}),
        help="how a token's position is known",
    )
    add(
        "--max-positions",
        type=integer,
        metavar="N",
        help="rows of cos and sin tables; without, they are computed",
    )
    add("--seq-len", type=integer, metavar="N", help="the length, for rope types that depend on it")
    add("--inverse", action="store_true", help="undo the rotation")
    add("--seed", type=integer, default=0, help="of what validation draws (default: 0)")
    more = parser.add_argument_group(
        "attention", "of queries, keys and values that are projected (and normed) already"
    )
    more.add_argument(
        "--attention", action="store_true", help="rotate inside attention, with a cache"
    )
    more.add_argument(
        "--mask",
        choices=attention_options.MASKS,
        help="the kind of mask that is an input (default: none)",
    )
    more.add_argument(
        "--window",
        type=integer,
        metavar="N",
        help="attend to N keys at most, its own included; 0: to all",
    )
    more.add_argument(
        "--softcap", type=float, metavar="C", help="cap scores: C·tanh(score/C); 0: not at all"
    )
    more.add_argument(
        "--normed",
        action="store_true",
        default=None,
        help="q, k (and v) come normed, where the model norms them",
    )
    more.add_argument(
        "--scale", type=float, metavar="S", help="of the scores (default: head_dim^-½)"
    )


def run(args: argparse.Namespace) -> int:
    """Export, validate, write the file and print the report; 1, and no file, where validation fails."""
    config = config_from_arguments(args)
    rope = rope_from_config(config, args.layer_type, args.interleaved)
    check_file(args.output)
    if args.seq_len is None and rope.spec.needs_length:
        raise UsageError(
            f"rope type {rope.rope_type!r} depends on the sequence length; give it with --seq-len"
        )
    if args.seq_len is not None and rope.spec.length_rule is None:
        given = f"--seq-len is {shown(args.seq_len)}"
        raise UsageError(f"{given}, but rope type {rope.rope_type!r} is the same at every length")
    try:
        files.checked(args.output)
        rope = rope if args.seq_len is None else rope.at_length(args.seq_len)
        report = export.validate(model := _model(args, config, rope), rope, seed=args.seed)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    except MemoryError as error:
        raise UsageError(f"there is not enough memory for this: {error}") from error
    if (
        report.passed
    ):  # before anything is printed: a reader that has seen enough must not cost the file
        with write_errors(args.output):
            export.save(model, args.output)
    print(report)
    print(f"{args.output} is {'written' if report.passed else 'not written'}")
    return int(not report.passed)


def _model(args: argparse.Namespace, config: ModelConfig, rope: RotaryEmbedding) -> onnx.ModelProto:
    heads, kv_heads = head_counts(config, args.layer_type)
    options = _given(args, "target", "dtype", "layout", "positions", "max_positions", "opset")
    options |= {"num_heads": heads, "num_kv_heads": kv_heads}
    options["metadata"] = {"rope_cpu.config": json.dumps(dict(config.source))}
    given = _given(args, *ATTENTION_ONLY)
    if not args.attention:
        if args.positions not in (None, *POSITIONS):
            raise UsageError(
                f"--positions {args.positions} is an option of attention; give --attention as well"
            )
        if given:
            raise UsageError(
                f"--{next(iter(given))} is an option of attention; give --attention as well"
            )
        return export.export_rope(rope, **options, inverse=args.inverse)
    if args.inverse:
        raise UsageError("--inverse and --attention are both given; attention rotates forward")
    if args.layout not in (layouts := attention_options.LAYOUTS):
        raise UsageError(
            f"--layout is {args.layout}; with --attention it is one of {', '.join(layouts)}"
        )
    check_attention_settings(config, rope, given)
    if not config.is_known:
        print(assumptions(config, given))
    if shared := config.attention.shared_layers:
        print(
            f"num_kv_shared_layers is {shared}: the last {shared} layers take an earlier one's k and v; feed those"
        )
    # A window or softcap of 0 is none.
    settings = {
        name: value
        for name, value in given.items()
        if name != "normed" and (value != 0 or name == "scale")
    }
    return export.export_attention(rope, **options, **settings, causal=config.attention.causal)


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the options that are given, by name."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def check_attention_settings(
    config: ModelConfig, rope: RotaryEmbedding, given: Mapping[str, Any]
) -> None:
    """Raise UsageError where the file would leave out what the model's attention has.

    Layers of a model may differ in their window; softcap and scale are those of all. given: options by name.
    """
    has, values = config.attention, config.values
    refused = {
        "latent attention (kv_lora_rank), of which only a part of each head is rotated": has.latent,
        "attention sinks": has.sinks,
        "norms of q and k after the rotation": has.qk_norm == "after",
        f"chunks of {has.chunk} tokens (attention_chunk_size)": has.chunk,
        f"queries scaled by their position ({has.query_scale})": has.query_scale,
        f"an attention of its own: {has.other}": has.other,
        f"a window of {has.window} on both sides (--window 0 is for layers without)": has.window
        and not has.causal
        and given.get("window") != 0,
    }
    for what, there in refused.items():
        if there:
            raise UsageError(
                f"the config has {what}: --attention cannot write it (model type {config.model_type})"
            )
    norms = "q, k and v" if has.v_norm else "q and k" if has.qk_norm else None
    if norms and "normed" not in given:
        raise UsageError(
            f"model type {config.model_type} norms {norms} before the rotation; give --normed, and feed them normed"
        )
    if config.is_known and not norms and "normed" in given:
        raise UsageError(
            f"--normed is given, but model type {config.model_type} does not norm q and k"
        )
    scale = None if has.scale == rope.head_dim**-0.5 else has.scale
    needed = {"window": has.window, "softcap": has.softcap, "scale": scale}
    for option, value in needed.items():
        none = ", or --window 0 for layers without" if option == "window" else ""
        right = {f"{value or 0:.6g}", *(["0"] if none else [])}
        if value is not None and f"{given.get(option, np.nan):.6g}" not in right:
            key = next((key for key in CONFIG_KEYS[option] if values.get(key)), None)
            source = (
                f"the model has {key} {values[key]}"
                if key
                else f"model type {config.model_type} has its own"
            )
            raise UsageError(f"{source}; give --{option} {value:.6g}{none}")


def assumptions(config: ModelConfig, given: Mapping[str, Any]) -> str:
    """Return what a file for an unknown model type takes for granted; given: options by name."""
    norms = [] if "normed" in given else ["q and k are not normed"]
    scale = [] if "scale" in given else ["scores scaled by head_dim^-½"]
    assumed = ", ".join(
        [*norms, "no attention sinks, chunks or latent attention", *scale, "causal"]
    )
    name = config.model_type
    unknown = (
        "the config has no model_type" if name is None else f"model type {shown(name)} is not known"
    )
    return f"{unknown}; assumed: {assumed}"
