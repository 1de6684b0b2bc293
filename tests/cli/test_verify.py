"""`rope-cpu verify`: its table, its JSON, its exit status, valid and invalid configs."""

import json
import math
import re

import pytest

from rope_cpu.cli import main as cli
from rope_cpu.cli import verify
from rope_cpu.cli import verify_cases as cases


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A short prefill, and no more timing than it takes to have a figure."""
    monkeypatch.setattr(verify, "TOKENS", 16)
    monkeypatch.setattr(cases, "TIMED_CALLS", 1)


def verified(tmp_path, capsys):
    """Verify the default config; return the text and the rows of the JSON file."""
    file = tmp_path / "report.json"
    assert cli.main(["verify", "--json", str(file)]) == 0
    return capsys.readouterr().out, json.loads(file.read_text())


def test_the_report_describes_the_rotation(tmp_path, capsys):
    out, report = verified(tmp_path, capsys)
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert report["passed"]
    assert (report["heads"], report["kv_heads"], report["rope_type"]) == (32, 8, "llama3")
    assert len(report["rows"]) == 4 * 2 * 4


def test_table_and_json_say_the_same(tmp_path, capsys):
    out, report = verified(tmp_path, capsys)
    table = [line.split() for line in out.splitlines() if line.startswith(("float", "bfloat"))]
    offered = [row for row in report["rows"] if row["verdict"] != "not offered"]
    assert [line[:3] for line in table] == [
        [row["dtype"], row["pairing"], row["way"]] for row in offered
    ]
    for line, row in zip(table, offered, strict=True):
        assert line[-1] == row["verdict"] == "ok"
        assert float(line[3]) == pytest.approx(row["max_error"], rel=0.01)


def test_refused_operations_are_listed_with_the_reason(tmp_path, capsys):
    out, report = verified(tmp_path, capsys)
    refused = [row for row in report["rows"] if "refused" in row]
    assert all(row["refused"] in " ".join(out.split()) for row in refused)
    # float64 has no kernel behind either operator; the elementary ops have.
    names = {(row["dtype"], row["way"]) for row in refused}
    assert names == {("float64", "onnx"), ("float64", "ort")}


def test_exit_code_1_where_a_row_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases, "compare", lambda error, bound: (math.inf, math.inf))
    assert cli.main(["verify", "--json", str(tmp_path / "r.json")]) == 1
    assert re.search(r"float32 +half-split +numpy +inf +inf +.* FAIL", capsys.readouterr().out)
    report = json.loads((tmp_path / "r.json").read_text())
    assert not report["passed"]
    assert report["rows"][0]["max_error"] == "inf"


def config(tmp_path, **changes):
    file = tmp_path / "config.json"
    keys = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    file.write_text(
        json.dumps({**keys, "rope_theta": 1e4, "max_position_embeddings": 2048} | changes)
    )
    return file


def test_a_config_of_ones_own(tmp_path, capsys):
    file = config(tmp_path)
    assert cli.main(["verify", str(file)]) == 0
    out = capsys.readouterr().out
    expected = f"{file}: rope type default, 16 of 16 elements rotated in half-split pairs"
    assert "".join(expected.split()) in "".join(out.split())  # lines are wrapped, also within paths
    assert "q (4 heads) and k (2)" in out


def test_layers_that_differ(tmp_path, capsys):
    file = config(
        tmp_path, model_type="gemma3_text", head_dim=16, rope_theta=1e6, rope_local_base_freq=1e4
    )
    assert cli.main(["verify", str(file)]) == 2
    one_line(capsys, "full_attention", "choose with --layer-type")
    assert cli.main(["verify", str(file), "--layer-type", "sliding_attention"]) == 0


def test_a_model_of_unknown_type(tmp_path, capsys):
    assert cli.main(["verify", str(config(tmp_path, model_type="mystery"))]) == 0
    assert "pairs of an unknown pairing" in " ".join(capsys.readouterr().out.split())


def test_a_model_whose_pairing_cannot_be_overruled(tmp_path, capsys):
    file = tmp_path / "config.json"
    keys = {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 2}
    file.write_text(json.dumps({**keys, "attention_head_dim": 128}))
    assert cli.main(["verify", str(file)]) == 0
    assert "in interleaved pairs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mystery", "num_attention_heads": None, "head_dim": 16}, "number of heads"),
        (
            {"head_dim": 16, "num_attention_heads": "x"},
            "`num_attention_heads` is 'x'; it must be an integer",
        ),
        (
            {"head_dim": 16, "num_attention_heads": [8, 8]},
            "`num_attention_heads` is [8, 8]; it must be an integer",
        ),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` is 0; it must be at least 1"),
        ({"rope_scaling": {"rope_type": "nope", "factor": 2.0}}, "nope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ],
)
def test_a_bad_config_is_one_line(changes, words, tmp_path, capsys):
    assert cli.main(["verify", str(config(tmp_path, **changes))]) == 2
    one_line(capsys, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not valid JSON"), ("[1]", "holds a list"), (None, "which is neither a file nor")],
)
def test_a_bad_file_is_one_line(text, words, tmp_path, capsys):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert cli.main(["verify", str(file)]) == 2
    one_line(capsys, words, str(file))


def test_the_table_fits_eighty_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["verify"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_json_that_cannot_be_written_after_all_costs_no_table(tmp_path, capsys):
    assert cli.main(["verify", "--json", "/proc/no.json"]) == 2
    captured = capsys.readouterr()
    assert "28 ok" in captured.out
    assert (
        captured.err.splitlines()[-1]
        == "rope-cpu: cannot write /proc/no.json: No such file or directory"
    )


def test_json_into_a_folder(tmp_path, capsys):
    assert cli.main(["verify", "--json", str(tmp_path)]) == 2
    one_line(capsys, "it is a folder")


def test_json_into_no_folder(tmp_path, capsys):
    assert cli.main(["verify", "--json", str(tmp_path / "no" / "x.json")]) == 2
    one_line(capsys, "cannot write")


def one_line(capsys, *words):
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rope-cpu: ")
    assert captured.err.count("\n") == 1
    assert all(text in captured.err for text in words)
