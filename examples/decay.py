"""Plot how the bound on attention scores falls with the distance of two tokens.

A score is the real part of a sum of h_i·exp(j·distance·θ_i). Summed by parts (RoFormer, section
3.4.3), its size is at most max|h_{i+1} - h_i| times the sum of |S_i|, where
S_i = Σ_{k<i} exp(j·distance·θ_k). The curve is the mean of |S_i|.

Needs matplotlib: pip install "rope-cpu[cli]"
"""

from __future__ import annotations

import argparse

import numpy as np
from matplotlib.figure import Figure

import rope_cpu


def bound(distances: np.ndarray, head_dim: int = 128) -> np.ndarray:
    """Return the mean of |S_i| for each distance in tokens, from the library's cos and sin."""
    cos, sin = rope_cpu.RotaryEmbedding(head_dim).cos_sin(distances, dtype=np.float64)
    return np.abs(np.cumsum(cos + 1j * sin, axis=-1)).mean(axis=-1)


def plot(distances: np.ndarray, heights: np.ndarray) -> Figure:
    """Return a figure of the curve."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(distances, heights)
    axes.set(xlabel="distance in tokens", ylabel="bound on scores (mean of |S|)")
    axes.set_title("head_dim 128, base 10000", fontsize="medium")
    axes.set_xlim(0, distances[-1])
    axes.set_ylim(0, None)
    return figure


def main(path: str) -> None:
    """Write the figure and print a few of its values."""
    distances = np.arange(0, 257)
    heights = bound(distances)
    plot(distances, heights).savefig(path)
    for distance in (0, 1, 8, 64, 256):
        print(f"distance {distance:3d}: {heights[distance]:6.2f}")
    print(f"written to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", nargs="?", default="decay.svg", help="output file (default: decay.svg)"
    )
    main(parser.parse_args().path)
