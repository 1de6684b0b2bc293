"""Every timed rotation is one, and what is none is not timed."""

from dataclasses import replace

import numpy as np
import pytest
from fewer_cases import pairwise

import rope_cpu
from rope_cpu.array_types import DTYPES
from rope_cpu.bench import measure as measuring
from rope_cpu.bench.cases import OURS, PEERS, UNALIGNED
from rope_cpu.bench.measure import Case, UnavailableError, measure
from rope_cpu.bench.workloads import Workload

ROTATING = {name: prepare for name, prepare in OURS.items() if name != "making the plan"}
IMPLEMENTATIONS = {**ROTATING, **UNALIGNED, **PEERS}
FREQUENCIES = 1e4 ** (-np.arange(8) / 8)
POSITIONS = {
    "tokens of one sequence": np.arange(7, 12),
    "a token of each of three sequences": np.array([[3], [40], [4000]]),
}


def dtypes(name):
    """Return the names of the dtypes that an implementation has."""
    if name == "ORT operator IO-bound":
        return ["float32"]
    if name.startswith("ORT") and name.endswith("run"):  # bfloat16 needs bound arrays
        return ["float32", "float16"]
    if name.startswith(("torch", "JAX", "ORT")):
        return ["float32", "float16", "bfloat16"]
    return list(DTYPES)


def rope_of_16():
    return rope_cpu.RotaryEmbedding.from_inv_freq(FREQUENCIES)


CONTENDERS = [(name, dtype) for name in IMPLEMENTATIONS for dtype in dtypes(name)]
PAIRINGS = (False, True)


@pytest.mark.parametrize(
    ("name", "dtype", "interleaved", "positions", "packed"),
    [
        pytest.param(
            *contender, *rest, marks=[pytest.mark.peers] * contender[0].startswith("torch")
        )
        for contender, *rest in pairwise(CONTENDERS, PAIRINGS, POSITIONS, (True, False))
    ],
)
@pytest.mark.filterwarnings("default")  # of the libraries, not of rope_cpu
def test_every_implementation_rotates(name, dtype, interleaved, positions, packed):
    ids = POSITIONS[positions]
    rope = rope_cpu.RotaryEmbedding.from_inv_freq(FREQUENCIES, interleaved=interleaved)
    workload = Workload(rope, ids, 4, 2, dtype, packed, in_place=name != "plan, unaligned out")
    try:
        call = IMPLEMENTATIONS[name](workload)
    except ImportError as error:
        pytest.skip(str(error))
    except UnavailableError as reason:
        if "uses all cores" not in str(reason):
            raise
        pytest.skip(str(reason))
    results = call.results(call.function(*call.arguments))
    assert workload.error(results) <= 1
    for result in results:
        # NumPy's view of tensors is float32.
        assert result.dtype == (np.float32 if name.startswith("torch") else DTYPES[dtype])


AXIAL = rope_cpu.RotaryEmbedding.axial(16, 2)
AXIAL_HEAD = rope_cpu.RotaryEmbedding.axial(16, 2, span="head")


@pytest.mark.parametrize(
    ("name", "rope", "ids", "reason"),
    [
        ("NumPy rotate_half", AXIAL, np.ones((5, 2)), "whole head vectors"),
        ("ORT primitive ops IO-bound", AXIAL_HEAD, np.ones((5, 2)), "one position per token"),
        ("ORT RotaryEmbedding-23 run", rope_of_16(), np.arange(5), "has no bfloat16"),
    ],
)
def test_an_implementation_that_cannot_be_timed_says_why(name, rope, ids, reason):
    pytest.importorskip("onnxruntime")
    with pytest.raises(UnavailableError, match=reason):
        PEERS[name](Workload(rope, ids, dtype="bfloat16"))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ROTATING)
def test_ours_rotate_in_place_or_elsewhere(name, in_place):
    workload = Workload(rope_of_16(), np.arange(5), 4, 2, "bfloat16", in_place=in_place)
    call = OURS[name](workload)
    q = call.arguments[0]
    results = call.function(*call.arguments)
    assert np.shares_memory(q, results[0]) == (in_place and name != "plan, new arrays")


