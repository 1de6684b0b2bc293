"""What many noisy timings allow to be said: pure functions of lists of numbers, without assumptions on their law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, inf, log

import numpy as np

CONFIDENCE = 0.95

# A median whose interval reaches from one value to more than this many times as much says too little.
MEANINGLESS = 1.5


@dataclass(frozen=True)
class Estimate:
    """A median with its quartiles and the interval that holds the true median with 95 % confidence."""

    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    high: float
    count: int

    @property
    def meaningless(self) -> bool:
        """Whether noise leaves the median undetermined."""
        return self.low <= 0 or self.high > MEANINGLESS * self.low


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of `values`, its quartiles and its interval."""
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return Estimate(median, lower, upper, *interval(values), len(values))


def interval(values: Sequence[float], part: float = 0.5, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return an interval that holds this quantile of the values' law with at least this confidence, whatever the law.

    The number of values below the true quantile is binomial(n, part), so order statistics bound it. Too few values (for
    a median fewer than six, for 95 %) leave a side unbounded.

    Source: H. A. David and H. N. Nagaraja, Order Statistics, 2003, section 7.1.
    """
    ordered, n = sorted(values), len(values)
    below = _outside(n, part, (1 - confidence) / 2)
    above = _outside(n, 1 - part, (1 - confidence) / 2)
    return (ordered[below - 1] if below else -inf, ordered[n - above] if above else inf)


def _outside(n: int, part: float, chance: float) -> int:
    """Return how many of the lowest of n values lie below a quantile but for this chance."""
    total, count = 0.0, 0
    while (total := total + comb(n, count) * part**count * (1 - part) ** (n - count)) <= chance:
        count += 1
    return count


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return value / base round by round: what disturbs a whole round cancels."""
    return [value / other for value, other in zip(values, base, strict=True)]


@dataclass(frozen=True)
class Change:
    """How many times as long something takes as it did, with the interval that both measurements leave."""

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

    Whatever else a machine does only adds time, so the quick quarter of the rounds tells most of the code.
    """
    (new_low, new_high), (old_low, old_high) = interval(new, 0.25), interval(old, 0.25)
    factor = float(np.quantile(new, 0.25) / np.quantile(old, 0.25))
    return Change(factor, max(new_low, 0.0) / old_high, new_high / old_low if old_low > 0 else inf)


def relative(row: Change, baseline: Change) -> Change:
    """Return a change in times of another one."""
    low = row.low / baseline.high
    return Change(row.factor / baseline.factor, low, row.high / baseline.low if baseline.low > 0 else inf)


def lesser(a: Change, b: Change) -> Change:
    """Return the change that is closer to none; none, where one says slower and the other faster."""
    if (a.factor - 1) * (b.factor - 1) < 0:
        return Change(1.0, min(a.low, b.low), max(a.high, b.high))
    return min(a, b, key=lambda change: abs(log(change.factor)))
