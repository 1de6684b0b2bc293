"""Oversized arguments: each is refused by name, before anything is allocated."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from refusals import nested, refusal

import rope_cpu
from rope_cpu import RotaryEmbedding, positions
from rope_cpu.arguments import limits
from rope_cpu.arguments.texts import shown

HUGE = 10**5000  # more digits than CPython writes
ROPE = RotaryEmbedding(8)
DYNAMIC = RotaryEmbedding(
    8, scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=4
)
WIDE = RotaryEmbedding(
    2**16, scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=4
)
ROWS = DYNAMIC.at_length([5, 6])
AXIAL = RotaryEmbedding.axial(8)
X = np.zeros((1, 2, 1, 8), np.float32)


def zeros(*shape, dtype=np.int64):
    """Return an array of any size that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def yarn(**values):
    section = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    return RotaryEmbedding(8, scaling=section | values)


def split_frames(**grids):
    return positions.mrope([[2, 2]], split_frames=True, **grids)


def token_types(**ids):
    return positions.token_types([1], video_token_id=None, **ids)


REFUSED = [
    (lambda: RotaryEmbedding(2**40), "head_dim"),
    (lambda: RotaryEmbedding(HUGE), "head_dim"),
    (lambda: RotaryEmbedding(64, max_position_embeddings=HUGE), "max_position_embeddings"),
    (lambda: RotaryEmbedding("x" * 10**7), "head_dim"),
    (lambda: RotaryEmbedding(nested(10**5)), "head_dim"),
    (lambda: RotaryEmbedding(64, scaling=nested(10**5)), "scaling"),
    (lambda: RotaryEmbedding(64, scaling={"rope_type": HUGE}), "rope_type"),
    (lambda: RotaryEmbedding(64, scaling={"rope_type": nested(10**5)}), "rope_type"),
    (lambda: RotaryEmbedding(64, scaling={"x" * 10**7: 1}), "xxx"),
    (lambda: yarn(beta_fast=1e308), "rope_theta"),
    (lambda: RotaryEmbedding.axial(2**40), "head_dim"),
    (lambda: RotaryEmbedding.axial(2**21, 2**20), "head_dim"),
    (lambda: RotaryEmbedding.axial(2**16, 2**15), "axes"),
    (lambda: RotaryEmbedding.axial(64, axis_dims=range(2**70)), "axis_dims"),
    (lambda: RotaryEmbedding.axial(64, rope_theta=range(2**50)), "rope_theta"),
    (lambda: RotaryEmbedding.mrope(64, range(2**50), rope_theta=1e4), "mrope_section"),
    (lambda: RotaryEmbedding.from_inv_freq(zeros(2**40)), "inv_freq"),
    (lambda: RotaryEmbedding.from_inv_freq(zeros(2**24)), "inv_freq"),
    (lambda: RotaryEmbedding.from_inv_freq(zeros(65, 8)), "inv_freq"),
    (lambda: RotaryEmbedding.from_inv_freq(zeros(1, 2**13, 8)), "inv_freq"),
    (lambda: RotaryEmbedding.from_inv_freq(zeros(64, 2**12, 2**15)), "inv_freq"),
    (lambda: RotaryEmbedding.from_inv_freq([1.0], blocks=range(2**50)), "blocks"),
    (lambda: replace(ROPE.spec, inv_freq=zeros(2**30, 1, 1, 4)), "inv_freq"),
    (lambda: DYNAMIC.at_length(range(2**22 + 1)), "seq_len"),
    (lambda: DYNAMIC.at_length(zeros(2**40)), "seq_len"),
    (lambda: DYNAMIC.at_length(zeros(2**20, 2**20)), "seq_len"),
    (lambda: DYNAMIC.at_length(HUGE), "seq_len"),
    (lambda: WIDE.at_length(range(1, 8193)), "len(lengths)"),
    (lambda: ROPE.cos_sin(zeros(2**40)), "position_ids"),
    (lambda: ROPE.cos_sin(range(2**50)), "position_ids"),
    (lambda: ROPE.cos_sin(np.broadcast_to(np.arange(8), (2**24, 8))), "position_ids"),
    (lambda: ROPE.cos_sin([HUGE]), "position_ids"),
    (lambda: ROPE.cos_sin([1], dtype="x" * 10**7), "dtype"),
    (lambda: ROPE.cos_sin([1], dtype={"a": 1}), "dtype"),
    (lambda: ROWS.cos_sin(zeros(2**26)), "position_ids"),
    (lambda: ROPE.plan(zeros(2**20, 2**20)), "position_ids"),
    (lambda: ROPE.plan(zeros(2**40)), "position_ids` is an array of shape (1099511627776,)"),
    (lambda: ROPE.plan([0], layout="thd", cu_seqlens=zeros(2**27)), "cu_seqlens"),
    (lambda: ROPE.plan([0], layout="thd", cu_seqlens=nested(10**5)), "cu_seqlens"),
    (lambda: ROPE.shift_plan(zeros(2**40)), "delta"),
    (lambda: ROPE.shift_plan(HUGE), "delta"),
    (lambda: ROPE.rerotate_plan(ROPE, zeros(2**20, 2**20)), "position_ids"),
    (lambda: ROPE.rerotate_plan("x" * 10**7, [0]), "old"),
    (lambda: AXIAL.plan(zeros(2**30, 2)), "position_ids"),
    (lambda: ROPE.rotate(zeros(1, 2**40, 1, 8, dtype=np.float32)), "x"),
    (lambda: ROPE(X, X, offset=zeros(2**40)), "offset"),
    (lambda: ROPE.rotate(zeros(2**30, 1, 1, 8, dtype=np.float32), offset=zeros(2**30)), "x"),
    (lambda: ROPE(X, X, offset=HUGE), "offset"),
    (lambda: ROPE(X, X, [0, 1], offset="x" * 10**7), "offset"),
    (lambda: ROPE(X, X, out="x" * 10**7), "out"),
    (lambda: ROPE(X, X, layout="x" * 10**7), "layout"),
    (lambda: ROPE.rotate(np.zeros(2, [(f"f{i}", "i4") for i in range(5000)])), "x"),
    (lambda: rope_cpu.apply_rotary(X, *ROPE.cos_sin([0]), zeros(2**40)), "position_ids"),
    (lambda: rope_cpu.sinusoidal(2**40, 8), "num_positions"),
    (lambda: rope_cpu.sinusoidal(8, 2**40), "dim"),
    (lambda: rope_cpu.sinusoidal(8, 8, base=5e-324), "base"),
    (lambda: rope_cpu.convert_weight(zeros(2**40), 8, to="half"), "w"),
    (lambda: rope_cpu.convert_weight([[1], [1, 2]], 1, to="half"), "w"),
    (lambda: rope_cpu.set_num_threads(HUGE), "n"),
    (lambda: rope_cpu.warmup(["x" * 10**7]), "dtypes"),
    (lambda: positions.packed([0, 2**40]), "cu_seqlens[-1]"),
    (lambda: positions.packed(list(range(10**5, 0, -1))), "cu_seqlens"),
    (lambda: positions.grid((2**20, 2**20)), "sizes"),
    (lambda: positions.grid([1] * 65), "sizes"),
    (lambda: positions.patches([[2**20, 2**10, 2**10]]), "grid_thw"),
    (lambda: positions.patches([[2**62, 2**62, 2**62]]), "grid_thw"),
    (lambda: positions.patches(zeros(2**40, 3)), "grid_thw"),
    (lambda: positions.with_unrotated([[1, 2]], before=2**40), "(before, after)"),
    (lambda: positions.mrope([[1, 1]], image_grid_thw=[[2**10, 2**9, 2**9]]), "token_types"),
    (lambda: split_frames(video_grid_thw=[[2**20, 2, 2]]), "video_grid_thw"),
    (lambda: positions.mrope([[0]], tokens_per_second=1e308), "tokens_per_second"),
    (lambda: token_types(image_token_id=HUGE), "image_token_id"),
]


