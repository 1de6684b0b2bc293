"""Every implementation that is timed computes the rotation, compared with an oracle written from the mathematics."""

from dataclasses import replace

import numpy as np
import pytest

import rope_cpu
from rope_cpu.bench.implementations import bandwidth
from rope_cpu.bench.implementations.base import UnavailableError
from rope_cpu.bench.implementations.registry import BY_NAME, TABLE
from rope_cpu.bench.measurement.case import Case, Contender, Ready
from rope_cpu.bench.measurement.measure import measure
from rope_cpu.bench.measurement.timing import Effort
from rope_cpu.bench.suites.contenders import baselines, rotating
from rope_cpu.bench.workload import DTYPES, Workload

QUICK = Effort(1e-5, 0.0, least=2, most=2)
storages = pytest.mark.parametrize("packed", [True, False], ids=["packed", "contiguous"])
POSITIONS = {
    "tokens of one sequence": np.arange(7, 12),
    "a token of each of three sequences": np.array([[3], [40], [4000]]),
}


def _rope(interleaved=False):
    return rope_cpu.RotaryEmbedding.from_inv_freq(
        1e4 ** (-np.arange(8) / 8), interleaved=interleaved
    )


def _rotated(x, ids, interleaved):
    """Rotate (batch, seq, heads, 16) in complex numbers."""
    x = x.astype(np.float64)
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :8] + 1j * x[..., 8:]
    angle = (np.atleast_2d(ids)[..., None] * 1e4 ** (-np.arange(8) / 8))[:, :, None]
    rotated = pairs * np.exp(1j * angle)
    if interleaved:
        return np.stack([rotated.real, rotated.imag], -1).reshape(x.shape)
    return np.concatenate([rotated.real, rotated.imag], -1)


@storages
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(
    ("row", "dtype", "interleaved"),
    [
        pytest.param(
            row,
            dtype,
            pairing,
            id=f"{row.name}-{dtype}-{pairing}",
            marks=[pytest.mark.peers] * peers,
        )
        for row in TABLE
        for peers in ["torch" in row.needs]
        for dtype in row.dtypes
        for pairing in row.pairings
    ],
)
@pytest.mark.filterwarnings("default")  # of the libraries, not of rope_cpu
def test_every_implementation_rotates(row, dtype, interleaved, positions, packed):
    ids = POSITIONS[positions]
    try:
        binding = row.bound(Workload(_rope(interleaved), ids, 4, 2, dtype, packed=packed))
    except UnavailableError as reason:
        pytest.skip(str(reason))
    given = [binding.bshd(x).copy() for x in binding.inputs]
    results = binding.results(binding.function(*binding.sets[0]))
    for x, result in zip(given, results, strict=True):
        exact = _rotated(x, ids, interleaved)
        assert binding.bshd(result).dtype == DTYPES[dtype]
        # Rounded cos and sin, two products and a sum, in the dtype or in float32 and rounded at the end.
        eps = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}[
            dtype
        ]
        # The oracle rounds the angle itself to float64.
        bound = (4 * eps + 2.0**-53 * ids.max()) * 2 * np.abs(given[0].astype(np.float64)).max()
        assert np.abs(binding.bshd(result).astype(np.float64) - exact).max() < bound


@pytest.mark.parametrize(
    ("name", "interleaved", "dtype", "reason"),
    [
        ("ORT com.microsoft run", False, "bfloat16", "has no bfloat16"),
        ("NumPy complex", False, "float32", "rotates the other pairing only"),
        ("NumPy rotate_half", True, "float32", "rotates the other pairing only"),
    ],
)
def test_a_workload_that_cannot_be_timed_is_refused_with_the_reason(
    name, interleaved, dtype, reason
):
    with pytest.raises(UnavailableError, match=reason):
        BY_NAME[name].bound(Workload(_rope(interleaved), np.arange(5), dtype=dtype))


@storages
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["plan", "plan, new arrays", "call"])
def test_ours_in_every_layout(name, layout, packed, in_place):
    workload = Workload(_rope(), np.arange(5), 4, 2, "bfloat16", layout, packed, in_place, copies=3)
    binding = BY_NAME[name].bound(workload)
    given = [binding.bshd(x).copy() for x in binding.inputs]
    results = binding.results(binding.function(*binding.sets[0]))
    for x, result in zip(given, results, strict=True):
        assert workload.error(x, binding.bshd(result), "float32") <= 1
    assert len(binding.sets) == 3
    same = np.shares_memory(binding.inputs[0], results[0])
    assert same == (in_place and name != "plan, new arrays")


