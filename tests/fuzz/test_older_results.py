"""Files of older benchmark runs, mutated: they are read and compared with, or refused."""

from __future__ import annotations

import json

from fuzz import mutations
from hypothesis import strategies as st
from refusals import check_text

from rope_cpu.bench import report, results
from rope_cpu.bench.results import Result, Timing

ENVIRONMENT = {"processor": "a processor", "cores": 2, "threads": 2}
ROWS = [
    Timing("one", "ours", samples=[1e-3, 1.1e-3, 1.2e-3, 1.3e-3], bytes_accessed=100),
    Timing("limit", "limit", samples=[1e-3, 1.1e-3, 1.2e-3, 1.3e-3], bytes_accessed=100),
    Timing("other", "ours", "skipped", "a reason"),
]
RUN = results.Run("llama3-8b", ENVIRONMENT, [Result("a case", "what", ROWS)])
NUMBERS = (0.0, 1e-3, -1.0, float("nan"), float("inf"), 1e308, 10**400)
TEXTS = ("", "ours", "timed", "limit", "x" * 5000)
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(NUMBERS + TEXTS)
KEYS = st.sampled_from(
    ("format", "environment", "processor", "cases", "rows", "samples", "name", "status", "x")
)


def test_older_results(search, tmp_path):
    path = tmp_path / "old.json"
    results.save(RUN, path)
    written = json.loads(path.read_text())

    def check(changed):
        path.write_text(json.dumps(changed))
        try:
            older = results.load(path)
            assert all(isinstance(line, str) for line in report.comparison(RUN, older))
        except (ValueError, TypeError) as error:
            check_text(error)

    search(check, 100, changed=mutations.mutated(written, mutations.values(SCALARS, KEYS), KEYS))
