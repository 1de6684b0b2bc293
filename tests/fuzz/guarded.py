"""The program of `test_guarded.py`: calls on arrays that end or start at untouchable memory.

It prints each call first. If the process dies, the last line names the call.
"""

from __future__ import annotations

import faulthandler
import sys

from fuzz import calls
from fuzz.placed import GuardedMemory
from hypothesis import HealthCheck, Phase, given, seed, settings

from rope_cpu.kernels import threads

EXAMPLES = "examples: "


def main(number, examples, large):
    """Check so many examples, drawn from a seed."""
    faulthandler.enable()
    threads.limit = threads.MAX_THREADS
    count = 0

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(call=calls.calls(large=large))
    def check(call):
        nonlocal count
        count += 1
        print(call, flush=True)
        calls.check(call, GuardedMemory(call.seed))

    check()
    print(f"{EXAMPLES}{count}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "large")
