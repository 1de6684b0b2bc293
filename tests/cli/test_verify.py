"""`rope-cpu verify`: its table, its JSON, its exit status, valid and invalid configs."""

import json
import re

import numpy as np
import pytest

from rope_cpu.cli import main as cli
from rope_cpu.cli import verify, verify_report
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


def rows(report):
    return [row for layers in report["layers"] for row in layers["rows"]]


def test_the_report_describes_the_rotation(tmp_path, capsys):
    out, report = verified(tmp_path, capsys)
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert report["passed"]
    (layers,) = report["layers"]
    assert (layers["heads"], layers["kv_heads"], layers["rope_type"]) == (32, 8, "llama3")
    assert (layers["layer_type"], layers["rotated"], layers["passed"]) == (None, True, True)
    assert len(layers["rows"]) == 4 * 2 * 4


def test_table_and_json_say_the_same(tmp_path, capsys):
    out, report = verified(tmp_path, capsys)
    lines = [line.split() for line in out.splitlines() if line.startswith(("float", "bfloat"))]
    table = [line for line in lines if line[1] in verify.PAIRINGS]
    offered = [row for row in rows(report) if row["verdict"] != "not offered"]
    assert [line[:3] for line in table] == [
        [row["dtype"], row["pairing"], row["way"]] for row in offered
    ]
    for line, row in zip(table, offered, strict=True):
        assert line[-1] == row["verdict"] == "ok"
        assert float(line[3]) == pytest.approx(row["max_error"], rel=0.01)
        assert float(line[4]) == pytest.approx(100 * row["beyond_rounding"], abs=0.1)


def test_a_decode_step_of_attention_is_verified(tmp_path, capsys):
    out, report = verified(tmp_path, capsys)
    assert "attention of a decode step after 63 cached tokens" in out
    (layers,) = report["layers"]
    found = layers["attention"]
    ways = ["numpy", *verify.TARGET_NAMES]
    assert [(row["dtype"], row["way"]) for row in found] == [
        (dtype, way) for dtype in ("float32", "bfloat16") for way in ways
    ]
    assert {row["verdict"] for row in found} == {"ok"}
    for row in found:
        # Half a unit in the last place of bfloat16 results below 2, and the roundings before it.
        largest = 2e-6 if row["dtype"] == "float32" else 2.0**-8 + 2.0**-12
        assert 0 < row["max_error"] <= largest
        assert 0 < row["of_tolerance"] <= 1
        assert row["from_numpy"] <= 2 * largest


def test_wrong_attention_fails(monkeypatch, tmp_path, capsys):
    operations = {
        **verify.ATTENTION_OPERATIONS,
        "numpy": ("primitive", lambda check, inputs: 1.001 * attended(check, inputs)),
    }
    attended = verify.ATTENTION_OPERATIONS["numpy"][1]
    monkeypatch.setattr(verify, "ATTENTION_OPERATIONS", operations)
    assert cli.main(["verify", "--json", str(tmp_path / "r.json")]) == 1
    assert re.search(r"float32 +numpy .* FAIL", capsys.readouterr().out)
    found = json.loads((tmp_path / "r.json").read_text())["layers"][0]["attention"]
    assert [row["verdict"] for row in found][:2] == ["FAIL", "ok"]


def test_refused_operations_are_listed_with_the_reason(tmp_path, capsys):
    out, report = verified(tmp_path, capsys)
    refused = [row for row in rows(report) if "refused" in row]
    assert all(row["refused"] in " ".join(out.split()) for row in refused)
    # float64 has no kernel behind either operator; the elementary ops have.
    names = {(row["dtype"], row["way"]) for row in refused}
    assert names == {("float64", "onnx"), ("float64", "ort")}


def test_exit_code_1_where_a_row_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases.reference.Exact, "error", lambda self, x: np.full(x.shape, np.inf))
    assert cli.main(["verify", "--json", str(tmp_path / "r.json")]) == 1
    assert re.search(r"float32 +half-split +numpy +inf +inf +.* FAIL", capsys.readouterr().out)
    report = json.loads((tmp_path / "r.json").read_text())
    assert not report["passed"]
    assert rows(report)[0]["max_error"] == "inf"


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


