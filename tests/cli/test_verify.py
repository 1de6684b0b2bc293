"""`rope-cpu verify`: its table, its JSON, its exit status, valid and invalid configs."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import DTYPES
from rope_cpu.cli import main as cli
from rope_cpu.cli import verify
from rope_cpu.export.targets import TARGETS

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "rope_theta": 1e4, "max_position_embeddings": 2048}
GEMMA = {"model_type": "gemma3_text", "head_dim": 16, "rope_local_base_freq": 1e4}


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """A function that verifies a changed config with a short prefill.

    It returns the exit code, the output with single spaces, and the layers in the JSON file.
    """
    monkeypatch.setattr(verify, "TOKENS", 16)

    def run(*arguments, **changes):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        code = cli.main(["verify", str(tmp_path), "--json", str(file), *arguments])
        out, err = capsys.readouterr()
        report = json.loads(file.read_text()) if file.exists() else {"layers": []}
        layers = {layer["layer_type"]: layer["rows"] for layer in report["layers"]}
        return SimpleNamespace(code=code, out=" ".join(out.split()), err=err, layers=layers)

    return run


def one_line(found, *words):
    assert found.code == 2
    assert found.out == ""
    assert found.err.startswith("rope-cpu: ")
    assert found.err.count("\n") == 1
    assert all(text in found.err for text in words)


def test_a_row_for_numpy_and_for_each_target(run):
    found = run()
    assert found.code == 0
    (rows,) = found.layers.values()
    ways = ["numpy", *TARGETS]
    labels = [(row["part"], row["dtype"], row["pairing"], row["by"]) for row in rows]
    verified = [("rotation", name, "half-split") for name in DTYPES]
    verified.append(("rotation", "float32", "interleaved"))
    verified += [("attention", name, "half-split") for name in ("float32", "bfloat16")]
    expected = [(*what, way) for what in verified for way in ways]
    expected.remove(("attention", "float32", "half-split", "numpy"))
    assert labels == expected
    offered = [row for row in rows if row["verdict"] != "not offered"]
    for row in offered:
        assert row["verdict"] == "ok"
        worst = max(outcome["ratio"] for outcome in row["report"])
        assert 0 < worst <= 1
        shown = f"{row['part']} {row['dtype']} {row['pairing']} {row['by']} [^ ]+ "
        assert re.search(f"{shown}{worst:.1%} ok ", found.out)
    for row in rows:
        assert row["refused"] in found.out
    assert "16 of 16 elements rotated in half-split pairs; q (4 heads) and k (2)" in found.out


@pytest.mark.usefixtures("brief_verify")
def test_each_row_is_a_line_as_soon_as_it_is_known(run, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "numpy_attention", interrupt)
    interrupted = run()
    assert "rotation float32 half-split numpy" in interrupted.out
    assert "attention" not in interrupted.out


@pytest.mark.usefixtures("brief_verify")
def test_layers_that_differ_are_verified_in_turn(run):
    types = ["sliding_attention", "full_attention"]
    found = run(**GEMMA)
    assert list(found.layers) == types
    assert [found.out.count(f", {name}:") for name in types] == [1, 1]
    assert list(run("--layer-type", types[0], **GEMMA).layers) == types[:1]
    one_line(run("--layer-type", "nope", **GEMMA), "nope", *types)


@pytest.mark.usefixtures("brief_verify")
def test_layers_that_are_not_rotated_are_named(run):
    changes = {"model_type": "cohere2", "num_hidden_layers": 4}
    found = run(**changes)
    assert found.code == 0
    assert "full_attention: not rotated max error" in found.out
    assert found.layers["full_attention"] == []
    one_line(run("--layer-type", "full_attention", **changes), "full_attention", "not rotated")


@pytest.mark.usefixtures("brief_verify")
def test_a_model_of_unknown_type_needs_the_pairing(run):
    words = "give --interleaved for pairs (2i, 2i+1), --half for (i, i+n)"
    one_line(run(model_type="mystery"), "'mystery'", words)
    for option, pairs in (("--half", "half-split"), ("--interleaved", "interleaved")):
        assert f"in {pairs} pairs" in run(option, model_type="mystery").out


def sixteen_ulps(q, k):
    bits = {2: np.int16, 4: np.int32, 8: np.int64}[k.itemsize]
    k.view(bits)[0, -1, 1, 0] += 16


def not_a_number(q, k):
    q[0, -1, 3, 2] = np.nan


def decode_step_alone(q, k):
    if q.shape[1] == 1:
        k[0, 0, 0, 0] = 0


FAULTS = (sixteen_ulps, not_a_number, decode_step_alone)


@pytest.mark.parametrize("spoil", FAULTS)
def test_a_fault_of_the_rotation_fails(spoil, dtype, interleaved, monkeypatch):
    monkeypatch.setattr(verify, "TOKENS", 40)
    frequencies = [1.0, 0.1, 0.01]
    rope = RotaryEmbedding.from_inv_freq(frequencies, head_dim=8, interleaved=interleaved)
    assert verify.numpy_rotation(rope, (4, 2), dtype).passed
    right = RotaryEmbedding.__call__

    def wrong(self, q, k, ids):
        results = right(self, q, k, ids)
        spoil(*results)
        return results

    monkeypatch.setattr(RotaryEmbedding, "__call__", wrong)
    assert not verify.numpy_rotation(rope, (4, 2), dtype).passed


@pytest.mark.usefixtures("brief_verify")
def test_attention_of_tokens_with_coordinates_is_that_of_numpy():
    found = list(verify.rows(RotaryEmbedding.axial(16, 2), (4, 2)))
    assert {row.by for row in found if "coordinates" in row.refused} == set(TARGETS)
    assert {row.verdict for row in found if not row.refused} == {"ok"}


@pytest.mark.usefixtures("brief_verify")
@pytest.mark.parametrize("factor", [1.0001, 1e18, np.nan])
def test_wrong_attention_fails(factor, run, monkeypatch):
    right = verify.attention
    monkeypatch.setattr(verify, "attention", lambda *arguments: factor * right(*arguments))
    found = run()
    assert found.code == 1
    (rows,) = found.layers.values()
    assert {row["by"]: row["verdict"] for row in rows if row["part"] == "attention"} == {
        "numpy": "FAIL",
        **dict.fromkeys(TARGETS, "ok"),
    }
    row = "attention float32 half-split numpy [^ ]+ > 1000% FAIL attention"
    assert re.search(row, found.out)


BAD_CONFIGS = [
    ({"num_attention_heads": None, "head_dim": 16, "model_type": "x"}, "`model_type` is 'x'"),
    ({"head_dim": 16, "num_attention_heads": "x"}, "`num_attention_heads` is 'x'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_CONFIGS)
def test_a_bad_config_is_one_line(changes, words, run):
    one_line(run(**changes), words)


@pytest.mark.usefixtures("brief_verify")
def test_json_that_cannot_be_written_after_all_costs_no_table(run):
    found = run("--json", "/proc/no.json")
    assert found.code == 2
    assert "numpy" in found.out
    expected = "rope-cpu: cannot write /proc/no.json: No such file or directory"
    assert found.err.splitlines()[-1] == expected


@pytest.mark.parametrize("place", ["", "no/x.json"])
def test_json_into_no_file(place, run, tmp_path):
    one_line(run("--json", str(tmp_path / place)), "must be a file in a folder that exists")
