"""`rope-cpu check`: the rotations of an ONNX file, and how far their cos and sin are off."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.inliner

from rope_cpu import RotaryEmbedding, command_line, export
from rope_cpu.accuracy.tolerance import compare, half_ulp, table_bound
from rope_cpu.arguments.texts import cut
from rope_cpu.cli.layer_rotations import maximum_context, pair_frequencies, rotations_from_arguments
from rope_cpu.command_line import UsageError
from rope_cpu.export.files import model_path
from rope_cpu.export.foreign import ForeignGraph, Rotation
from rope_cpu.export.graph import FLOAT32, FLOAT64, HALF

# Positions below which errors are measured, besides the end of tables; the second stands for the
# model's maximum where no config says it. Positions that are compared at once.
NEAR = 4096
FAR = 131072
CHUNK = 4096

# A frequency that turns nothing, and the relative difference below which two numbers, one of them
# perhaps a float16, are the same.
STILL = 1e-12
SAME = 1e-3

# What is known of a rotation, by name. The rotations of a config, each behind its layers in words.
Facts = dict[str, Any]
Expected = Sequence[tuple[str, RotaryEmbedding]]

# A rotation of the file, the facts, and the rotation that it ought to be.
Finding = tuple[Rotation, Facts, RotaryEmbedding]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu check`."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="ONNX file of any origin")
    config = "config.json, its folder, or a GGUF file (default: the file's own frequencies)"
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help=config)
    layers = "layer type, for a file with layers of one type"
    parser.add_argument("--layer-type", metavar="NAME", help=layers)
    command_line.add_pairing_arguments(parser)
    fix = "write exact tables, and angles computed in float64"
    parser.add_argument("--fix", action="store_true", help=fix)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file that --fix writes")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Check a file; return 0 if its rotations are right, with --fix those of the new file, else 1.

    Raises UsageError if a file cannot be read, or has no rotation that can be read.
    """
    if args.fix != (args.output is not None):
        raise UsageError("`--fix` and `-o` need each other")
    if args.fix:
        command_line.check_file(args.output)
        with _usage_errors():
            model_path(args.output, "output")
    expected, maximum = _expected(args)
    with _usage_errors(f"{args.model} cannot be read: "):
        model = onnx.load(args.model, format="protobuf", load_external_data=args.fix)
        model = onnx.inliner.inline_local_functions(model) if model.functions else model
    found = check(model, args.model, expected, maximum)
    reports = [_report(args.model, found, expected)]
    if args.fix:
        for rotation, facts, exact in found:
            # One that is none of several stays as it is.
            if not facts["right"] and (len(expected) < 2 or facts["against the config"] is None):
                rotation.replace(exact)
        found = check(model, args.output, expected, maximum)
        reports.append(_report(args.output, found, expected))
        with command_line.write_errors(args.output):
            export.save(model, args.output)
    text = json.dumps(reports, indent=2).split("\n")
    command_line.print_lines(text if args.json else _lines(reports))
    return 0 if reports[-1]["right"] else 1


def _expected(args: argparse.Namespace) -> tuple[Expected, int]:
    """Return the rotations of CONFIG and its maximum length; none, and 0, without it."""
    if args.config is None:
        return [], 0
    config = command_line.read_config(args.config)
    expected = [
        (rotation.layers, _rope(pair_frequencies(rope), rope.attention_factor, rope.interleaved))
        for rotation in rotations_from_arguments(config, args)
        for rope in rotation.by_length.values()
    ]
    if not expected:
        raise UsageError(f"{args.config} describes no rotation")
    return expected, maximum_context(config.values)


def _rope(inv_freq: Any, factor: float, interleaved: bool) -> RotaryEmbedding:
    return RotaryEmbedding.from_inv_freq(inv_freq, attention_factor=factor, interleaved=interleaved)


