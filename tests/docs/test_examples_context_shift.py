"""The example that measures the error of repeated shifts."""

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "context_shift.py"))
errors_after_shifts = EXAMPLE["errors_after_shifts"]

# Half a unit in the last place of numbers below 8, which no element of the test reaches.
HALF_ULP = {"float32": 2.0**-22, "float16": 2.0**-9, "bfloat16": 2.0**-6}


@pytest.mark.parametrize("name", HALF_ULP)
def test_errors_add_up_to_less_than_their_bounds(name):
    """A shift rounds an element once, and float32 cos, sin and products three times more.

    The two errors of a pair are rotated together, so that each grows to √2 of the sum at most.
    """
    counts = [1, 4, 16]
    errors = errors_after_shifts(EXAMPLE["DTYPES"][name], -7, counts, tokens=32)
    means = [mean for _, mean in errors]
    assert 0 < means[0] < means[1] < means[2]
    for count, (largest, mean) in zip(counts, errors, strict=True):
        assert mean <= largest
        assert largest <= np.sqrt(2) * count * (HALF_ULP[name] + 3 * 2.0**-24 * 16)


def test_the_table_has_a_row_for_each_dtype(capsys):
    EXAMPLE["main"](["--shifts", "2", "1", "--tokens", "16"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["dtype", "1", "2"]
    assert [line.split()[0] for line in lines[3:]] == ["float32", "float16", "bfloat16"]
