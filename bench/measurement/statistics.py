"""Estimates from noisy timings, without assumptions on their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, inf, log

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


def interval(values: Values, quantile: float = 0.5) -> tuple[float, float]:
    """Return an interval that holds a quantile of the distribution with 95 % confidence or more.

    The number of values below the true quantile is binomial(n, quantile) for any continuous
    distribution, so order statistics bound it. Too few values (for a median fewer than six) leave a
    side unbounded.

    Source: H. A. David and H. N. Nagaraja, Order Statistics, 2003, section 7.1.
    """
    ordered = np.sort(values).tolist()
    count = len(ordered)
    below = _least_outside(count, quantile)
    above = _least_outside(count, 1 - quantile)
    low = ordered[below - 1] if below else -inf
    high = ordered[count - above] if above else inf
    return low, high


def _least_outside(count: int, quantile: float) -> int:
    """Return the least number of `count` values below a quantile, with one-sided confidence."""
    probability = 0.0  # that at most `below` values lie below
    for below in range(count + 1):
        probability += comb(count, below) * quantile**below * (1 - quantile) ** (count - below)
        if probability > (1 - CONFIDENCE) / 2:
            return below
    return count


@dataclass(frozen=True)
class Change:
    """A time relative to an earlier one, with an interval from those of both measurements."""

    factor: float
    low: float
    high: float

    def slower(self, threshold: float) -> bool:
        """Whether it is slower by more than `threshold` (0.1: 10 %) and by more than noise."""
        return self.factor > 1 + threshold and self.low > 1

    def faster(self, threshold: float) -> bool:
        """Whether it is faster by more than `threshold` and by more than noise."""
        return self.factor * (1 + threshold) < 1 and self.high < 1


def change(new: Sequence[float], old: Sequence[float]) -> Change:
    """Return the change of the lower quartile.

    All disturbances only add time, so the fastest quarter of the rounds says most about the code.
    """
    new_low, new_high = interval(new, 0.25)
    old_low, old_high = interval(old, 0.25)
    factor = float(np.quantile(new, 0.25) / np.quantile(old, 0.25))
    low = max(new_low, 0.0) / old_high
    high = new_high / old_low if old_low > 0 else inf
    return Change(factor, low, high)


def relative(row: Change, baseline: Change) -> Change:
    """Return a change relative to that of a baseline."""
    factor = row.factor / baseline.factor
    low = row.low / baseline.high
    high = row.high / baseline.low if baseline.low > 0 else inf
    return Change(factor, low, high)


def lesser(a: Change, b: Change) -> Change:
    """Return the smaller of two changes; no change if one is slower and the other faster."""
    if (a.factor - 1) * (b.factor - 1) < 0:
        return Change(1.0, min(a.low, b.low), max(a.high, b.high))
    return min(a, b, key=lambda change: abs(log(change.factor)))