@contextmanager
def _usage_errors(words: str = "") -> Iterator[None]:
    """Convert an error of the enclosed block, such as of a file of any content."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # those of onnx and protobuf have no common class
        raise UsageError(words + cut(str(error))) from error


def check(model: onnx.ModelProto, path: Path, expected: Expected, maximum: int) -> list[Finding]:
    """Return the findings of a model; path: its file. Raises UsageError if there are none."""
    with _usage_errors(f"{path} cannot be read: "):
        rotations = ForeignGraph(model, os.path.dirname(path)).rotations()
        return [finding(rotation, expected, maximum) for rotation in rotations]


def finding(rotation: Rotation, expected: Expected, maximum: int) -> Finding:
    """Measure a rotation, and compare it with the one of the config from which it is least off."""
    first = rotation.values(np.arange(1))
    factor = float(first[0].mean(dtype=FLOAT64))
    own = _rope(rotation.inv_freq.astype(FLOAT64), factor, rotation.interleaved)
    ends = {NEAR, maximum or FAR, rotation.rows or NEAR}
    ends = {min(end, rotation.rows or end) for end in ends}
    compared = [
        (*measured(rotation, rope, sorted(ends), 0.0), layers, rope)
        for layers, rope in expected
        if len(rope.inv_freq) == len(own.inv_freq)
    ]
    if compared:
        share, errors, layers, exact = min(compared, key=lambda one: one[0])
        different = differences(own, exact, share <= 1)
    else:
        fit = float(ml_dtypes.finfo(first.dtype).eps) + max(ends) * float(np.finfo(FLOAT64).eps)
        share, errors = measured(rotation, own, sorted(ends), factor * fit)
        layers = ""
        exact = own
        different = [text for _, rope in expected[:1] for text in differences(own, rope, False)]
    found = {
        "names": ", ".join(rotation.names),
        "right": not different and share <= 1,
        "read from": f"{rotation.source}, {first.dtype.name}",
        "rows": rotation.rows or "none: computed",
        **facts(own),
        "config": layers or None,
        "against the config": "; ".join(different) or None,
        "exact values": "of the file's own frequencies" if exact is own else "of the config",
        **{f"largest error below {end}": float(f"{error:.2g}") for end, error in errors.items()},
        "times the tolerance": float(f"{share:.3g}"),
    }
    return rotation, found, exact


def facts(rope: RotaryEmbedding) -> Facts:
    """Return the facts of a rotation that a config determines.

    The base follows from the first quarter of the frequencies, which most rope types do not scale,
    and is None where they are no geometric series. The scaling is that of the last wavelength.
    """
    pairs = len(rope.inv_freq)
    quarter = rope.inv_freq[: max(pairs // 4, 2)]
    index = np.arange(len(quarter))
    slope, start = np.polyfit(index, np.log(np.maximum(quarter, STILL)), 1)
    is_series = np.allclose(np.exp(start + slope * index), quarter, SAME)
    scaling = np.exp(slope * (pairs - 1)) / max(rope.inv_freq[-1], STILL)
    return {
        "pairs": pairs,
        "pairing": "interleaved" if rope.interleaved else "half-split",
        "base": float(f"{np.exp(-slope * pairs):.5g}") if is_series else None,
        "scaling": float(f"{scaling:.5g}") if is_series else None,
        "attention factor": float(f"{rope.attention_factor:.6g}"),
    }


def differences(own: RotaryEmbedding, expected: RotaryEmbedding, is_exact: bool) -> list[str]:
    """Return the differences of a rotation from one of the config; is_exact: of the same values.

    Facts of a table are those of its rounded values, so that only pairings of exact ones differ.
    """
    found = []
    own_facts = facts(own)
    for name, value in facts(expected).items():
        given = own_facts[name]
        same = given == value or None in (given, value) or (is_exact and name != "pairing")
        if not same and not (isinstance(value, float) and math.isclose(given, value, rel_tol=SAME)):
            found.append(f"{name} {given}, not {value}")
    if len(own.inv_freq) == len(expected.inv_freq) and not is_exact:
        ratio = np.maximum(own.inv_freq, STILL) / np.maximum(expected.inv_freq, STILL)
        if not np.allclose(ratio, 1, SAME):
            found.append(f"frequencies {ratio.min():.6g} to {ratio.max():.6g} times those")
    return found


def measured(
    rotation: Rotation, exact: RotaryEmbedding, ends: Sequence[int], fit: float
) -> tuple[float, dict[int, float]]:
    """Return the largest share of the tolerance, and the largest errors below some positions.

    fit: the most that exact values of fitted frequencies may be off.
    """
    errors = np.empty(0)
    share = 0.0
    for start in range(0, ends[-1], CHUNK):
        ids = np.arange(start, min(start + CHUNK, ends[-1]))
        exact_values = np.stack(exact.cos_sin(ids, FLOAT64))
        values = rotation.values(ids)
        error = np.abs(values.astype(FLOAT64) - exact_values)
        bound = table_bound(exact_values, exact.attention_factor, values.dtype) + fit
        if values.dtype in HALF:  # onnxruntime rounds float64 to float32 before
            bound = bound + half_ulp(exact_values, FLOAT32)
        share = max(share, compare(error, bound)[1])
        errors = np.append(errors, error.max(axis=(0, 2)))
    return share, {end: float(errors[:end].max()) for end in ends}


def _report(path: Path, found: Sequence[Finding], expected: Expected) -> Facts:
    """Return what was found in a file."""
    known = [facts for _, facts, _ in found]
    layers = {one["config"] for one in known if one["against the config"] is None}
    missing = sorted({name for name, _ in expected} - layers)
    return {
        "file": str(path),
        "right": not missing and all(one["right"] for one in known),
        "no rotation is that of": ", ".join(missing) or None,
        "rotations": known,
    }


def _lines(reports: Sequence[Facts]) -> Iterator[str]:
    """Yield the lines of reports, one a fact."""
    for part in (part for report in reports for part in (report, *report["rotations"])):
        known = {name: value for name, value in part.items() if value is not None}
        yield from (f"  {name:<27} {known[name]}" for name in known if name != "rotations")
        yield ""