def test_packed_views_are_strided_and_start_where_numpys_arrays_do():
    q, k = Workload(rope_of_16(), np.arange(5), 4, 2).arrays()
    assert (q.shape, k.shape) == ((1, 5, 4, 16), (1, 5, 2, 16))
    assert q.strides[1] == k.strides[1] == 8 * 16 * 4
    assert q.ctypes.data % 64 == 16
    assert k.ctypes.data - q.ctypes.data == 4 * 16 * 4


def test_bytes_are_those_read_and_written():
    whole = Workload(rope_of_16(), np.arange(5), 4, 2, "bfloat16")
    # 5 tokens · 6 heads · 16 elements of 2 bytes, read and written; 5 · 8 cos and as many sin of 4
    # bytes.
    assert whole.bytes_accessed == 2 * 5 * 6 * 16 * 2 + 5 * 8 * 2 * 4
    part = rope_cpu.RotaryEmbedding.from_inv_freq(FREQUENCIES[::2], head_dim=16)
    in_place = replace(whole, rope=part)
    assert in_place.bytes_accessed == 2 * 5 * 6 * 8 * 2 + 5 * 4 * 2 * 4
    assert replace(in_place, in_place=False).bytes_accessed == 2 * 5 * 6 * 16 * 2 + 5 * 4 * 2 * 4


PARTIAL = rope_cpu.RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=16, attention_factor=1.5)


@pytest.mark.parametrize(
    ("rope", "ids"), [(AXIAL, np.array([[0, 5], [3, 9], [70, 2]])), (PARTIAL, np.arange(4, 7))]
)
def test_the_error_is_right_for_blocks_partial_rotation_and_factors(rope, ids):
    workload = Workload(rope, ids, 4, 2, "float64")
    call = OURS["plan"](workload)
    q, k = call.function(*call.arguments)
    assert workload.error((q, k)) <= 1
    q[0, 1, 0, 0] += 1e-12
    assert workload.error((q, k)) > 1


def test_a_wrong_implementation_is_named_and_not_timed(quick):
    def wrong(workload):
        right = OURS["plan"](workload)
        return replace(right, function=lambda q, k, out: (q, k))  # not rotated

    def crash(workload):
        raise RuntimeError("first line\nsecond line")

    def missing(workload):
        raise ModuleNotFoundError("no module")

    peers = {"wrong": wrong, "crash": crash, "missing": missing}
    workload = Workload(rope_of_16(), np.arange(5), 4, 2)
    case = measure(Case("case", "what", workload, {"plan": OURS["plan"]}, peers), quick)
    assert {row.name: row.problem.partition(" is ")[0] for row in case.rows if row.problem} == {
        "wrong": "wrong: its error",
        "crash": "failed: RuntimeError: first line",
        "missing": "skipped: no module",
    }
    assert [len(row.samples) for row in case.rows[:4]] == [2, 0, 0, 0]
    assert not case.broken
    assert measure(Case("case", "what", workload, {"ours": wrong}), quick).broken


@pytest.mark.parametrize("threads", [1, 2])
def test_the_limit_scales_every_element(threads, rng):
    given = rng.standard_normal(50_001).astype(np.float32)
    x = given.copy()
    measuring.scale(x, np.float32(2), threads)
    assert (x == 2 * given).all()
    assert measuring.scale.stats.cache_path is None  # no file beside the package


def test_a_case_that_needs_more_memory_than_is_free_is_skipped(monkeypatch):
    monkeypatch.setattr(measuring, "available_memory", lambda: 2**20)
    case = Case("case", "what", Workload(rope_of_16(), np.arange(2**16)), OURS, PEERS)
    result = measure(case)
    assert [row.problem.partition(":")[0] for row in result.rows] == ["skipped"]
    assert not result.broken
