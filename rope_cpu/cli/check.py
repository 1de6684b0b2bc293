"""`rope-cpu check`: the rotations of an ONNX file, and how far their cos and sin are off."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.inliner

from rope_cpu import RotaryEmbedding, export
from rope_cpu.accuracy.tolerance import compare, half_ulp, table_bound
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Float64
from rope_cpu.cli.layer_rotations import maximum_context, pair_frequencies, rotations_from_arguments
from rope_cpu.command_line import (
    UsageError,
    add_pairing_arguments,
    check_file,
    print_lines,
    read_config,
    write_errors,
)
from rope_cpu.export.files import model_path
from rope_cpu.export.foreign import CHUNK, DEVIATIONS, SAME, ForeignGraph, Rotation, rounding
from rope_cpu.export.graph import FLOAT32, HALF

# Positions below which errors are measured, besides the end of tables. The second stands for the
# model's maximum where no config says it.
NEAR = 4096
FAR = 131072

# A frequency that turns nothing.
STILL = 1e-12

PAIRINGS = {True: "interleaved", False: "half-split", None: "not found"}
TOLERANCE = "½ ulp (of 16 bits with that of float32) + 1e-9·A, and the uncertainty of a fit"

# Columns of values, on a screen of 80.
WIDTH = 50

# What is known of a rotation, by name.
Facts = dict[str, Any]


class Expected(NamedTuple):
    """A rotation of the config: its layers in words, and its facts."""

    layers: str
    rope: RotaryEmbedding
    facts: Facts


class Finding(NamedTuple):
    """A rotation of the file, its facts, its differences from the nearest one of the config.

    exact: the rotation that it ought to be, the nearest one or its own.
    """

    rotation: Rotation
    facts: Facts
    differences: Sequence[str]
    exact: RotaryEmbedding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu check`."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="ONNX file of any origin")
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help="config.json of the model, its folder, or a GGUF file (default: cos and sin are "
        "compared with those of the file's own frequencies)",
    )
    parser.add_argument(
        "--layer-type", metavar="NAME", help="layer type, for a file with layers of one type"
    )
    add_pairing_arguments(parser)
    parser.add_argument(
        "--fix", action="store_true", help="write exact tables, and angles computed in float64"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file that --fix writes")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Check a file; return 0 if its rotations are right, with --fix those of the new file, else 1.

    Raises UsageError if a file cannot be read, or has no rotation that can be read.
    """
    if args.fix != (args.output is not None):
        raise UsageError("`--fix` and `-o` need each other")
    if args.fix:
        check_file(args.output)
        try:
            model_path(args.output, "output")
        except ValueError as error:
            raise UsageError(str(error)) from error
    expected, maximum = _expected(args)
    model = _load(args.model, with_tables=args.fix)
    found = check(model, args.model, expected, maximum)
    reports = [_report(args.model, found, expected)]
    if args.fix:
        fix(found, len(expected))
        reports.append(_report(args.output, check(model, args.output, expected, maximum), expected))
        with write_errors(args.output):
            export.save(model, args.output)
    if args.json:
        print_lines(json.dumps(reports, indent=2).split("\n"))
    else:
        print_lines(line for report in reports for line in _lines(report))
    return 0 if reports[-1]["right"] else 1


def _expected(args: argparse.Namespace) -> tuple[list[Expected], int]:
    """Return the rotations of CONFIG and its maximum length; none, and 0, without it."""
    if args.config is None:
        return [], 0
    config = read_config(args.config)
    expected = [
        Expected(rotation.layers, one_axis, facts(one_axis, rope.interleaved))
        for rotation in rotations_from_arguments(config, args)
        for rope in rotation.by_length.values()
        for one_axis in [_rope(pair_frequencies(rope), rope.attention_factor)]
    ]
    if not expected:
        raise UsageError(f"{args.config} describes no rotation")
    return expected, maximum_context(config.values)


def _rope(inv_freq: Float64, factor: float) -> RotaryEmbedding:
    return RotaryEmbedding.from_inv_freq(inv_freq, attention_factor=factor)


def _load(path: Path, with_tables: bool) -> onnx.ModelProto:
    """Return the model in a file, with its local functions inlined."""
    with _read_errors(path):
        model = onnx.load(path, format="protobuf", load_external_data=with_tables)
        return onnx.inliner.inline_local_functions(model) if model.functions else model


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Convert an error of the enclosed block, which reads a file of any content."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # onnx, onnxruntime and protobuf have no common class of errors
        raise UsageError(f"{path} cannot be read: {cut(str(error))}") from error


def check(
    model: onnx.ModelProto, path: Path, expected: Sequence[Expected], maximum: int
) -> list[Finding]:
    """Return the rotations of a model; path: its file. Raises UsageError if there are none."""
    with _read_errors(path):
        graph = ForeignGraph(model, os.path.dirname(path))
        rotations = graph.rotations()
        unread = graph.unread(rotations)
        found = [finding(rotation, expected, maximum) for rotation in rotations]
    if unread:
        raise UsageError(
            f"{path} has rotations that cannot be read, by the operators of {shown(unread)}: cos "
            "is no table, nor the cosine of positions times constant frequencies"
        )
    if not found:
        raise UsageError(
            f"{path} has no rotation that can be read: no operator with tables of cos and sin, and "
            "no Cos and Sin of positions times constant frequencies"
        )
    return found


