"""Draw the pictures of the manual into docs/pictures, and docs/bench.png: python docs/draw.py."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import rope_cpu

COLORS = ("#d3443a", "#3d7fcb", "#3a8f5c", "#c98a1b", "#7a52a1", "#4a4a4a", "#1f9aa0", "#b0568f")
DARK = "#333333"
LIGHT = "#dddddd"
GREY = "#8a949d40"  # half transparent: on white and on black paper
TIMES = "\N{MULTIPLICATION SIGN}"
DOCS = Path(__file__).parent
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COS_SIN = "cos and sin"
# Color, color of the text and width of a step; layers have others.
_STEP_STYLES = {_COS_SIN: (GREY, DARK, 1.6)}
# Text stays text, and the same input gives the same file.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "rope_cpu", "font.size": 10}
INKS = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
# Browsers apply it in a dark palette: paper and ink change, colors and white text on them do not.
DARK_PALETTE = f"""
@media (prefers-color-scheme: dark) {{
  path[style*="fill: #ffffff"] {{ fill: #1e2129 !important }}
  [style*="fill: {DARK}"] {{ fill: {LIGHT} !important }}
  [style*="stroke: {DARK}"] {{ stroke: {LIGHT} !important }}
}}
"""
# Row of the table of times in performance.md → its name in the picture.
CONTENDERS = {
    "rope_cpu plan": "rope_cpu",
    "NumPy rotate_half": "NumPy",
    "torch.compile": "torch.compile",
    "JAX jit": "JAX jit",
    "onnxruntime, RotaryEmbedding-23 alone, IO-bound": "onnxruntime",
}


def pairings() -> Figure:
    """Draw the elements of a head of 8 elements; each color is a pair."""
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    rows = figure.subplots(2, 1)
    titles = {
        False: "half-split (the default): pair i is elements (i, i + 4)",
        True: "interleaved: pair i is elements (2i, 2i + 1)",
    }
    for axes, (interleaved, title) in zip(rows, titles.items(), strict=True):
        spec = rope_cpu.RotaryEmbedding(8, interleaved=interleaved).spec
        first, second = spec.pair_elements()
        for pair, elements in enumerate(zip(first, second, strict=True)):
            for element in elements:
                _box(axes, element, 0, f"x{element}", COLORS[pair])
            _arc(axes, *elements, COLORS[pair])
        axes.set_xlim(-0.1, 8.1)
        axes.set_ylim(-0.1, 1.9)
        axes.set_title(title, loc="left", fontsize=10)
        axes.axis("off")
    return figure


def layouts() -> Figure:
    """Draw the order in memory of two tokens of two sequences with two heads."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    rows = figure.subplots(4, 1)
    names = {"b": "sequence", "s": "token", "t": "token", "h": "head"}
    orders = {"bshd": "bsh", "bhsd": "bhs", "sbhd": "sbh", "thd": "th"}
    for axes, (layout, order) in zip(rows, orders.items(), strict=True):
        sizes = [4 if axis == "t" else 2 for axis in order]
        for place, index in enumerate(np.ndindex(*sizes)):
            values = dict(zip(order, index, strict=True))
            token = values.get("s", values.get("t", 0))
            sequence = values.get("b", token // 2)
            _box(axes, place, 0, f"head {values['h']}", COLORS[2 * sequence + token % 2])
        listed = ", ".join(names[axis] for axis in order)
        axes.set_title(f'"{layout}": {listed}, element', loc="left", fontsize=10)
        axes.set_xlim(-0.1, 8.1)
        axes.set_ylim(-0.1, 1.1)
        axes.axis("off")
    figure.supxlabel(
        "one box: the vector of one head; one color: one token", fontsize=10, color=DARK
    )
    return figure


def scaling() -> Figure:
    """Draw the wavelengths of the pairs of Llama 3.1, before and after scaling."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    before = rope_cpu.RotaryEmbedding(128, rope_theta=5e5)
    after = rope_cpu.RotaryEmbedding(128, rope_theta=5e5, scaling=LLAMA3)
    lengths = {"original context, 8,192": 8192, "maximum context, 131,072": 131072}
    axes.plot(2 * np.pi / before.inv_freq, "--", color=COLORS[1], label="before scaling")
    axes.plot(2 * np.pi / after.inv_freq, color=COLORS[0], label='after, "llama3" with factor 8')
    scaled = np.flatnonzero(after.inv_freq != before.inv_freq)
    axes.axvspan(scaled[0], 63, color=GREY, label="scaled pairs")
    for text, length in lengths.items():
        axes.axhline(length, color=DARK, lw=0.8, ls=":")
        axes.text(0.5, length * 1.2, text, fontsize=9, color=DARK)
    axes.set_yscale("log")
    axes.set(xlabel="pair (0 rotates fastest)", ylabel="wavelength in tokens", xlim=(0, 63))
    axes.legend(loc="lower right", fontsize=9)
    return figure


def several_axes() -> Figure:
    """Draw the share of the axes in the pairs of a head, for three constructors."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    rows = figure.subplots(3, 1)
    axial_blocks = rope_cpu.RotaryEmbedding.axial(64, 3, axis_dims=(16, 24, 24))
    mrope = rope_cpu.RotaryEmbedding.mrope(64, [8, 12, 12], rope_theta=1e6)
    interleaved = rope_cpu.RotaryEmbedding.mrope(
        64, [12, 10, 10], rope_theta=1e6, mrope_interleaved=True
    )
    ropes = {
        "axial(64, 3, axis_dims=(16, 24, 24))": axial_blocks,
        "mrope(64, [8, 12, 12])": mrope,
        "mrope(64, [12, 10, 10], mrope_interleaved=True)": interleaved,
    }
    for axes, (title, rope) in zip(rows, ropes.items(), strict=True):
        for pair in range(32):
            (axis,) = np.flatnonzero(rope.inv_freq[:, pair])
            axes.add_patch(Rectangle((pair, 0), 0.9, 1, color=COLORS[axis]))
        axes.set_xlim(0, 32)
        axes.set_ylim(0, 1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.axis("off")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in COLORS[:3]]
    figure.legend(
        handles,
        ["time", "row", "column"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        title="each box is one of 32 pairs; its color is the axis whose coordinate rotates it",
    )
    return figure


def plan() -> Figure:
    """Draw the work of a plan and of calls, over the layers of a forward pass."""
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    axes = figure.subplots()
    layers = [f"layer {n}" for n in range(4)]
    calls = [step for layer in layers for step in (_COS_SIN, layer)]
    rows = {"plan, then plan(q, k)": [_COS_SIN, *layers], "rope(q, k)": calls}
    for row, (name, steps) in enumerate(rows.items()):
        axes.text(-0.2, 0.3 - row, name, ha="right", va="center", family="monospace", fontsize=9)
        start = 0.0
        for step in steps:
            start = _step(axes, start, -row, step)
    axes.annotate(
        "time",
        xy=(12.0, -1.45),
        xytext=(0, -1.45),
        va="center",
        color=DARK,
        arrowprops={"arrowstyle": "->", "color": DARK},
    )
    axes.set_xlim(-3.9, 12.2)
    axes.set_ylim(-1.7, 0.9)
    axes.axis("off")
    return figure


def at_length() -> Figure:
    """Draw the slowest wavelength of two rope types against the length of the sequence."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + pair / 3 for pair in range(16)],
        "original_max_position_embeddings": 4096,
    }
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    ropes = {
        "dynamic": rope_cpu.RotaryEmbedding(32, scaling=dynamic, max_position_embeddings=4096),
        "longrope": rope_cpu.RotaryEmbedding(32, scaling=longrope, max_position_embeddings=16384),
    }
    lengths = np.unique(np.geomspace(1000, 16384, 200).astype(int))
    for color, (name, rope) in zip(COLORS, ropes.items(), strict=False):
        slowest = [2 * np.pi / rope.at_length(int(n)).inv_freq[-1] for n in lengths]
        axes.plot(lengths, slowest, color=color, label=f'"{name}"')
    axes.set_ylim(0, None)
    axes.axvline(4096, color=DARK, lw=0.8, ls=":")
    axes.text(4200, 0, "original context, 4,096", va="bottom", fontsize=9, color=DARK)
    axes.set(
        xlabel="length of the sequence in tokens: the argument of at_length",
        ylabel="wavelength of the slowest pair",
    )
    axes.legend(loc="upper left", fontsize=9)
    return figure


def decay() -> Figure:
    """Draw the bound on scores by the example that explains it."""
    example = runpy.run_path(str(DOCS.parent / "examples" / "decay.py"))
    distances = np.arange(257)
    figure: Figure = example["plot"](distances, example["bound"](distances))
    return figure


def bench() -> Figure:
    """Draw the times of well-known contenders from the first table of performance.md."""
    figure = Figure(figsize=(6.5, 2.6), layout="constrained")
    columns = figure.subplots(1, 3, sharey=True)
    titles = ("one token", "512 tokens", "4096 tokens")
    times = _table_of_times()
    for column, (axes, title) in enumerate(zip(columns, titles, strict=True)):
        texts = [times[name][3 + column] for name in CONTENDERS]
        multiples = [1.0, *map(float, texts[1:])]
        axes.barh(list(CONTENDERS.values()), multiples, color=[COLORS[0]] + 4 * [COLORS[1]])
        for row, (text, multiple) in enumerate(zip(texts, multiples, strict=True)):
            shown = text if row == 0 else f"{text} {TIMES}"
            axes.annotate(
                shown,
                (multiple, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=11,
            )
        axes.set_title(title, fontsize=11)
        axes.set_xlim(0, 1.6 * max(multiples))
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0, labelsize=11)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    columns[0].invert_yaxis()
    figure.supxlabel("time to rotate q and k into other arrays; shorter is faster", fontsize=11)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "pairings": pairings,
    "layouts": layouts,
    "scaling": scaling,
    "axes": several_axes,
    "plan": plan,
    "at_length": at_length,
    "decay": decay,
    "bench": bench,
}


def _table_of_times() -> dict[str, list[str]]:
    """Return the cells of the tables of performance.md by the first one of their row."""
    rows: dict[str, list[str]] = {}
    for line in (DOCS / "performance.md").read_text(encoding="utf-8").splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.setdefault(name, cells)
    return rows


def _step(axes: Any, start: float, y: float, text: str) -> float:
    """Draw a step of work, and return where the next one starts."""
    face, ink, width = _STEP_STYLES.get(text, (COLORS[1], "white", 1.2))
    axes.add_patch(Rectangle((start, y), width, 0.6, color=face))
    center = (start + width / 2, y + 0.3)
    axes.text(*center, text, ha="center", va="center", fontsize=8, color=ink)
    return start + width + 0.1


def _box(axes: Any, x: float, y: float, text: str, color: str) -> None:
    axes.add_patch(Rectangle((x, y), 0.9, 0.9, color=color))
    axes.text(x + 0.45, y + 0.45, text, ha="center", va="center", color="white", fontsize=9)


def _arc(axes: Any, first: float, second: float, color: str) -> None:
    start = (first + 0.45, 0.95)
    end = (second + 0.45, 0.95)
    bend = -0.9 / abs(second - first) if abs(second - first) > 1 else -0.6
    style = f"arc3,rad={bend}"
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=style, color=color, lw=1.5))


def main(folder: Path) -> None:
    """Write all pictures."""
    with matplotlib.rc_context(SVG | dict.fromkeys(INKS, DARK)):
        for name, draw in PICTURES.items():
            path = folder / f"{name}.svg"
            draw().savefig(path, metadata={"Date": None})
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace("</style>", f"{DARK_PALETTE}</style>", 1), "utf-8")


if __name__ == "__main__":
    main(DOCS / "pictures")
    bench().savefig(DOCS / "bench.png", dpi=200)
