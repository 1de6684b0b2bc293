"""Every timed implementation is a rotation, compared with an oracle from the mathematics."""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

import rope_cpu
from rope_cpu.array_types import DTYPES
from rope_cpu.bench import measure as measuring
from rope_cpu.bench.cases import OURS, PEERS
from rope_cpu.bench.measure import Case, UnavailableError, measure
from rope_cpu.bench.timing import Call, Effort
from rope_cpu.bench.workload import Workload

QUICK = Effort(1e-5, 0.0, least=2, most=2)
IMPLEMENTATIONS = {**OURS, **PEERS}
storages = pytest.mark.parametrize("packed", [True, False], ids=["packed", "contiguous"])
POSITIONS = {
    "tokens of one sequence": np.arange(7, 12),
    "a token of each of three sequences": np.array([[3], [40], [4000]]),
}
ALL_DTYPES = ("float32", "float64", "float16", "bfloat16")


def _dtypes(name):
    """Return the names of the dtypes that an implementation has."""
    if name == "ORT operator IO-bound":
        return ("float32",)
    if name.startswith("ORT") and name.endswith("run"):  # bfloat16 needs bound arrays
        return ("float32", "float16")
    return (
        ALL_DTYPES[:1] + ALL_DTYPES[2:] if name.startswith(("torch", "JAX", "ORT")) else ALL_DTYPES
    )


def _pairings(name):
    one = {"NumPy rotate_half": [False], "NumPy complex": [True]}
    return one.get(name, [False, True])


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


@dataclass(frozen=True)
class OracleWorkload(Workload):
    """A workload whose results are compared with the oracle above; names the compared dtypes."""

    compared: list = field(default_factory=list)

    def error(self, x, result, arithmetic):
        exact = _rotated(x, self.ids, self.rope.interleaved)
        self.compared.append(result.dtype)
        # Rounded cos and sin, two products and a sum, in the dtype or in float32 and rounded at the
        # end.
        eps = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
        # The oracle rounds the angle itself to float64.
        bound = 4 * eps[self.dtype] + 2.0**-53 * self.ids.max()
        largest = np.abs(x.astype(np.float64)).max()
        return np.abs(result.astype(np.float64) - exact).max() / (bound * 2 * largest)


@storages
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(
    ("name", "dtype", "interleaved"),
    [
        pytest.param(
            name,
            dtype,
            pairing,
            id=f"{name}-{dtype}-{pairing}",
            marks=[pytest.mark.peers] if name.startswith("torch") else [],
        )
        for name in IMPLEMENTATIONS
        for dtype in _dtypes(name)
        for pairing in _pairings(name)
    ],
)
@pytest.mark.filterwarnings("default")  # of the libraries, not of rope_cpu
def test_every_implementation_rotates(name, dtype, interleaved, positions, packed):
    ids = POSITIONS[positions]
    workload = OracleWorkload(_rope(interleaved), ids, 4, 2, dtype, packed=packed)
    try:
        call = IMPLEMENTATIONS[name](workload)
    except UnavailableError as reason:
        if not str(reason).endswith(("is not installed", "uses all cores")):
            raise
        pytest.skip(str(reason))
    assert call.error(call.function(*call.argument_sets[0])) < 1
    assert workload.compared == [DTYPES[dtype]] * 2


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
        PEERS[name](Workload(_rope(interleaved), np.arange(5), dtype=dtype))


@pytest.mark.parametrize(
    ("rope", "ids", "reason"),
    [
        (rope_cpu.RotaryEmbedding(16, rotary_dim=8), np.arange(5), "whole head vectors only"),
        (rope_cpu.RotaryEmbedding.axial(16, 2), np.ones((5, 2)), "whole head vectors only"),
        (
            rope_cpu.RotaryEmbedding.axial(16, 2, span="head"),
            np.ones((5, 2)),
            "one position per token",
        ),
    ],
)
def test_peers_refuse_other_kinds_of_rotation(rope, ids, reason):
    pytest.importorskip("onnxruntime")
    with pytest.raises(UnavailableError, match=reason):
        PEERS["ORT primitive ops run"](Workload(rope, ids))


