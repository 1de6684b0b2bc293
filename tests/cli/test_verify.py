import argparse
import json
import re

import numpy as np
import oracle
import pytest

from rope_cpu import RotaryEmbedding, reference
from rope_cpu.cli import common, verify
from rope_cpu.cli import main as cli
from rope_cpu.cli import verify_cases as cases

mp = oracle.CONTEXT
PROMISED = 2.0**-95


def exact_value(exact, index):
    return mp.mpf(float(exact.high[index])) + mp.mpf(float(exact.low[index]))


POSITIONS = [0, 1, 511, -3, 2**20 - 3, 2**53, 0.3, -1234.5678]
STEPS = [1.0, -0.3, 2.5e-6, 5e5**-0.5, 0.0, 7.25, -15707.9]


@pytest.mark.parametrize("factor", [1.0, 1.25, 0.1])
def test_reference_angles_against_mpmath(factor):
    rope = RotaryEmbedding.from_inv_freq(STEPS, attention_factor=factor)
    cos, sin = reference.cos_sin(rope.spec, np.array([POSITIONS]))
    for row, position in enumerate(POSITIONS):
        for pair, step in enumerate(STEPS):
            angle = mp.mpf(position) * mp.mpf(step)
            assert abs(exact_value(cos, (0, row, 0, pair)) - mp.mpf(factor) * mp.cos(angle)) < PROMISED
            assert abs(exact_value(sin, (0, row, 0, pair)) - mp.mpf(factor) * mp.sin(angle)) < PROMISED


def test_reference_rotation_against_mpmath(rng):
    x = rng.standard_normal((2, 3, 4, 6)) * 10.0 ** rng.integers(-3, 3, (2, 3, 4, 6))
    ids = rng.uniform(-1000, 1000, (2, 3, 2))
    inv_freq = rng.standard_normal((2, 2, 3))  # (axes, heads, pairs)
    rope = RotaryEmbedding.from_inv_freq(inv_freq, interleaved=True)
    exact, _ = reference.rotation(rope.spec, x, ids)
    for batch, seq, head, pair in np.ndindex(2, 3, 4, 3):
        angle = sum(mp.mpf(ids[batch, seq, axis]) * mp.mpf(inv_freq[axis, head // 2, pair]) for axis in range(2))
        a, b = (mp.mpf(x[batch, seq, head, 2 * pair + one]) for one in (0, 1))
        c, s = mp.cos(angle), mp.sin(angle)
        for one, due in enumerate((a * c - b * s, a * s + b * c)):
            found = exact_value(exact, (batch, seq, head, 2 * pair + one))
            assert abs(found - due) < PROMISED * (abs(a) + abs(b))


def test_error_is_seen_below_float64():
    exact = reference.Exact(np.array([1.0]), np.array([2.0**-60]))
    assert exact.error(np.array([1.0])) == 2.0**-60
    assert exact.error(np.array([1.0 + 2.0**-52])) == 2.0**-52 - 2.0**-60
    assert exact.error(np.array([np.nan])) == np.inf


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A short prefill, and no more timing than it takes to have a figure."""
    monkeypatch.setattr(verify, "TOKENS", 16)
    monkeypatch.setattr(cases, "TIMED_CALLS", 1)


def spoiled(spoil):
    """The kernels, and then a fault in one place."""

    def way(*arguments):
        prepare = cases.numpy_way(*arguments)

        def prepare_spoiled(q, k, ids):
            call, out = prepare(q, k, ids)
            return lambda: (call(), spoil(*out)), out

        return prepare_spoiled

    return way


def small(interleaved=False):
    return RotaryEmbedding.from_inv_freq([1.0, 0.1, 0.01], head_dim=8, interleaved=interleaved, attention_factor=1.1)


def rows(spoil=None, tokens=40):
    ropes = {"half-split": small(), "interleaved": small(True)}
    ways = {"numpy": cases.numpy_way} | ({"spoiled": spoiled(spoil)} if spoil else {})
    return list(cases.rows(ropes, (4, 2), tokens, ways))


def test_kernels_pass_in_every_dtype_and_pairing():
    found = rows()
    assert [(row.dtype, row.pairing) for row in found] == [
        (dtype, pairing)
        for dtype in ("float32", "float64", "float16", "bfloat16")
        for pairing in ("half-split", "interleaved")
    ]
    for row in found:
        assert row.verdict == "ok"
        assert 0 < row.figures.of_tolerance <= 1
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
        assert row.verdict == ("FAIL" if row.way == "spoiled" else "ok"), row


def test_what_is_bound_stays_until_the_call(rng):
    """onnxruntime 1.29 holds nothing that is bound: memory that was let go would be somebody else's by then."""
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64))
    q = rng.standard_normal((1, 4, 1, 64)).astype(np.float32)
    prepare = cases.onnx_way("primitive", rope, np.dtype(np.float32), (4, 4), 600)
    call, (q_rot, k_rot) = prepare(q, q.copy(), np.array([512]))
    others = [np.full((1, 1), 7) for _ in range(100)]
    call()
    assert np.array_equal(q_rot, k_rot)
    exact, bound = reference.rotation(rope.spec, q.transpose(0, 2, 1, 3), np.array([[512]]))
    assert (exact.error(q_rot.transpose(0, 2, 1, 3)) <= bound).all()
    assert all(other == 7 for other in others)


def test_a_fault_in_the_decode_step_alone_fails():
    def spoil(q, k):
        if q.shape[2] == 1:
            k[0, 0, 0, 0] = 0

    assert {row.verdict for row in rows(spoil) if row.way == "spoiled"} == {"FAIL"}


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
    assert len(report["rows"]) == 4 * 2 * 4
    shown = [row for row in report["rows"] if row["verdict"] != "not offered"]
    assert [line[:3] for line in table] == [[row["dtype"], row["pairing"], row["way"]] for row in shown]
    for line, row in zip(table, shown, strict=True):
        assert line[-1] == row["verdict"] == "ok"
        assert float(line[3]) == pytest.approx(row["max_error"], rel=0.01)
    for row in report["rows"]:
        assert row.get("refused", "") in " ".join(out.split())
    # float64 has no kernel behind either operator; the elementary ops have.
    refused = {(row["dtype"], row["way"]) for row in report["rows"] if "refused" in row}
    assert refused == {("float64", "onnx"), ("float64", "ort")}


def test_exit_code_1_where_a_row_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(verify.WAYS, "numpy", spoiled(not_a_number))
    assert cli.main(["verify", "--json", str(tmp_path / "r.json")]) == 1
    assert re.search(r"float32 +half-split +numpy +inf +inf +.* FAIL", capsys.readouterr().out)
    report = json.loads((tmp_path / "r.json").read_text())
    assert not report["passed"]
    assert report["rows"][0]["max_error"] == "inf"


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
    rope = common.rope_of(common.config_of(argparse.Namespace(config=None)), None)
    assert (rope.head_dim, rope.rotary_dim, rope.interleaved, rope.attention_factor) == (128, 128, False, 1.0)
    for i, omega in enumerate(rope.inv_freq.tolist()):
        exact = llama3_inv_freq(i)
        assert abs(mp.mpf(omega) - exact) <= 8 * 2.0**-53 * exact


def test_several_axes_and_heads_with_frequencies_of_their_own():
    frequencies = np.array([[[1.0, 0.0], [0.5, 0.1]], [[0.0, 0.3], [0.2, 0.7]]])  # (axes, heads, pairs)
    ropes = {"half-split": RotaryEmbedding.from_inv_freq(frequencies)}
    found = list(cases.rows(ropes, (4, 2), 20, {"numpy": cases.numpy_way}))
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
