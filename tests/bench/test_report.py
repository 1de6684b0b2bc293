"""Output of results that were not measured: files, tables, comparisons."""

import json

import pytest
from bench_runs import ENVIRONMENT, timed_case, timed_row, timed_run

from rope_cpu.bench import report, results, statistics
from rope_cpu.bench.measure import Case
from rope_cpu.bench.results import Result


def test_tables_fit_a_hundred_columns():
    run = timed_run(timed_case(), timed_case(wobble=0.4, name="layouts"))
    lines = [
        *report.heading(ENVIRONMENT, "a-model-with-a-long-name" * 3),
        *report.columns(),
        *report.title(Case("name " * 30, "what", {})),
        *(line for case in run.cases for line in report.case_lines(case)),
        report.closing(run),
        *report.comparison(run, {("prefill-32768/bfloat16/interleaved/out/cold", "plan"): 1e-3}),
    ]
    assert max(map(len, lines)) <= report.WIDTH
    text = "\n".join(lines)
    assert "a_package_with_a_long_name is not installed" in text
    assert "1e+09 times the tolerance" in text
    assert "limit, 128 threads" not in text  # the slower way is not the limit


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


def test_a_file_has_samples_and_figures_and_gives_its_medians(tmp_path):
    run = timed_run(timed_case())
    path = tmp_path / "run.json"
    results.save(run, path)
    row = json.loads(path.read_text())["cases"][0]["rows"][0]
    assert row["samples"] == run.cases[0].rows[0].samples
    assert row["seconds"]["median"] == pytest.approx(2e-6)
    assert row["gb_per_s"] == pytest.approx(20.48)
    assert row["of_limit"] == pytest.approx(0.5)
    timed = {
        (case.name, row.name): row.seconds.median for case in run.cases for row in case.timed()
    }
    assert results.load_medians(path) == timed


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 0}',
        '{"format": 2}',
        "[1]",
        "{",
        "null",
        "\xff",
        '{"format": 2, "cases": [{}]}',
        '{"format": 2, "cases": ["case"]}',
        "[" * 100_000,
        *(
            f'{{"format": 2, "cases": [{{"name": "a", "rows": [{row}]}}]}}'
            for row in (
                '"row"',
                '{"name": [], "status": "timed", "seconds": {"median": 1.0}}',
                '{"name": "a", "status": "timed", "seconds": {"median": null}}',
                '{"name": "a", "status": "timed", "seconds": {"median": NaN}}',
                '{"name": "a", "status": "timed", "seconds": {"median": 0}}',
            )
        ),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{path} is not a file") as refusal:
        results.load_medians(path)
    assert len(str(refusal.value)) < 1000


def test_a_comparison_has_medians_and_their_ratio():
    run = timed_run(timed_case(ours=3e-6, name="decode-1/float32"))
    lines = list(report.comparison(run, {("decode-1/float32", "plan"): 2e-6, ("old", "plan"): 1.0}))
    assert len(lines) == 3
    assert lines[2].split() == ["decode-1/float32", "plan", "2.00", "µs", "3.00", "µs", "1.50"]


def test_a_comparison_of_nothing_says_so():
    lines = list(report.comparison(timed_run(timed_case(name="new")), {("old", "plan"): 1.0}))
    assert lines == ["", "Nothing was compared: no row of this run is in the older one."]
    assert report.closing(timed_run(timed_case())) == "1 case in 0 s"
