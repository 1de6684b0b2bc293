"""`rope-cpu verify`: rotate a prompt and a decode step in every way there is, and show that all ways agree."""

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
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rope_cpu import __version__, _warmup
from rope_cpu._onnx_path import OnnxPath
from rope_cpu._threads import get_num_threads
from rope_cpu._usage import UsageError, add_config_arguments, both_pairings, config_of, heads_of
from rope_cpu._verification import DTYPES, LAYOUT, NumPyPath, Outcome, Row, rows
from rope_cpu.rotary import RotaryEmbedding

TOKENS = 512
TARGETS = ("primitive", "onnx", "ort")
PACKAGES = ("numpy", "numba", "onnx", "onnxruntime")

WIDTH = 100
LEGEND = (
    "max error: from a reference that shares no code with the kernels and is exact beyond float64. of bound: the "
    "largest as a share of ½ ulp + 3·u·A·(|a| + |b|), what the tolerance allows that element. vs numpy: the largest "
    "difference. prompt, decode: the fastest call, outputs given; `rope-cpu bench` measures with care."
)
_STYLE = {"ok": "green", "FAIL": "bold red", "not offered": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `rope-cpu verify`."""
    add_config_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON")


def run(args: argparse.Namespace) -> int:
    """Verify a config and print the table; return 1 where a row is out of tolerance."""
    config = config_of(args)
    heads = heads_of(config)
    pairings, own_pairing = both_pairings(config, args.layer_type)
    ropes = {name: rope.at_length(TOKENS + 1) for name, rope in pairings.items()}
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageError(f"cannot write {args.json}: there is no folder {args.json.parent}")
    model = "Llama 3.1 8B" if args.config is None else str(args.config)
    outcome = Outcome(model, own_pairing, ropes["half-split"], heads, _with_progress(ropes, heads))
    if args.json is not None:
        _write(args.json, outcome)
    _print(outcome)
    return 0 if outcome.passed else 1


def _with_progress(ropes: dict[str, RotaryEmbedding], heads: tuple[int, int]) -> list[Row]:
    """Compile and verify, with a progress bar on standard error."""
    exported = partial(OnnxPath, layout=LAYOUT, heads=heads, tokens=TOKENS + 1)
    onnx_paths = {target: partial(exported, target=target) for target in TARGETS}
    paths: dict[str, Any] = {"numpy": lambda rope, dtype: NumPyPath(rope), **onnx_paths}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        kernels = progress.add_task("loading kernels", total=len(_warmup.todo(list(DTYPES))))
        told = False
        for made in _warmup.specialise(list(DTYPES)):
            if made.compiled and not told:
                progress.console.print("compiling kernels: this takes up to a minute, once for this machine")
                told = True
            progress.update(kernels, advance=1, description=made.name)
        progress.remove_task(kernels)
        rotating = progress.add_task("rotating", total=len(DTYPES) * len(ropes) * len(paths))
        found = []
        for row in rows(ropes, heads, TOKENS, paths):
            found.append(row)
            progress.update(rotating, advance=1, description=f"{row.dtype} {row.pairing}, {row.path}: {row.verdict}")
    return found


def _print(outcome: Outcome) -> None:
    console = Console(highlight=False, width=WIDTH)
    rope, (heads, kv_heads) = outcome.rope, outcome.heads
    factor = "" if rope.attention_factor == 1 else f", attention factor {rope.attention_factor:.6g}"
    rotated = f"{rope.rotary_dim} of {rope.head_dim} elements rotated in {outcome.pairing}{factor}"
    console.print(f"{outcome.model}: rope type {rope.rope_type}, {rotated}", markup=False)
    console.print(f"q ({heads} heads) and k ({kv_heads}): a prompt of {TOKENS} tokens, and a decode step after it\n")
    reasons = list(dict.fromkeys(row.refused for row in outcome.rows if row.refused))
    console.print(_table(outcome.rows, reasons))
    for number, reason in enumerate(reasons):
        console.print(f"{_mark(number)} {reason}", markup=False)
    console.print(LEGEND, style="dim")
    counts = Counter(row.verdict for row in outcome.rows)
    console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLE if counts[verdict]))


def _table(found: list[Row], reasons: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("dtype", "pairing", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("max error", "of bound", "vs numpy", "prompt", "decode"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in found:
        mark = f" {_mark(reasons.index(row.refused))}" if row.refused else ""
        table.add_row(*_cells(row), f"[{_STYLE[row.verdict]}]{row.verdict}{mark}[/]")
    return table


def _cells(row: Row) -> list[str]:
    if row.figures is None:
        return [row.dtype, row.pairing, row.path, *[""] * 5]
    found = row.figures
    # Rounded towards the verdict: what passes never shows as more than 100 %, what fails never as 100.
    rounded = math.floor if found.of_bound <= 1 else math.ceil
    share = f"{rounded(1e4 * found.of_bound) / 100:.2f} %" if math.isfinite(found.of_bound) else str(found.of_bound)
    times = _time(found.prompt_seconds), _time(found.decode_seconds)
    return [row.dtype, row.pairing, row.path, f"{found.max_error:.2e}", share, f"{found.from_numpy:.1e}", *times]


def _mark(number: int) -> str:
    return "¹²³⁴⁵⁶⁷⁸⁹"[number] if number < 9 else f"({number + 1})"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _report(outcome: Outcome) -> dict[str, Any]:
    rope, (heads, kv_heads) = outcome.rope, outcome.heads
    return {
        "model": outcome.model,
        "pairing": outcome.pairing,
        "rope_type": rope.rope_type,
        "head_dim": rope.head_dim,
        "rotary_dim": rope.rotary_dim,
        "attention_factor": rope.attention_factor,
        "heads": heads,
        "kv_heads": kv_heads,
        "prompt_tokens": TOKENS,
        "threads": get_num_threads(),
        "python": platform.python_version(),
        "versions": {"rope-cpu": __version__} | {package: version(package) for package in PACKAGES},
        "passed": outcome.passed,
        "rows": [_entry(row) for row in outcome.rows],
    }


def _entry(row: Row) -> dict[str, Any]:
    entry = {"dtype": row.dtype, "pairing": row.pairing, "path": row.path, "verdict": row.verdict}
    if row.figures is None:
        return {**entry, "refused": row.refused}
    # JSON knows no infinity and no NaN: a number that is none becomes its name.
    return entry | {key: v if math.isfinite(v) else str(v) for key, v in asdict(row.figures).items()}


def _write(file: Path, outcome: Outcome) -> None:
    try:
        file.write_text(json.dumps(_report(outcome), indent=2, allow_nan=False) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
