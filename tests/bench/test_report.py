"""Output of results that were not measured: files and tables."""

import json

import pytest
from bench_runs import ENVIRONMENT, timed_case, timed_run

from rope_cpu.bench import report, results
from rope_cpu.bench.results import estimate


def test_a_row_has_its_rate_share_of_the_limit_and_ratio():
    ours, _, peer, *more = report.case_lines(timed_case())
    # 40960 bytes in 2 µs are 20.48 GB/s, half of the limit.
    assert ours.split() == ["plan", "2.00", "µs", "1.98", "…", "2.02", "20.5", "50", "%", "1"]
    assert " 6000 " in peer  # 12 ms
    assert not any("limit, 128 threads" in line for line in more)  # the slower way is not the limit
    assert max(map(len, more)) <= report.WIDTH


def test_a_noisy_ratio_is_given_by_its_lower_bound_above_1():
    wide = estimate([3.0] * 20 + [9.0] * 20)
    assert wide.meaningless
    assert report.ratio_text(wide) == "> 3.00"
    assert report.ratio_text(estimate([0.5] * 20 + [9.0] * 20)) == "noise"
    assert report.ratio_text(estimate([4.0] * 40)) == "4.00"


def test_durations_have_three_digits():
    seconds = (2.5e-9, 9.996e-7, 1.3e-6, 0.0123)
    assert [*map(report.duration, seconds)] == ["2.50 ns", "1000 ns", "1.30 µs", "12.3 ms"]


def test_a_file_has_every_sample(tmp_path):
    run = timed_run(timed_case())
    path = tmp_path / "run.json"
    results.save(run, path)
    (case,) = run.cases
    assert json.loads(path.read_text())["cases"][0]["rows"][0]["samples"] == case.rows[0].samples


@pytest.mark.parametrize(("cores", "text"), [(1, "1 core, 1 in use"), (2, "2 cores, 1 in use")])
def test_a_machine_of_one_core(cores, text):
    environment = ENVIRONMENT | {"processor": "CPU", "cores": cores, "threads": 1}
    assert results.machine(environment) == f"CPU, {text}"
