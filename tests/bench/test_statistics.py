"""The statistics of the benchmarks, on drawn data whose truth is known."""

import math

import numpy as np
import pytest

from rope_cpu.bench.measurement import statistics
from rope_cpu.bench.measurement.measure import Result, Row
from rope_cpu.bench.measurement.statistics import Change, change, estimate, interval, lesser, relative


@pytest.mark.parametrize("count", [1, 5])
def test_few_values_bound_nothing(count):
    assert interval([1.0] * count) == (-math.inf, math.inf)
    assert estimate([1.0] * count).meaningless


def test_the_interval_is_made_of_order_statistics():
    # Binomial(6, ½): one outside on either side has probability 1/64 each, two would have 7/64.
    assert interval([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == (1.0, 6.0)
    # Binomial(9, ½): 1 + 9 of 512 on either side are within 2.5 %, 1 + 9 + 36 are not.
    assert interval(list(range(1, 10))) == (2, 8)


@pytest.mark.parametrize("count", [7, 15, 41])
def test_the_interval_holds_the_median_as_often_as_it_says(count):
    draws = np.random.default_rng(3).lognormal(sigma=1.0, size=(4000, count))
    held = sum(low <= 1.0 <= high for low, high in map(interval, draws.tolist()))
    # 4000 draws of an event of probability p ≥ 0.95 scatter by sqrt(0.95·0.05/4000) = 0.0034.
    assert held / 4000 > 0.95 - 4 * 0.0034


def test_drift_cancels_in_ratios():
    drift = np.exp(np.linspace(0, 1, 20))
    noise = np.random.default_rng(0).uniform(0.99, 1.01, 20)
    ours = Row("ours", "ours", samples=(2e-6 * drift).tolist())
    theirs = Row("theirs", "peer", samples=(6e-6 * drift * noise).tolist())
    ratio = Result("case", "", [ours, theirs]).ratio(theirs)
    assert ratio.median == pytest.approx(3, rel=0.01)
    assert not ratio.meaningless
    assert ours.seconds.meaningless


def _rounds(rng, cost, spread=0.05, count=25):
    """Times with the long tail to one side that timings have."""
    return (cost * (1 + spread * rng.exponential(size=count))).tolist()


def test_runs_of_the_same_build_show_no_regression():
    rng, alarms = np.random.default_rng(5), 0
    for _ in range(200):
        rows = [change(_rounds(rng, 2.0), _rounds(rng, 2.0)) for _ in range(60)]
        alarms += any(row.slower(0.1) for row in rows)
    assert alarms <= 10  # of 200 comparisons of 60 rows: 19 of 20 must be silent


def test_twenty_percent_slower_is_caught_and_named():
    rng = np.random.default_rng(6)
    caught = sum(change(_rounds(rng, 2.4), _rounds(rng, 2.0)).slower(0.1) for _ in range(200))
    assert caught > 195
    back = sum(change(_rounds(rng, 2.0), _rounds(rng, 2.4)).faster(0.1) for _ in range(200))
    assert back > 195


def test_noise_is_no_regression():
    rng = np.random.default_rng(7)
    alarms = sum(change(_rounds(rng, 2.0, spread=3.0), _rounds(rng, 2.0, spread=3.0)).slower(0.1) for _ in range(1000))
    # Two intervals of 95 % that exclude each other on one side: 3 of 1000 for a normal law.
    assert alarms <= 12


def test_too_few_rounds_show_no_change():
    assert change([2.0] * 5, [1.0] * 5) == Change(2.0, 0.0, math.inf)
    assert not change([2.0] * 5, [1.0] * 5).slower(0.1)


@pytest.mark.parametrize("count", [13, 25, 41])
def test_the_interval_holds_the_lower_quartile_as_often_as_it_says(count):
    draws = np.random.default_rng(4).exponential(size=(4000, count))
    quartile = -math.log(0.75)
    held = sum(low <= quartile <= high for low, high in (interval(draw, 0.25) for draw in draws.tolist()))
    assert held / 4000 > 0.95 - 4 * 0.0034


def test_disturbed_rounds_do_not_hide_a_change():
    rng = np.random.default_rng(8)
    disturbed = [[x * (1 if i % 2 else rng.uniform(2, 50)) for i, x in enumerate(_rounds(rng, c))] for c in (2.0, 2.4)]
    assert change(disturbed[1], disturbed[0]).slower(0.1)


def test_changes_relative_to_a_baseline():
    row, baseline = Change(1.5, 1.4, 1.6), Change(1.5, 1.45, 1.55)
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
