"""The picture of `rope-cpu show --plot`: wavelength against pair, and score against distance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rope_cpu.arguments.texts import cut
from rope_cpu.array_types import Float64, Int64
from rope_cpu.cli import groups
from rope_cpu.cli.groups import Group

# Inches.
_WIDTH = 9.0
_ROW_HEIGHT = 3.2
_TITLE_AND_LEGEND_HEIGHT = 1.2

# Sizes in points; _RIM: the part of a line that shows behind an equal one.
_LINE = 1.2
_RIM = 1.8
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "lines.linewidth": _LINE,
    "lines.markersize": 3,
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar sign in a name begins no formula
}
# Of a curve before scaling: marks would hide its dashes.
_BEFORE = {"color": "0.55", "linestyle": "--", "marker": "", "zorder": 1.5}
_CONTEXT_STYLES = {"original context": ":", "maximum context": "-."}

# Largest distances without a known maximum context: a multiple of the original context, or the
# longest wavelength within these bounds.
_TIMES_ORIGINAL = 4
_LEAST_DISTANCE = 64
_MOST_DISTANCE = 2**20

_POINTS = 400

# Each score is the mean over the distances from d / _WINDOW to d * _WINDOW.
_WINDOW = 1.1


@rc_context(_STYLE)
def draw(found: Sequence[Group]) -> Figure:
    """Return the figure: a panel of wavelengths for each axis, and one of expected scores."""
    rotated = [group for group in found if group.spec is not None]
    axes = list(dict.fromkeys(axis for group in rotated for axis, _ in _by_axis(group)))
    # The scores take the space that is left in rows of two panels.
    cells = [*axes, *["scores"] * (2 - len(axes) % 2)]
    rows: list[Any] = [cells[start : start + 2] for start in range(0, len(cells), 2)]
    height = _ROW_HEIGHT * len(rows) + _TITLE_AND_LEGEND_HEIGHT
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    panels = figure.subplot_mosaic(rows)
    scores = panels["scores"]
    waves = {axis: panels[axis] for axis in axes}
    _prepare_wavelengths(waves)
    _prepare_scores(scores, axes)
    for group in rotated:
        rope_type = next(iter(group.ropes.values())).rope_type
        name = f"{cut(group.name)} ({rope_type})" if rotated[1:] else ""
        for axis, pairs in _by_axis(group):
            largest = axis.extent or _largest_distance(group)
            label = f"{name} {axis.name}".strip()
            _draw_axis(waves[axis], scores, group, pairs, largest, axis.step, label)
    _draw_contexts(waves, scores, [group.contexts for group in rotated])
    figure.suptitle(_title(rotated))
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _by_axis(group: Group) -> Iterator[tuple[groups.Axis, Int64]]:
    """Yield the axes that rotate pairs, each with the numbers of its pairs."""
    axis_of_pair = next(iter(group.pairs.values())).axis
    for number, axis in enumerate(group.axes):
        pairs = np.flatnonzero(axis_of_pair == number)
        if pairs.size > 0:
            yield axis, pairs


def _prepare_wavelengths(panels: Mapping[groups.Axis, Axes]) -> None:
    """Set titles and scales; panels share the scale of wavelengths."""
    first, *others = panels.values()
    for panel in others:
        panel.sharey(first)
    first.set_yscale("log")
    for axis, panel in panels.items():
        panel.set_title(f"{axis.name}: wavelengths" if axis.name else "wavelengths")
        panel.locator_params("x", integer=True)
        panel.set_xlabel("pair of the head")
        panel.set_ylabel(f"wavelength in {axis.unit}")


def _prepare_scores(panel: Axes, axes: Sequence[groups.Axis]) -> None:
    """Set title and scale."""
    units = " or ".join(dict.fromkeys(axis.unit for axis in axes))
    along = "along one axis " if len(axes) > 1 else ""
    panel.set_title("expected scores")
    panel.set_xscale("log")
    panel.margins(x=0)
    panel.set_xlabel(f"distance {along}in {units}")
    panel.set_ylabel("mean of cos(distance · frequency)")
    panel.grid(axis="y", color="0.9")


def _draw_axis(
    panel: Axes, scores: Axes, group: Group, pairs: Int64, largest: float, step: float, name: str
) -> None:
    """Draw the wavelengths and scores of an axis at each length, and grey before scaling.

    The grey curve is left out if it equals another.
    """
    before = next(iter(group.pairs.values())).before[pairs]
    changed = [at_length.changed[pairs] for at_length in group.pairs.values()]
    otherwise = "after scaling" if np.any(changed) else ""
    curves = [
        (length or otherwise, at_length.frequencies[pairs])
        for length, at_length in group.pairs.items()
    ]
    if all(pairs_of_length.any() for pairs_of_length in changed):
        curves.append(("before scaling", before))
    for label, frequencies in curves:
        color = f"C{len(scores.lines)}"
        style: dict[str, Any] = {"color": color, "marker": ".", "zorder": 2.0}
        style |= _BEFORE if frequencies is before else {}
        label = f"{name} {label}".strip() or "all pairs"
        panel.plot(pairs, 2 * np.pi / frequencies, **style, label=label)
        distances, values = expected_scores(frequencies, largest, step)
        # A curve that equals earlier ones, as of another axis, is wider and drawn behind them.
        equal = sum(np.array_equal(line.get_ydata(), values) for line in scores.lines)
        style |= {"linewidth": _LINE + _RIM * equal, "zorder": style["zorder"] - equal / 10}
        scores.plot(distances, values, **style | {"marker": ""})
    _shade(panel, pairs, np.any(changed, axis=0), f"{name} pairs that scaling changes".strip())


def _shade(panel: Axes, pairs: Int64, changed: NDArray[np.bool_], label: str) -> None:
    """Shade runs of pairs."""
    if not changed.any():
        return
    panel.fill_between(
        np.add.outer(pairs, [-0.5, 0.5]).ravel(),
        0,
        1,
        where=np.repeat(changed, 2),
        transform=panel.get_xaxis_transform(),
        color="0.93",
        linewidth=0,
        zorder=0,
        label=label,
    )


def _draw_contexts(
    panels: Mapping[groups.Axis, Axes], scores: Axes, found: Sequence[Mapping[str, int]]
) -> None:
    """Draw contexts as wavelengths and as distances; only rotations of tokens have any."""
    for name, length in dict.fromkeys(item for of_layer in found for item in of_layer.items()):
        style = _CONTEXT_STYLES[name]
        for panel in panels.values():
            panel.axhline(length, color="0.4", linestyle=style, linewidth=1)
        label = f"{name}: {length} tokens"
        scores.axvline(length, color="0.4", linestyle=style, linewidth=1, label=label)


def _title(rotated: Sequence[Group]) -> str:
    """Return the model, its rope types and attention factors."""
    ropes = [rope for group in rotated for rope in group.ropes.values()]
    types = dict.fromkeys(rope.rope_type for rope in ropes)
    factors = dict.fromkeys(f"{rope.attention_factor:.4g}" for rope in ropes)
    heads = ", the first head" if ropes[0].spec.inv_freq.shape[2] > 1 else ""
    facts = f"rope type {', '.join(types)}; attention factor {', '.join(factors)}"
    return f"{cut(rotated[0].model)}{heads}\n{facts}"


def _largest_distance(group: Group) -> float:
    """Return the maximum context, or a bounded stand-in for configs without one."""
    known = group.contexts
    if "maximum context" in known:
        return known["maximum context"]
    if known:
        return _TIMES_ORIGINAL * known["original context"]
    frequencies = next(iter(group.pairs.values())).frequencies
    longest = 2 * np.pi / frequencies[frequencies > 0].min()
    return float(np.clip(longest, _LEAST_DISTANCE, _MOST_DISTANCE))


def expected_scores(
    frequencies: Float64, largest: float, step: float = 1.0
) -> tuple[Float64, Float64]:
    """Return distances from `step` to `largest`, and the expected scores there, both (points,).

    The expected score at distance d is the mean over pairs of cos(d·frequency): the score of a
    query and a key whose pairs have the same direction, relative to distance 0. It is 1 at distance
    0 and never larger. The attention factor, which multiplies all scores alike, is left out.

    Distances are multiples of `step` up to `largest`, spread evenly on a logarithmic scale, and
    each score is the mean over all distances within 10 %. Single distances would sample the fast
    pairs less than once per wavelength, which draws waves that do not exist (aliasing).

    frequencies: (pairs,), in radians per unit of position. step: 1 for whole positions.
    """
    steps = max(round(largest / step), 1)
    points = np.unique(np.geomspace(1, steps, _POINTS).round())
    first = np.ceil(points / _WINDOW)
    last = np.floor(points * _WINDOW)
    count = (last - first + 1)[:, None]
    middle = ((first + last) / 2)[:, None]
    # Multiples of 2π change no cosine at whole multiples of the step.
    angles = np.remainder(frequencies * step + np.pi, 2 * np.pi) - np.pi
    # The sum of cos(k·angle) over consecutive k is a Dirichlet kernel, so no distance is left out.
    means = np.cos(middle * angles) * _half_sinc(count * angles) / _half_sinc(angles)
    scores: Float64 = means.mean(axis=-1)
    return points * step, scores


def _half_sinc(angle: Float64) -> Float64:
    """Return sin(angle/2) / (angle/2)."""
    ratio: Float64 = np.sinc(angle / (2 * np.pi))
    return ratio
