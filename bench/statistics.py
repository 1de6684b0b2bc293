"""Estimates from noisy timings, without assumptions on their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, inf

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.float64]

CONFIDENCE = 0.95

# A median is meaningless if the upper end of its interval exceeds so many times the lower end.
MEANINGLESS = 1.5


@dataclass(frozen=True)
class Estimate:
    """A median with its quartiles, and with an interval of 95 % confidence."""

    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    high: float

    @property
    def meaningless(self) -> bool:
        """Whether noise leaves the median undetermined."""
        return self.low <= 0 or self.high > MEANINGLESS * self.low


def estimate(values: Values) -> Estimate:
    """Return the median of values, its quartiles and its interval."""
    lower_quartile, median, upper_quartile = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    low, high = interval(values)
    return Estimate(median, lower_quartile, upper_quartile, low, high)


def interval(values: Values) -> tuple[float, float]:
    """Return an interval that holds the median of the distribution with 95 % confidence or more.

    The number of values below the true median is binomial(n, ½) for any continuous distribution, so
    order statistics bound it. Fewer than six values leave both sides unbounded.

    Source: H. A. David and H. N. Nagaraja, Order Statistics, 2003, section 7.1.
    """
    ordered = np.sort(values).tolist()
    count = len(ordered)
    outside = _least_outside(count)
    if not outside:
        return -inf, inf
    return ordered[outside - 1], ordered[count - outside]


def _least_outside(count: int) -> int:
    """Return the least number of `count` values below the median, with one-sided confidence."""
    probability = 0.0  # that at most `below` values lie below
    for below in range(count + 1):
        probability += comb(count, below) / 2**count
        if probability > (1 - CONFIDENCE) / 2:
            return below
    return count
