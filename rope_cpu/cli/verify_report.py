"""The tables and the JSON of `rope-cpu verify`."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.table import Table

from rope_cpu import __version__
from rope_cpu.arguments.texts import escaped
from rope_cpu.cli.verify_attention import CACHED, AttentionRow
from rope_cpu.cli.verify_cases import Figures, Row
from rope_cpu.kernels.threads import get_num_threads
from rope_cpu.rotation.embedding import RotaryEmbedding

PACKAGES = ("numpy", "numba", "onnx", "onnxruntime")

WIDTH = 100  # of running text; the table takes 80
LEGEND = (
    "max error: largest difference from a reference that is exact beyond float64 and shares no "
    "code with the kernels. beyond rounding: largest error without the rounding of the result, "
    "½ ulp, in per cent of the error allowed to the arithmetic before it, 3·u·A·(|a| + |b|); "
    "above 100 % a row fails. (u is 2^-53 for float64, else 2^-24; A the attention factor; a and b "
    "are the elements of the pair.) vs numpy: largest difference from the NumPy kernels. prefill, "
    "decode: fastest call with preallocated outputs; `rope-cpu bench` measures times more "
    "precisely. of tolerance: largest error in per cent of the error allowed to an element, which "
    "the roundings of all steps of the attention determine."
)
_STYLES = {"ok": "green", "FAIL": "bold red", "not offered": "yellow"}
_HEADER = (
    "dtype",
    "pairing",
    "by",
    "max\nerror",
    "beyond\nrounding",
    "vs\nnumpy",
    "prefill",
    "decode",
    "",
)
_ATTENTION_HEADER = ("dtype", "by", "max\nerror", "of\ntolerance", "vs\nnumpy", "")
_PAIRING_TEXTS = {True: "interleaved pairs", False: "half-split pairs"}


@dataclass(frozen=True)
class VerifiedLayers:
    """The layers of one type, or all layers, and their measured rows.

    layer_type: None for all layers. rope: in the model's own pairing; None if the layers are not
    rotated. heads: the numbers of query heads and of key/value heads. attention: the measured
    decode steps of attention.
    """

    layer_type: str | None
    rope: RotaryEmbedding | None = None
    heads: tuple[int, int] = (0, 0)
    rows: Sequence[Row] = ()
    attention: Sequence[AttentionRow] = ()

    @property
    def passed(self) -> bool:
        """Whether no row is out of tolerance."""
        return all(row.verdict != "FAIL" for row in self.all_rows)

    @property
    def all_rows(self) -> list[Row | AttentionRow]:
        """The rows of rotation and of attention."""
        return [*self.rows, *self.attention]


def print_report(model: str, layers: Sequence[VerifiedLayers], tokens: int) -> None:
    """Print a heading and a table for each layer type, and what holds for all of them.

    tokens: of the prefill.
    """
    columns = get_terminal_size((WIDTH, 0)).columns
    console = Console(highlight=False, width=min(WIDTH, columns))
    all_rows = [row for group in layers for row in group.all_rows]
    # Captured, since rich would end the process if the reader of standard output stops reading.
    with console.capture() as captured:
        for group in layers:
            for line in _heading(model, group, tokens):
                console.print(escaped(line), markup=False)
            if group.rope is not None:
                console.print(_table(group.rows))
                console.print(f"\nattention of a decode step after {CACHED} cached tokens\n")
                console.print(_attention_table(group.attention))
            console.print()
        for text in _refusals(all_rows):
            console.print(escaped(text), markup=False, style=_STYLES["not offered"])
        console.print(LEGEND, style="dim")
        counts = Counter(row.verdict for row in all_rows)
        present = [verdict for verdict in _STYLES if counts[verdict]]
        console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in present))
    print(captured.get(), end="")


def _heading(model: str, group: VerifiedLayers, tokens: int) -> Iterator[str]:
    name = model if group.layer_type is None else f"{model}, {group.layer_type}"
    rope = group.rope
    if rope is None:
        yield f"{name}: not rotated"
        return
    text = f"{name}: rope type {rope.rope_type}, {rope.rotary_dim} of {rope.head_dim} elements"
    text += f" rotated in {_PAIRING_TEXTS[rope.interleaved]}"
    if rope.attention_factor != 1:
        text += f", attention factor {rope.attention_factor:.6g}"
    yield text
    yield (
        f"q ({group.heads[0]} heads) and k ({group.heads[1]}): "
        f"a prefill of {tokens} tokens, and a decode step after it"
    )
    yield ""


def _refusals(measured: Sequence[Row | AttentionRow]) -> list[str]:
    """Return why operations are not offered, without repetitions."""
    texts = [
        f"not offered: {row.dtype} by {row.operation}: {row.refused}"
        for row in measured
        if row.refused
    ]
    return list(dict.fromkeys(texts))


def _table(measured: Sequence[Row]) -> Table:
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


def _attention_table(measured: Sequence[AttentionRow]) -> Table:
    table = Table(*_ATTENTION_HEADER, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns[2:-1]:
        column.justify = "right"
    for row in measured:
        if not row.refused:
            figures = (f"{row.max_error:.2e}", _percentage(row.of_tolerance))
            verdict = f"[{_STYLES[row.verdict]}]{row.verdict}[/]"
            table.add_row(row.dtype, row.operation, *figures, f"{row.from_numpy:.1e}", verdict)
    return table


def _figure_texts(figures: Figures) -> list[str]:
    return [
        f"{figures.max_error:.2e}",
        _percentage(figures.beyond_rounding),
        f"{figures.from_numpy:.1e}",
        _duration(figures.prefill_seconds),
        _duration(figures.decode_seconds),
    ]


def _percentage(fraction: float) -> str:
    """Round towards the verdict: passing shows at most 100 %, failing more than 100 %."""
    if not math.isfinite(fraction):
        return str(fraction)
    round_to_verdict = math.floor if fraction <= 1 else math.ceil
    return f"{round_to_verdict(1e3 * fraction) / 10:.1f} %"


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} µs"
    return f"{1e3 * seconds:.2f} ms"


def json_report(
    model: str, layers: Sequence[VerifiedLayers], tokens: int, passed: bool
) -> dict[str, Any]:
    """Return the content of the JSON file; tokens: of the prefill."""
    return {
        "model": model,
        "prefill_tokens": tokens,
        "threads": get_num_threads(),
        "python": platform.python_version(),
        "versions": {"rope-cpu": __version__} | {package: version(package) for package in PACKAGES},
        "passed": passed,
        "layers": [_json_layers(group) for group in layers],
    }


def _json_layers(group: VerifiedLayers) -> dict[str, Any]:
    """Return one entry of `layers`: a layer type, null for all layers, and its rows."""
    entry: dict[str, Any] = {
        "layer_type": group.layer_type,
        "rotated": group.rope is not None,
        "passed": group.passed,
        "rows": [_json_row(row) for row in group.rows],
        "attention": [_json_attention(row) for row in group.attention],
    }
    if group.rope is not None:
        entry |= {
            "pairing": _PAIRING_TEXTS[group.rope.interleaved],
            "rope_type": group.rope.rope_type,
            "head_dim": group.rope.head_dim,
            "rotary_dim": group.rope.rotary_dim,
            "attention_factor": group.rope.attention_factor,
            "heads": group.heads[0],
            "kv_heads": group.heads[1],
        }
    return entry


def _json_row(row: Row) -> dict[str, Any]:
    entry = {
        "dtype": row.dtype,
        "pairing": row.pairing,
        "way": row.operation,
        "verdict": row.verdict,
    }
    if row.figures is None:
        return {**entry, "refused": row.refused}
    return {**entry, **_finite(asdict(row.figures))}


def _json_attention(row: AttentionRow) -> dict[str, Any]:
    entry = {"dtype": row.dtype, "way": row.operation, "verdict": row.verdict}
    if row.refused:
        return {**entry, "refused": row.refused}
    names = ("max_error", "of_tolerance", "from_numpy")
    return {**entry, **_finite({name: getattr(row, name) for name in names})}


def _finite(figures: dict[str, float]) -> dict[str, float | str]:
    """Return figures for JSON, which has no infinity and no NaN: they are written as strings."""
    return {name: value if math.isfinite(value) else str(value) for name, value in figures.items()}
