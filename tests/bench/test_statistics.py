"""The statistics of the benchmarks, on drawn data whose truth is known."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from rope_cpu.bench import results
from rope_cpu.bench.results import Timing, estimate


def test_the_interval_is_made_of_order_statistics():
    assert estimate([1.0] * 5) == (1, -math.inf, math.inf)
    # Binomial(6, ½): one outside on either side has probability 1/64 each, two would have 7/64.
    assert estimate([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == (3.5, 1, 6)
    # Binomial(9, ½): 1 + 9 of 512 on either side are within 2.5 %, 1 + 9 + 36 are not.
    assert estimate(list(range(1, 10))) == (5, 2, 8)


# Of 4000 events that happen with a probability of 0.95 at least, fewer happen once in 10^8 runs.
FEWEST_HELD = binom.ppf(1e-8, 4000, 0.95)


@pytest.mark.parametrize("count", [7, 15, 41])
def test_the_interval_holds_the_median_as_often_as_it_says(count, rng):
    draws = rng.lognormal(sigma=1.0, size=(4000, count))
    held = sum(low <= 1.0 <= high for _, low, high in map(estimate, draws.tolist()))
    assert held >= FEWEST_HELD


def test_drift_cancels_in_ratios(rng):
    drift = np.exp(np.linspace(0, 1, 20))
    noise = rng.uniform(0.99, 1.01, 20)
    ours = Timing("ours", "ours", samples=(2e-6 * drift).tolist())
    theirs = Timing("theirs", "peer", samples=(6e-6 * drift * noise).tolist())
    ratio = results.ratio(theirs, ours)
    assert ratio.median == pytest.approx(3, rel=0.01)
    assert ratio.high < 1.02 * ratio.low
    assert ours.seconds.high > 1.2 * ours.seconds.low