@pytest.mark.parametrize(("call", "argument"), REFUSED)
def test_absurd_arguments_are_refused(call, argument):
    tracemalloc.start()
    text = refusal(call)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"`{argument}" in text
    assert peak < 2**25  # 32 MiB: modules may be loaded


def test_the_largest_values_are_accepted():
    rope = RotaryEmbedding.axial(limits.HEAD_DIM, limits.AXES)
    assert (rope.head_dim, rope.axes) == (limits.HEAD_DIM, limits.AXES)
    assert rope_cpu.sinusoidal(1, limits.HEAD_DIM).shape == (1, limits.HEAD_DIM)


def test_rows_of_lengths_count_once():
    """As many ids as there are rows of lengths are one table, not a table for each."""
    rope = DYNAMIC.at_length([5] * 2**13)
    ids = np.zeros((2**13, 9), np.int64)
    assert rope.cos_sin(ids)[0].shape == (2**13, 9, 4)


def test_grids_of_as_many_axes_as_there_may_be():
    ids = positions.grid([2, 3, *[1] * (limits.AXES - 2)])
    np.testing.assert_array_equal(ids[:, :2], [(i, j) for i in range(2) for j in range(3)])
    assert ids.shape == (6, limits.AXES)
    assert not ids[:, 2:].any()


VALUES = [
    (5, "5"),
    (True, "True"),
    ("text", "'text'"),
    ([1, "a", None], "[1, 'a', None]"),
    ({"b": 1, "a": [2.5]}, "{'a': [2.5], 'b': 1}"),
    (np.arange(3), "array([0, 1, 2])"),
    (np.zeros((5, 7)), "an array of shape (5, 7)"),
    (-HUGE, "an integer of 16610 bits"),
]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=[row[1] for row in VALUES])
def test_values_are_shown(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**7,
        b"x" * 10**6,
        nested(10**5),
        [HUGE] * 10**5,
        {str(i): [i] * 100 for i in range(10**4)},
        np.array("x" * 10**6),
        np.array(HUGE, dtype=object),
        [[[["x" * 1000] * 100] * 100] * 100] * 100,
    ],
    ids=["str", "bytes", "nested", "ints", "dict", "array", "object", "wide"],
)
def test_long_values_are_cut(value):
    assert len(shown(value)) <= 300
