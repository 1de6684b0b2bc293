"""The program of `test_guarded.py`: calls on arrays that end or start at untouchable memory.

It prints each call first. If the process dies, the last line names the call. Calls rotate arrays,
write to caches, or attend to them.
"""

from __future__ import annotations

import faulthandler
import sys

from fuzz import appends, attentions, calls
from fuzz.conftest import check_examples
from fuzz.placed import GuardedMemory

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

    def check(call):
        print(call, flush=True)
        check_call(call, GuardedMemory(call.seed))

    print(f"{EXAMPLES}{check_examples(check, number, examples, call=draw(large=large))}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "large")
