"""`rope-cpu verify`: check the NumPy kernels and the ONNX exports of a config's rotations."""

from __future__ import annotations

import argparse
import json
import textwrap
from importlib.metadata import version
from pathlib import Path
from shutil import get_terminal_size

from rope_cpu import export
from rope_cpu.arguments.texts import escaped
from rope_cpu.cli import command_line, groups
from rope_cpu.cli.command_line import UsageError, print_lines
from rope_cpu.cli.groups import Group
from rope_cpu.cli.verify_rows import TOKENS, Row, pairing, rows

# Elements of q: eight times those of the largest models, and some 10 GB of references.
LARGEST = 2**26
PACKAGES = ("rope-cpu", "numpy", "numba", "onnx", "onnxruntime")
WIDTH = 100
LEAST_WIDTH = 80  # the table would lose digits in fewer columns
LEGEND = (
    "max error: largest difference from the exact rotation, or from attention in float64. "
    "tolerance: largest share of the error allowed to an element, of a rotation ½ ulp + "
    "3·u·A·(|a| + |b|); above 100 % a row fails. Results of 16 bits have most of it from their own "
    "rounding. worst case: the case of that element. Those of ONNX are the cases of "
    "`export.validate`, whose inputs reach thousands."
)
_ROW = "{:9} {:8} {:11} {:9} {:>9} {:>9} {:4} {}"
_HEADER = _ROW.format("", "dtype", "pairing", "by", "max error", "tolerance", "", "worst case")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu verify`."""
    command_line.add_config_arguments(parser)
    command_line.add_pairing_arguments(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the reports to a JSON file"
    )


def run(args: argparse.Namespace) -> int:
    """Verify each layer type of a config and print its table.

    Returns 1 if a row is out of tolerance, else 0.
    """
    if args.json is not None:
        command_line.check_file(args.json)
    config = command_line.config_from_arguments(args)
    model = "Llama 3.1 8B" if args.config is None else str(args.config)
    found = groups.from_arguments(config, args)
    if not any(group.spec for group in found):
        listed = ", ".join(group.layer_type or "all layers" for group in found)
        raise UsageError(f"nothing to verify: {listed} are not rotated")
    with command_line.usage_errors():
        for group in found:
            _check(group)
    verified = {group.layer_type: _verified(model, group) for group in found}
    _print(LEGEND)
    if args.json is not None:
        _write_json(args.json, model, verified)
    failed = any(row.verdict == "FAIL" for rows in verified.values() for row in rows)
    return 1 if failed else 0


def _check(group: Group) -> None:
    """Raise UsageError for too many heads, ValueError if they or the rotation are left open."""
    for rope in group.ropes.values():
        heads, _ = group.heads
        if heads * rope.head_dim * TOKENS > LARGEST:
            raise UsageError(
                f"the config has {heads} heads of {rope.head_dim} elements; "
                f"a prefill of {TOKENS} tokens of them is too large to verify"
            )


def _verified(model: str, group: Group) -> list[Row]:
    """Print what layers rotate, and each row as soon as it is known; return the rows."""
    name = model if group.layer_type is None else f"{model}, {group.layer_type}"
    rope = next(iter(group.ropes.values()), None)
    if rope is None:
        print_lines([f"{name}: not rotated", ""])
        return []
    heads = group.heads
    facts = f"rope type {rope.rope_type}, {rope.rotary_dim} of {rope.head_dim} elements rotated"
    _print(f"{name}: {facts} in {pairing(rope)} pairs; q ({heads[0]} heads) and k ({heads[1]})")
    print_lines(["", _HEADER])
    found = []
    for row in rows(rope, heads):
        found.append(row)
        if row.report is not None:
            _print(_line(row, row.report), len(_HEADER) - len("worst case"))
    print_lines([""])
    refusals = {f"not offered by {row.by}: {row.refused}": None for row in found if row.refused}
    for line in refusals:
        _print(line)
    return found


def _line(row: Row, report: export.Report) -> str:
    """Return the line of a row that is offered."""
    worst = report.worst
    share = "> 1000%" if worst.ratio > 10 else f"{worst.ratio:.1%}"
    figures = (f"{report.max_abs_error:.2e}", share, row.verdict)
    return _ROW.format(row.part, row.dtype, row.pairing, row.by, *figures, worst.case)


def _print(text: str, indent: int = 0) -> None:
    """Print a text in lines that fit the screen; indent: of the second line and all after it."""
    columns = min(WIDTH, max(LEAST_WIDTH, get_terminal_size((WIDTH, 0)).columns))
    wrapper = textwrap.TextWrapper(columns, "", " " * indent, break_on_hyphens=False)
    print_lines(wrapper.wrap(escaped(text)))


def _write_json(path: Path, model: str, layers: dict[str | None, list[Row]]) -> None:
    """Write the rows of each layer type, with the outcomes of their reports."""
    entries = [
        {"layer_type": name, "rows": [row.as_dict() for row in found]}
        for name, found in layers.items()
    ]
    versions = {package: version(package) for package in PACKAGES}
    content = {"model": model, "versions": versions, "layers": entries}
    with command_line.write_errors(path):
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")
