"""The picture of `rope-cpu show --plot`: the wavelengths of all pairs, and those before scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from rope_cpu.arguments.texts import cut
from rope_cpu.array_types import Float64, Int64
from rope_cpu.cli.groups import Axis, Group

# Inches.
_WIDTH = 8
_PANEL_HEIGHT = 3.5


class _Curve(NamedTuple):
    axis: Axis
    label: str
    pairs: Int64
    frequencies: Float64
    style: str


@rc_context({"text.parse_math": False})  # a dollar sign in a name begins no formula
def draw(rotated: Sequence[Group]) -> Figure:
    """Return the figure: a panel for each axis, with the curves of groups of layers."""
    curves = [curve for group in rotated for curve in _curves(group)]
    axes = list(dict.fromkeys(curve.axis for curve in curves))
    figure = Figure(figsize=(_WIDTH, _PANEL_HEIGHT * len(axes)), layout="constrained")
    panels = figure.subplots(len(axes), squeeze=False, sharey=True)[:, 0]
    figure.suptitle(cut(rotated[0].model))
    for panel, axis in zip(panels, axes, strict=True):
        for curve in curves:
            if curve.axis == axis:
                waves = 2 * np.pi / curve.frequencies
                panel.plot(curve.pairs, waves, curve.style, label=curve.label)
        panel.set_yscale("log")
        panel.set(xlabel="pair", ylabel=f"wavelength in {axis.unit}", title=axis.name)
        panel.legend()
    return figure


def _curves(group: Group) -> Iterator[_Curve]:
    """Yield the curves of a group: at each length, and before scaling where that changes any."""
    for length, found in group.pairs.items():
        for number, axis in enumerate(group.axes):
            pairs = np.flatnonzero(found.axis == number)
            if pairs.size == 0:
                continue
            label = f"{cut(group.name)} {length}".strip()
            yield _Curve(axis, label, pairs, found.frequencies[pairs], ".-")
            if found.changed[pairs].any():
                before = f"{label} before scaling"
                yield _Curve(axis, before, pairs, found.before[pairs], "--")
