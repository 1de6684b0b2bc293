"""The rows of `rope-cpu verify`: kernels pass, and a fault anywhere fails."""

import numpy as np
import oracle
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.cli import verify_cases as cases


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(cases, "TIMED_CALLS", 1)


def spoiled(spoil):
    """The kernels, and then a fault in one place."""

    def operation(*arguments):
        prepare = cases.numpy_operation(*arguments)

        def prepare_spoiled(q, k, ids):
            call, out = prepare(q, k, ids)
            return lambda: (call(), spoil(*out)), out

        return prepare_spoiled

    return operation


def not_a_number(q, k):
    q[0, 3, -1, 2] = np.nan


def small(interleaved=False):
    return RotaryEmbedding.from_inv_freq(
        [1.0, 0.1, 0.01], head_dim=8, interleaved=interleaved, attention_factor=1.1
    )


def rows(spoil=None, tokens=40):
    ropes = {"half-split": small(), "interleaved": small(True)}
    operations = {"numpy": cases.numpy_operation} | ({"spoiled": spoiled(spoil)} if spoil else {})
    return list(cases.rows(ropes, (4, 2), tokens, operations))


def test_kernels_pass_in_every_dtype_and_pairing():
    found = rows()
    assert [(row.dtype, row.pairing) for row in found] == [
        (dtype, pairing)
        for dtype in ("float32", "float64", "float16", "bfloat16")
        for pairing in ("half-split", "interleaved")
    ]
    for row in found:
        assert row.verdict == "ok"
        assert 0 < row.figures.beyond_rounding <= 1
        assert row.figures.max_error > 0
        assert row.figures.from_numpy == 0
        assert row.figures.decode_seconds > 0


def sixteen_ulps(q, k):
    bits = {2: np.int16, 4: np.int32, 8: np.int64}[k.itemsize]
    k.view(bits)[0, 1, -1, 0] += 16


def rest(q, k):
    q[0, 0, 0, 7] += np.asarray(0.5, q.dtype)


def swapped(q, k):
    q[:] = q[:, ::-1].copy()


@pytest.mark.parametrize("spoil", [sixteen_ulps, rest, not_a_number, swapped])
def test_a_fault_fails_every_row(spoil):
    for row in rows(spoil):
        assert row.verdict == ("FAIL" if row.operation == "spoiled" else "ok"), row


def test_what_is_bound_stays_until_the_call(rng):
    """onnxruntime 1.29 keeps no reference to bound arrays: their memory could be reused."""
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64))
    q = rng.standard_normal((1, 4, 1, 64)).astype(np.float32)
    prepare = cases.onnx_operation("primitive", rope, np.dtype(np.float32), (4, 4), 600)
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

    assert {row.verdict for row in rows(spoil) if row.operation == "spoiled"} == {"FAIL"}


def test_several_axes_and_heads_with_frequencies_of_their_own():
    frequencies = np.array(
        [[[1.0, 0.0], [0.5, 0.1]], [[0.0, 0.3], [0.2, 0.7]]]
    )  # (axes, heads, pairs)
    ropes = {"half-split": RotaryEmbedding.from_inv_freq(frequencies)}
    found = list(cases.rows(ropes, (4, 2), 20, {"numpy": cases.numpy_operation}))
    assert [row.verdict for row in found] == ["ok"] * 4
