"""`rope-cpu verify`: check a prefill and a decode step by every implementation of the rotation."""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections import Counter
from collections.abc import Iterator
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
from rope_cpu.cli.verify_cases import Figures, Operation, Row, numpy_operation, onnx_operation, rows
from rope_cpu.command_line import (
    UsageError,
    add_config_arguments,
    both_pairings,
    check_file,
    config_from_arguments,
    head_counts,
    write_errors,
)
from rope_cpu.kernels.threads import get_num_threads
from rope_cpu.rotation.embedding import RotaryEmbedding
from rope_cpu.warmup import compile_kernels, kernel_builds

TOKENS = 512
# Elements of q: eight times those of the largest models, and some 10 GB of references.
LARGEST = 2**26
TARGET_NAMES = ("primitive", "onnx", "ort")
OPERATIONS: dict[str, Operation] = {
    "numpy": numpy_operation,
    **{target: partial(onnx_operation, target) for target in TARGET_NAMES},
}
PACKAGES = ("numpy", "numba", "onnx", "onnxruntime")

WIDTH = 100  # of running text; the table takes 80
LEGEND = (
    "max error: largest difference from a reference that is exact beyond float64 and shares no "
    "code with the kernels. error / tolerance: largest error relative to the tolerance of that "
    "element, ½ ulp + 3·u·A·(|a| + |b|). vs numpy: largest difference from the NumPy kernels. "
    "prefill, decode: fastest call with preallocated outputs; `rope-cpu bench` measures times more "
    "precisely."
)
_STYLES = {"ok": "green", "FAIL": "bold red", "not offered": "yellow"}
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
_PAIRING_TEXTS = {
    True: "interleaved pairs",
    False: "half-split pairs",
    None: "pairs of an unknown pairing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu verify`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the table to a JSON file"
    )


def run(args: argparse.Namespace) -> int:
    """Verify a config and print the table; return 1 if a row is out of tolerance, else 0."""
    if args.json is not None:
        check_file(args.json)
    config = config_from_arguments(args)
    heads = head_counts(config, args.layer_type)
    half, interleaved, own = both_pairings(config, args.layer_type)
    if heads[0] * half.head_dim * TOKENS > LARGEST:
        raise UsageError(
            f"the config has {heads[0]} heads of {half.head_dim} elements; "
            f"a prefill of {TOKENS} tokens of them is too large to verify"
        )
    ropes = {
        "half-split": half.at_length(TOKENS + 1),
        "interleaved": interleaved.at_length(TOKENS + 1),
    }
    measured = _rows_with_progress(ropes, heads)
    model = "Llama 3.1 8B" if args.config is None else str(args.config)
    rope = ropes["half-split"]
    report = _report(model, _PAIRING_TEXTS[own], rope, heads, measured)
    _print_report(report, measured)
    if args.json is not None:
        text = json.dumps(report, indent=2, allow_nan=False)
        with write_errors(args.json):
            args.json.write_text(f"{text}\n", "utf-8")
    return 0 if report["passed"] else 1


def _rows_with_progress(ropes: dict[str, RotaryEmbedding], heads: tuple[int, int]) -> list[Row]:
    """Compile the kernels and measure all rows, with a progress bar on a terminal."""
    console = Console(stderr=True)
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
        task = progress.add_task("rotating", total=len(DTYPES) * len(ropes) * len(OPERATIONS))
        measured = []
        for row in rows(ropes, heads, TOKENS, OPERATIONS):
            measured.append(row)
            text = f"{row.dtype} {row.pairing}, {row.operation}: {row.verdict}"
            progress.update(task, advance=1, description=text)
    return measured


def _load_kernels(progress: Progress) -> None:
    dtypes = list(DTYPES)
    task = progress.add_task("loading kernels", total=len(kernel_builds(dtypes)))
    announced = False
    for kernel in compile_kernels(dtypes):
        if kernel.compiled and not announced:
            progress.console.print(
                "compiling kernels: this takes up to a minute, once for this machine"
            )
            announced = True
        progress.update(task, advance=1, description=kernel.name)
    progress.remove_task(task)


def _print_report(report: dict[str, Any], measured: list[Row]) -> None:
    columns = get_terminal_size((WIDTH, 0)).columns
    console = Console(highlight=False, width=min(WIDTH, columns))
    # Captured, since rich would end the process if the reader of standard output stops reading.
    with console.capture() as captured:
        for line in _heading(report):
            console.print(line, markup=False)
        console.print(_table(measured))
        for text in _refusals(measured):
            console.print(text, markup=False, style=_STYLES["not offered"])
        console.print(LEGEND, style="dim")
        counts = Counter(row.verdict for row in measured)
        present = [verdict for verdict in _STYLES if counts[verdict]]
        console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in present))
    print(captured.get(), end="")


def _heading(report: dict[str, Any]) -> Iterator[str]:
    widths = f"{report['rotary_dim']} of {report['head_dim']} elements"
    text = f"{report['model']}: rope type {report['rope_type']}, {widths} rotated"
    text += f" in {report['pairing']}"
    if report["attention_factor"] != 1:
        text += f", attention factor {report['attention_factor']:.6g}"
    yield text
    yield (
        f"q ({report['heads']} heads) and k ({report['kv_heads']}): "
        f"a prefill of {TOKENS} tokens, and a decode step after it"
    )
    yield ""


def _refusals(measured: list[Row]) -> list[str]:
    """Return why operations are not offered, without repetitions."""
    texts = [
        f"not offered: {row.dtype} by {row.operation}: {row.refused}"
        for row in measured
        if row.refused
    ]
    return list(dict.fromkeys(texts))


def _table(measured: list[Row]) -> Table:
    table = Table(*_HEADER, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns[3:-1]:
        column.justify = "right"
    for row in measured:
        if row.figures is not None:
            verdict = f"[{_STYLES[row.verdict]}]{row.verdict}[/]"
            table.add_row(
                row.dtype, row.pairing, row.operation, *_figure_texts(row.figures), verdict
            )
    return table


def _figure_texts(figures: Figures) -> list[str]:
    return [
        f"{figures.max_error:.2e}",
        _percentage(figures.of_tolerance),
        f"{figures.from_numpy:.1e}",
        _duration(figures.prefill_seconds),
        _duration(figures.decode_seconds),
    ]


def _percentage(fraction: float) -> str:
    """Round towards the verdict: passing shows at most 100 %, failing more than 100 %."""
    if not math.isfinite(fraction):
        return str(fraction)
    round_to_verdict = math.floor if fraction <= 1 else math.ceil
    return f"{round_to_verdict(1e4 * fraction) / 100:.2f} %"


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} µs"
    return f"{1e3 * seconds:.2f} ms"


def _report(
    model: str, pairing: str, rope: RotaryEmbedding, heads: tuple[int, int], measured: list[Row]
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
        "passed": all(row.verdict != "FAIL" for row in measured),
        "rows": [_json_row(row) for row in measured],
    }


def _json_row(row: Row) -> dict[str, Any]:
    entry = {
        "dtype": row.dtype,
        "pairing": row.pairing,
        "way": row.operation,
        "verdict": row.verdict,
    }
    if row.figures is None:
        return {**entry, "refused": row.refused}
    # JSON has no infinity and no NaN: they are written as strings.
    figures = {
        name: value if math.isfinite(value) else str(value)
        for name, value in asdict(row.figures).items()
    }
    return {**entry, **figures}
