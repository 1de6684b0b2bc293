import argparse
import json
import re
from fractions import Fraction

import numpy as np
import oracle
import pytest

from rope_cpu import RotaryEmbedding, reference
from rope_cpu.cli import common as _usage
from rope_cpu.cli import main as cli
from rope_cpu.cli import verification as _verification
from rope_cpu.cli import verify

mp = oracle.CONTEXT
TOLD = 2.0**-100


def exact_value(exact, index):
    return mp.mpf(float(exact.high[index])) + mp.mpf(float(exact.low[index]))


@pytest.mark.parametrize("first", [0, 1, 511, 2**20 - 3])
@pytest.mark.parametrize("factor", [1.0, 1.25, 0.1])
def test_reference_angles_against_mpmath(first, factor):
    steps = [1.0, -0.3, 2.5e-6, 5e5**-0.5, 0.0, 7.25, -15707.9]
    cos, sin = reference.consecutive([Fraction(step) for step in steps], first, 3, factor)
    for row in range(3):
        for pair, step in enumerate(steps):
            angle = mp.mpf(first + row) * mp.mpf(step)
            assert abs(exact_value(cos, (row, pair)) - mp.mpf(factor) * mp.cos(angle)) < TOLD
            assert abs(exact_value(sin, (row, pair)) - mp.mpf(factor) * mp.sin(angle)) < TOLD


def test_reference_rotation_against_mpmath(rng):
    x_a, x_b = rng.standard_normal((2, 7, 5)) * 10.0 ** rng.integers(-3, 3, (2, 7, 5))
    cos, sin = reference.consecutive([Fraction(step) for step in rng.random(5).tolist()], 3, 7, 1.0)
    first, second = reference.rotate(x_a, x_b, cos, sin)
    for index in np.ndindex(7, 5):
        a, b, c, s = mp.mpf(x_a[index]), mp.mpf(x_b[index]), exact_value(cos, index), exact_value(sin, index)
        reach = abs(a) + abs(b)
        assert abs(exact_value(first, index) - (a * c - b * s)) < TOLD * reach
        assert abs(exact_value(second, index) - (a * s + b * c)) < TOLD * reach


def test_error_is_seen_below_float64():
    exact = reference.Exact(np.array([1.0]), np.array([2.0**-60]))
    assert exact.error(np.array([1.0])) == 2.0**-60
    assert exact.error(np.array([1.0 + 2.0**-52])) == 2.0**-52 - 2.0**-60


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A short prompt, and no more timing than it takes to have a figure."""
    monkeypatch.setattr(verify, "TOKENS", 16)
    monkeypatch.setattr(_verification, "TIMED_SECONDS", 0.0)


class Spoiled(_verification.NumPyPath):
    """The kernels, and then a fault in one place."""

    def __init__(self, rope, spoil):
        super().__init__(rope)
        self.spoil = spoil

    def prepare(self, q, k, ids):
        call, q_rot, k_rot = super().prepare(q, k, ids)

        def spoiled():
            call()
            self.spoil(q_rot, k_rot)

        return spoiled, q_rot, k_rot


def small(interleaved=False):
    return RotaryEmbedding.from_inv_freq([1.0, 0.1, 0.01], head_dim=8, interleaved=interleaved, attention_factor=1.1)


def rows(spoil=None, tokens=40):
    ropes = {"half-split": small(), "interleaved": small(True)}
    paths = {"numpy": lambda rope, dtype: _verification.NumPyPath(rope)}
    if spoil:
        paths["spoiled"] = lambda rope, dtype: Spoiled(rope, spoil)
    return list(_verification.rows(ropes, (4, 2), tokens, paths))


def test_kernels_pass_in_every_dtype_and_pairing():
    found = rows()
    assert [(row.dtype, row.pairing) for row in found] == [
        (dtype, pairing)
        for dtype in ("float32", "float64", "float16", "bfloat16")
        for pairing in ("half-split", "interleaved")
    ]
    for row in found:
        assert row.verdict == "ok"
        assert 0 < row.figures.of_bound <= 1
        assert row.figures.max_error > 0
        assert row.figures.from_numpy == 0
        assert row.figures.decode_seconds > 0


def sixteen_ulps(q, k):
    bits = {2: np.int16, 4: np.int32, 8: np.int64}[k.itemsize]
    k.view(bits)[0, 1, -1, 0] += 16


def rest(q, k):
    q[0, 0, 0, 7] += np.asarray(0.5, q.dtype)


def not_a_number(q, k):
    q[0, 3, -1, 2] = np.nan


def swapped(q, k):
    q[:] = q[:, ::-1].copy()


@pytest.mark.parametrize("spoil", [sixteen_ulps, rest, not_a_number, swapped])
def test_a_fault_fails_every_row(spoil):
    for row in rows(spoil):
        assert row.verdict == ("FAIL" if row.path == "spoiled" else "ok"), row


def test_what_is_bound_stays_until_the_call(rng):
    """onnxruntime 1.29 holds nothing that is bound: memory that was let go would be somebody else's by then."""
    from rope_cpu.cli.onnx_path import OnnxPath

    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64))
    q = rng.standard_normal((1, 4, 1, 64)).astype(np.float32)
    onnx = OnnxPath(rope, np.dtype(np.float32), "primitive", "bhsd", (4, 4), 600)
    call, q_rot, _ = onnx.prepare(q, q.copy(), np.array([512]))
    others = [np.full((1, 1), 7) for _ in range(100)]
    call()
    expected, _ = onnx.session.run(None, {"q": q, "k": q, "position_ids": np.array([[512]])})
    assert np.array_equal(q_rot, expected)
    assert all(other == 7 for other in others)


