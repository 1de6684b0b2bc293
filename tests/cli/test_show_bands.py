"""The table of `rope-cpu show`: its rows, numbers and width."""

import numpy as np

from rope_cpu.cli.show_axes import AXES, Axis
from rope_cpu.cli.show_bands import band_lines, changed_pairs

ROW = Axis("row", "patches")
COLUMN = Axis("column", "patches")


def rows(frequencies, unscaled, pair_axis=None, axes=(AXES["token"],)):
    """Return the rows without the header, with single spaces."""
    frequencies = np.array(frequencies, float)
    if pair_axis is None:
        pair_axis = np.zeros(len(frequencies), int)
    lines = band_lines(frequencies, np.array(unscaled, float), np.array(pair_axis), axes)
    return [" ".join(line.split()) for line in lines][1:]


def test_bands_of_pairs_scaled_alike():
    unscaled = 2 * np.pi / np.array([10, 100, 1000, 2.5e4, 2e6, 4e6])
    assert rows(unscaled / [1, 1, 1.5, 3, 4, 4], unscaled) == [
        "0-1 10 to 100 unscaled",
        "2-3 1500 to 75000 1.5 to 3 times as long",
        "4-5 8e6 to 1.6e7 4 times as long",
    ]


def test_a_single_pair_of_the_largest_growth_ends_the_ramp():
    assert rows([1, 0.4, 0.1], [1, 0.8, 0.4]) == [
        "0 6.28 unscaled",
        "1-2 15.7 to 62.8 2 to 4 times as long",
    ]


def test_roundings_are_no_scaling():
    unscaled = np.array([1.0, 0.5])
    assert rows(unscaled * (1 + 1e-12), unscaled) == ["0-1 6.28 to 12.6 unscaled"]
    assert not changed_pairs(unscaled * (1 + 1e-12), unscaled).any()


def test_pairs_without_rotation():
    frequencies = [1, 0, 0]
    assert rows(frequencies, [1, 0.5, 0.2]) == ["0 6.28 unscaled", "1-2 not rotated"]
    assert changed_pairs(np.array([0.5, 0.0]), np.array([1.0, 1.0])).tolist() == [True, False]


def test_a_row_for_each_axis_with_its_unit():
    frequencies = [0, 1, 0.5, 0.25, 0.1]
    assert rows(frequencies, frequencies, [-1, 1, 0, 1, 0], (ROW, COLUMN)) == [
        "row 2 of 2-4 12.6 to 62.8 patches unscaled",
        "column 2 of 1-3 6.28 to 25.1 patches unscaled",
        "none 0 not rotated",
    ]


def test_columns_are_aligned():
    unscaled = np.array([1.0, 1e-3])
    lines = list(band_lines(unscaled / [1, 2], unscaled, np.zeros(2, int), (AXES["token"],)))
    assert len(lines) == 3
    header, unscaled_row, scaled_row = lines
    assert header.index("scale") == unscaled_row.index("unscaled") == scaled_row.index("2 times")
    assert "tokens" in header
