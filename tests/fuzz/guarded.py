"""The program of `test_guarded.py`: calls on arrays that end or start at untouchable memory.

It prints each call first. If the process dies, the last line names the call. Calls rotate arrays,
write to caches, or attend to them.
"""

from __future__ import annotations

import faulthandler
import sys

from fuzz import appends, attentions, calls
from fuzz.placed import GuardedMemory
from hypothesis import HealthCheck, Phase, given, seed, settings

from rope_cpu.kernels import threads

EXAMPLES = "examples: "
KINDS = {
    "calls": (calls.calls, calls.check),
    "appends": (appends.appends, appends.check),
    "attentions": (attentions.attentions, attentions.check),
}


def main(number, examples, kind, large):
    """Check so many examples of a kind, drawn from a seed."""
    draw, check_call = KINDS[kind]
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
    @given(call=draw(large=large))
    def check(call):
        nonlocal count
        count += 1
        print(call, flush=True)
        check_call(call, GuardedMemory(call.seed))

    check()
    print(f"{EXAMPLES}{count}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "large")
