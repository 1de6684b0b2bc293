"""The picture of `rope-cpu show --plot`: wavelength against pair, and score against distance."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from rope_cpu.arguments.texts import cut
from rope_cpu.cli.show_axes import Axis
from rope_cpu.cli.show_picture.curves import Curve, rotation_curves
from rope_cpu.cli.show_picture.panels import SMALL, draw_scores, draw_wavelengths, wavelength_scale
from rope_cpu.cli.show_summary import LayerRotation

# Inches.
_WIDTH = 9.0
_ROW_HEIGHT = 3.2
_TITLE_AND_LEGEND_HEIGHT = 1.2
_CAPTION_HEIGHT = 0.5

_CAPTION = (
    "Expected score: the mean over {pairs} of cos(distance · frequency). It is the part of the "
    "score from rotated elements, for a query and a key whose pairs have the same direction, "
    "relative to distance 0, where it is 1; the attention factor is left out. Each point is the "
    "mean over all distances within 10 %."
)
_CAPTION_WIDTH = 145  # characters

# Three labels up to this length fit beside each other.
_SHORT_LABEL = 45


def plot(rotations: Sequence[LayerRotation], path: Path) -> None:
    """Draw the wavelengths of rotations and their expected scores into a file."""
    draw(rotations).savefig(path, dpi=130)


def draw(rotations: Sequence[LayerRotation]) -> Figure:
    """Return the figure: a panel of wavelengths for each axis, and a panel of expected scores."""
    rotated = [rotation for rotation in rotations if rotation.by_length]
    curves = list(rotation_curves(rotated))
    contexts = [context for rotation in rotated for context in rotation.contexts.items()]
    contexts = list(dict.fromkeys(contexts))
    axes = list(dict.fromkeys(curve.axis for curve in curves))
    rows = len(axes) // 2 + 1
    heights = (_ROW_HEIGHT * rows + _TITLE_AND_LEGEND_HEIGHT, _CAPTION_HEIGHT)
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)
    panels, footer = parts.ravel()
    panels.suptitle(_plain(_title(rotated)), fontsize=11)
    _add_panels(panels, axes, curves, contexts)
    _add_legend(panels)
    caption = _CAPTION.format(pairs="the pairs of an axis" if len(axes) > 1 else "rotated pairs")
    footer.text(0.02, 0.95, textwrap.fill(caption, _CAPTION_WIDTH), fontsize=SMALL, va="top")
    return figure


def _add_panels(
    panels: SubFigure,
    axes: Sequence[Axis],
    curves: Sequence[Curve],
    contexts: Sequence[tuple[str, int]],
) -> None:
    """Draw two panels in a row; the last one, of the scores, takes the space that is left.

    Panels of the same unit have the same wavelengths at the same height.
    """
    grid = panels.add_gridspec(len(axes) // 2 + 1, 2)
    panel_of_unit: dict[str, Axes] = {}
    for number, axis in enumerate(axes):
        cell = grid[number // 2, number % 2]
        panel = panels.add_subplot(cell, sharey=panel_of_unit.get(axis.unit))
        if axis.unit not in panel_of_unit:
            same_unit = [curve for curve in curves if curve.axis.unit == axis.unit]
            panel.set_yscale(wavelength_scale(same_unit))
            panel_of_unit[axis.unit] = panel
        draw_wavelengths(panel, [curve for curve in curves if curve.axis == axis], contexts)
    last_cell = grid[-1, :] if len(axes) % 2 == 0 else grid[-1, 1]
    draw_scores(panels.add_subplot(last_cell), curves, contexts)


def _add_legend(panels: SubFigure) -> None:
    """Add one legend for all panels, below them."""
    handles: dict[str, Any] = {}
    for panel in panels.axes:
        own_handles, labels = panel.get_legend_handles_labels()
        handles.update(zip(labels, own_handles, strict=True))
    panels.legend(
        list(handles.values()),
        [_plain(label) for label in handles],
        loc="outside lower center",
        ncols=3 if len(handles) % 3 == 0 and max(map(len, handles)) < _SHORT_LABEL else 2,
        fontsize=SMALL,
        frameon=False,
    )


def _title(rotations: Sequence[LayerRotation]) -> str:
    """Return the model and its rope type, and in a second line contexts and attention factors."""
    first = rotations[0]
    types = dict.fromkeys(rotation.rope.rope_type for rotation in rotations)
    names = dict.fromkeys(name for rotation in rotations for name in rotation.contexts)
    contexts = [_counted(name, _lengths(rotations, name)) for name in names]
    factors = dict.fromkeys(
        f"{rope.attention_factor:.4g}"
        for rotation in rotations
        for rope in rotation.by_length.values()
    )
    facts = [*contexts, _counted("attention factor", factors)]
    if first.rope.spec.inv_freq.shape[2] > 1:
        facts.append("the first head")
    return f"{cut(first.model)}, {_counted('rope type', types)}\n{', '.join(facts)}"


def _lengths(rotations: Sequence[LayerRotation], name: str) -> Collection[str]:
    """Return the different lengths of a context."""
    lengths = [rotation.contexts[name] for rotation in rotations if name in rotation.contexts]
    return dict.fromkeys(map(str, lengths))


def _counted(noun: str, names: Collection[str]) -> str:
    """Return "rope type yarn", or "rope types yarn and default"."""
    plural = "s" if len(names) > 1 else ""
    return f"{noun}{plural} {' and '.join(names)}"


def _plain(text: str) -> str:
    """Return a text in which Matplotlib takes no dollar sign for the start of a formula."""
    return text.replace("$", "\\$")