def test_a_fault_in_the_decode_step_alone_fails():
    def spoil(q, k):
        if q.shape[2] == 1:
            k[0, 0, 0, 0] = 0

    assert {row.verdict for row in rows(spoil) if row.path == "spoiled"} == {"FAIL"}


def test_table_and_json_say_the_same(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert cli.main(["verify", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100
    report = json.loads(file.read_text())
    assert report["passed"]
    assert (report["heads"], report["kv_heads"], report["rope_type"]) == (32, 8, "llama3")
    table = [line.split() for line in out.splitlines() if line.startswith(("float", "bfloat"))]
    assert [line[:3] for line in table] == [[row["dtype"], row["pairing"], row["path"]] for row in report["rows"]]
    assert len(table) == 4 * 2 * 4
    for line, row in zip(table, report["rows"], strict=True):
        if row["verdict"] == "not offered":
            assert line[3:5] == ["not", "offered"]
            assert row["refused"].split(";")[0] in " ".join(out.split())
        else:
            assert line[-1] == row["verdict"] == "ok"
            assert float(line[3]) == pytest.approx(row["max_error"], rel=0.01)
    # float64 has no kernel behind either operator; the elementary ops have.
    refused = {(row["dtype"], row["path"]) for row in report["rows"] if row["verdict"] == "not offered"}
    assert refused == {("float64", "onnx"), ("float64", "ort")}


def test_exit_code_1_where_a_row_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify, "NumPyPath", lambda rope: Spoiled(rope, not_a_number))
    assert cli.main(["verify", "--json", str(tmp_path / "r.json")]) == 1
    assert re.search(r"float32 +half-split +numpy +nan +nan +.* FAIL", capsys.readouterr().out)
    report = json.loads((tmp_path / "r.json").read_text())
    assert not report["passed"]
    assert report["rows"][0]["max_error"] == "nan"


def llama3_inv_freq(i, rotary_dim=128, theta=500000, factor=8, low=1, high=4, original=8192):
    """Llama 3.1's own rule, in 200 bits: short waves stay, long ones stretch, those between are mixed."""
    omega = mp.mpf(theta) ** (-mp.mpf(2 * i) / rotary_dim)
    wavelength = 2 * mp.pi / omega
    if wavelength < mp.mpf(original) / high:
        return omega
    if wavelength > mp.mpf(original) / low:
        return omega / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * omega / factor + smooth * omega


def test_the_shipped_config_is_llama_3_1(capsys):
    rope = _usage.rotary_of(_usage.config_of(argparse.Namespace(config=None)), None)
    assert (rope.head_dim, rope.rotary_dim, rope.interleaved, rope.attention_factor) == (128, 128, False, 1.0)
    for i, omega in enumerate(rope.inv_freq.tolist()):
        exact = llama3_inv_freq(i)
        assert abs(mp.mpf(omega) - exact) <= 8 * 2.0**-53 * exact


def test_several_axes_and_heads_with_frequencies_of_their_own():
    frequencies = np.array([[[1.0, 0.0], [0.5, 0.1]], [[0.0, 0.3], [0.2, 0.7]]])  # (axes, heads, pairs)
    ropes = {"half-split": RotaryEmbedding.from_inv_freq(frequencies)}
    paths = {"numpy": lambda rope, dtype: _verification.NumPyPath(rope)}
    found = list(_verification.rows(ropes, (4, 2), 20, paths))
    assert [row.verdict for row in found] == ["ok"] * 4


def config(tmp_path, **changes):
    file = tmp_path / "config.json"
    keys = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    file.write_text(json.dumps({**keys, "rope_theta": 1e4, "max_position_embeddings": 2048} | changes))
    return file


def test_a_config_of_ones_own(tmp_path, capsys):
    file = config(tmp_path)
    assert cli.main(["verify", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"{file}: rope type default, 16 of 16 elements rotated in half-split pairs" in " ".join(out.split())
    assert "q (4 heads) and k (2)" in out


def test_layers_that_differ(tmp_path, capsys):
    file = config(tmp_path, model_type="gemma3_text", head_dim=16, rope_theta=1e6, rope_local_base_freq=1e4)
    assert cli.main(["verify", str(file)]) == 2
    one_line(capsys, "full_attention", "choose with --layer-type")
    assert cli.main(["verify", str(file), "--layer-type", "sliding_attention"]) == 0


def test_a_model_of_unknown_type(tmp_path, capsys):
    assert cli.main(["verify", str(config(tmp_path, model_type="mystery"))]) == 0
    assert "pairs that its type does not tell" in " ".join(capsys.readouterr().out.split())


def test_a_model_whose_pairing_cannot_be_overruled(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text('{"_class_name": "FluxTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 128}')
    assert cli.main(["verify", str(file)]) == 0
    assert "in interleaved pairs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mystery", "num_attention_heads": None, "head_dim": 16}, "number of heads"),
        ({"head_dim": 16, "num_attention_heads": "x"}, "`num_attention_heads` is 'x'; it must be an integer"),
        ({"head_dim": 16, "num_attention_heads": [8, 8]}, "`num_attention_heads` is [8, 8]; it must be an integer"),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` is 0; it must be at least 1"),
        ({"rope_scaling": {"rope_type": "nope", "factor": 2.0}}, "nope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ],
)
def test_a_bad_config_is_one_line(changes, said, tmp_path, capsys):
    assert cli.main(["verify", str(config(tmp_path, **changes))]) == 2
    one_line(capsys, said)


@pytest.mark.parametrize(("text", "said"), [("{", "is no JSON"), ("[1]", "holds a list"), (None, "there is no")])
def test_a_bad_file_is_one_line(text, said, tmp_path, capsys):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert cli.main(["verify", str(file)]) == 2
    one_line(capsys, said, str(file))


def test_the_table_fits_eighty_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["verify"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_json_that_cannot_be_written_after_all_costs_no_table(tmp_path, capsys):
    assert cli.main(["verify", "--json", "/proc/no.json"]) == 2
    captured = capsys.readouterr()
    assert "28 ok" in captured.out
    assert captured.err.splitlines()[-1] == "rope-cpu: cannot write /proc/no.json: No such file or directory"


def test_json_into_a_folder(tmp_path, capsys):
    assert cli.main(["verify", "--json", str(tmp_path)]) == 2
    one_line(capsys, "it is a folder")


def test_json_into_no_folder(tmp_path, capsys):
    assert cli.main(["verify", "--json", str(tmp_path / "no" / "x.json")]) == 2
    one_line(capsys, "cannot write")


def one_line(capsys, *said):
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rope-cpu: ")
    assert captured.err.count("\n") == 1
    assert all(text in captured.err for text in said)
