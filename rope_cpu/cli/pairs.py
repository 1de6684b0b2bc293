"""The pairs of groups of layers, and the axes that rotate them, as `rope-cpu show` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.array_types import Float64, Int64
from rope_cpu.cli.groups import Group
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.models.model_types import data


@dataclass(frozen=True)
class Axis:
    """A position axis: a row of axes.json.

    name: such as "row", "" for the only axis. unit: of its positions, in the plural.
    """

    name: str
    unit: str


AXES = {kind: Axis(**row) for kind, row in data("axes.json").items()}
_MROPE = ("time", "height", "width")

# Relative difference below which two wavelengths are the same: frequencies carry a few roundings.
SAME = 1e-9


@dataclass(frozen=True)
class Pairs:
    """The pairs of the first head in arrays (pairs,), at one length.

    frequencies: on the axis that rotates a pair, 0 without rotation. axis: the number of that axis,
    -1 without rotation. before: the frequencies before scaling.
    """

    frequencies: Float64
    axis: Int64
    before: Float64

    @property
    def changed(self) -> NDArray[np.bool_]:
        """Which rotated pairs have another wavelength than before scaling."""
        differs = np.abs(self.before - self.frequencies) >= SAME * self.before
        return differs & (self.frequencies > 0)


def axes_of(group: Group) -> tuple[Axis, ...]:
    """Return the axes of the positions of layers; those without a known meaning have a number."""
    count = 0 if group.spec is None else group.spec.axes
    kinds = group.config.axes[-count:]
    if len(kinds) < count == len(_MROPE):
        kinds = _MROPE
    if len(kinds) < count:
        return tuple(Axis(f"axis {number}", "positions") for number in range(count))
    return tuple(AXES[kind] for kind in kinds)


def pairs_of(group: Group) -> dict[str, Pairs]:
    """Return the pairs of each of `Group.ropes`."""
    return {length: _pairs(rope.spec, group.parameters) for length, rope in group.ropes.items()}


def _pairs(spec: RopeSpec, parameters: Mapping[str, Any]) -> Pairs:
    """Return the pairs of the first head of a rotation with rope parameters."""
    by_axis = np.abs(spec.inv_freq[0, :, 0])
    frequencies = by_axis.max(axis=0)
    axis = np.where(by_axis.any(axis=0), by_axis.argmax(axis=0), -1)
    rule = spec.length_rule
    theta = parameters.get("rope_theta", rule and rule.settings.rope_theta)
    if theta is None:
        return Pairs(frequencies, axis, frequencies)
    share = parameters.get("partial_rotary_factor") or 1.0
    width = spec.rotary_dim
    if int(spec.head_dim * share) == width - 1:
        width -= 1  # frequencies are computed for an odd width, and one element more is rotated
    before = float(theta) ** -(np.arange(0, spec.rotary_dim, 2) / width)
    return Pairs(frequencies, axis, before)