def test_packed_views_are_strided_and_start_where_numpys_arrays_do():
    workload = Workload(_rope(), np.arange(5), 4, 2)
    ((q, k),) = workload.arrays()
    assert (q.shape, k.shape) == ((1, 5, 4, 16), (1, 5, 2, 16))
    assert q.strides[1] == k.strides[1] == 8 * 16 * 4
    assert q.ctypes.data % 64 == 16
    assert k.ctypes.data - q.ctypes.data == 4 * 16 * 4


def test_bytes_are_those_read_and_written():
    whole = Workload(_rope(), np.arange(5), 4, 2, "bfloat16")
    # 5 tokens · 6 heads · 16 elements of 2 bytes, read and written; 5 · 8 cos and as many sin of 4 bytes.
    assert whole.bytes_accessed == 2 * 5 * 6 * 16 * 2 + 5 * 8 * 2 * 4
    part = rope_cpu.RotaryEmbedding.from_inv_freq(1e4 ** (-np.arange(4) / 4), head_dim=16)
    assert replace(whole, rope=part).bytes_accessed == 2 * 5 * 6 * 8 * 2 + 5 * 4 * 2 * 4
    assert (
        replace(whole, rope=part, in_place=False).bytes_accessed
        == 2 * 5 * 6 * 16 * 2 + 5 * 4 * 2 * 4
    )


@pytest.mark.parametrize(
    ("rope", "ids"),
    [
        (rope_cpu.RotaryEmbedding.axial(16, 2), np.array([[0, 5], [3, 9], [70, 2]])),
        (
            rope_cpu.RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=16, attention_factor=1.5),
            np.array([4, 5, 6]),
        ),
    ],
)
def test_the_error_is_right_for_blocks_partial_rotation_and_factors(rope, ids):
    workload = Workload(rope, ids, 4, 2, "float64")
    binding = BY_NAME["plan"].bound(workload)
    x = binding.inputs[0].copy()
    q, _ = binding.function(*binding.sets[0])
    assert workload.error(x, q, "float32") <= 1
    q[0, 1, 0, 0] += 1e-12
    assert workload.error(x, q, "float32") > 1


@storages
def test_onnxruntime_writes_to_its_own_arrays_alone(packed):
    workload = Workload(_rope(), np.arange(64), packed=packed, copies=4)
    binding = BY_NAME["ORT RotaryEmbedding-23 IO-bound"].bound(workload)
    sizes = 64 * 16 * np.array([32, 8])  # what results take
    others = [np.full(size, 7, np.float32) for size in sizes for _ in range(50)]
    for arguments in binding.sets:
        binding.function(*arguments)
    assert all((other == 7).all() for other in others)


@storages
def test_what_is_bound_to_onnxruntime_stays_while_it_is_timed(packed):
    workload = Workload(_rope(), np.arange(64), packed=packed, copies=4)
    names = [name for name in BY_NAME if name.endswith("IO-bound")]
    rows = [rotating(name, workload) for name in names]
    case = measure(Case("case", "what", lambda: rows), Effort(1e-3, 0.0, least=20, most=20))
    assert [(row.name, row.status) for row in case.rows] == [(name, "timed") for name in names]


def test_a_wrong_implementation_is_named_and_not_timed():
    workload, calls = Workload(_rope(), np.arange(5), 4, 2), []
    right = rotating("plan", workload)

    def wrong():
        ready = right.bind()

        def function(q, k, out):
            calls.append(q)
            return q, k  # not rotated

        return Ready(function, ready.sets, ready.bytes_accessed, ready.error)

    def crash():
        raise RuntimeError("first line\nsecond line")

    def missing():
        raise UnavailableError("is not installed")

    rows = [
        right,
        *(Contender(f.__name__, "peer", f) for f in (wrong, crash, missing)),
        *baselines(workload.bytes_accessed),
    ]
    case = measure(Case("case", "what", lambda: rows), QUICK)
    assert [(row.name, row.status) for row in case.rows[:4]] == [
        ("plan", "timed"),
        ("wrong", "wrong"),
        ("crash", "failed"),
        ("missing", "skipped"),
    ]
    assert len(calls) == 1
    assert "times the tolerance" in case.rows[1].reason
    assert case.rows[2].reason == "RuntimeError: first line"
    assert case.rows[3].reason == "is not installed"
    assert [len(row.samples) for row in case.rows[:4]] == [2, 0, 0, 0]
    assert case.limit.status == "timed"
    assert not case.broken


@pytest.mark.parametrize("threads", [1, 2])
def test_baselines_scale_every_element(threads, rng):
    x, factor = rng.standard_normal(50_001).astype(np.float32), np.float32(2)
    given, out = x.copy(), np.zeros_like(x)
    bandwidth.scale(x, out, threads, factor=factor)
    assert (x == given).all()
    assert (out == 2 * given).all()
    bandwidth.scale(x, x, threads, factor=factor)
    assert (x == 2 * given).all()
    bandwidth.scale(x, x, threads, times=3, factor=factor)
    assert (x == 16 * given).all()
