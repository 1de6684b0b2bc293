"""The picture of `rope-cpu show --plot`: wavelength against pair, and score against distance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rope_cpu.array_types import Float64
from rope_cpu.cli.show_summary import LayerRotation, pair_frequencies
from rope_cpu.rotation.embedding import RotaryEmbedding

DISTANCES = np.unique(np.geomspace(1, 131072, 400).astype(int))


def plot(rotations: Sequence[LayerRotation], path: Path) -> None:
    """Draw wavelengths before and after scaling, and expected scores, into a file.

    The expected score of a query and a key whose pairs have the same direction is A² times the mean
    cosine of their angles (A: the attention factor); it is 1 at distance 0 for A = 1.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    waves, decay = axes
    for rotation in rotations:
        if rotation.unscaled is not None and _is_scaled(rotation, rotation.unscaled):
            label = f"{rotation.name}, before scaling"
            _draw_curves(axes, rotation.unscaled, label=label, style="--")
        for length, rope in rotation.by_length.items():
            label = f"{rotation.name} {length}".strip()
            score = rope.attention_factor**2
            _draw_curves(axes, pair_frequencies(rope), label=label, style="-", score=score)
    waves.set(xlabel="pair", ylabel="wavelength in tokens", yscale="log")
    decay.set(xlabel="distance in tokens", ylabel="expected score", xscale="log")
    figure.legend(
        *waves.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small"
    )
    figure.savefig(path)


def _is_scaled(rotation: LayerRotation, unscaled: Float64) -> bool:
    return not all(
        np.allclose(unscaled, pair_frequencies(rope)) for rope in rotation.by_length.values()
    )


def _draw_curves(
    axes: Any, frequencies: Float64, *, label: str, style: str, score: float = 1
) -> None:
    """Draw the wavelengths of all pairs, and the expected score; score: its value at distance 0."""
    waves, decay = axes
    wavelengths = np.full(frequencies.shape, np.nan)
    rotated = frequencies > 0
    wavelengths[rotated] = 2 * np.pi / frequencies[rotated]
    # Wavelengths that fall belong to the next axis, whose curve is separate.
    starts = np.flatnonzero(np.diff(wavelengths) < 0) + 1
    pairs = np.insert(np.arange(len(wavelengths), dtype=float), starts, np.nan)
    (line,) = waves.plot(pairs, np.insert(wavelengths, starts, np.nan), style, label=label)
    cos, _ = RotaryEmbedding.from_inv_freq(frequencies).cos_sin(DISTANCES, dtype=np.float64)
    decay.plot(DISTANCES, score * cos.mean(axis=-1), style, color=line.get_color())
