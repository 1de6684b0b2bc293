"""Output of results that were not measured: files, tables, comparisons, pictures."""

import json

import pytest

from rope_cpu.bench import report, results
from rope_cpu.bench.compare import Finding, compare
from rope_cpu.bench.implementations.table import PEERS
from rope_cpu.bench.measurement import statistics
from rope_cpu.bench.measurement.case import Case
from rope_cpu.bench.measurement.rows import Result, Row
from rope_cpu.bench.measurement.statistics import Change

ENVIRONMENT = {
    "processor": "A processor with a name as long as processors' names are, 64-core, 3.5 GHz",
    "cores": 128,
    "threads": 128,
    "governor": "performance",
    "load": 0.5,
    "caches": {"L1": 49152, "L2": 1048576, "L3": 33554432},
    "python": "3.11.7",
    "versions": {
        "numpy": "2.4.6",
        "numba": "0.68.1",
        "torch": "2.13.0+cpu",
        "jax": "0.10.2",
        "onnxruntime": "1.31.1",
    },
    "time": "2026-01-01T00:00:00+00:00",
}


def _row(name, role, seconds, bytes_accessed=40960, wobble=0.01, **more):
    samples = [seconds * (1 + wobble * (i % 5 - 2)) for i in range(15)]
    return Row(name, role, samples=samples, bytes_accessed=bytes_accessed, **more)


def _case(ours=2e-6, limit=1e-6, name="prefill-32768/bfloat16/interleaved/out/cold", **more):
    rows = [_row("plan", "ours", ours, **more), _row("limit, 1 thread", "limit", limit)]
    peers = [_row(name, "peer", 3e-3 * (i + 4), first_call=1.0) for i, name in enumerate(PEERS)]
    skipped = Row(
        "a peer",
        "peer",
        "skipped",
        "a_package_with_a_long_name is not installed, and neither is another one",
    )
    wrong = Row("another", "peer", "wrong", "its error is 1e+09 times the tolerance; not timed")
    slow_limit = _row("limit, 128 threads", "limit", 2 * limit)
    return Result(
        name, "a description " * 20, rows=[rows[0], *peers, skipped, wrong, rows[1], slow_limit]
    )


def _run(*cases):
    return results.Run("rope-cpu bench", "llama3-8b", ENVIRONMENT, list(cases))


def test_tables_fit_a_hundred_columns():
    run = _run(_case(), _case(wobble=0.4, name="layouts"))
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
    case = _case()
    ours, peer = list(report.case_lines(case))[:2]
    # 40960 bytes in 2 µs are 20.48 GB/s, half of the limit.
    assert ours.split() == ["plan", "2.00", "µs", "1.98", "…", "2.02", "20.5", "50", "%", "1"]
    assert " 6000 " in peer  # 12 ms


def test_a_noisy_ratio_is_marked():
    case = Result(
        "case", "", rows=[_row("plan", "ours", 1e-6), _row("peer", "peer", 1.2e-6, wobble=0.4)]
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
    run = _run(_case())
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
    assert list(report.closing(_run(_case())))[-1].startswith("1 case in")


def test_a_slower_kernel_is_caught_on_a_slower_machine():
    old = _run(_case())
    same = _run(_case(ours=3e-6, limit=1.5e-6))
    slower = _run(_case(ours=2.4e-6))
    assert [finding.change.slower(0.1) for finding in compare(same, old)] == [False]
    (finding,) = compare(slower, old)
    assert finding.change.slower(0.1)
    assert finding.change.factor == pytest.approx(1.2)
    assert not finding.change.slower(0.3)


def test_without_a_limit_the_peer_is_the_baseline():
    def case(ours, peer):
        return Result(
            "import", "", rows=[_row("ours", "ours", ours, 0), _row("peer", "peer", peer, 0)]
        )

    (finding,) = compare(_run(case(4.0, 2.0)), _run(case(2.0, 1.0)))
    assert finding.change.factor == pytest.approx(1)


def test_rows_and_cases_of_one_run_only_are_left_out():
    assert compare(_run(_case(name="new")), _run(_case(name="old"))) == []


def test_rows_that_return_new_memory_are_compared_relative_to_its_cost():
    def run(ours, memory, limit=1e-6, new=True):
        rows = [
            _row("plan, new arrays", "ours", ours, new=new),
            _row("limit, 2 threads", "limit", limit),
        ]
        return _run(
            Result("prefill-4096/float32", "", rows=[*rows, _row("new memory", "memory", memory)])
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
            _row("call", "ours", ours),
            _row("limit, 2 threads", "limit", limit),
            _row("other", role, other, 0),
        ]
        return _run(Result("prefill-128/float32", "", rows=rows))

    old = run(4e-6, 2e-6)
    (finding,) = compare(run(6e-6, 3e-6, limit=1.1e-6), old)
    assert finding.change.factor == pytest.approx(1)
    (finding,) = compare(run(6e-6, 2e-6), old)
    assert finding.change.slower(0.3)
    without = _run(
        Result(
            "prefill-128/float32", "", rows=[row for row in old.cases[0].rows if row.role != role]
        )
    )
    (finding,) = compare(run(6e-6, 3e-6), without)  # an older file has no such row
    assert finding.change.slower(0.3)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    from rope_cpu.bench import plot

    threads = [
        _row(f"plan, {text}", "ours", 2e-6 / n)
        for n, text in ((1, "1 thread"), (2, "2 threads"), (4, "4 threads"))
    ]
    scaling = Result(
        "prefill-512/bfloat16", "", rows=[*threads, _row("limit, 1 thread", "limit", 1e-6)]
    )
    path = tmp_path / f"run.{suffix}"
    plot.save(_run(_case(name="decode-1/float32"), _case(name="decode-1/bfloat16"), scaling), path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_every_case_with_several_implementations_has_bars(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from rope_cpu.bench import plot

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: figures.append(figure))
    call = _row("call", "ours", 4e-6)
    without_peers = Result("decode-8/float32", "", rows=[_row("plan", "ours", 2e-6), call])
    alone = Result("shift/float32", "", rows=[_row("shift", "ours", 2e-6)])
    plot.save(_run(_case(name="decode-1/float32"), without_peers, alone), tmp_path / "run.png")
    (figure,) = figures
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.get_visible()]
    assert titles == ["decode-1/float32", "decode-8/float32"]
    bars = figure.axes[1].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([2e-6, 4e-6])
    labels = [text.get_text() for text in figure.axes[1].texts]
    assert labels == ["2.00 µs", "4.00 µs (2.00 times)"]


def test_a_file_of_an_older_version_is_loaded(tmp_path):
    """It has a list of latencies, which were measured once."""
    run = _run(_case())
    path = tmp_path / "run.json"
    results.save(run, path)
    data = json.loads(path.read_text())
    data["latency"] = [{"situation": "alone", "callers": 1, "calls": 1000, "p50": 1e-6}]
    path.write_text(json.dumps(data))
    assert results.load(path) == run


def test_a_picture_of_nothing_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    from rope_cpu.bench import plot

    with pytest.raises(ValueError, match="nothing that can be drawn"):
        plot.save(_run(), tmp_path / "run.png")
