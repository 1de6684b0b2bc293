"""`rope-cpu check`: the rotations of an ONNX file, and how far their cos and sin are off."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from rope_cpu import RotaryEmbedding, export
from rope_cpu.accuracy.tolerance import half_ulp, table_bound
from rope_cpu.arguments.texts import cut
from rope_cpu.array_types import Float64
from rope_cpu.cli import command_line
from rope_cpu.cli.layer_rotations import maximum_context, pair_frequencies, rotations_from_arguments
from rope_cpu.export.files import model_path
from rope_cpu.export.foreign import ForeignGraph, Rotation, inlined

# Positions below which errors are measured, besides the end of tables; the second stands for the
# model's maximum where no config says it. Positions that are compared at once.
NEAR = 4096
FAR = 131072
CHUNK = 4096

# The relative difference below which two numbers are the same.
SAME = 1e-3

# What is known of a rotation, by name. The rotations of a config, by their layers.
Facts = dict[str, Any]
Ropes = dict[str, RotaryEmbedding]


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
    expected, maximum = _expected(args)
    try:
        reports = list(_reports(args, expected, maximum))
    except (OSError, command_line.UsageError):
        raise
    except Exception as error:  # those of onnx and protobuf have no common class
        raise command_line.UsageError(f"{args.model} cannot be read: {cut(str(error))}") from error
    text = json.dumps(reports, indent=2).split("\n")
    command_line.print_lines(text if args.json else _lines(reports))
    return 0 if reports[-1]["right"] else 1


def _expected(args: argparse.Namespace) -> tuple[Ropes, int]:
    """Return the rotations of CONFIG and its maximum length; none, and a default, without it."""
    if args.config is None:
        return {}, FAR
    config = command_line.read_config(args.config)
    expected = {}
    for rotation in rotations_from_arguments(config, args):
        for length, rope in rotation.by_length.items():
            name = f"{rotation.layers} {length}".strip()
            expected[name] = _rope(pair_frequencies(rope), rope.attention_factor, rope.interleaved)
    if not expected:
        raise command_line.UsageError(f"{args.config} describes no rotation")
    return expected, maximum_context(config.values) or FAR


def _rope(inv_freq: Float64, factor: float, interleaved: bool) -> RotaryEmbedding:
    """Return a rotation by one frequency for each pair."""
    return RotaryEmbedding.from_inv_freq(inv_freq, attention_factor=factor, interleaved=interleaved)


def _reports(args: argparse.Namespace, expected: Ropes, maximum: int) -> Iterator[Facts]:
    """Yield the report of a file, and with --fix that of the new file."""
    if args.fix:
        command_line.check_file(args.output)
        model_path(args.output, "output")
    model = onnx.load(args.model, format="protobuf", load_external_data=args.fix)
    model = inlined(model)
    for path in filter(None, [args.model, args.output]):
        fix = args.fix and path is args.model
        rotations = ForeignGraph(model, str(args.model.parent)).rotations()
        found = [check(rotation, expected, maximum, fix) for rotation in rotations]
        yield {"file": str(path), "right": all(one["right"] for one in found), "rotations": found}
    if args.fix:
        with command_line.write_errors(args.output):
            export.save(model, args.output)


def check(rotation: Rotation, expected: Ropes, maximum: int, fix: bool) -> Facts:
    """Compare a rotation with the nearest one of the config, and measure its errors.

    fix: replace its cos and sin where only these are wrong.
    """
    cos, _ = rotation.values(np.arange(1))
    factor = float(cos.mean(dtype=np.float64))
    own = _rope(rotation.inv_freq.astype(np.float64), factor, rotation.interleaved)
    layers = min(expected, key=lambda name: distance(own, expected[name]), default="")
    wanted = expected.get(layers, own)
    exact = wanted if distance(own, wanted) < np.inf else own
    ends = {min(end, rotation.rows or end) for end in (NEAR, maximum, rotation.rows or NEAR)}
    errors = largest_errors(rotation, exact, max(ends))
    rounding = 2 * float(half_ulp(1.0, cos.dtype))
    # Frequencies of tables are only known as well as these are rounded. Files round an attention
    # factor and its product in float32, and large angles in float64 at best.
    of_factor = min(rounding, 2.0**-23) if exact.attention_factor != 1 else 0.0
    slack = max(ends) * 2.0**-52 + (rounding if exact is own else of_factor)
    tolerance = exact.attention_factor * float(table_bound(1.0, 1.0, cos.dtype) + slack)
    share = float(errors.max()) / tolerance
    different = list(differences(own, wanted, SAME + rounding, 2 * rounding / max(ends)))
    if fix and share > 1 and not different:
        rotation.replace(exact)
    return {
        "names": ", ".join(rotation.names),
        "right": not different and share <= 1,
        "read from": f"{rotation.source}, {cos.dtype.name}",
        "rows": rotation.rows or "none: computed",
        **facts(own),
        "config": layers or None,
        "against the config": "; ".join(different) or None,
        **{f"largest error below {n}": float(f"{errors[:n].max():.2g}") for n in sorted(ends)},
        "times the tolerance": float(f"{share:.3g}"),
    }


def distance(own: RotaryEmbedding, other: RotaryEmbedding) -> float:
    """Return the largest difference between frequencies, infinite for another number of pairs."""
    if own.rotary_dim != other.rotary_dim:
        return np.inf
    return float(np.abs(own.inv_freq - other.inv_freq).max())


def facts(rope: RotaryEmbedding) -> Facts:
    """Return the facts of a rotation that a config determines.

    The base is that of the first two frequencies, which most rope types do not scale, and None
    where the third is not of the same series. The scaling is that of the last wavelength.
    """
    inv_freq = np.maximum(rope.inv_freq, 1e-12)  # some types do not rotate the last pairs
    pairs = len(inv_freq)
    ratios = inv_freq[:2] / inv_freq[1:3]
    is_series = pairs > 2 and np.isclose(ratios[0], ratios[1], SAME)
    return {
        "pairs": pairs,
        "interleaved": rope.interleaved,
        "base": float(f"{ratios[0] ** pairs:.5g}") if is_series else None,
        "scaling": float(f"{ratios[0] ** (1 - pairs) / inv_freq[-1]:.5g}") if is_series else None,
        "attention factor": float(f"{rope.attention_factor:.6g}"),
    }


def differences(
    own: RotaryEmbedding, wanted: RotaryEmbedding, relative: float, absolute: float
) -> Iterator[str]:
    """Yield the differences of a rotation from one of the config, in words.

    relative, absolute: tolerances of numbers and of frequencies, as tables fix low ones badly.
    """
    if distance(own, wanted) < np.inf:
        if np.allclose(own.inv_freq, wanted.inv_freq, relative, absolute):
            own = _rope(wanted.inv_freq, own.attention_factor, own.interleaved)
        else:
            yield f"frequencies off by up to {distance(own, wanted):.3g}"
    given = facts(own)
    for name, value in facts(wanted).items():
        if None not in (given[name], value) and not np.isclose(given[name], value, relative):
            yield f"{name} {given[name]}, not {value}"


def largest_errors(rotation: Rotation, exact: RotaryEmbedding, end: int) -> Float64:
    """Return the largest error of cos and sin at each position below an end."""
    errors = []
    for ids in np.array_split(np.arange(end), end // CHUNK + 1):
        values = rotation.values(ids).astype(np.float64)
        error = np.abs(values - np.stack(exact.cos_sin(ids, np.float64)))
        errors.append(error.max(axis=(0, 2)))
    return np.concatenate(errors)


def _lines(reports: list[Facts]) -> Iterator[str]:
    """Yield the lines of reports, one a fact."""
    for part in (part for report in reports for part in (report, *report["rotations"])):
        known = {name: value for name, value in part.items() if value is not None}
        yield from (f"  {name:<27} {known[name]}" for name in known if name != "rotations")
        yield ""
