"""The curves in the picture of `rope-cpu show --plot`, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from rope_cpu.arguments.texts import cut
from rope_cpu.array_types import Float64, Int64
from rope_cpu.cli.show_axes import Axis
from rope_cpu.cli.show_bands import changed_pairs
from rope_cpu.cli.show_summary import LayerRotation, pair_axes, pair_frequencies

_BEFORE_COLOR = "0.55"

# Largest distances without a known maximum context: a multiple of the original context, or the
# longest wavelength within these bounds.
_TIMES_ORIGINAL = 4
_LEAST_DISTANCE = 64
_MOST_DISTANCE = 2**20


@dataclass(frozen=True)
class Curve:
    """The pairs of one axis of a rotation, at one length, as a line in the panels.

    group: name of the layers and the axis, as far as there are several. pairs: their numbers in the
    head. frequencies: one for each of them. changed: which of them scaling changes at any length,
    in the first curve of a group; none in the others. largest: the largest distance of scores.
    """

    group: str
    label: str
    color: str
    style: str
    axis: Axis
    pairs: Int64
    frequencies: Float64
    changed: NDArray[np.bool_]
    largest: float

    @property
    def wavelengths(self) -> Float64:
        """Positions for one turn of each pair."""
        return 2 * np.pi / self.frequencies


def rotation_curves(rotations: Sequence[LayerRotation]) -> Iterator[Curve]:
    """Yield the curves of every rotation, in a colour for each axis and length."""
    colors = (f"C{number}" for number in count())
    for rotation in rotations:
        layers = ""
        if len(rotations) > 1:
            layers = f"{cut(rotation.layers)} ({rotation.rope.rope_type})"
        pair_axis = pair_axes(rotation.rope)
        for number, axis in enumerate(rotation.axes):
            pairs = np.flatnonzero(pair_axis == number)
            if pairs.size > 0:
                group = " ".join(filter(None, (layers, axis.name)))
                yield from _axis_curves(rotation, axis, pairs, group, colors)


def _axis_curves(
    rotation: LayerRotation, axis: Axis, pairs: Int64, group: str, colors: Iterator[str]
) -> Iterator[Curve]:
    """Yield the curve of an axis at each length, and a dashed one before scaling.

    The dashed one is left out if it equals another.
    """
    before = rotation.unscaled[pairs]
    after = {length: pair_frequencies(rope)[pairs] for length, rope in rotation.by_length.items()}
    changed_by_length = [changed_pairs(scaled, before) for scaled in after.values()]
    own_colors = [next(colors) for _ in after]
    unscaled = Curve(
        group=group,
        label=f"{group} before scaling".strip(),
        color=own_colors[0] if group else _BEFORE_COLOR,
        style="--",
        axis=axis,
        pairs=pairs,
        frequencies=before,
        changed=np.zeros(pairs.shape, bool),
        largest=_largest_distance(rotation, axis),
    )
    is_another_curve = all(changed.any() for changed in changed_by_length)
    curves = [unscaled] if is_another_curve else []
    otherwise = "after scaling" if np.any(changed_by_length) else ""
    for (length, scaled), color in zip(after.items(), own_colors, strict=True):
        label = f"{group} {length or otherwise}".strip() or "all pairs"
        curves.append(replace(unscaled, label=label, color=color, style="-", frequencies=scaled))
    yield replace(curves[0], changed=np.any(changed_by_length, axis=0))
    yield from curves[1:]


def _largest_distance(rotation: LayerRotation, axis: Axis) -> float:
    """Return the maximum context, or a bounded stand-in for configs without one."""
    if axis.extent is not None:
        return axis.extent
    lengths = [rope.spec.lengths for rope in rotation.by_length.values()]
    known = [*rotation.contexts.values(), *(length[0] for length in lengths if length)]
    if "maximum context" not in rotation.contexts and len(known) == 1:
        return _TIMES_ORIGINAL * known[0]
    if known:
        return max(known)
    frequencies = pair_frequencies(rotation.rope)
    longest = 2 * np.pi / frequencies[frequencies > 0].min()
    return float(np.clip(longest, _LEAST_DISTANCE, _MOST_DISTANCE))
