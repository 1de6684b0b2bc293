"""Every implementation that is timed computes the rotation, by an oracle of the tests' own."""

import numpy as np
import pytest

import rope_cpu
from rope_cpu.bench.implementations import bandwidth
from rope_cpu.bench.implementations.base import UnavailableError
from rope_cpu.bench.implementations.registry import BY_NAME, TABLE
from rope_cpu.bench.measurement.case import Case, Contender, Ready
from rope_cpu.bench.measurement.measure import measure
from rope_cpu.bench.measurement.timing import Effort
from rope_cpu.bench.suites.contenders import limits, rotating
from rope_cpu.bench.workload import DTYPES, Workload

QUICK = Effort(1e-5, 0.0, least=2, most=2)
POSITIONS = {
    "tokens of one sequence": (np.arange(7, 12), 1, 5),
    "a token of each of three sequences": (np.array([[3], [40], [4000]]), 3, 1),
}


def _rope(interleaved=False):
    return rope_cpu.RotaryEmbedding.from_inv_freq(1e4 ** (-np.arange(8) / 8), interleaved=interleaved)


def _turned(x, ids, interleaved):
    """Rotate (batch, seq, heads, 16) in complex numbers."""
    x = x.astype(np.float64)
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :8] + 1j * x[..., 8:]
    angle = (np.atleast_2d(ids)[..., None] * 1e4 ** (-np.arange(8) / 8))[:, :, None]
    turned = pairs * np.exp(1j * angle)
    if interleaved:
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("storage", ["packed", "contiguous"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.peers] * ("torch" in row.needs)) for row in TABLE]
)
@pytest.mark.filterwarnings("default")  # what others warn of is not ours
def test_it_rotates(row, dtype, interleaved, positions, storage):
    ids, batch, tokens = POSITIONS[positions]
    workload = Workload(_rope(interleaved), ids, batch, tokens, 4, 2, dtype, storage=storage)
    try:
        binding = row.bound(workload)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    given = [binding.bshd(x).copy() for x in binding.inputs]
    results = binding.results(binding.function(*binding.sets[0]))
    for x, result in zip(given, results, strict=True):
        exact = _turned(x, ids, interleaved)
        assert binding.bshd(result).dtype == DTYPES[dtype]
        # Rounded cos and sin, two products and a sum, in the dtype or in float32 and rounded at the end.
        eps = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}[dtype]
        # The oracle rounds the angle itself to float64.
        bound = (4 * eps + 2.0**-53 * ids.max()) * 2 * np.abs(given[0].astype(np.float64)).max()
        assert np.abs(binding.bshd(result).astype(np.float64) - exact).max() < bound


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("storage", ["packed", "contiguous"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["plan", "plan, new arrays", "call", "bare kernel"])
def test_ours_in_every_layout(name, layout, storage, in_place):
    workload = Workload(
        _rope(), np.arange(5), 1, 5, 4, 2, "bfloat16", layout=layout, storage=storage, in_place=in_place, copies=3
    )
    binding = BY_NAME[name].bound(workload)
    given = [binding.bshd(x).copy() for x in binding.inputs]
    results = binding.results(binding.function(*binding.sets[0]))
    for x, result in zip(given, results, strict=True):
        assert workload.error(x, binding.bshd(result), "float32") <= 1
    assert len(binding.sets) == 3
    same = np.shares_memory(binding.inputs[0], results[0])
    assert same == (in_place and name != "plan, new arrays")


def test_packed_views_are_strided_and_start_where_numpys_arrays_do():
    workload = Workload(_rope(), np.arange(5), 1, 5, 4, 2, "float32")
    ((q, k),) = workload.arrays()
    assert (q.shape, k.shape) == ((1, 5, 4, 16), (1, 5, 2, 16))
    assert q.strides[1] == k.strides[1] == 8 * 16 * 4
    assert q.ctypes.data % 64 == 16
    assert k.ctypes.data - q.ctypes.data == 4 * 16 * 4


def test_bytes_are_those_read_and_written():
    whole = Workload(_rope(), np.arange(5), 1, 5, 4, 2, "bfloat16")
    # 5 tokens · 6 heads · 16 elements of 2 bytes, read and written; 5 · 8 cos and as many sin of 4 bytes.
    assert whole.bytes_accessed == 2 * 5 * 6 * 16 * 2 + 5 * 8 * 2 * 4
    part = rope_cpu.RotaryEmbedding.from_inv_freq(1e4 ** (-np.arange(4) / 4), head_dim=16)
    assert whole.but(rope=part).bytes_accessed == 2 * 5 * 6 * 8 * 2 + 5 * 4 * 2 * 4
    assert whole.but(rope=part, in_place=False).bytes_accessed == 2 * 5 * 6 * 16 * 2 + 5 * 4 * 2 * 4


@pytest.mark.parametrize(
    ("rope", "ids"),
    [
        (rope_cpu.RotaryEmbedding.axial(16, 2), np.array([[0, 5], [3, 9], [70, 2]])),
        (rope_cpu.RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=16, attention_factor=1.5), np.array([4, 5, 6])),
    ],
)
def test_the_reference_knows_blocks_parts_and_factors(rope, ids):
    workload = Workload(rope, ids, 1, 3, 4, 2, "float64")
    binding = BY_NAME["plan"].bound(workload)
    x = binding.inputs[0].copy()
    q, _ = binding.function(*binding.sets[0])
    assert workload.error(x, q, "float32") <= 1
    q[0, 1, 0, 0] += 1e-12
    assert workload.error(x, q, "float32") > 1


