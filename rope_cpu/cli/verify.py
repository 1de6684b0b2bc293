"""`rope-cpu verify`: check a prefill and a decode step by every implementation of the rotation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rope_cpu.array_types import DTYPES
from rope_cpu.cli.layer_rotations import LayerRotation, rotations_from_arguments
from rope_cpu.cli.verify_attention import (
    ATTENTION_DTYPES,
    AttentionRow,
    attention_operations,
    attention_rows,
)
from rope_cpu.cli.verify_cases import Operation, Row, numpy_operation, onnx_operation, rows
from rope_cpu.cli.verify_report import VerifiedLayers, json_report, print_report
from rope_cpu.command_line import (
    UsageError,
    add_config_arguments,
    add_pairing_arguments,
    check_file,
    config_from_arguments,
    head_counts,
    in_both_pairings,
    write_errors,
)
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.warmup import compile_kernels, kernel_builds

TOKENS = 512
# Elements of q: eight times those of the largest models, and some 10 GB of references.
LARGEST = 2**26
TARGET_NAMES = ("primitive", "onnx", "ort")
OPERATIONS: dict[str, Operation] = {
    "numpy": numpy_operation,
    **{target: partial(onnx_operation, target) for target in TARGET_NAMES},
}
ATTENTION_OPERATIONS = attention_operations(TARGET_NAMES)
PAIRINGS = ("half-split", "interleaved")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu verify`."""
    add_config_arguments(parser)
    add_pairing_arguments(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the tables to a JSON file"
    )


def run(args: argparse.Namespace) -> int:
    """Verify each layer type of a config and print the tables.

    Returns 1 if a row is out of tolerance, else 0.
    """
    if args.json is not None:
        check_file(args.json)
    config = config_from_arguments(args)
    layers = [_unmeasured(config, rotation) for rotation in rotations_from_arguments(config, args)]
    if all(group.rope is None for group in layers):
        names = ", ".join(group.layer_type or "all layers" for group in layers)
        raise UsageError(f"nothing to verify: {names} are not rotated")
    layers = _measured_with_progress(layers)
    model = "Llama 3.1 8B" if args.config is None else str(args.config)
    print_report(model, layers, TOKENS)
    passed = all(group.passed for group in layers)
    if args.json is not None:
        text = json.dumps(json_report(model, layers, TOKENS, passed), indent=2, allow_nan=False)
        with write_errors(args.json):
            args.json.write_text(f"{text}\n", "utf-8")
    return 0 if passed else 1


def _unmeasured(config: ModelConfig, rotation: LayerRotation) -> VerifiedLayers:
    """Return a layer type without rows; raise UsageError if it cannot be verified."""
    if not rotation.by_length:
        return VerifiedLayers(rotation.layer_type)
    heads = head_counts(config, rotation.layer_type)
    rope = rotation.rope
    if heads[0] * rope.head_dim * TOKENS > LARGEST:
        raise UsageError(
            f"the config has {heads[0]} heads of {rope.head_dim} elements; "
            f"a prefill of {TOKENS} tokens of them is too large to verify"
        )
    return VerifiedLayers(rotation.layer_type, rope, heads)


def _measured_with_progress(layers: Sequence[VerifiedLayers]) -> list[VerifiedLayers]:
    """Compile the kernels and measure all rows, with a progress bar on a terminal."""
    console = Console(stderr=True)
    rotated = sum(group.rope is not None for group in layers)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        _load_kernels(progress)
        of_rotation = len(DTYPES) * len(PAIRINGS) * len(OPERATIONS)
        of_attention = len(ATTENTION_DTYPES) * len(ATTENTION_OPERATIONS)
        task = progress.add_task("rotating", total=rotated * (of_rotation + of_attention))
        measured = []
        for group in layers:
            group_rows = []
            for row in _rows(group):
                group_rows.append(row)
                text = f"{row.dtype} {row.pairing}, {row.operation}: {row.verdict}"
                progress.update(task, advance=1, description=text)
            attended = []
            for attended_row in _attention_rows(group):
                attended.append(attended_row)
                text = f"attention, {attended_row.dtype}, {attended_row.operation}"
                progress.update(task, advance=1, description=f"{text}: {attended_row.verdict}")
            measured.append(replace(group, rows=group_rows, attention=attended))
    return measured


def _rows(group: VerifiedLayers) -> Iterator[Row]:
    """Measure a layer type in both pairings; yield nothing if it is not rotated."""
    if group.rope is None:
        return
    ropes = dict(zip(PAIRINGS, in_both_pairings(group.rope.spec), strict=True))
    yield from rows(ropes, group.heads, TOKENS, OPERATIONS)


def _attention_rows(group: VerifiedLayers) -> Iterator[AttentionRow]:
    """Measure a decode step of attention in the layers' own pairing; nothing if not rotated."""
    if group.rope is not None:
        yield from attention_rows(group.rope, group.heads, ATTENTION_OPERATIONS)


def _load_kernels(progress: Progress) -> None:
    dtypes = list(DTYPES)
    builds = kernel_builds(dtypes)
    task = progress.add_task("loading kernels", total=len(builds))
    announced = False
    for kernel in compile_kernels(builds):
        if kernel.compiled and not announced:
            progress.console.print(
                "compiling kernels: this takes up to a minute, once for this machine"
            )
            announced = True
        progress.update(task, advance=1, description=kernel.name)
    progress.remove_task(task)
