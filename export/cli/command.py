"""The arguments of `rope-cpu export`, and its run: export, validate, write, report."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.array_types import DTYPES
from rope_cpu.command_line import (
    UsageError,
    add_config_arguments,
    add_pairing_arguments,
    check_file,
    config_from_arguments,
    head_counts,
    integer,
    print_lines,
    write_errors,
)
from rope_cpu.configs.model_config import ModelConfig

from .. import attention_settings, files
from ..checkpoints.layer_attention import layer_type_at
from ..layouts import LAYOUTS
from ..options import POSITIONS
from ..targets import TARGETS
from ..validation.validate import MAX_SEED
from .model_attention import (
    GRAPH_OPTIONS,
    check_without_attention,
    export_model_attention,
    given_options,
    model_metadata,
    rotation,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu export`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--layer",
        type=integer,
        metavar="N",
        help="index of a layer, from 0, instead of its type",
    )
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
        help="rows of cos and sin tables (default: no tables, computed in the graph; for attention "
        "with target ort the config's max_position_embeddings)",
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
        "attention",
        "of one layer, as its config describes it",
    )
    group.add_argument(
        "--attention", action="store_true", help="write attention with a cache and rotated keys"
    )
    group.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="safetensors file, or its index, with the layer's weights; the input is then hidden "
        "states (default: inputs q, k, v, and the model's norms and sinks)",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="depart from the model on purpose, such as window=none, or say what its config does "
        "not; the file's metadata say so",
    )
    group.add_argument(
        "--mask",
        choices=attention_settings.MASKS,
        help="kind of mask that is an input (default: none)",
    )
    group.add_argument(
        "--cache",
        choices=attention_settings.CACHES,
        help="growing: each step returns a longer cache (default); shared: written in place; "
        "fastest with target ort, while onnx reads the whole capacity at each step",
    )
    group.add_argument(
        "--cache-dtype",
        choices=("int8",),
        help="dtype of a shared cache, with scales as inputs (default: that of --dtype)",
    )
    group.add_argument(
        "--name-prefix",
        metavar="PREFIX",
        help="beginning of all names in the graph, for layers that are to be merged",
    )


def run(args: argparse.Namespace) -> int:
    """Export, validate, write the file and print the report.

    Returns 0, or 1 if validation fails; no file is written then.
    """
    check_file(args.output)
    make_model = export_model_attention if args.attention else _export_rotation
    try:
        files.model_path(args.output, "output")
        whole_number("seed", args.seed, 0, MAX_SEED)
        model, rope = make_model(args, config_from_arguments(args))
        report = export.validate(model, rope, seed=args.seed)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    except MemoryError as error:
        raise UsageError(f"there is not enough memory for this: {error}") from error
    # The file is written before anything is printed: printing fails if the reader of a pipe quits.
    if report.passed:
        with write_errors(args.output):
            export.save(model, args.output)
    print_lines(str(report).split("\n"))
    print_lines([f"{args.output} is {'written' if report.passed else 'not written'}"])
    return 0 if report.passed else 1


def _export_rotation(
    args: argparse.Namespace, config: ModelConfig
) -> tuple[onnx.ModelProto, RotaryEmbedding]:
    """Return a model of the rotation alone, and the rotation."""
    check_without_attention(args)
    rope = rotation(args, config)
    layer_type = args.layer_type if args.layer is None else layer_type_at(config, args.layer)
    heads, kv_heads = head_counts(config, layer_type)
    model = export.export_rope(
        rope,
        num_heads=heads,
        num_kv_heads=kv_heads,
        inverse=args.inverse,
        metadata=model_metadata(args, config),
        **given_options(args, GRAPH_OPTIONS),
    )
    return model, rope
