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
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rope_cpu import __version__
from rope_cpu.cli.common import add_config_arguments, both_pairings, check_file, config_of, heads_of, writing
from rope_cpu.cli.onnx_path import OnnxPath
from rope_cpu.cli.verification import LAYOUT, NumPyPath, Outcome, Row, rows
from rope_cpu.kernels.threads import get_num_threads
from rope_cpu.rotary import RotaryEmbedding
from rope_cpu.validation.arrays import DTYPES
from rope_cpu.warmup import specialise, todo

TOKENS = 512
TARGETS = ("primitive", "onnx", "ort")
PACKAGES = ("numpy", "numba", "onnx", "onnxruntime")

WIDTH = 100  # of prose; the table takes 80
LEGEND = (
    "max error: from a reference that shares no code with the kernels and is exact beyond float64. of bound: the "
    "largest as a share of ½ ulp + 3·u·A·(|a| + |b|), what the tolerance allows that element. vs numpy: the largest "
    "difference. prompt, decode: the fastest call, outputs given; `rope-cpu bench` measures with care."
)
_STYLE = {"ok": "green", "FAIL": "bold red", "not offered": "yellow"}
_HEADER = "dtype", "pairing", "by", "max error", "of bound", "vs numpy", "prompt", "decode"
_NAMES, _FIGURES = "{:<8} {:<11} {:<9}", "{:>9} {:>9} {:>8} {:>8} {:>8}"
_OWN = {True: "interleaved pairs", False: "half-split pairs", None: "pairs that its type does not tell"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `rope-cpu verify`."""
    add_config_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON")


def run(args: argparse.Namespace) -> int:
    """Verify a config and print the table; return 1 where a row is out of tolerance."""
    if args.json is not None:
        check_file(args.json)
    config = config_of(args)
    heads = heads_of(config)
    half, interleaved, own = both_pairings(config, args.layer_type)
    ropes = {"half-split": half.at_length(TOKENS + 1), "interleaved": interleaved.at_length(TOKENS + 1)}
    model = "Llama 3.1 8B" if args.config is None else str(args.config)
    outcome = Outcome(model, _OWN[own], ropes["half-split"], heads, _with_progress(ropes, heads))
    _print(outcome)
    if args.json is not None:
        with writing(args.json):
            args.json.write_text(json.dumps(_report(outcome), indent=2, allow_nan=False) + "\n", "utf-8")
    return 0 if outcome.passed else 1


def _with_progress(ropes: dict[str, RotaryEmbedding], heads: tuple[int, int]) -> list[Row]:
    """Compile and verify, with a progress bar on standard error."""
    exported = partial(OnnxPath, layout=LAYOUT, heads=heads, tokens=TOKENS + 1)
    onnx_paths = {target: partial(exported, target=target) for target in TARGETS}
    paths: dict[str, Any] = {"numpy": lambda rope, dtype: NumPyPath(rope), **onnx_paths}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        kernels = progress.add_task("loading kernels", total=len(todo(list(DTYPES))))
        told = False
        for made in specialise(list(DTYPES)):
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
    console = Console(highlight=False, width=min(WIDTH, get_terminal_size((WIDTH, 0)).columns))
    with console.capture() as captured:  # rich would end the process where a reader stops reading
        _print_on(console, outcome)
    print(captured.get(), end="")


def _print_on(console: Console, outcome: Outcome) -> None:
    rope, (heads, kv_heads) = outcome.rope, outcome.heads
    factor = "" if rope.attention_factor == 1 else f", attention factor {rope.attention_factor:.6g}"
    rotated = f"{rope.rotary_dim} of {rope.head_dim} elements rotated in {outcome.pairing}{factor}"
    console.print(f"{outcome.model}: rope type {rope.rope_type}, {rotated}", markup=False)
    console.print(f"q ({heads} heads) and k ({kv_heads}): a prompt of {TOKENS} tokens, and a decode step after it\n")
    reasons = list(dict.fromkeys(row.refused for row in outcome.rows if row.refused))
    console.print((_NAMES + _FIGURES).format(*_HEADER), style="bold", soft_wrap=True)
    for row in outcome.rows:
        mark = f" {_mark(reasons.index(row.refused))}" if row.refused else ""
        console.print(f"{_cells(row)} [{_STYLE[row.verdict]}]{row.verdict}{mark}[/]", soft_wrap=True)
    for number, reason in enumerate(reasons):
        console.print(f"{_mark(number)} {reason}", markup=False)
    console.print(LEGEND, style="dim")
    counts = Counter(row.verdict for row in outcome.rows)
    console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLE if counts[verdict]))


def _cells(row: Row) -> str:
    """Return a row up to its verdict, which follows the names where there are no figures."""
    names = _NAMES.format(row.dtype, row.pairing, row.path)
    if row.figures is None:
        return names
    found = row.figures
    # Rounded towards the verdict: what passes never shows as more than 100 %, what fails never as 100.
    rounded = math.floor if found.of_bound <= 1 else math.ceil
    share = f"{rounded(1e4 * found.of_bound) / 100:.2f} %" if math.isfinite(found.of_bound) else str(found.of_bound)
    times = _time(found.prompt_seconds), _time(found.decode_seconds)
    return names + _FIGURES.format(f"{found.max_error:.2e}", share, f"{found.from_numpy:.1e}", *times)


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
