"""Output of results that were not measured: files, tables, comparisons."""

import json

import pytest
from bench_runs import ENVIRONMENT, timed_case, timed_row, timed_run

from rope_cpu.bench import report, results
from rope_cpu.bench.compare import Finding, compare
from rope_cpu.bench.measurement import statistics
from rope_cpu.bench.measurement.case import Case
from rope_cpu.bench.measurement.rows import Result
from rope_cpu.bench.measurement.statistics import Change


def test_tables_fit_a_hundred_columns():
    run = timed_run(timed_case(), timed_case(wobble=0.4, name="layouts"))
    findings = [
        Finding("a case with a name that is longer than any", "row " * 9, Change(1.5, 1.2, 123.4))
    ]
    lines = [
        *report.heading(ENVIRONMENT, "a-model-with-a-long-name" * 3),
        *report.columns(),
        *report.title(Case("name " * 30, "what", list)),
        *(line for case in run.cases for line in report.case_lines(case)),
        *report.closing(run),
        *report.findings_lines(findings, 0.1, False),
    ]
    assert max(map(len, lines)) <= report.WIDTH
    text = "\n".join(lines)
    assert "a_package_with_a_long_name is not installed" in text
    assert "1e+09 times the tolerance" in text
    assert "limit, 128 threads" not in text  # the slower way is not the limit
    assert "ORT RotaryEmbedding-23 IO-bound 15000" in text  # a name and its ratio stay on one line


def test_a_row_has_its_rate_share_of_the_limit_and_ratio():
    case = timed_case()
    ours, peer = list(report.case_lines(case))[:2]
    # 40960 bytes in 2 µs are 20.48 GB/s, half of the limit.
    assert ours.split() == ["plan", "2.00", "µs", "1.98", "…", "2.02", "20.5", "50", "%", "1"]
    assert " 6000 " in peer  # 12 ms


def test_a_noisy_ratio_is_marked():
    case = Result(
        "case",
        "",
        rows=[timed_row("plan", "ours", 1e-6), timed_row("peer", "peer", 1.2e-6, wobble=0.4)],
    )
    assert "noise" in list(report.case_lines(case))[1]


def test_a_noisy_ratio_above_1_is_given_by_its_lower_bound():
    wide = statistics.estimate([3.0] * 20 + [9.0] * 20)
    assert wide.meaningless
    assert report.ratio_text(wide) == "> 3.00"
    assert report.ratio_text(statistics.estimate([0.5] * 20 + [9.0] * 20)) == "noise"
    assert report.ratio_text(statistics.estimate([4.0] * 40)) == "4.00"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5e-9, "2.50 ns"),
        (9.996e-7, "1000 ns"),
        (1.3e-6, "1.30 µs"),
        (0.0123, "12.3 ms"),
        (123.4, "123 s"),
        (0, "0.00 ns"),
    ],
)
def test_durations(seconds, text):
    assert report.duration(seconds) == text


def test_a_saved_run_is_loaded_unchanged(tmp_path):
    run = timed_run(timed_case())
    path = tmp_path / "run.json"
    results.save(run, path)
    assert results.load(path) == run
    row = json.loads(path.read_text())["cases"][0]["rows"][0]
    assert row["seconds"]["median"] == pytest.approx(2e-6)
    assert row["gb_per_s"] == pytest.approx(20.48)
    assert row["of_limit"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "text", ['{"format": 0}', '{"format": 2}', "[1]", "{", "null", '{"format": 2, "cases": [{}]}']
)
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} is not a file"):
        results.load(path)


def test_a_comparison_of_nothing_says_so():
    lines = list(report.findings_lines([], 0.1, True))
    assert lines == ["", "Nothing was compared: no row of this run is in the older one."]
    one = Finding("case", "row", Change(1.0, 0.9, 1.1))
    assert list(report.findings_lines([one], 0.005, True))[-1].startswith(
        "1 row compared, 0 slower by more than 0.5 %"
    )
    assert list(report.closing(timed_run(timed_case())))[-1].startswith("1 case in")


def test_a_slower_kernel_is_caught_on_a_slower_machine():
    old = timed_run(timed_case())
    same = timed_run(timed_case(ours=3e-6, limit=1.5e-6))
    slower = timed_run(timed_case(ours=2.4e-6))
    assert [finding.change.slower(0.1) for finding in compare(same, old)] == [False]
    (finding,) = compare(slower, old)
    assert finding.change.slower(0.1)
    assert finding.change.factor == pytest.approx(1.2)
    assert not finding.change.slower(0.3)


def test_without_a_limit_the_peer_is_the_baseline():
    def case(ours, peer):
        return Result(
            "import",
            "",
            rows=[timed_row("ours", "ours", ours, 0), timed_row("peer", "peer", peer, 0)],
        )

    (finding,) = compare(timed_run(case(4.0, 2.0)), timed_run(case(2.0, 1.0)))
    assert finding.change.factor == pytest.approx(1)


def test_rows_and_cases_of_one_run_only_are_left_out():
    assert compare(timed_run(timed_case(name="new")), timed_run(timed_case(name="old"))) == []


def test_rows_that_return_new_memory_are_compared_relative_to_its_cost():
    def run(ours, memory, limit=1e-6, new=True):
        rows = [
            timed_row("plan, new arrays", "ours", ours, new=new),
            timed_row("limit, 2 threads", "limit", limit),
        ]
        return timed_run(
            Result(
                "prefill-4096/float32", "", rows=[*rows, timed_row("new memory", "memory", memory)]
            )
        )

    old = run(4e-6, 2e-6)
    # Taking new memory is slower, or all memory is.
    for same in (run(5e-6, 2.5e-6), run(5e-6, 2e-6, limit=1.25e-6)):
        (finding,) = compare(same, old)
        assert finding.change.factor == pytest.approx(1)
    # The row alone is slower, or it takes no new memory.
    for slower in (run(5e-6, 2e-6), run(5e-6, 2.5e-6, new=False)):
        (finding,) = compare(slower, old)
        assert finding.change.slower(0.1)


@pytest.mark.parametrize("role", ["core", "copy"])
def test_rows_are_compared_relative_to_cores_and_copies(role):
    def run(ours, other, limit=1e-6):
        rows = [
            timed_row("call", "ours", ours),
            timed_row("limit, 2 threads", "limit", limit),
            timed_row("other", role, other, 0),
        ]
        return timed_run(Result("prefill-128/float32", "", rows=rows))

    old = run(4e-6, 2e-6)
    (finding,) = compare(run(6e-6, 3e-6, limit=1.1e-6), old)
    assert finding.change.factor == pytest.approx(1)
    (finding,) = compare(run(6e-6, 2e-6), old)
    assert finding.change.slower(0.3)
    without = timed_run(
        Result(
            "prefill-128/float32", "", rows=[row for row in old.cases[0].rows if row.role != role]
        )
    )
    (finding,) = compare(run(6e-6, 3e-6), without)  # an older file has no such row
    assert finding.change.slower(0.3)


def test_a_file_of_an_older_version_is_loaded(tmp_path):
    """It has a list of latencies, which were measured once."""
    run = timed_run(timed_case())
    path = tmp_path / "run.json"
    results.save(run, path)
    data = json.loads(path.read_text())
    data["latency"] = [{"situation": "alone", "callers": 1, "calls": 1000, "p50": 1e-6}]
    path.write_text(json.dumps(data))
    assert results.load(path) == run
