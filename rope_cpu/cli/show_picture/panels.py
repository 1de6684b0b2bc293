"""The panels in the picture of `rope-cpu show --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from rope_cpu.array_types import Float64
from rope_cpu.cli.show_bands import pairs_text
from rope_cpu.cli.show_picture.curves import Curve
from rope_cpu.cli.show_picture.scores import expected_scores

# Sizes in points.
SMALL = 8
_MEDIUM = 10
_LINE_WIDTH = 1.2

_CONTEXT_LINE: dict[str, Any] = {"color": "0.4", "linestyle": ":", "linewidth": 1}
_SHADE = "0.93"

# Ends of a curve.
_FIRST = 0
_LAST = -1

# More runs of scaled pairs are not named.
_NAMED_RUNS = 3


def wavelength_scale(curves: Sequence[Curve]) -> str:
    """Return "log", or "linear" for wavelengths within a factor of 10, as those of LTX are."""
    waves = np.concatenate([curve.wavelengths for curve in curves])
    return "log" if waves.max() > 10 * waves.min() else "linear"


def draw_wavelengths(
    panel: Axes, curves: Sequence[Curve], contexts: Sequence[tuple[str, int]]
) -> None:
    """Draw the wavelengths of one axis, its scaled pairs and the contexts."""
    axis = curves[0].axis
    for curve in curves:
        panel.plot(
            curve.pairs,
            curve.wavelengths,
            curve.style,
            color=curve.color,
            label=curve.label,
            marker=".",
            markersize=3,
            linewidth=_LINE_WIDTH,
        )
        _shade_changed_pairs(panel, curve)
    falls = not axis.name and curves[0].frequencies.argmax() == 0
    name = f"{axis.name}: " if axis.name else ""
    panel.set_title(f"{name}wavelengths", fontsize=_MEDIUM)
    panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    panel.margins(y=0.12)  # space for the label of the upper context
    panel.set_xlabel("pair (0 rotates fastest)" if falls else "pair of the head")
    panel.set_ylabel(f"wavelength in {axis.unit}")
    panel.tick_params(labelsize=SMALL)
    if axis.extent is None:
        for name, length in contexts:
            _draw_horizontal_context(panel, curves, name, length)


def _draw_horizontal_context(panel: Axes, curves: Sequence[Curve], name: str, length: int) -> None:
    """Draw a context as a labelled wavelength.

    Wavelengths rise with the pairs, so the space above the line is free at the left and the space
    below it at the right, unless a curve starts or ends near the line. The maximum is labelled
    above its line and the original context below, also because they may be near each other.
    """
    panel.axhline(length, **_CONTEXT_LINE)
    is_original = name.startswith("original")
    if is_original:
        is_left = not _is_free(curves, length, _LAST)
    else:
        is_left = _is_free(curves, length, _FIRST)
    panel.annotate(
        _short_label(name, length),
        (0.02 if is_left else 0.98, length),
        xycoords=("axes fraction", "data"),
        xytext=(0, -2 if is_original else 2),
        textcoords="offset points",
        ha="left" if is_left else "right",
        va="top" if is_original else "bottom",
        fontsize=SMALL,
    )


def _is_free(curves: Sequence[Curve], length: int, end: int) -> bool:
    """Return True if no curve has its first or last pair within a factor of 4 of a wavelength."""
    ratios = [curve.wavelengths[end] / length for curve in curves]
    return not any(1 / 4 < ratio < 4 for ratio in ratios)


def _shade_changed_pairs(panel: Axes, curve: Curve) -> None:
    """Shade the runs of pairs whose wavelength scaling changes."""
    numbers = np.flatnonzero(curve.changed)
    if numbers.size == 0:
        return
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    names = ", ".join(pairs_text(curve.pairs[run]) for run in runs[:_NAMED_RUNS])
    more = ", …" if len(runs) > _NAMED_RUNS else ""
    label = f"{curve.group} pairs that scaling changes: {names}{more}".strip()
    for number, run in enumerate(runs):
        panel.axvspan(
            curve.pairs[run[0]] - 0.5,
            curve.pairs[run[-1]] + 0.5,
            color=_SHADE,
            linewidth=0,
            zorder=0,
            label=label if number == 0 else None,
        )


def draw_scores(panel: Axes, curves: Sequence[Curve], contexts: Sequence[tuple[str, int]]) -> None:
    """Draw the expected scores of all curves, and the contexts."""
    lines = [expected_scores(curve.frequencies, curve.largest, curve.axis.step) for curve in curves]
    for number, (distances, scores) in enumerate(lines):
        # Two axes often have the same scores: lines that later ones cover are drawn wider.
        covering = sum(_is_same(scores, later) for _, later in lines[number + 1 :])
        curve = curves[number]
        width = _LINE_WIDTH * (1 + 2 * covering)
        panel.plot(distances, scores, curve.style, color=curve.color, linewidth=width)
    if any(curve.axis.extent is None for curve in curves):
        for name, length in contexts:
            _draw_vertical_context(panel, name, length)
    units = " or ".join(dict.fromkeys(curve.axis.unit for curve in curves))
    along = "along one axis " if any(curve.axis.name for curve in curves) else ""
    panel.axhline(0, color="0.8", linewidth=0.6, zorder=0)
    panel.set_title("expected scores", fontsize=_MEDIUM)
    panel.set_xscale("log")
    panel.set_xlim(min(curve.axis.step for curve in curves), max(curve.largest for curve in curves))
    panel.set_ylim(top=1.02)
    panel.set_xlabel(f"distance {along}in {units}")
    panel.set_ylabel("expected score (1 at distance 0)")
    panel.tick_params(labelsize=SMALL)


def _is_same(scores: Float64, others: Float64) -> bool:
    return scores.shape == others.shape and bool(np.allclose(scores, others, rtol=0, atol=0.02))


def _draw_vertical_context(panel: Axes, name: str, length: int) -> None:
    """Draw a context as a labelled distance."""
    panel.axvline(length, **_CONTEXT_LINE)
    panel.annotate(
        _short_label(name, length),
        (length, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-3, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="top",
        fontsize=SMALL,
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
    )


def _short_label(name: str, length: int) -> str:
    """Return "original 8192": the title of the figure says that it is a context."""
    return f"{name.removesuffix(' context')} {length}"
