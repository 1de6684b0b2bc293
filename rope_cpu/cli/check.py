"""`rope-cpu check`: the rotations of an ONNX file, and how far their cos and sin are off."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.cli import command_line, groups
from rope_cpu.export.files import model_path
from rope_cpu.export.foreign_check import FAR, FARTHEST, repaired


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu check`."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="ONNX file of any origin")
    config = "config.json, its folder, or a GGUF file (default: the file's own frequencies)"
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help=config)
    parser.add_argument("--layer-type", metavar="NAME", help="layer type of CONFIG to compare with")
    command_line.add_pairing_arguments(parser)
    parser.add_argument("--fix", action="store_true", help="write exact tables and float64 angles")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file that --fix writes")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Check a file; return 0 if its rotations are right, with --fix those of the new file, else 1.

    Raises UsageError if a file cannot be read, or has no rotation that can be read.
    """
    if args.fix != (args.output is not None):
        raise command_line.UsageError("`--fix` and `-o` need each other")
    ropes, maximum = _expected(args)
    try:
        reports = list(_reports(args, ropes, min(maximum, FARTHEST)))
    except ArgumentError as error:
        subject = str(args.model) if error.argument == "model" else f"`{error.argument}`"
        raise command_line.UsageError(error.text(subject)) from error
    text = json.dumps([_as_dict(report) for report in reports], indent=2)
    lines = text if args.json else "\n\n".join(map(str, reports))
    command_line.print_lines(lines.split("\n"))
    return 0 if reports[-1].passed else 1


def _expected(args: argparse.Namespace) -> tuple[dict[str, RotaryEmbedding], int]:
    """Return the rotations of CONFIG and its maximum length; none, and a default, without it."""
    if args.config is None:
        return {}, FAR
    config = command_line.read_config(args.config)
    found = groups.from_arguments(config, args)
    with command_line.usage_errors():
        expected = {
            f"{group.name} {length}".strip(): rope
            for group in found
            for length, rope in group.ropes.items()
        }
        maximum = config.maximum_length
    if not expected:
        raise command_line.UsageError(f"{args.config} describes no rotation")
    return expected, maximum or FAR


def _reports(
    args: argparse.Namespace, ropes: dict[str, RotaryEmbedding], positions: int
) -> Iterator[export.Report]:
    """Yield the report of a file, and with --fix that of the new file, which is written."""
    if not args.fix:
        yield export.check(args.model, ropes, positions=positions)
        return
    command_line.check_file(args.output)
    model_path(args.output, "output")
    model, before = repaired(str(args.model), ropes, positions)
    yield before
    yield replace(export.check(model, ropes, positions=positions), title=str(args.output))
    with command_line.write_errors(args.output):
        export.save(model, args.output)


def _as_dict(report: export.Report) -> dict[str, Any]:
    """Return a report for JSON."""
    rotations = [
        {
            "names": outcome.case,
            "right": outcome.passed,
            **outcome.facts,
            "against the config": outcome.problem or None,
            "times the tolerance": float(f"{outcome.ratio:.3g}"),
        }
        for outcome in report.outcomes
    ]
    return {"file": report.title, "right": report.passed, "rotations": rotations}
