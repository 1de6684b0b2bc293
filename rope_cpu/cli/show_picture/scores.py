"""Expected scores: the effect of a rotation on a score, by distance."""

from __future__ import annotations

import numpy as np

from rope_cpu.array_types import Float64

_POINTS = 400

# Each score is the mean over the distances from d / _WINDOW to d * _WINDOW.
_WINDOW = 1.1


def expected_scores(
    frequencies: Float64, largest: float, step: float = 1.0
) -> tuple[Float64, Float64]:
    """Return distances and the expected scores there.

    The expected score at distance d is the mean over pairs of cos(d·frequency): the score of a
    query and a key whose pairs have the same direction, relative to distance 0. It is 1 at distance
    0 and never larger. The attention factor, which multiplies all scores alike, is left out.

    Distances are multiples of `step` up to `largest`, spread evenly on a logarithmic scale, and
    each score is the mean over all distances within 10 %. Single distances would sample the fast
    pairs less than once per wavelength, which draws waves that do not exist (aliasing).

    Parameters
    ----------
    frequencies : ndarray of float64, shape (pairs,)
        Radians per unit of position.
    largest : float
        Largest distance.
    step : float
        Difference of two distances, 1 for whole positions.

    Returns
    -------
    distances, scores : ndarray of float64, shape (points,)
    """
    steps = max(round(largest / step), 1)
    points = np.unique(np.geomspace(1, steps, _POINTS).round())
    first = np.ceil(points / _WINDOW)
    last = np.floor(points * _WINDOW)
    count = (last - first + 1)[:, None]
    middle = ((first + last) / 2)[:, None]
    # Multiples of 2π change no cosine at whole multiples of the step.
    angles = np.remainder(frequencies * step + np.pi, 2 * np.pi) - np.pi
    # The sum of cos(k·angle) over consecutive k is a Dirichlet kernel, so no distance is left out.
    means = np.cos(middle * angles) * _half_sinc(count * angles) / _half_sinc(angles)
    scores: Float64 = means.mean(axis=-1)
    return points * step, scores


def _half_sinc(angle: Float64) -> Float64:
    """Return sin(angle/2) / (angle/2)."""
    ratio: Float64 = np.sinc(angle / (2 * np.pi))
    return ratio
