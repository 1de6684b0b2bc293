"""How calls are timed, on a clock that the timed functions advance."""

import numpy as np
import pytest

from rope_cpu.bench.timing import Call, Effort, calibrate, interleave, settle


class Machine:
    """A clock, and calls that take a given time, multiplied by a drift that grows with time."""

    def __init__(self, drift=0.0):
        self.now = 0.0
        self.drift = drift
        self.log = []

    def clock(self):
        return self.now

    def call(self, name, cost):
        self.now += cost * (1 + self.drift * self.now)
        self.log.append(name)

    def timed(self, name, cost):
        return Call(self.call, (name, cost))

    def pause(self, seconds=0.002):
        self.now += seconds

    def interleave(self, calls, *effort):
        return interleave(calls, Effort(*effort), self.clock, self.pause)


@pytest.mark.parametrize(("spinning", "checks"), [(0.0, 1), (0.03, 16), (9.0, 50)])
def test_the_next_one_waits_until_threads_sleep(spinning, checks):
    """Threads that spin add to the process's time; its own sleep adds little."""
    slept = []
    settle(slept.append, lambda: min(sum(slept), spinning) + 1e-5 * len(slept))
    assert len(slept) == checks


@pytest.mark.parametrize(("cost", "loops"), [(1e-6, 2000), (3e-4, 7), (0.002, 1), (0.5, 1)])
def test_calls_are_repeated_until_a_sample_is_long_enough(cost, loops):
    machine = Machine()
    found, per_call = calibrate(machine.timed("a", cost), 0.002, machine.clock)
    assert found == pytest.approx(loops, abs=1)
    assert per_call == pytest.approx(cost)


def test_rounds_end_with_the_budget():
    # A round takes 11 ms: a pause of 2, eight calls to warm up, one that is timed.
    for effort, rounds in {(0.0, 3): 3, (1e-9, 7): 7, (0.1, 3): 10}.items():
        machine = Machine()
        (samples,) = machine.interleave([machine.timed("a", 1e-3)], 1e-3, *effort)
        assert len(samples) == rounds


def test_the_order_changes_from_round_to_round():
    machine = Machine()
    contenders = [machine.timed(name, 0.02) for name in "abcd"]
    machine.interleave(contenders, 0.02, 0.0, 12)
    timed = machine.log[-12 * 4 :]
    orders = {tuple(timed[i : i + 4]) for i in range(0, len(timed), 4)}
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(orders) > 4


def test_drift_does_not_change_ratios():
    machine = Machine(drift=0.5)
    calls = [machine.timed("ours", 1e-4), machine.timed("theirs", 4e-4)]
    ours, theirs = machine.interleave(calls, 0.002, 2.0, 30)
    assert max(ours) > 1.05 * min(ours)
    assert np.divide(theirs, ours) == pytest.approx(4, rel=0.02)