def finding(rotation: Rotation, expected: Sequence[Expected], maximum: int) -> Finding:
    """Compare a rotation with the nearest one of the config, and measure its errors."""
    length = np.hypot(*rotation.values(0).astype(np.float64))
    own = _rope(rotation.inv_freq, float(length.mean()))
    own_facts = facts(own, rotation.interleaved)
    compared = [(differences(own, own_facts, one), one) for one in expected]
    different, nearest = min(compared, key=lambda pair: len(pair[0]), default=([], None))
    exact = own
    fit = (rotation.slope_error, DEVIATIONS * rounding(rotation.dtype) / length.size**0.5)
    if nearest is not None and nearest.facts["pairs"] == own_facts["pairs"]:
        exact = nearest.rope
        fit = (0.0, 0.0)
    ends = {NEAR, maximum or FAR}
    if rotation.rows is not None:
        ends = {min(end, rotation.rows) for end in ends} | {rotation.rows}
    errors, share = measured(rotation, exact, sorted(ends), fit)
    found = {
        "names": ", ".join(rotation.names),
        "right": not different and share <= 1,
        "read from": f"{rotation.source}, {rotation.dtype.name}",
        "rows": rotation.rows or "none: computed",
        **own_facts,
        "config": nearest and nearest.layers,
        "against the config": "; ".join(different) or None,
        "exact values": "of the file's own frequencies" if exact is own else "of the config",
        **{f"largest error below {end}": float(f"{error:.2g}") for end, error in errors.items()},
        "times the tolerance": float(f"{share:.3g}"),
    }
    return Finding(rotation, found, different, exact)


def facts(rope: RotaryEmbedding, interleaved: bool | None) -> Facts:
    """Return the facts of a rotation that a config determines.

    The base follows from the first quarter of the frequencies, which most rope types do not scale,
    and is not found where they are no geometric series. The scaling is that of the last wavelength.
    """
    pairs = len(rope.inv_freq)
    quarter = rope.inv_freq[: max(pairs // 4, 2)]
    index = np.arange(len(quarter))
    slope, start = np.polyfit(index, np.log(np.maximum(quarter, STILL)), 1)
    is_series = np.allclose(np.exp(start + slope * index), quarter, SAME)
    scaling = np.exp(slope * (pairs - 1)) / max(rope.inv_freq[-1], STILL)
    return {
        "pairs": pairs,
        "pairing": PAIRINGS[interleaved],
        "base": float(f"{np.exp(-slope * pairs):.5g}") if is_series else PAIRINGS[None],
        "scaling": float(f"{scaling:.5g}") if is_series else PAIRINGS[None],
        "attention factor": float(f"{rope.attention_factor:.6g}"),
    }


def differences(own: RotaryEmbedding, own_facts: Facts, one: Expected) -> list[str]:
    """Return the differences of a rotation from one of the config."""
    found = [
        f"{name} {own_facts[name]}, not {value}"
        for name, value in one.facts.items()
        if own_facts[name] != PAIRINGS[None] and not _is_same(own_facts[name], value)
    ]
    if len(own.inv_freq) == len(one.rope.inv_freq):
        ratio = np.maximum(own.inv_freq, STILL) / np.maximum(one.rope.inv_freq, STILL)
        if not np.allclose(ratio, 1, SAME):
            found.append(f"frequencies {ratio.min():.6g} to {ratio.max():.6g} times those")
    return found


def _is_same(value: Any, expected: Any) -> bool:
    both = isinstance(value, float) and isinstance(expected, float)
    return bool(np.isclose(value, expected, SAME)) if both else value == expected


def fix(found: Sequence[Finding], choices: int) -> None:
    """Make the rotations exact that are not right.

    choices: number of rotations of the config. One that is none of several stays as it is.
    """
    for one in found:
        if not one.facts["right"] and (choices < 2 or not one.differences):
            one.rotation.replace(one.exact)


def measured(
    rotation: Rotation, exact: RotaryEmbedding, ends: Sequence[int], fit: tuple[float, float]
) -> tuple[dict[int, float], float]:
    """Return the largest errors below some positions, and the largest share of the tolerance.

    fit: what exact values of a fit may be off, by position and beside it.
    """
    by_position: list[Float64] = []
    share = 0.0
    for start in range(0, ends[-1], CHUNK):
        values = rotation.values(start)[:, : ends[-1] - start].astype(np.float64)
        ids = np.arange(start, start + values.shape[1])
        exact_values = np.stack(exact.cos_sin(ids, np.float64))
        error = np.nan_to_num(np.abs(values - exact_values), nan=np.inf)
        slack = exact.attention_factor * (fit[0] * ids + fit[1])[:, None]
        bound = table_bound(exact_values, exact.attention_factor, rotation.dtype) + slack
        if rotation.dtype in HALF:  # onnxruntime rounds float64 to float32 before
            bound = bound + half_ulp(exact_values, FLOAT32)
        share = max(share, compare(error, bound)[1])
        by_position.append(error.max(axis=(0, 2)))
    errors = np.concatenate(by_position)
    return {end: float(errors[:end].max()) for end in ends}, share


def _report(path: Path, found: Sequence[Finding], expected: Sequence[Expected]) -> Facts:
    """Return what was found in a file."""
    layers = {one.facts["config"] for one in found if not one.differences}
    missing = sorted({one.layers for one in expected} - layers)
    return {
        "file": str(path),
        "right": not missing and all(one.facts["right"] for one in found),
        "no rotation is that of": ", ".join(missing) or None,
        "tolerance": TOLERANCE,
        "rotations": [one.facts for one in found],
    }


def _lines(report: Facts) -> Iterator[str]:
    """Yield the lines of a report."""
    for part in (report, *report["rotations"]):
        for name, value in part.items():
            if value is not None and name != "rotations":
                for line in textwrap.wrap(str(value), WIDTH) or [""]:
                    yield f"  {name:<27} {line}"
                    name = ""
        yield ""
