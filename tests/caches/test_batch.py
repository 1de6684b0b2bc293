"""Batch: the sequences of one step, the places of their new tokens, and what is refused."""

import array
import copy
import pickle
import time
from collections import deque

import numpy as np
import pytest
import refusals

import rope_cpu
from rope_cpu import Batch


def draw(rng):
    """Return random arguments of a batch: pages of which no two are one."""
    sequences = int(rng.integers(0, 7))
    page_size = int(rng.choice([1, 2, 3, 16]))
    seq_lens = rng.integers(0, 40, sequences)
    seq_lens[rng.random(sequences) < 0.2] = 0
    query_lens = np.minimum(rng.integers(0, 12, sequences), seq_lens)
    needed = -(-seq_lens // page_size)
    most = int(needed.max(initial=0)) + int(rng.integers(0, 3))
    table = rng.permutation(sequences * most).reshape(sequences, most)
    table[np.arange(most) >= needed[:, None]] = rng.choice([-1, -7, 0, 2**62])
    given_back = (seq_lens - query_lens) // page_size  # whole pages before the new tokens
    if rng.random() < 0.5:
        table[np.arange(most) < given_back[:, None]] = -1
    return seq_lens, query_lens, table, page_size


def test_places_are_those_of_a_loop_over_the_tokens(rng):
    for _ in range(60):
        seq_lens, query_lens, table, page_size = draw(rng)
        positions, slots, ends = [], [], [0]
        for length, new, pages in zip(seq_lens, query_lens, table, strict=True):
            for position in range(length - new, length):
                positions.append(position)
                slots.append(pages[position // page_size] * page_size + position % page_size)
            ends.append(len(positions))
        batch = Batch(
            seq_lens=seq_lens, query_lens=query_lens, page_table=table, page_size=page_size
        )
        assert batch.cache_position.tolist() == positions
        assert batch.slot_mapping.tolist() == slots
        assert batch.cu_seqlens.tolist() == ends
        assert batch.seq_lens.tolist() == seq_lens.tolist()
        assert batch.query_lens.tolist() == query_lens.tolist()
        assert batch.page_size == page_size
        needed = -(-seq_lens // page_size)
        for row, count in enumerate(needed):
            assert batch.page_table[row, :count].tolist() == table[row, :count].tolist()
        assert batch.pages_needed == (max(slots) // page_size + 1 if slots else 0)
        for name in ("cache_position", "slot_mapping", "cu_seqlens", "seq_lens", "query_lens"):
            assert getattr(batch, name).dtype == np.int64


def test_arguments_are_lists_or_arrays_of_any_integers(rng):
    usual = Batch(seq_lens=[3, 9], query_lens=[3, 1], page_table=[[4, -1], [0, 2]], page_size=8)
    for dtype in ("int8", "int32", ">i8"):
        batch = Batch(
            seq_lens=np.array([3, 9], dtype),
            query_lens=np.array([3, 1], dtype)[::1],
            page_table=np.array([[4, -1], [0, 2]], dtype, order="F"),
            page_size=np.int32(8),
        )
        assert batch.slot_mapping.tolist() == usual.slot_mapping.tolist()
        assert batch.page_table.flags.c_contiguous  # as the kernel reads it
    unsigned = Batch(
        seq_lens=(3, 9), query_lens=range(3, 0, -2), page_table=np.uint64([[4, 0], [0, 2]]),
        page_size=8,
    )  # fmt: skip
    assert unsigned.slot_mapping.tolist() == usual.slot_mapping.tolist()
    ranges = make(page_table=[range(4, 5), range(0, 3, 2)])
    assert ranges.slot_mapping.tolist() == usual.slot_mapping.tolist()


def integers(row):
    return array.array("q", row)


@pytest.mark.parametrize("rows_of", [list, tuple])
@pytest.mark.parametrize("row_of", [list, tuple, np.array, integers, deque])
def test_rows_of_a_page_table_may_differ_in_length(rows_of, row_of, rng):
    for _ in range(20):
        seq_lens, query_lens, table, page_size = draw(rng)
        needed = -(-seq_lens // page_size)
        most = table.shape[1]
        rows = [
            row[: rng.integers(count, most + 1)] for row, count in zip(table, needed, strict=True)
        ]
        given = rows_of(row_of(row) for row in rows)
        lengths = {"seq_lens": seq_lens, "query_lens": query_lens, "page_size": page_size}
        batch = Batch(page_table=given, **lengths)
        expected = Batch(page_table=table, **lengths)
        assert np.array_equal(batch.slot_mapping, expected.slot_mapping)
        assert batch.pages_needed == expected.pages_needed
        for row, pages, count in zip(batch.page_table, table, needed, strict=True):
            assert row[:count].tolist() == pages[:count].tolist()


def test_batches_are_immutable_and_copy_their_arguments():
    arguments = {
        "seq_lens": np.array([3, 9]),
        "query_lens": np.array([3, 1]),
        "page_table": np.array([[4, -1], [0, 2]]),
    }
    batch = Batch(**arguments, page_size=8)
    for argument in arguments.values():
        argument[...] = 0
    assert batch.seq_lens.tolist() == [3, 9]
    assert batch.query_lens.tolist() == [3, 1]
    assert batch.page_table.tolist() == [[4, -1], [0, 2]]
    for name in (*arguments, "cache_position", "slot_mapping", "cu_seqlens", "page_size", "other"):
        with pytest.raises(AttributeError, match="cannot assign to field"):
            setattr(batch, name, 1)
    for name in (*arguments, "cache_position", "slot_mapping", "cu_seqlens"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(batch, name)[...] = 1


@pytest.mark.parametrize(
    "arguments",
    [
        ([3, 9], [3, 1], [[4, -1], [0, 2]], 8),
        ([], [], [], 8),
        ([0, 0], [0, 0], [[], []], 8),
        ([5, 0], [0, 0], [[-1], [9]], 8),
    ],
    ids=["usual", "no sequences", "no pages", "idle"],
)
def test_batches_print_pickle_and_copy(arguments):
    names = ("seq_lens", "query_lens", "page_table", "page_size")
    batch = Batch(**dict(zip(names, arguments, strict=True)))
    tokens = sum(arguments[1])
    assert repr(batch) == f"Batch(sequences={len(arguments[0])}, tokens={tokens}, page_size=8)"
    for again in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert repr(again) == repr(batch)
        for name in (*names, "cache_position", "slot_mapping", "cu_seqlens", "pages_needed"):
            assert np.array_equal(getattr(again, name), getattr(batch, name))
    assert batch.cache_position.shape == batch.slot_mapping.shape == (tokens,)
    assert batch.cu_seqlens.shape == (len(arguments[0]) + 1,)


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "dynamic_powers"])
def test_a_step_without_sequences_is_like_any_other(rope_type):
    scaling = {"rope_type": rope_type, "factor": 2.0, "max_position_embeddings": 4}
    if rope_type != "dynamic":
        del scaling["factor"]
    batch = Batch(seq_lens=[], query_lens=[], page_table=[], page_size=8)
    rope = rope_cpu.RotaryEmbedding(16, scaling=scaling).at_length(batch.seq_lens)
    plan = rope.plan(batch.cache_position, layout="thd", cu_seqlens=batch.cu_seqlens)
    cache = rope_cpu.KVCache.zeros(1, 8, 2, 16, dtype=np.float32)
    x = np.zeros((0, 2, 16), np.float32)
    q_rot = plan.append(x, x, x, cache, batch)
    assert rope_cpu.attention(q_rot, cache, batch).shape == (0, 2, 16)


def make(seq_lens=(3, 9), query_lens=(3, 1), page_table=((4, -1), (0, 2)), page_size=8):
    return Batch(
        seq_lens=seq_lens, query_lens=query_lens, page_table=page_table, page_size=page_size
    )


REFUSED = [
    (
        lambda: make(seq_lens=(3, -9)),
        ValueError,
        "`seq_lens` holds -9; it must hold lengths from 0 to",
    ),
    (lambda: make(seq_lens=(3, 2**28 + 1)), ValueError, "`seq_lens` holds 268435457"),
    (lambda: make(seq_lens=((3, 9),)), ValueError, r"`seq_lens` has shape .1, 2.; .*sequences"),
    (lambda: make(seq_lens=(3.0, 9.0)), TypeError, "`seq_lens` has dtype float64; .* integers"),
    (lambda: make(seq_lens=(True, False)), TypeError, "`seq_lens` has dtype bool"),
    (lambda: make(seq_lens=np.ma.array([3, 9])), TypeError, "`seq_lens` is a masked array"),
    (lambda: make(query_lens=(4, 1)), ValueError, "`query_lens` holds 4 for sequence 0; it"),
    (lambda: make(query_lens=(3.5, 1)), TypeError, "`query_lens` has dtype float64"),
    (lambda: make(page_table=((4,), (0,))), ValueError, "`page_table` has 1 pages for a sequence;"),
    (lambda: make(page_table=((4, 0),)), ValueError, r"`page_table` has shape .1, 2."),
    (lambda: make(page_table=((), ())), ValueError, "`page_table` has 0 pages .* must have 1 of"),
    (lambda: make(page_table=((4, 5), (0,))), ValueError, "`page_table` holds -1 under token 8 of"),
    (lambda: make(page_table=((4,), (0,), (1, 2))), ValueError, r"`page_table` has shape .3, 2."),
    (lambda: make(page_table=((4.0,), (0, 2))), TypeError, "`page_table` has dtype float64"),
    (lambda: make(page_table=(([4],), ([0], [2]))), ValueError, r"a row of shape .1, 1."),
    (lambda: make(page_table=((4,), 0)), ValueError, r"`page_table` has a row of shape ..;"),
    (lambda: make(page_table=("4", "02")), TypeError, "`page_table` has dtype <U1"),
    (lambda: make(page_table=((True,), (0, 2))), TypeError, "`page_table` has dtype bool"),
    (lambda: make(page_table=((4,), {0: 0, 2: 2})), TypeError, "`page_table` has dtype object"),
    (lambda: make(page_table=((4,), np.ma.array([0, 2]))), TypeError, "`page_table` is a masked"),
    (lambda: make(page_table=((4.0, 0), (1, 2))), TypeError, "`page_table` has dtype float64"),
    (lambda: make(page_table=((-2, 0), (1, 2))), ValueError, "`page_table` holds -2 for sequence"),
    (lambda: make(page_table=((4, 0), (1, 2**50))), ValueError, "`page_table` holds"),
    (lambda: make(page_table=((4, -1), (0, -1))), ValueError, "`page_table` holds -1 under token"),
    (lambda: make(page_size=2**29), ValueError, "`page_size` is 536870912; it must be at most"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


def repeated(value, *shape):
    """Return an array of one number that takes no memory."""
    return np.broadcast_to(np.int64(value), shape)


HOSTILE = {
    "many lengths": lambda: make(seq_lens=repeated(1, 2**59)),
    "many lengths that fit memory": lambda: make(seq_lens=repeated(1, 2**26)),
    "a range of lengths": lambda: make(seq_lens=range(2**60)),
    "many new lengths": lambda: make(query_lens=repeated(1, 2**59)),
    "a large page table": lambda: make(page_table=repeated(1, 2**29, 2**30)),
    "a page table of a range": lambda: make(page_table=[[4], range(2**70)]),
    "a page table of ranges": lambda: make(page_table=[range(2**24)] * 2**10),
    "a page table of long rows": lambda: make(page_table=[repeated(1, 2**24)] * 2**10),
    "a page table of one long row": lambda: make(page_table=[[0]] * 2**13 + [[0] * 2**13]),
    "a page table with many axes": lambda: make(page_table=repeated(1, *[2] * 59)),
    "many pages that sequences need": lambda: make(
        seq_lens=[2**28] * 4, query_lens=[0] * 4, page_table=repeated(1, 4, 2**57), page_size=1
    ),
    "many new tokens": lambda: make(
        seq_lens=[2**28], query_lens=[2**28], page_table=[[0]], page_size=2**28
    ),
    "many new tokens of many sequences": lambda: make(
        seq_lens=repeated(2**28, 2**20), query_lens=repeated(2**28, 2**20), page_size=2**28
    ),
    "an integer of many digits": lambda: make(seq_lens=[10**5000, 1]),
    "a page size of many digits": lambda: make(page_size=10**5000),
    "unsigned": lambda: make(seq_lens=np.array([2**64 - 1, 1], np.uint64)),
}


@pytest.mark.parametrize("call", HOSTILE.values(), ids=HOSTILE)
def test_hostile_arguments_are_refused_at_once(call):
    refusals.refusal(call)
    start = time.process_time()
    with pytest.raises((ValueError, TypeError)):
        call()
    assert time.process_time() - start < 0.5


def test_a_page_table_is_read_as_far_as_sequences_need_it():
    """Servers keep room for the longest sequences; here for 2^58 pages."""
    start = time.process_time()
    batch = make(page_table=repeated(1, 2, 2**58), query_lens=(3, 0))
    assert time.process_time() - start < 0.5
    assert batch.page_table.shape == (2, 2)
