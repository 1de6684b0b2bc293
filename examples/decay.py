"""Draw how far the score of two tokens can reach, against their distance: the decay that RoPE was derived with.

A score is the real part of a sum of h_i·exp(j·distance·θ_i). Summed by parts (RoFormer, section 3.4.3), its size is at
most max|h_{i+1} - h_i| times the sum of |S_i|, S_i = Σ_{k<i} exp(j·distance·θ_k). The curve is the mean of |S_i|.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import rope_cpu


def bound(distances: np.ndarray, head_dim: int = 128) -> np.ndarray:
    """Return the mean of |S_i| for each distance in tokens; cos and sin are the library's own."""
    cos, sin = rope_cpu.RotaryEmbedding(head_dim).cos_sin(distances, dtype=np.float64)
    return np.abs(np.cumsum(cos + 1j * sin, axis=-1)).mean(axis=-1)


def drawing(distances: np.ndarray, heights: np.ndarray) -> str:
    """Return an SVG of the curve, 640 x 320, with axes and a few labels."""
    left, top, width, height = 50, 20, 570, 250
    across = left + width * distances / distances[-1]
    down = top + height * (1 - heights / heights[0])
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    ticks = [
        f'<text x="{left + width * part:.0f}" y="{top + height + 18}" text-anchor="middle">'
        f"{distances[-1] * part:.0f}</text>"
        for part in (0, 0.25, 0.5, 0.75, 1)
    ]
    levels = [
        f'<text x="{left - 6}" y="{top + height * (1 - part) + 4:.0f}" text-anchor="end">{heights[0] * part:.1f}</text>'
        for part in (0, 0.5, 1)
    ]
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="320" font-family="sans-serif" font-size="12">',
            '<rect width="640" height="320" fill="white"/>',
            f'<path d="M{left},{top}v{height}h{width}" fill="none" stroke="black"/>',
            f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
            *ticks,
            *levels,
            f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">distance in tokens</text>',
            f'<text x="{left + 10}" y="{top + 10}">bound on scores (mean of |S|), head_dim 128, base 10000</text>',
            "</svg>",
            "",
        ]
    )


def main(path: str) -> None:
    """Write the drawing and print a few of its values."""
    distances = np.arange(0, 257)
    heights = bound(distances)
    Path(path).write_text(drawing(distances, heights))
    for distance in (0, 1, 8, 64, 256):
        print(f"distance {distance:3d}: {heights[distance]:6.2f}")
    print(f"drawn in {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", nargs="?", default="decay.svg", help="where to draw (default: decay.svg)"
    )
    main(parser.parse_args().path)
