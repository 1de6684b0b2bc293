"""The example that plots the decay: its curve against a sum written out, and its file."""

from __future__ import annotations

import cmath
import runpy
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "decay.py"


def test_curve_is_the_sum_by_parts_and_falls():
    bound = runpy.run_path(str(EXAMPLE))["bound"]
    heights = bound(np.arange(0, 257))
    for distance in (0, 1, 37, 256):
        total = 0
        sizes = []
        for i in range(64):
            total += cmath.exp(1j * distance * 10000 ** (-2 * i / 128))
            sizes.append(abs(total))
        assert heights[distance] == pytest.approx(sum(sizes) / 64, rel=1e-12)
    assert heights[0] == 32.5
    assert heights[64] < heights[8] < heights[0]
    assert heights[200:].max() < heights[0] / 3


def test_it_writes_a_figure(tmp_path, capsys):
    runpy.run_path(str(EXAMPLE))["main"](str(tmp_path / "decay.svg"))
    assert "distance   0:  32.50" in capsys.readouterr().out
    root = ElementTree.parse(tmp_path / "decay.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
