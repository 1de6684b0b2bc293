"""Estimates from many noisy timings: pure functions of numbers, without assumptions on their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, inf, log

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.float64]

CONFIDENCE = 0.95

# A median means nothing if the upper end of its interval is more than this many times the lower end.
MEANINGLESS = 1.5


@dataclass(frozen=True)
class Estimate:
    """A median with its quartiles and the interval that holds the true median with 95 % confidence."""

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
    """Return the median of `values`, its quartiles and its interval."""
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return Estimate(median, lower, upper, *interval(values))


def interval(values: Values, quantile: float = 0.5) -> tuple[float, float]:
    """Return an interval that holds a quantile of the distribution of the values with at least 95 % confidence.

    The number of values below the true quantile is binomial(n, quantile) whatever the distribution, so order statistics
    bound it. Too few values (for a median fewer than six) leave a side unbounded.

    Source: H. A. David and H. N. Nagaraja, Order Statistics, 2003, section 7.1.
    """
    ordered, n = np.sort(values).tolist(), len(values)
    below, above = _outside(n, quantile), _outside(n, 1 - quantile)
    return (ordered[below - 1] if below else -inf, ordered[n - above] if above else inf)


def _outside(n: int, quantile: float) -> int:
    """Return how many of n values lie below a quantile at least, except with the probability of one side."""
    total, count = 0.0, 0
    while (total := total + comb(n, count) * quantile**count * (1 - quantile) ** (n - count)) <= (
        1 - CONFIDENCE
    ) / 2:
        count += 1
    return count


@dataclass(frozen=True)
class Change:
    """A time relative to an earlier one, with the interval that both measurements leave."""

    factor: float
    low: float
    high: float

    def slower(self, threshold: float) -> bool:
        """Whether it is slower by more than `threshold` (0.1: 10 %), and by more than noise explains."""
        return self.factor > 1 + threshold and self.low > 1

    def faster(self, threshold: float) -> bool:
        """Whether it is faster by more than `threshold`, and by more than noise explains."""
        return self.factor * (1 + threshold) < 1 and self.high < 1


def change(new: Sequence[float], old: Sequence[float]) -> Change:
    """Return how the lower quartile changed.

    Whatever else a machine does only adds time, so the quick quarter of the rounds says most about the code.
    """
    (new_low, new_high), (old_low, old_high) = interval(new, 0.25), interval(old, 0.25)
    factor = float(np.quantile(new, 0.25) / np.quantile(old, 0.25))
    return Change(factor, max(new_low, 0.0) / old_high, new_high / old_low if old_low > 0 else inf)


def relative(row: Change, baseline: Change) -> Change:
    """Return a change relative to that of a baseline."""
    low = row.low / baseline.high
    return Change(
        row.factor / baseline.factor, low, row.high / baseline.low if baseline.low > 0 else inf
    )


def lesser(a: Change, b: Change) -> Change:
    """Return the smaller of two changes; no change, where one is slower and the other faster."""
    if (a.factor - 1) * (b.factor - 1) < 0:
        return Change(1.0, min(a.low, b.low), max(a.high, b.high))
    return min(a, b, key=lambda change: abs(log(change.factor)))