@pytest.mark.parametrize("storage", ["packed", "contiguous"])
def test_onnxruntime_writes_to_its_own_arrays_alone(storage):
    workload = Workload(_rope(), np.arange(64), 1, 64, 32, 8, "float32", storage=storage, copies=4)
    binding = BY_NAME["ORT RotaryEmbedding-23 IO-bound"].bound(workload)
    sizes = 64 * 16 * np.array([32, 8])  # what results take
    others = [np.full(size, 7, np.float32) for size in sizes for _ in range(50)]
    for arguments in binding.sets:
        binding.function(*arguments)
    assert all((other == 7).all() for other in others)


@pytest.mark.parametrize("storage", ["packed", "contiguous"])
def test_what_is_bound_to_onnxruntime_stays_while_it_is_timed(storage):
    workload = Workload(_rope(), np.arange(64), 1, 64, 32, 8, "float32", storage=storage, copies=4)
    names = [name for name in BY_NAME if name.endswith("IO-bound")]
    rows = [rotating(name, workload) for name in names]
    case = measure(Case("case", "what", lambda: rows), Effort(1e-3, 0.0, least=20, most=20))
    assert [(row.name, row.status) for row in case.rows] == [(name, "timed") for name in names]


def test_a_wrong_implementation_is_named_and_not_timed():
    workload, calls = Workload(_rope(), np.arange(5), 1, 5, 4, 2), []
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
        *limits(workload.bytes_accessed),
    ]
    case = measure(Case("case", "what", lambda: rows), QUICK)
    assert [(row.name, row.status) for row in case.rows[:4]] == [
        ("plan", "timed"),
        ("wrong", "wrong"),
        ("crash", "failed"),
        ("missing", "skipped"),
    ]
    assert len(calls) == 1
    assert "times what is allowed" in case.rows[1].reason
    assert case.rows[2].reason == "RuntimeError: first line"
    assert case.rows[3].reason == "is not installed"
    assert [len(row.samples) for row in case.rows[:4]] == [2, 0, 0, 0]
    assert case.limit.status == "timed"
    assert not case.broken


@pytest.mark.parametrize("parallel", [False, True])
def test_yardsticks_do_their_work(parallel, rng):
    x, factor = rng.standard_normal(50_001).astype(np.float32), np.array([2], np.float32)
    given, out = x.copy(), np.zeros_like(x)
    bandwidth.scale(x, out, factor, parallel)
    assert (x == given).all()
    assert (out == 2 * given).all()
    bandwidth.scale(x, x, factor, parallel)
    assert (x == 2 * given).all()
    bandwidth.scale(x, x, factor, parallel, unit=4096, times=3)
    assert (x == 16 * given).all()
