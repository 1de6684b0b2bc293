"""Rotate the same queries as text, as patches of an image and as patches of a video, and compare what that costs.

Usage: python examples/dimensions.py

Once a plan holds cos and sin of its tokens, the number of axes is gone: the ratios printed are near 1.
"""

from __future__ import annotations

import time

import numpy as np

import rope_cpu
from rope_cpu import positions

SHAPE = (1, 4096, 16, 128)  # batch, tokens, heads, head_dim


def plans() -> dict[str, rope_cpu.RotaryPlan]:
    """Return one plan for each way to see 4096 tokens."""
    rotary = rope_cpu.RotaryEmbedding
    video = positions.grid((16, 16, 16))
    return {
        "1-D, text": rotary(128).plan(np.arange(4096)),
        "2-D, image": rotary.axial(128, 2).plan(positions.grid((64, 64))),
        "3-D, video": rotary.axial(128, 3, axis_dims=(16, 56, 56), interleaved=True).plan(video),
        "3-D, video, half-split": rotary.axial(128, 3, axis_dims=(16, 56, 56), span="head").plan(
            video
        ),
        "3-D, video, blocks": rotary.axial(128, 3, axis_dims=(16, 56, 56)).plan(video),
        "M-RoPE": rotary.mrope(128, [24, 20, 20], rope_theta=5e6, mrope_interleaved=True).plan(
            video
        ),
    }


def main(repeats: int = 60) -> dict[str, tuple[float, float]]:
    """Print what each costs in times of text, the median round by round, into another array and in place; return it."""
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    each = plans()
    elsewhere, in_place = ratios(each, x, np.empty_like(x), repeats), ratios(each, x, x, repeats)
    print(f"{'times of text':24s} {'into another array':>18s} {'in place':>9s}")
    for name in each:
        print(f"{name:24s} {elsewhere[name]:18.2f} {in_place[name]:9.2f}")
    return {name: (elsewhere[name], in_place[name]) for name in each}


def ratios(
    each: dict[str, rope_cpu.RotaryPlan], x: np.ndarray, out: np.ndarray, repeats: int
) -> dict[str, float]:
    """Return the time of each plan in times of the first."""
    times: dict[str, list[float]] = {name: [] for name in each}
    for _ in range(repeats):  # in turn, so that a busy moment of the machine meets all of them
        for name, plan in each.items():
            start = time.perf_counter()
            plan.rotate(x, out=out)
            times[name].append(time.perf_counter() - start)
    text = np.array(next(iter(times.values())))
    return {name: float(np.median(taken / text)) for name, taken in times.items()}


if __name__ == "__main__":
    main()
