"""`rope-cpu verify`: rotate a prefill and a decode step in every way there is, and show that all ways agree."""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections import Counter
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rope_cpu import __version__
from rope_cpu.array_types import DTYPES
from rope_cpu.cli.common import (
    UsageError,
    add_config_arguments,
    both_pairings,
    check_file,
    config_of,
    heads_of,
    writing,
)
from rope_cpu.cli.verify_cases import Row, Way, numpy_way, onnx_way, rows
from rope_cpu.kernels.threads import get_num_threads
from rope_cpu.rotation.embedding import RotaryEmbedding
from rope_cpu.warmup import specialise, todo

TOKENS = 512
LARGEST = (
    2**26
)  # elements of q: eight times those of the largest models, and some 10 GB of references
TARGETS = ("primitive", "onnx", "ort")
WAYS: dict[str, Way] = {
    "numpy": numpy_way,
    **{target: partial(onnx_way, target) for target in TARGETS},
}
PACKAGES = ("numpy", "numba", "onnx", "onnxruntime")

WIDTH = 100  # of prose; the table takes 80
LEGEND = (
    "max error: from a reference that shares no code with the kernels and is exact beyond float64. error / tolerance: "
    "the largest as a share of ½ ulp + 3·u·A·(|a| + |b|), what is allowed for that element. vs numpy: the largest "
    "difference. prefill, decode: the fastest call, outputs preallocated; `rope-cpu bench` measures with care."
)
_STYLE = {"ok": "green", "FAIL": "bold red", "not offered": "yellow"}
_HEADER = (
    "dtype",
    "pairing",
    "by",
    "max\nerror",
    "error /\ntolerance",
    "vs\nnumpy",
    "prefill",
    "decode",
    "",
)
_OWN = {True: "interleaved pairs", False: "half-split pairs", None: "pairs of an unknown pairing"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `rope-cpu verify`."""
    add_config_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON")


def run(args: argparse.Namespace) -> int:
    """Verify a config and print the table; return 1 where a row is out of tolerance."""
    if args.json is not None:
        check_file(args.json)
    config = config_of(args)
    heads = heads_of(config, args.layer_type)
    half, interleaved, own = both_pairings(config, args.layer_type)
    if heads[0] * half.head_dim * TOKENS > LARGEST:
        shape = f"{heads[0]} heads of {half.head_dim} elements"
        raise UsageError(
            f"the config has {shape}; a prefill of {TOKENS} tokens of them is too large to verify"
        )
    ropes = {
        "half-split": half.at_length(TOKENS + 1),
        "interleaved": interleaved.at_length(TOKENS + 1),
    }
    found = _with_progress(ropes, heads)
    model, rope = "Llama 3.1 8B" if args.config is None else str(args.config), ropes["half-split"]
    report = _report(model, _OWN[own], rope, heads, found)
    _print(report, rope, found)
    if args.json is not None:
        with writing(args.json):
            args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", "utf-8")
    return int(not report["passed"])


def _with_progress(ropes: dict[str, RotaryEmbedding], heads: tuple[int, int]) -> list[Row]:
    """Compile and verify, with a progress bar on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        kernels, announced = (
            progress.add_task("loading kernels", total=len(todo(list(DTYPES)))),
            False,
        )
        for made in specialise(list(DTYPES)):
            if made.compiled and not announced:
                progress.console.print(
                    "compiling kernels: this takes up to a minute, once for this machine"
                )
                announced = True
            progress.update(kernels, advance=1, description=made.name)
        progress.remove_task(kernels)
        rotating, found = (
            progress.add_task("rotating", total=len(DTYPES) * len(ropes) * len(WAYS)),
            [],
        )
        for row in rows(ropes, heads, TOKENS, WAYS):
            found.append(row)
            progress.update(
                rotating,
                advance=1,
                description=f"{row.dtype} {row.pairing}, {row.way}: {row.verdict}",
            )
    return found


def _print(report: dict[str, Any], rope: RotaryEmbedding, found: list[Row]) -> None:
    console = Console(highlight=False, width=min(WIDTH, get_terminal_size((WIDTH, 0)).columns))
    with console.capture() as captured:  # rich would end the process where a reader stops reading
        factor = (
            "" if rope.attention_factor == 1 else f", attention factor {rope.attention_factor:.6g}"
        )
        rotated = (
            f"{rope.rotary_dim} of {rope.head_dim} elements rotated in {report['pairing']}{factor}"
        )
        console.print(f"{report['model']}: rope type {rope.rope_type}, {rotated}", markup=False)
        tokens = f"a prefill of {TOKENS} tokens, and a decode step after it"
        console.print(f"q ({report['heads']} heads) and k ({report['kv_heads']}): {tokens}\n")
        console.print(_table(found))
        for way, dtype, reason in dict.fromkeys(
            (row.way, row.dtype, row.refused) for row in found if row.refused
        ):
            console.print(
                f"not offered: {dtype} by {way}: {reason}",
                markup=False,
                style=_STYLE["not offered"],
            )
        console.print(LEGEND, style="dim")
        counts = Counter(row.verdict for row in found)
        console.print(
            ", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLE if counts[verdict])
        )
    print(captured.get(), end="")


def _table(found: list[Row]) -> Table:
    table = Table(*_HEADER, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns[3:-1]:
        column.justify = "right"
    for row in found:
        if row.figures is not None:
            of, verdict = row.figures, f"[{_STYLE[row.verdict]}]{row.verdict}[/]"
            share, times = (
                _share(of.of_tolerance),
                (_time(of.prefill_seconds), _time(of.decode_seconds)),
            )
            errors = f"{of.max_error:.2e}", share, f"{of.from_numpy:.1e}"
            table.add_row(row.dtype, row.pairing, row.way, *errors, *times, verdict)
    return table


def _share(of_tolerance: float) -> str:
    """Round towards the verdict: what passes never shows as more than 100 %, what fails never as 100."""
    if not math.isfinite(of_tolerance):
        return str(of_tolerance)
    return f"{(math.floor if of_tolerance <= 1 else math.ceil)(1e4 * of_tolerance) / 100:.2f} %"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _report(
    model: str, pairing: str, rope: RotaryEmbedding, heads: tuple[int, int], found: list[Row]
) -> dict[str, Any]:
    return {
        "model": model,
        "pairing": pairing,
        "rope_type": rope.rope_type,
        "head_dim": rope.head_dim,
        "rotary_dim": rope.rotary_dim,
        "attention_factor": rope.attention_factor,
        "heads": heads[0],
        "kv_heads": heads[1],
        "prefill_tokens": TOKENS,
        "threads": get_num_threads(),
        "python": platform.python_version(),
        "versions": {"rope-cpu": __version__} | {package: version(package) for package in PACKAGES},
        "passed": all(row.verdict != "FAIL" for row in found),
        "rows": [_entry(row) for row in found],
    }


def _entry(row: Row) -> dict[str, Any]:
    entry = {"dtype": row.dtype, "pairing": row.pairing, "way": row.way, "verdict": row.verdict}
    if row.figures is None:
        return {**entry, "refused": row.refused}
    # JSON knows no infinity and no NaN: a number that is none becomes its name.
    return entry | {
        key: v if math.isfinite(v) else str(v) for key, v in asdict(row.figures).items()
    }
