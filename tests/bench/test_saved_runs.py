"""`rope-cpu bench --from`: a saved run is shown, drawn and compared; nothing is timed."""

import json

import pytest

from rope_cpu.bench import plot, results
from rope_cpu.command_line import UsageError


@pytest.fixture
def saved(bench, capsys, tmp_path):
    """Return the file of a run, and what was printed when it was timed."""
    path = tmp_path / "saved.json"
    assert bench("decode-1/float32", "plan-64", "--no-peers", "--json", str(path)) == 0
    return str(path), capsys.readouterr().out


def test_a_saved_run_is_shown_as_it_was_printed(bench, saved, capsys):
    path, printed = saved
    assert bench("--from", path) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "plan, new arrays" in "".join(shown)
    differing = [line for line in printed.splitlines() if line not in shown]
    # The forecast, and how long it took.
    assert [line.split(",")[0].split(" in ")[0] for line in differing] == ["2 cases"] * 2


def test_cases_of_a_saved_run_are_shown_drawn_and_compared(bench, saved, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    path, _ = saved
    drawn = []
    monkeypatch.setattr(plot, "save", lambda run, to, cases: drawn.append((run, cases)))
    assert bench("--from", path, "decode", "--plot", "run.png", "--compare", path) == 0
    out = capsys.readouterr().out
    assert "decode-1/float32" in out
    assert "plan-64" not in out
    assert "3 rows compared, 0 slower" in out
    ((run, cases),) = drawn
    assert run == results.load(path)  # limits are taken from the whole run
    assert [case.name for case in cases] == ["decode-1/float32"]
    with pytest.raises(UsageError, match=r"'prefill', which matches no case of .*saved.json"):
        bench("--from", path, "prefill")


def test_a_saved_run_without_its_environment_is_refused(bench, saved, tmp_path):
    path, _ = saved
    data = json.loads((tmp_path / "saved.json").read_text())
    for fact, value in (("caches", None), ("governor", 1), ("versions", [])):
        changed = data | {"environment": data["environment"] | {fact: value}}
        (tmp_path / "changed.json").write_text(json.dumps(changed))
        with pytest.raises(UsageError, match=f"changed.json is not a file of .*{fact}"):
            bench("--from", str(tmp_path / "changed.json"))
    del data["environment"]["load"]
    (tmp_path / "changed.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"changed.json is not a file of .*load"):
        bench("--from", str(tmp_path / "changed.json"))
    assert bench("--from", path, "--compare", str(tmp_path / "changed.json")) == 0
