"""`rope-cpu export`: write a config's rotation, or its attention, as an ONNX file that has been validated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.cli.common import (
    UsageError,
    add_config_arguments,
    add_pairing_arguments,
    check_file,
    config_of,
    heads_of,
    rope_of,
    writing,
)
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.rope_parameters import latent
from rope_cpu.export import files
from rope_cpu.export.attention_options import LAYOUTS as ATTENTION_LAYOUTS
from rope_cpu.export.attention_options import MASKS
from rope_cpu.export.attention_options import POSITIONS as ATTENTION_POSITIONS
from rope_cpu.export.layouts import LAYOUTS
from rope_cpu.export.options import POSITIONS
from rope_cpu.export.targets import TARGETS

DTYPES = tuple(str(dtype) for dtype in TARGETS["primitive"].dtypes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `rope-cpu export`."""
    add_config_arguments(parser)
    add_pairing_arguments(parser)
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="where to write; tables may go to FILE.data")
    add("--target", choices=TARGETS, default="onnx", help="what the graph is made of (default: onnx)")
    add("--dtype", choices=DTYPES, default="float32", help="of inputs and outputs (default: float32)")
    add("--opset", type=int, metavar="N", help="default: the lowest that the target can be written in")
    add("--layout", choices=LAYOUTS, default="bhsd", help="axes of queries and keys (default: bhsd)")
    add("--positions", choices=sorted({*POSITIONS, *ATTENTION_POSITIONS}), help="how a token's position is known")
    add("--max-positions", type=int, metavar="N", help="rows of cos and sin tables; without, they are computed")
    add("--seq-len", type=int, metavar="N", help="the length, for rope types that depend on it")
    add("--inverse", action="store_true", help="undo the rotation")
    add("--seed", type=int, default=0, help="of what validation draws (default: 0)")
    more = parser.add_argument_group("attention", "of queries, keys and values that are projected (and normed) already")
    more.add_argument("--attention", action="store_true", help="rotate inside attention, with a cache")
    more.add_argument("--mask", choices=MASKS, help="the kind of mask that is an input (default: none)")
    more.add_argument("--window", type=int, metavar="N", help="attend to N keys at most, its own included; 0: to all")
    more.add_argument("--softcap", type=float, metavar="C", help="cap scores: C·tanh(score/C); 0: not at all")
    more.add_argument("--scale", type=float, metavar="S", help="of the scores (default: head_dim^-½)")


def run(args: argparse.Namespace) -> int:
    """Export, validate, write the file and print the report; 1, and no file, where validation fails."""
    config = config_of(args)
    rope = rope_of(config, args.layer_type, args.interleaved)
    check_file(args.output)
    if args.seq_len is None and rope.spec.needs_length:
        raise UsageError(f"rope type {rope.rope_type!r} depends on the sequence length; say it with --seq-len")
    if args.seq_len is not None and rope.spec.length_rule is None:
        raise UsageError(f"--seq-len is {args.seq_len}, but rope type {rope.rope_type!r} is the same at every length")
    try:
        files.checked(args.output)
        rope = rope if args.seq_len is None else rope.at_length(args.seq_len)
        report = export.validate(model := _model(args, config, rope), rope, seed=args.seed)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    except MemoryError as error:
        raise UsageError(f"there is not enough memory for this: {error}") from error
    if report.passed:  # before anything is printed: a reader that has seen enough must not cost the file
        with writing(args.output):
            export.save(model, args.output)
    print(report)
    print(f"{args.output} is {'written' if report.passed else 'not written'}")
    return int(not report.passed)


def _model(args: argparse.Namespace, config: ModelConfig, rope: RotaryEmbedding) -> onnx.ModelProto:
    heads, kv_heads = heads_of(config)
    chosen: dict[str, Any] = {
        "target": args.target,
        "dtype": args.dtype,
        "layout": args.layout,
        "max_positions": args.max_positions,
        "opset": args.opset,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "metadata": {"rope_cpu.config": json.dumps(dict(config.source))},
    }
    if args.positions is not None:
        chosen["positions"] = args.positions
    of_attention = {name: getattr(args, name) for name in ("mask", "window", "softcap", "scale")}
    given = {name: value for name, value in of_attention.items() if value is not None}
    if not args.attention:
        if args.positions not in (None, *POSITIONS):
            raise UsageError(f"--positions {args.positions} is an option of attention; give --attention as well")
        if given:
            raise UsageError(f"--{next(iter(given))} is an option of attention; give --attention as well")
        return export.export_rope(rope, **chosen, inverse=args.inverse)
    if args.inverse:
        raise UsageError("--inverse and --attention are both given; attention rotates forward")
    if args.layout not in ATTENTION_LAYOUTS:
        raise UsageError(f"--layout is {args.layout}; with --attention it is one of {', '.join(ATTENTION_LAYOUTS)}")
    _hear(config, rope, given)
    for name in ("window", "softcap"):
        if given.get(name) == 0:
            del given[name]
    return export.export_attention(rope, **chosen, **given)


def _hear(config: ModelConfig, rope: RotaryEmbedding, given: dict[str, Any]) -> None:
    """Refuse to pass over what a config says about its attention: layers may differ, so the user has to say it."""
    text = values = config.values
    if latent(values) or ("kv_lora_rank" in values and values.get("use_mla", True)):
        raise UsageError("the config has latent attention (kv_lora_rank), of which only a part of each head is rotated")
    scalar = text.get("query_pre_attn_scalar")
    said = {
        "sliding_window": ("window", text.get("sliding_window") if text.get("use_sliding_window", True) else None),
        "attn_logit_softcapping": ("softcap", text.get("attn_logit_softcapping")),
        "attention_multiplier": ("scale", text.get("attention_multiplier")),
        "query_pre_attn_scalar": ("scale", None if not scalar else scalar**-0.5),
    }
    for key, (option, value) in said.items():
        default = option == "scale" and value == rope.head_dim**-0.5
        if value is not None and not default and option not in given:
            none = "" if option == "scale" else f", or --{option} 0 for layers without"
            raise UsageError(f"the config has {key} {text[key]}; give --{option} {value:.6g}{none}")
