"""The picture of `rope-cpu show --plot`: the wavelengths of all pairs, and those before scaling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rope_cpu.arguments.texts import cut
from rope_cpu.cli.groups import Group
from rope_cpu.cli.pairs import Axis, axes_of, pairs_of

# Inches.
_WIDTH = 8
_PANEL_HEIGHT = 3.5


@rc_context({"text.parse_math": False})  # a dollar sign in a name begins no formula
def draw(rotated: Sequence[Group]) -> Figure:
    """Return the figure: a panel for each axis, with the curves of groups of layers."""
    axes = list(dict.fromkeys(axis for group in rotated for axis in _rotating_axes(group).values()))
    figure = Figure(figsize=(_WIDTH, _PANEL_HEIGHT * len(axes)), layout="constrained")
    figure.suptitle(cut(rotated[0].model))
    panels = figure.subplots(len(axes), squeeze=False, sharey=True)[:, 0]
    for group in rotated:
        for number, axis in _rotating_axes(group).items():
            _draw_axis(panels[axes.index(axis)], group, number)
    for panel, axis in zip(panels, axes, strict=True):
        panel.set_yscale("log")
        panel.set(xlabel="pair", ylabel=f"wavelength in {axis.unit}", title=axis.name)
        panel.legend()
    return figure


def _rotating_axes(group: Group) -> dict[int, Axis]:
    """Return the axes that rotate pairs, by number."""
    axis_of_pair = next(iter(pairs_of(group).values())).axis
    return {number: axis for number, axis in enumerate(axes_of(group)) if number in axis_of_pair}


def _draw_axis(panel: Axes, group: Group, number: int) -> None:
    """Draw the wavelengths of an axis at each length, and before scaling where that changes any."""
    for length, found in pairs_of(group).items():
        pairs = np.flatnonzero(found.axis == number)
        label = f"{cut(group.name)} {length}".strip()
        panel.plot(pairs, 2 * np.pi / found.frequencies[pairs], ".-", label=label)
        if found.changed[pairs].any():
            before = f"{label} before scaling"
            panel.plot(pairs, 2 * np.pi / found.before[pairs], "--", label=before)
