"""Compare the time of rotating the same queries as text, image patches and video patches.

Usage: python examples/dimensions.py

A plan holds the cos and sin of its tokens, whatever the number of axes: the printed ratios are
near 1.
"""

from __future__ import annotations

import time

import numpy as np

import rope_cpu
from rope_cpu import positions

SHAPE = (1, 4096, 16, 128)  # batch, tokens, heads, head_dim


def plans() -> dict[str, rope_cpu.RotaryPlan]:
    """Return plans of 4096 tokens with 1, 2 and 3 axes."""
    rotary = rope_cpu.RotaryEmbedding
    image_ids = positions.grid((64, 64))
    video_ids = positions.grid((16, 16, 16))
    widths = (16, 56, 56)
    video = rotary.axial(128, 3, axis_dims=widths, interleaved=True)
    video_half_split = rotary.axial(128, 3, axis_dims=widths, span="head")
    video_blocks = rotary.axial(128, 3, axis_dims=widths)
    mrope = rotary.mrope(128, [24, 20, 20], rope_theta=5e6, mrope_interleaved=True)
    return {
        "1-D, text": rotary(128).plan(np.arange(4096)),
        "2-D, image": rotary.axial(128, 2).plan(image_ids),
        "3-D, video": video.plan(video_ids),
        "3-D, video, half-split": video_half_split.plan(video_ids),
        "3-D, video, blocks": video_blocks.plan(video_ids),
        "M-RoPE": mrope.plan(video_ids),
    }


def main(repeats: int = 60) -> dict[str, tuple[float, float]]:
    """Print and return the time of each plan relative to text, into another array and in place."""
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    all_plans = plans()
    out_of_place = ratios(all_plans, x, np.empty_like(x), repeats)
    in_place = ratios(all_plans, x, x, repeats)
    print(f"{'relative to text':24s} {'into another array':>18s} {'in place':>9s}")
    for name in all_plans:
        print(f"{name:24s} {out_of_place[name]:18.2f} {in_place[name]:9.2f}")
    return {name: (out_of_place[name], in_place[name]) for name in all_plans}


def ratios(
    all_plans: dict[str, rope_cpu.RotaryPlan], x: np.ndarray, out: np.ndarray, repeats: int
) -> dict[str, float]:
    """Return the time of each plan relative to the first, as the median over rounds."""
    times: dict[str, list[float]] = {name: [] for name in all_plans}
    for _ in range(repeats):  # alternately, so that a busy moment affects all plans alike
        for name, plan in all_plans.items():
            start = time.perf_counter()
            plan.rotate(x, out=out)
            times[name].append(time.perf_counter() - start)
    text = np.array(next(iter(times.values())))
    return {name: float(np.median(seconds / text)) for name, seconds in times.items()}


if __name__ == "__main__":
    main()