GEMMA = {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def headings(out):
    """Return the layer type of each heading; lines are wrapped, also within paths."""
    return re.findall(r"config.json,([a-z_]+):", "".join(out.split()))


def test_layers_that_differ_are_verified_in_turn(tmp_path, capsys):
    file = config(tmp_path, **GEMMA)
    json_file = tmp_path / "report.json"
    assert cli.main(["verify", str(file), "--json", str(json_file)]) == 0
    out = capsys.readouterr().out
    types = ["sliding_attention", "full_attention"]
    assert headings(out) == types
    assert "72 ok, 8 not offered" in out
    report = json.loads(json_file.read_text())
    assert [layers["layer_type"] for layers in report["layers"]] == types
    assert [len(layers["rows"]) for layers in report["layers"]] == [32, 32]


def test_one_of_the_layer_types(tmp_path, capsys):
    file = config(tmp_path, **GEMMA)
    assert cli.main(["verify", str(file), "--layer-type", "sliding_attention"]) == 0
    assert headings(capsys.readouterr().out) == ["sliding_attention"]
    assert cli.main(["verify", str(file), "--layer-type", "nope"]) == 2
    one_line(capsys, "nope", "sliding_attention", "full_attention")


def test_one_failing_layer_type_fails_all(monkeypatch, tmp_path, capsys):
    def rows_of(ropes, *arguments):
        beyond = 0.5 if ropes["half-split"].inv_freq[1] < 0.2 else 1.5  # full attention: 1e6^-1/8
        figures = cases.Figures(1e-7, beyond, 0.0, 1e-6, 1e-6)
        return [cases.Row("float32", "half-split", "numpy", figures)]

    monkeypatch.setattr(verify, "rows", rows_of)
    json_file = tmp_path / "r.json"
    file = config(tmp_path, **GEMMA)
    assert cli.main(["verify", str(file), "--json", str(json_file)]) == 1
    assert "17 ok, 1 FAIL" in capsys.readouterr().out
    report = json.loads(json_file.read_text())
    assert not report["passed"]
    assert [layers["passed"] for layers in report["layers"]] == [False, True]


def test_layers_that_are_not_rotated_are_named(tmp_path, capsys):
    file = config(tmp_path, model_type="cohere2", num_hidden_layers=4)
    json_file = tmp_path / "report.json"
    assert cli.main(["verify", str(file), "--json", str(json_file)]) == 0
    out = capsys.readouterr().out
    assert "full_attention:notrotated" in "".join(out.split())
    assert "36 ok, 4 not offered" in out
    unrotated = [
        layers for layers in json.loads(json_file.read_text())["layers"] if not layers["rotated"]
    ]
    assert [(layers["layer_type"], layers["rows"]) for layers in unrotated] == [
        ("full_attention", [])
    ]
    assert cli.main(["verify", str(file), "--layer-type", "full_attention"]) == 2
    one_line(capsys, "full_attention", "not rotated")


def test_a_model_of_unknown_type_needs_the_pairing(tmp_path, capsys):
    file = str(config(tmp_path, model_type="mystery"))
    assert cli.main(["verify", file]) == 2
    one_line(capsys, "'mystery'", "give --interleaved for pairs (2i, 2i+1), --half for (i, i+n)")
    for option, pairs in (("--half", "half-split"), ("--interleaved", "interleaved")):
        assert cli.main(["verify", file, option]) == 0
        assert f"in {pairs} pairs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.9999999, "99.9 %"), (1.0, "100.0 %"), (1.0000001, "100.1 %"), (np.inf, "inf")],
)
def test_percentages_are_rounded_towards_the_verdict(fraction, text):
    assert verify_report._percentage(fraction) == text


def test_a_model_whose_pairing_cannot_be_overruled(tmp_path, capsys):
    file = tmp_path / "config.json"
    keys = {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 2}
    file.write_text(json.dumps({**keys, "attention_head_dim": 128}))
    assert cli.main(["verify", str(file)]) == 0
    assert "in interleaved pairs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": None, "head_dim": 16, "model_type": "x"}, "`model_type` is 'x'"),
        ({"model_type": "falcon_h2", "n_head": 0}, "`model_type` is 'falcon_h2'"),
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
    assert "36 ok" in captured.out
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
