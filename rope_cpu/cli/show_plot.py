"""The drawing of `rope-cpu show --plot`: wavelengths by pair, and how far a score reaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rope_cpu.cli.show_summary import Layers, one_axis
from rope_cpu.rotation.embedding import RotaryEmbedding

DISTANCES = np.unique(np.geomspace(1, 131072, 400).astype(int))


def plot(shown: Sequence[Layers], path: Path) -> None:
    """Draw wavelength against pair, before and after scaling, and the expected score against distance, into a file.

    The expected score of a query and a key whose pairs have the same direction is A² times the mean cosine of their
    angles; 1 at distance 0 for A = 1.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    waves, decay = figure.subplots(1, 2)
    for layers in shown:
        plain = layers.plain
        if plain is not None and not all(
            np.allclose(plain, one_axis(rope)) for rope in layers.lengths.values()
        ):
            _curves(waves, decay, 2 * np.pi / plain, plain, f"{layers.name}, before scaling", "--")
        for when, rope in layers.lengths.items():
            frequencies = one_axis(rope)
            with np.errstate(divide="ignore"):
                wavelengths = np.where(frequencies > 0, 2 * np.pi / frequencies, np.nan)
            label = f"{layers.name} {when}".strip()
            _curves(waves, decay, wavelengths, frequencies, label, "-", rope.attention_factor**2)
    waves.set(xlabel="pair", ylabel="wavelength in tokens", yscale="log")
    decay.set(xlabel="distance in tokens", ylabel="expected score", xscale="log")
    figure.legend(
        *waves.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small"
    )
    figure.savefig(path)


def _curves(
    waves: Any,
    decay: Any,
    wavelengths: Any,
    frequencies: Any,
    label: str,
    style: str,
    scale: float = 1,
) -> None:
    # Where wavelengths fall another axis begins: the line ends there.
    begins = np.flatnonzero(np.diff(wavelengths) < 0) + 1
    pairs = np.insert(np.arange(len(wavelengths), dtype=float), begins, np.nan)
    (line,) = waves.plot(pairs, np.insert(wavelengths, begins, np.nan), style, label=label)
    cos, _ = RotaryEmbedding.from_inv_freq(frequencies).cos_sin(DISTANCES, dtype=np.float64)
    decay.plot(DISTANCES, scale * cos.mean(axis=-1), style, color=line.get_color())