@storages
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_ours_in_every_layout(name, layout, packed, in_place):
    workload = Workload(_rope(), np.arange(5), 4, 2, "bfloat16", layout, packed, in_place, copies=3)
    call = OURS[name](workload)
    q = call.argument_sets[0][0]
    results = call.function(*call.argument_sets[0])
    assert call.error(results) <= 1
    assert len(call.argument_sets) == 3
    assert np.shares_memory(q, results[0]) == (in_place and name != "plan, new arrays")


def test_packed_views_are_strided_and_start_where_numpys_arrays_do():
    workload = Workload(_rope(), np.arange(5), 4, 2)
    ((q, k),) = workload.arrays()
    assert (q.shape, k.shape) == ((1, 5, 4, 16), (1, 5, 2, 16))
    assert q.strides[1] == k.strides[1] == 8 * 16 * 4
    assert q.ctypes.data % 64 == 16
    assert k.ctypes.data - q.ctypes.data == 4 * 16 * 4


@pytest.mark.parametrize("aligned_out", [True, False])
def test_arrays_of_results_are_aligned_where_asked(aligned_out):
    workload = Workload(
        _rope(), np.arange(5), packed=False, in_place=False, aligned_out=aligned_out
    )
    ((q, k, out),) = workload.argument_sets()
    assert [x.ctypes.data % 64 for x in (q, k)] == [16, 16]
    assert [x.ctypes.data % 64 for x in out] == ([0, 0] if aligned_out else [16, 16])


def test_bytes_are_those_read_and_written():
    whole = Workload(_rope(), np.arange(5), 4, 2, "bfloat16")
    # 5 tokens · 6 heads · 16 elements of 2 bytes, read and written; 5 · 8 cos and as many sin of 4
    # bytes.
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
    call = OURS["plan"](workload)
    x = call.argument_sets[0][0].copy()
    q, _ = call.function(*call.argument_sets[0])
    assert workload.error(x, q, "float32") <= 1
    q[0, 1, 0, 0] += 1e-12
    assert workload.error(x, q, "float32") > 1


@storages
def test_onnxruntime_writes_to_its_own_arrays_alone(packed):
    workload = Workload(_rope(), np.arange(64), packed=packed, copies=4)
    call = PEERS["ORT RotaryEmbedding-23 IO-bound"](workload)
    sizes = 64 * 16 * np.array([32, 8])  # what results take
    others = [np.full(size, 7, np.float32) for size in sizes for _ in range(50)]
    for arguments in call.argument_sets:
        call.function(*arguments)
    assert all((other == 7).all() for other in others)


@storages
def test_what_is_bound_to_onnxruntime_stays_while_it_is_timed(packed):
    workload = Workload(_rope(), np.arange(64), packed=packed, copies=4)
    names = [name for name in PEERS if name.endswith("IO-bound")]
    rows = {name: partial(PEERS[name], workload) for name in names}
    case = measure(Case("case", "what", {}, rows), Effort(1e-3, 0.0, least=20, most=20))
    assert [(row.name, row.status) for row in case.rows] == [(name, "timed") for name in names]


def test_a_wrong_implementation_is_named_and_not_timed():
    workload = Workload(_rope(), np.arange(5), 4, 2)
    right = partial(OURS["plan"], workload)
    calls = []

    def wrong():
        call = right()

        def function(q, k, out):
            calls.append(q)
            return q, k  # not rotated

        return Call(function, call.argument_sets, call.bytes_accessed, call.error)

    def crash():
        raise RuntimeError("first line\nsecond line")

    def missing():
        raise UnavailableError("is not installed")

    peers = {"wrong": wrong, "crash": crash, "missing": missing}
    case = measure(Case("case", "what", {"plan": right}, peers, workload.bytes_accessed), QUICK)
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
def test_the_limit_scales_every_element(threads, rng):
    x = rng.standard_normal(50_001).astype(np.float32)
    factor = np.float32(2)
    given = x.copy()
    measuring.scale(x, threads, factor)
    assert (x == 2 * given).all()


def test_the_limit_leaves_no_file_beside_the_package():
    assert measuring._scale.stats.cache_path is None
