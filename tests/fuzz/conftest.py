"""How long the fuzz tests search, and from which seed.

By default each test draws a few examples, the same ones every time. Two environment variables
change that:

    ROPE_CPU_FUZZ_SECONDS   go on for so long in all, each test for its share, with new seeds
    ROPE_CPU_FUZZ_SEED      the first seed (default 0)

    seed=$RANDOM; echo "seed $seed"
    ROPE_CPU_FUZZ_SECONDS=60 ROPE_CPU_FUZZ_SEED=$seed pytest -m "" tests/fuzz

A failure names the seed that finds it in the first round, so without ROPE_CPU_FUZZ_SECONDS. With it
the number of examples of each test stands at the end, unless pytest-xdist runs the tests.
"""

from __future__ import annotations

import os
import time
from itertools import count

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

try:
    from hypothesis.internal.conjecture import providers
except ImportError:  # an older release
    providers = None

SECONDS = float(os.environ.get("ROPE_CPU_FUZZ_SECONDS") or 0)
FIRST_SEED = int(os.environ.get("ROPE_CPU_FUZZ_SEED") or 0)

SETTINGS = {
    "deadline": None,
    "database": None,
    "report_multiple_bugs": False,
    "phases": (Phase.generate, Phase.shrink),
    "suppress_health_check": list(HealthCheck),
}


def check_examples(check, number, examples, **strategies):
    """Check a property, check(**drawn), on so many examples of a seed; return their number."""
    drawn = 0

    def counted(**values):
        nonlocal drawn
        drawn += 1
        check(**values)

    seed(number)(settings(max_examples=examples, **SETTINGS)(given(**strategies)(counted)))()
    return drawn


COUNTS = pytest.StashKey[dict[str, str]]()
SHARE = pytest.StashKey[float]()


class Search:
    """Draws examples until a test's share of the time is spent, at least one round of them."""

    def __init__(self, name, seconds, counts):
        self.name = name
        self.seconds = seconds
        self.counts = counts

    def rounds(self, run_round):
        """Call run_round(seed) → examples until the time is up."""
        stop = time.monotonic() + self.seconds
        examples = 0
        for number in count(FIRST_SEED):
            try:
                examples += run_round(number)
            except BaseException as error:
                repeat = f"ROPE_CPU_FUZZ_SEED={number} pytest -m '' '{self.name}'"
                error.add_note(f"To repeat it: {repeat}")
                raise
            self.counts[self.name] = f"{examples} examples, seeds {FIRST_SEED} to {number}"
            if time.monotonic() >= stop:
                return

    def __call__(self, check, examples, **strategies):
        """Check a property, check(**drawn), on rounds of so many examples."""
        self.rounds(lambda number: check_examples(check, number, examples, **strategies))


@pytest.fixture
def search(request, monkeypatch):
    """The search of one test; see the module."""
    # Hypothesis also draws constants of the imported modules, so a seed would find other examples
    # after other tests. There is no setting for it.
    if hasattr(providers, "_get_local_constants"):
        monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)
    config = request.config
    share = SECONDS / max(config.stash.get(SHARE, 1), 1)
    return Search(request.node.nodeid, share, config.stash.setdefault(COUNTS, {}))


def pytest_collection_modifyitems(config, items):
    config.stash[SHARE] = sum("search" in getattr(item, "fixturenames", ()) for item in items)


def pytest_terminal_summary(terminalreporter, config):
    if SECONDS:
        for name, text in config.stash.get(COUNTS, {}).items():
            terminalreporter.write_line(f"{name}: {text}")
