"""The statistics of the benchmarks, on drawn data whose truth is known."""

import math

import numpy as np
import pytest
from scipy.stats import binom, hypergeom

from rope_cpu.bench.measurement import statistics
from rope_cpu.bench.measurement.rows import Result, Row
from rope_cpu.bench.measurement.statistics import (
    Change,
    change,
    estimate,
    interval,
    lesser,
    relative,
)


@pytest.mark.parametrize("count", [1, 5])
def test_few_values_bound_nothing(count):
    assert interval([1.0] * count) == (-math.inf, math.inf)
    assert estimate([1.0] * count).meaningless


def test_the_interval_is_made_of_order_statistics():
    # Binomial(6, ½): one outside on either side has probability 1/64 each, two would have 7/64.
    assert interval([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == (1.0, 6.0)
    # Binomial(9, ½): 1 + 9 of 512 on either side are within 2.5 %, 1 + 9 + 36 are not.
    assert interval(list(range(1, 10))) == (2, 8)


# Of 4000 events that happen with a probability of 0.95 at least, fewer happen once in 10^8 runs.
FEWEST_HELD = binom.ppf(1e-8, 4000, 0.95)


@pytest.mark.parametrize("count", [7, 15, 41])
def test_the_interval_holds_the_median_as_often_as_it_says(count, rng):
    draws = rng.lognormal(sigma=1.0, size=(4000, count))
    held = sum(low <= 1.0 <= high for low, high in map(interval, draws.tolist()))
    assert held >= FEWEST_HELD


def test_drift_cancels_in_ratios(rng):
    drift = np.exp(np.linspace(0, 1, 20))
    noise = rng.uniform(0.99, 1.01, 20)
    ours = Row("ours", "ours", samples=(2e-6 * drift).tolist())
    theirs = Row("theirs", "peer", samples=(6e-6 * drift * noise).tolist())
    ratio = Result("case", "", [ours, theirs]).ratio(theirs)
    assert ratio.median == pytest.approx(3, rel=0.01)
    assert not ratio.meaningless
    assert ours.seconds.meaningless


def _rounds(rng, cost, spread=0.05, count=25):
    """Times with the long tail to one side that timings have."""
    return (cost * (1 + spread * rng.exponential(size=count))).tolist()


def test_runs_of_the_same_build_show_no_regression(rng):
    alarms = 0
    for _ in range(200):
        rows = [change(_rounds(rng, 2.0), _rounds(rng, 2.0)) for _ in range(60)]
        alarms += any(row.slower(0.1) for row in rows)
    # For quartiles 10 % apart, 19 of 25 draws must exceed 2, which has the probability 5e-12 in
    # each of 12,000 rows.
    assert alarms == 0


def test_twenty_percent_slower_is_caught_and_named(rng):
    caught = sum(change(_rounds(rng, 2.4), _rounds(rng, 2.0)).slower(0.1) for _ in range(200))
    # For quartiles less than 10 % apart, 19 of 25 draws must exceed 1.8: 2e-10 in each of 200 rows.
    assert caught == 200
    back = sum(change(_rounds(rng, 2.0), _rounds(rng, 2.4)).faster(0.1) for _ in range(200))
    assert back == 200


def test_noise_is_no_regression(rng):
    alarms = sum(
        change(_rounds(rng, 2.0, spread=3.0), _rounds(rng, 2.0, spread=3.0)).slower(0.1)
        for _ in range(1000)
    )
    # Of 25 rounds the interval reaches from the 2nd to the 12th. The 2nd of one run is above the
    # 12th of another if of the 13 least of all 50 at least 12 belong to that one, as likely as in
    # any draw of 13 of the 50: 4 in 10,000.
    assert interval(list(range(1, 26)), 0.25) == (2, 12)
    assert alarms <= binom.isf(1e-8, 1000, hypergeom.sf(11, 50, 25, 13))


def test_too_few_rounds_show_no_change():
    assert change([2.0] * 5, [1.0] * 5) == Change(2.0, 0.0, math.inf)
    assert not change([2.0] * 5, [1.0] * 5).slower(0.1)


@pytest.mark.parametrize("count", [13, 25, 41])
def test_the_interval_holds_the_lower_quartile_as_often_as_it_says(count, rng):
    draws = rng.exponential(size=(4000, count))
    quartile = -math.log(0.75)
    held = sum(
        low <= quartile <= high for low, high in (interval(draw, 0.25) for draw in draws.tolist())
    )
    assert held >= FEWEST_HELD


def test_disturbed_rounds_do_not_hide_a_change(rng):
    """Every other round is."""

    def disturbed(cost):
        rounds = _rounds(rng, cost, count=81)
        return [x * (1 if i % 2 else rng.uniform(2, 50)) for i, x in enumerate(rounds)]

    # The intervals reach from the 13th to the 29th of 81, which are of the 40 quiet rounds. The
    # slower one begins above 2.4; for the quicker one to end there, 12 of 40 draws must exceed 4,
    # with a probability of 1e-11.
    assert change(disturbed(2.4), disturbed(2.0)).slower(0.1)


def test_changes_relative_to_a_baseline():
    row = Change(1.5, 1.4, 1.6)
    baseline = Change(1.5, 1.45, 1.55)
    both = relative(row, baseline)
    assert (both.factor, both.low, both.high) == (1.0, 1.4 / 1.55, 1.6 / 1.45)
    assert lesser(row, both) is both
    assert lesser(Change(1.5, 1.4, 1.6), Change(1.1, 1.0, 1.2)).factor == 1.1
    # Memory is twice as fast today and the row gained a little less: nothing got slower.
    assert lesser(Change(0.5, 0.4, 0.6), Change(1.1, 1.05, 1.2)) == Change(1.0, 0.4, 1.2)


def test_a_known_but_wide_median_is_meaningless():
    values = np.linspace(1, 3, 21).tolist()
    assert estimate(values).meaningless
    assert estimate(values).high > statistics.MEANINGLESS * estimate(values).low
