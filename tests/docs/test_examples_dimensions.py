"""The example that compares text, images and videos: its plans, and one printed line for each."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[2] / "examples" / "dimensions.py"


def test_plans_rotate_by_their_coordinates():
    plans = runpy.run_path(str(EXAMPLE))["plans"]()
    x = np.zeros((1, 4096, 1, 128))
    x[..., 0] = 1.0
    token = 16 * 16 * 3 + 16 * 5 + 7  # frame 3, row 5, column 7; in the image row 13, column 23
    first = {name: plan.rotate(x)[0, token, 0] for name, plan in plans.items()}
    angle = {"1-D, text": token, "2-D, image": token // 64, "M-RoPE": 3, "3-D, video": 3}
    for name, radians in angle.items():
        np.testing.assert_allclose(first[name][0], np.cos(radians), rtol=0, atol=8 * 2.0**-53)


def test_it_prints_one_line_per_plan(capsys):
    ratios = runpy.run_path(str(EXAMPLE))["main"](repeats=1)
    assert ratios["1-D, text"] == (1.0, 1.0)
    assert len(capsys.readouterr().out.splitlines()) - 1 == len(ratios) == 6
