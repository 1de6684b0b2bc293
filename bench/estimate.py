"""How long a run takes, estimated before it starts.

The constants were measured on two slow cores. Kernels that are not in the cache are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from .measurement.case import Case
from .plurals import counted

# Seconds that a case takes beyond its budget (checks, choice of loop counts), and the share of the
# budget that it takes in addition (the last round, pauses).
PREPARATION = 0.4
SHARE_OF_BUDGET = 0.25
# Bytes of arrays that are filled, and accessed in untimed calls, per second.
FILLED_PER_SECOND = 6e8

# Estimates in seconds up to which they are rounded to 5 and to 10 seconds; above, to minutes.
_ROUNDED_TO_5 = 60
_ROUNDED_TO_10 = 170


def seconds(case: Case) -> float:
    """Return the expected duration of a case."""
    rounds = case.effort.budget * (1 + SHARE_OF_BUDGET) + case.overrun
    return PREPARATION + rounds + case.first_calls + case.memory / FILLED_PER_SECOND


def about(total: float) -> str:
    """Return a duration in rounded words: "20 s", "1 min 40 s", "4 min"."""
    if total > _ROUNDED_TO_10:
        return f"{total / 60:.0f} min"
    if total <= _ROUNDED_TO_5:
        return f"{5 * max(1, round(total / 5))} s"
    minutes, rest = divmod(10 * round(total / 10), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def summary(cases: Iterable[Case]) -> str:
    """Return the number of cases and about how long they take."""
    durations = [seconds(case) for case in cases]
    return f"{counted(len(durations), 'case')}, about {about(sum(durations))}"
