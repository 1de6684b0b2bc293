"""Output of results that were not measured: files, tables, comparisons."""

import json

import pytest
from bench_runs import ENVIRONMENT, timed_case, timed_run

from rope_cpu.bench import report, results
from rope_cpu.bench.results import OlderRun, conditions, estimate

CONDITIONS = conditions("llama3-8b", ENVIRONMENT)


def older_run(name, seconds, **changes):
    return OlderRun(CONDITIONS | changes, {(name, "plan"): seconds})


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


def test_a_file_has_samples_and_gives_their_medians(tmp_path):
    run = timed_run(timed_case())
    path = tmp_path / "run.json"
    results.save(run, path)
    (case,) = run.cases
    assert json.loads(path.read_text())["cases"][0]["rows"][0]["samples"] == case.rows[0].samples
    medians = {(case.name, row.name): row.seconds.median for row in case.timed()}
    assert results.load(path) == OlderRun(CONDITIONS, medians)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("\xff", "'utf-8' codec"),
        ("[" * 100_000, "decoding a JSON array"),
        ("{}", "it lacks 'format'"),
        ('{"format": 2}', "its format is 2"),
        ('{"format": 3, "cases": ["case"]}', "indices must be integers"),
        ('{"format": 3, "cases": [{"name": "a", "rows": [{"status": "timed"}]}]}', "'name'"),
        ('{"format": 3, "cases": []}', "it lacks 'model'"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, reason):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{path} is not a file .* in format 3: .*{reason}"):
        results.load(path)


@pytest.mark.parametrize("samples", [[], 1.0, [None], ["x"], [0.0]])
def test_a_file_without_times_is_refused(tmp_path, samples):
    path = tmp_path / "other.json"
    run = timed_run(timed_case())
    run.cases[0].rows[0].samples = samples
    results.save(run, path)
    with pytest.raises(ValueError, match="is not a file"):
        results.load(path)


def test_a_comparison_has_medians_and_their_ratio():
    run = timed_run(timed_case(ours=3e-6, name="decode-1/float32"))
    lines = list(report.comparison(run, older_run("decode-1/float32", 2e-6)))
    assert lines[-1].split() == ["decode-1/float32", "plan", "2.00", "µs", "3.00", "µs", "1.50"]
    assert len(lines) == 3  # a blank line, the header, the row
    _, nothing = report.comparison(run, older_run("other", 1.0))
    assert "Nothing was compared" in nothing


@pytest.mark.parametrize(("cores", "text"), [(1, "1 core, 1 in use"), (2, "2 cores, 1 in use")])
def test_a_machine_of_one_core(cores, text):
    environment = ENVIRONMENT | {"processor": "CPU", "cores": cores, "threads": 1}
    assert results.machine(environment) == f"CPU, {text}"


@pytest.mark.parametrize("changed", ["machine", "model"])
def test_a_comparison_names_what_differs(changed):
    older = older_run("other", 1.0, **{changed: "another"})
    _, line, _ = report.comparison(timed_run(timed_case()), older)
    assert line == f"The older run differs: {changed} another"
