"""The table of `rope-cpu show`: bands of pairs that are scaled alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rope_cpu.array_types import Float64, Int64
from rope_cpu.cli.show_axes import Axis

# Relative difference below which two wavelengths are the same: frequencies carry a few roundings.
SAME = 1e-9

# Effects of scaling on a pair.
_UNSCALED = "unscaled"
_UNROTATED = "not rotated"
_MOST = "scaled most"
_BETWEEN = "scaled in between"

# Stands for the axis of pairs without rotation, if there are several axes.
_NO_AXIS = Axis("none", "")

# Numbers of at least this size are written with an exponent.
_LARGE = 1e6


class Band(NamedTuple):
    """Pairs of one axis that are scaled alike, as the texts of a row of the table."""

    axis: str
    pairs: str
    wavelengths: str
    scale: str


def band_lines(
    frequencies: Float64, unscaled: Float64, pair_axis: Int64, axes: Sequence[Axis]
) -> Iterator[str]:
    """Yield the lines of the table, a header first.

    frequencies, unscaled: one for each pair, after and before scaling. pair_axis: the axis of each
    pair, -1 for pairs without rotation.
    """
    bands = list(_bands(frequencies, unscaled, pair_axis, axes))
    unit = f" in {axes[0].unit}" if len(axes) == 1 else ""
    header = Band("axis", "pairs", f"wavelengths{unit}", "scale")
    columns = [*zip(header, *bands, strict=True)]
    if len(axes) == 1:
        columns = columns[1:]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def changed_pairs(frequencies: Float64, unscaled: Float64) -> NDArray[np.bool_]:
    """Return which rotated pairs have another wavelength than before scaling."""
    changed: NDArray[np.bool_] = np.abs(unscaled - frequencies) >= SAME * unscaled
    return changed & (frequencies > 0)


def pairs_text(pairs: Int64) -> str:
    """Return "0-28", or "20 of 1-58" for pairs between which others lie."""
    first = pairs[0]
    last = pairs[-1]
    if len(pairs) == 1:
        return str(first)
    between = f"{first}-{last}"
    return between if last - first + 1 == len(pairs) else f"{len(pairs)} of {between}"


def _bands(
    frequencies: Float64, unscaled: Float64, pair_axis: Int64, axes: Sequence[Axis]
) -> Iterator[Band]:
    """Yield the bands, axis by axis; pairs without rotation are a band of the only axis."""
    growth = np.divide(
        unscaled, frequencies, out=np.full(unscaled.shape, np.inf), where=frequencies > 0
    )
    labels = _scaling_labels(growth)
    if len(axes) == 1:
        pair_axis = np.zeros_like(pair_axis)
    for number, axis in [*enumerate(axes), (-1, _NO_AXIS)]:
        own_pairs = np.flatnonzero(pair_axis == number)
        for label, run in groupby(own_pairs, key=labels.__getitem__):
            pairs = np.array(list(run))
            waves = "" if label == _UNROTATED else _range(2 * np.pi / frequencies[pairs])
            unit = f" {axis.unit}" if len(axes) > 1 else ""
            yield Band(
                axis.name, pairs_text(pairs), waves + unit, _scale_text(label, growth[pairs])
            )


def _scaling_labels(growth: Float64) -> list[str]:
    """Label each pair by the growth of its wavelength; infinite for pairs that are not rotated.

    A single pair of largest growth gets no label of its own: it is the end of a ramp.
    """
    largest = growth[np.isfinite(growth)].max(initial=1.0)
    scaled = np.isfinite(growth) & (np.abs(growth - 1) >= SAME)
    scaled_most = scaled & (np.abs(growth / largest - 1) < SAME)
    labels = np.full(growth.shape, _UNSCALED, dtype=object)
    labels[scaled] = _BETWEEN
    if scaled_most.sum() > 1:
        labels[scaled_most] = _MOST
    labels[np.isinf(growth)] = _UNROTATED
    return list(labels)


def _scale_text(label: str, growth: Float64) -> str:
    if label == _MOST:
        return f"{_number(growth[0])} times as long"
    if label == _BETWEEN:
        return f"{_range(growth)} times as long"
    return label


def _range(values: Float64) -> str:
    """Return "6.28 to 1610", or one number for values that are equal in three digits."""
    least = _number(values.min())
    most = _number(values.max())
    return least if least == most else f"{least} to {most}"


def _number(value: float) -> str:
    """Return a number in three digits: 6.28, 1610, 2.05e7."""
    rounded = float(f"{value:.3g}")
    if 1000 <= rounded < _LARGE:
        return f"{rounded:.0f}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
