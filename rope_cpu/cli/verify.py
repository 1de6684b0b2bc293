"""`rope-cpu verify`: check the NumPy kernels and the ONNX exports of a config's rotations."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.table import Table

from rope_cpu.arguments.texts import escaped
from rope_cpu.cli.command_line import (
    UsageError,
    add_config_arguments,
    add_pairing_arguments,
    check_file,
    config_from_arguments,
    head_counts,
    write_errors,
)
from rope_cpu.cli.layer_rotations import LayerRotation, rotations_from_arguments
from rope_cpu.cli.verify_rows import TOKENS, Heads, Row, pairing, rows
from rope_cpu.configs.model_config import ModelConfig

# Elements of q: eight times those of the largest models, and some 10 GB of references.
LARGEST = 2**26
PACKAGES = ("rope-cpu", "numpy", "numba", "onnx", "onnxruntime")
WIDTH = 100
LEAST_WIDTH = 80  # the table would lose digits in fewer columns
LEGEND = (
    "max error: largest difference from the exact rotation, or from attention in float64. "
    "of tolerance: largest share of the error allowed to an element, of a rotation ½ ulp + "
    "3·u·A·(|a| + |b|); above 100 % a row fails. Results of 16 bits have most of it from their own "
    "rounding. worst case: the case of that element. Those of ONNX are the cases of "
    "`export.validate`, whose inputs reach thousands."
)
_STYLES = {"ok": "green", "FAIL": "bold red", "not offered": "yellow"}
_HEADER = ("", "dtype", "pairing", "by", "max error", "of tolerance", "worst case", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu verify`."""
    add_config_arguments(parser)
    add_pairing_arguments(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the reports to a JSON file"
    )


def run(args: argparse.Namespace) -> int:
    """Verify each layer type of a config and print its table.

    Returns 1 if a row is out of tolerance, else 0.
    """
    if args.json is not None:
        check_file(args.json)
    config = config_from_arguments(args)
    model = "Llama 3.1 8B" if args.config is None else str(args.config)
    rotations = rotations_from_arguments(config, args)
    heads = [_heads(config, rotation) for rotation in rotations]
    if not any(heads):
        names = ", ".join(rotation.layer_type or "all layers" for rotation in rotations)
        raise UsageError(f"nothing to verify: {names} are not rotated")
    layers: dict[str | None, list[Row]] = {}
    for rotation, counts in zip(rotations, heads, strict=True):
        found = _found(rotation, counts) if counts else []
        _print_layers(model, rotation, counts, found)
        layers[rotation.layer_type] = found
    _print(LEGEND, style="dim")
    if args.json is not None:
        _write_json(args.json, model, layers)
    failed = any(row.verdict == "FAIL" for found in layers.values() for row in found)
    return 1 if failed else 0


def _found(rotation: LayerRotation, heads: Heads) -> list[Row]:
    """Return the rows of a layer type; without a terminal, print a line for each as it is found."""
    console = Console(stderr=True)
    found = []
    with console.status("verifying; the first run compiles kernels for half a minute"):
        for row in rows(rotation.rope, heads):
            found.append(row)
            if not console.is_terminal:
                console.print(f"verified {row.part} {row.dtype} {row.pairing} by {row.by}")
    return found


def _heads(config: ModelConfig, rotation: LayerRotation) -> Heads | None:
    """Return the numbers of heads, None without a rotation; raise UsageError for too many."""
    if not rotation.by_length:
        return None
    heads = head_counts(config, rotation.layer_type)
    head_dim = rotation.rope.head_dim
    if heads[0] * head_dim * TOKENS > LARGEST:
        raise UsageError(
            f"the config has {heads[0]} heads of {head_dim} elements; "
            f"a prefill of {TOKENS} tokens of them is too large to verify"
        )
    return heads


def _print_layers(
    model: str, rotation: LayerRotation, heads: Heads | None, found: Sequence[Row]
) -> None:
    """Print what a layer type rotates, the table of its rows, and why others are not offered."""
    name = model if rotation.layer_type is None else f"{model}, {rotation.layer_type}"
    if heads is None:
        _print(escaped(f"{name}: not rotated") + "\n", markup=False)
        return
    rope = rotation.rope
    facts = f"rope type {rope.rope_type}, {rope.rotary_dim} of {rope.head_dim} elements rotated"
    facts += f" in {pairing(rope)} pairs; q ({heads[0]} heads) and k ({heads[1]})"
    _print(escaped(f"{name}: {facts}"), markup=False)
    _print("")
    _print(_table(found))
    _print("")
    refusals = {f"not offered by {row.by}: {row.refused}": None for row in found if row.refused}
    for line in refusals:
        _print(escaped(line), markup=False, style=_STYLES["not offered"])


def _print(content: str | Table, **options: Any) -> None:
    """Print by rich; captured, since it would end the process if the reader stops reading."""
    columns = get_terminal_size((WIDTH, 0)).columns
    console = Console(highlight=False, width=min(WIDTH, max(LEAST_WIDTH, columns)))
    with console.capture() as captured:
        console.print(content, **options)
    print(re.sub(r" +\n", "\n", captured.get()), end="", flush=True)


def _table(found: Sequence[Row]) -> Table:
    """Return the table of the rows that are offered."""
    table = Table(*_HEADER, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for row in found:
        if row.report is not None:
            worst = row.report.worst
            labels = (row.part, row.dtype, row.pairing, row.by)
            share = "> 1000%" if worst.ratio > 10 else f"{worst.ratio:.1%}"
            figures = (f"{row.report.max_abs_error:.2e}", share, worst.case)
            table.add_row(*labels, *figures, f"[{_STYLES[row.verdict]}]{row.verdict}[/]")
    return table


def _write_json(path: Path, model: str, layers: dict[str | None, list[Row]]) -> None:
    """Write the rows of each layer type, with the outcomes of their reports."""
    entries = [
        {"layer_type": name, "rows": [row.as_dict() for row in found]}
        for name, found in layers.items()
    ]
    versions = {package: version(package) for package in PACKAGES}
    content = {"model": model, "versions": versions, "layers": entries}
    with write_errors(path):
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")
