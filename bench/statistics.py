"""What many noisy timings allow to be said: pure functions of lists of numbers, without assumptions on their law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, inf

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


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which `part` (0 to 1) of `values` lies, interpolated between neighbours.

    Raises ValueError where `values` is empty or `part` is no part.
    """
    if not values or not 0 <= part <= 1:
        raise ValueError(f"`part` is {part} of {len(values)} values; it must be from 0 to 1, of at least one value")
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of `values`, its quartiles and its interval."""
    median, lower, upper = (quantile(values, part) for part in (0.5, 0.25, 0.75))
    return Estimate(median, lower, upper, *median_interval(values), len(values))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return an interval that holds the median of the values' law with at least this confidence, whatever the law.

    The number of values below the true median is binomial(n, ½), so order statistics bound it. Fewer than six values
    cannot reach 95 %: their interval is unbounded.

    Source: H. A. David and H. N. Nagaraja, Order Statistics, 2003, section 7.1.
    """
    ordered, n = sorted(values), len(values)
    below = outside = 0
    while outside + comb(n, below) <= (1 - confidence) / 2 * 2**n:
        outside += comb(n, below)
        below += 1
    return (ordered[below - 1], ordered[n - below]) if below else (-inf, inf)


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


def change(new: Estimate, old: Estimate) -> Change:
    """Return the change from one measurement to another, which knows nothing of the first one's noise."""
    if new.low <= 0 or old.low <= 0:  # too few rounds for an interval
        return Change(new.median / old.median, 0.0, inf)
    return Change(new.median / old.median, new.low / old.high, new.high / old.low)
