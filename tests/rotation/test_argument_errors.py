"""Every refusal names the argument, its value and the rule, and nothing is written before it."""

import numpy as np
import pytest

import rope_cpu
from rope_cpu import RotaryEmbedding, apply_rotary

F32 = np.float32


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


def read_only(x):
    x.flags.writeable = False
    return x


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)
AXIAL = RotaryEmbedding.from_inv_freq([[1.0, 0.1], [0.5, 2.0], [1.0, 1.0]])
PER_HEAD = RotaryEmbedding.from_inv_freq(np.ones((1, 3, 2)))
PLAN = ROPE.plan([1, 2, 3])
X = zeros(2, 3, 4, 6)
TABLE = zeros(10, 2)
OVERLAP = zeros(2, 3, 5, 6)
BUFFER = zeros(100)

WRONG = {
    "head_dim": (lambda: ROPE.rotate(zeros(1, 3, 4, 8)), ValueError, "`x` has head_dim 8, but this rotary is for head_dim 6"),
    "head_dim of k": (lambda: ROPE(X, zeros(2, 3, 1, 5)), ValueError, "`k` has head_dim 5"),
    "rank": (lambda: ROPE.rotate(zeros(3, 4, 6)), ValueError, "`x` has shape .3, 4, 6.; layout bshd means .batch, seq, heads, head_dim"),
    "rank of packed tokens": (lambda: ROPE.rotate(X, [1, 2, 3], layout="thd"), ValueError, "layout thd means .tokens, heads, head_dim"),
    "list": (lambda: ROPE.rotate([[1.0]]), TypeError, "`x` is a list; it must be a NumPy array"),
    "none": (lambda: ROPE(X, None), TypeError, "`k` is a NoneType"),
    "integer array": (lambda: ROPE.rotate(zeros(2, 3, 4, 6, dtype=int)), TypeError, "`x` has dtype int64; it must be float32"),
    "complex array": (lambda: ROPE.rotate(zeros(2, 3, 4, 6, dtype=complex)), TypeError, "`x` has dtype complex128"),
    "other byte order": (lambda: PLAN.rotate(zeros(2, 3, 4, 6, dtype=">f4")), TypeError, "native byte order"),
    "two dtypes": (lambda: PLAN(X, zeros(2, 3, 1, 6, dtype="f8")), TypeError, "`k` has dtype float64, but `q` has float32"),
    "16-bit dtypes mixed": (
        lambda: PLAN(zeros(2, 3, 4, 6, dtype="f2"), zeros(2, 3, 1, 6).astype("bfloat16")),
        TypeError,
        "`k` has dtype bfloat16, but `q` has float16",
    ),
    "batch of k": (lambda: ROPE(X, zeros(1, 3, 1, 6)), ValueError, "`k` has batch 1, but `q` has 2"),
    "sequence of k": (lambda: ROPE(X, zeros(2, 4, 1, 6)), ValueError, "`k` has 4 tokens .*but `q` has 3"),
    "sequence of a plan": (lambda: PLAN.rotate(zeros(2, 4, 1, 6)), ValueError, "`x` has 4 tokens .*positions are given for 3"),
    "batch of ids": (lambda: ROPE.rotate(X, zeros(3, 3, dtype=int)), ValueError, "`x` has batch 2 .*positions are given for 3"),
    "no ids for a batch": (lambda: ROPE.rotate(X, zeros(0, 3)), ValueError, "`x` has batch 2 .*positions are given for 0"),
    "heads": (lambda: PER_HEAD.rotate(zeros(1, 1, 4, 4), [[0]]), ValueError, "`x` has 4 heads, not a multiple of 3"),
    "layout": (lambda: ROPE.rotate(X, layout="bsdh"), ValueError, "`layout` is 'bsdh'; it must be one of bshd, bhsd, sbhd, thd"),
    "layout of another type": (lambda: ROPE.plan([1], layout=3), ValueError, "`layout` is 3"),
    "inverse": (lambda: ROPE.rotate(X, inverse=1), TypeError, "`inverse` is 1; it must be True or False"),
    "bool ids": (lambda: ROPE.plan([True, False]), TypeError, "`position_ids` has dtype bool"),
    "complex ids": (lambda: ROPE.plan([1j]), TypeError, "`position_ids` has dtype complex128"),
    "text ids": (lambda: ROPE.plan("12"), TypeError, "`position_ids` has dtype <U2"),
    "ragged ids": (lambda: ROPE.plan([[1, 2], [3]]), ValueError, "`position_ids` is a list of unequal rows; it must be a regular array"),
    "ids as objects": (lambda: ROPE.plan(np.array([1, 2], object)), TypeError, "`position_ids` has dtype object; positions must be integers"),
    "masked ids": (lambda: ROPE.plan(np.ma.array([1, 2], mask=[0, 1])), TypeError, "`position_ids` is a masked array"),
    "masked delta": (lambda: ROPE.shift(X, np.ma.array([1, 2, 3])), TypeError, "`delta` is a masked array"),
    "ragged offset": (lambda: ROPE.rotate(X, offset=[[1], [2, 3]]), ValueError, "`offset` is a list of unequal rows; it must be a regular array"),
    "masked rows of a table": (lambda: apply_rotary(X, TABLE, TABLE, np.ma.array([1, 2, 3])), TypeError, "`position_ids` is a masked array"),
    "half ids": (lambda: ROPE.plan(np.zeros(3, "f2")), TypeError, "`position_ids` has dtype float16"),
    "one id": (lambda: ROPE.plan(3), ValueError, "`position_ids` has shape .*; it must be .seq,. or .batch, seq."),
    "three-dimensional ids": (lambda: ROPE.plan(zeros(1, 1, 1)), ValueError, "`position_ids` has shape .1, 1, 1."),
    "batched ids of packed tokens": (lambda: ROPE.plan([[1]], layout="thd"), ValueError, "it must be .tokens,."),
    "no ids for packed tokens": (lambda: ROPE.rotate(X[0], layout="thd"), ValueError, "`position_ids` is None; packed tokens"),
    "axes": (lambda: AXIAL.plan([1, 2, 3]), ValueError, "`position_ids` has shape .3,.; it must be .seq, 3. or .batch, seq, 3."),
    "coordinates": (lambda: AXIAL.plan(zeros(5, 2)), ValueError, "`position_ids` has shape .5, 2.; its last axis must hold 3 coordinates"),
    "coordinates of a table": (lambda: AXIAL.cos_sin(zeros(3, 2, 5)), ValueError, "has shape .3, 2, 5.; .*np.moveaxis.position_ids, 0, -1."),
    "coordinates of a shift": (lambda: AXIAL.shift(zeros(1, 3, 1, 4), [1, 2]), ValueError, "`delta` has shape .2,.; its last axis must hold 3"),
    "axes first": (lambda: AXIAL.plan(zeros(3, 2, 5)), ValueError, "its axes come first: np.moveaxis.position_ids, 0, -1."),
    "no ids for axes": (lambda: AXIAL.rotate(zeros(1, 1, 1, 4)), ValueError, "with 3 axes each token needs its coordinates"),
    "infinite position": (lambda: ROPE.plan([0.0, np.inf]), ValueError, "`position_ids` holds inf; positions must be finite"),
    "no number": (lambda: ROPE.cos_sin([np.nan]), ValueError, "`position_ids` holds nan"),
    "too large": (lambda: ROPE.plan([2**53 + 1]), ValueError, r"`position_ids` holds 9007199254740993; positions must be within ±2\^53"),
    "too small": (lambda: ROPE.plan([-(2**60)]), ValueError, "positions must be within"),
    "infinite delta": (lambda: ROPE.shift(X, np.inf), ValueError, "`delta` holds inf"),
    "shifted keys": (lambda: ROPE.shift(zeros(2, 3, 4, 8), 1), ValueError, "`keys` has head_dim 8"),
    "rank 5": (lambda: PLAN(zeros(1, 2, 3, 4, 6), X), ValueError, "`q` has shape .1, 2, 3, 4, 6."),
    "rank 5 out": (lambda: PLAN.rotate(X, out=zeros(1, 2, 3, 4, 6)), ValueError, "`out` has shape .1, 2, 3, 4, 6."),
    "delta shape": (lambda: ROPE.shift(X, zeros(2, 2, 2)), ValueError, "`delta` has shape .2, 2, 2."),
    "both": (lambda: ROPE.rotate(X, [1, 2, 3], offset=1), ValueError, "`offset` is 1 and `position_ids` are given as well"),
    "offset of another type": (lambda: ROPE.rotate(X, offset=1.5), TypeError, "`offset` is 1.5; it must be an integer"),
    "bool offset": (lambda: ROPE.rotate(X, offset=True), TypeError, "`offset` is True"),
    "offsets": (lambda: ROPE.rotate(X, offset=[1, 2, 3]), ValueError, "`offset` has shape .3,.; .* one for each of 2 batch rows"),
    "huge offset": (lambda: ROPE.rotate(X, offset=2**53), ValueError, "`offset` is 9007199254740992, for 3 tokens; positions must be within"),
    "very huge offset": (lambda: ROPE.rotate(X, offset=2**70), ValueError, "`offset` holds 1180591620717411303424; positions must be within"),
    "very huge position": (lambda: ROPE.plan([2**70]), ValueError, "`position_ids` holds 1180591620717411303424; positions must be within"),
    "False as offset": (lambda: ROPE.rotate(X, [1, 2, 3], offset=False), ValueError, "`offset` is False and `position_ids` are given"),
    "text as length": (lambda: ROPE.at_length("12"), TypeError, "`seq_len` is '12'"),
    "unknown table dtype": (lambda: ROPE.cos_sin([1], "foo"), TypeError, "`dtype` is 'foo'"),
    "no table dtype": (lambda: ROPE.cos_sin([1], None), TypeError, "`dtype` is None"),
    "one array for tables": (lambda: ROPE.cos_sin([1], out=TABLE), TypeError, "`out` is an array of shape .10, 2.; .* for cos and for sin"),
    "no array for tables": (lambda: ROPE.cos_sin([1], out=([], TABLE)), TypeError, "`out.0.` is a list; .* like `cos`"),
    "shape of out for tables": (lambda: ROPE.cos_sin([1], out=(zeros(1, 2), TABLE)), ValueError, "`out.1.` has shape .10, 2.; it must be that of `sin`, .1, 2."),
    "dtype of out for tables": (lambda: ROPE.cos_sin([1], "f2", out=(zeros(1, 2), zeros(1, 2))), TypeError, "`out.0.` has dtype float32; it must be that of `cos`, float16"),
    "read-only out for tables": (lambda: ROPE.cos_sin([1], out=(zeros(1, 2), read_only(zeros(1, 2)))), ValueError, "`out.1.` is read-only"),
    "one place for both tables": (lambda: ROPE.cos_sin([1], out=(TABLE[:1], TABLE[:1])), ValueError, "`out.1.` shares memory with `out.0.`"),
    "out over cos": (lambda: apply_rotary(X[:1], BUFFER[:6].reshape(3, 2), TABLE[:3], out=BUFFER[:72].reshape(1, 3, 4, 6)), ValueError, "`out` shares memory with `cos`"),
    "three outs": (lambda: PLAN(X, Y, out=(X, Y, Z)), TypeError, "`out` is a tuple of 3; it must be a pair of arrays"),
    "a stack of outs": (lambda: PLAN(X, Y, out=np.zeros((2, 2, 3, 4, 6), F32)), TypeError, "it must be a pair of arrays"),
    "sliding windows": (
        lambda: PLAN.rotate(X[:1], out=np.lib.stride_tricks.as_strided(BUFFER, (1, 3, 4, 6), (0, 48, 12, 4))),
        ValueError,
        "each axis must step over all that lies closer together",
    ),
    "out for two": (lambda: ROPE(X, X.copy(), out=X), TypeError, "`out` is an array .*; it must be a pair of arrays"),
    "out is one of a pair": (lambda: ROPE(X, X.copy(), out=(X,)), TypeError, "it must be a pair of arrays"),
    "out shape": (lambda: ROPE.rotate(X, out=zeros(2, 3, 3, 6)), ValueError, "`out` has shape .2, 3, 3, 6.; it must be that of `x`"),
    "out dtype": (lambda: ROPE.rotate(X, out=zeros(2, 3, 4, 6, dtype="f8")), TypeError, "`out` has dtype float64; it must be that of `x`"),
    "out is no array": (lambda: ROPE.rotate(X, out=[1]), TypeError, "`out` is a list"),
    "out of q": (lambda: ROPE(X, X.copy(), out=(None, None)), TypeError, r"`out\[0\]` is a NoneType"),
    "read-only out": (lambda: ROPE.rotate(X, out=read_only(zeros(2, 3, 4, 6))), ValueError, "`out` is read-only"),
    "out over a table that is looked up": (lambda: apply_rotary(X[:1], BUFFER[:6].reshape(3, 2), TABLE[:3], [0, 1, 2], out=BUFFER[:72].reshape(1, 3, 4, 6)), ValueError, "`out` shares memory with `cos`"),
    "masked table": (lambda: apply_rotary(X, np.ma.array(TABLE[:3]), TABLE[:3]), TypeError, "`cos` is a masked array"),
    "overlapping out": (lambda: ROPE.rotate(OVERLAP[:, :, :4], out=OVERLAP[:, :, 1:]), ValueError, "`out` shares memory with `x`"),
    "out is the other input": (lambda: PLAN(X, Y, out=(Y, zeros(2, 3, 4, 6))), ValueError, r"`out\[0\]` shares memory with `k`"),
    "one out for both": (lambda: PLAN(X, Y, out=(X, X)), ValueError, r"`out\[1\]` shares memory with `q`"),
    "one new out for both": (lambda: PLAN(X, Y, out=(Z, Z)), ValueError, r"`out\[1\]` shares memory with `out\[0\]`"),
    "out that repeats itself": (
        lambda: PLAN.rotate(X, out=np.lib.stride_tricks.as_strided(zeros(6), X.shape, (0, 0, 0, 4))),
        ValueError,
        "each axis must step over all that lies closer together",
    ),
    "length 0": (lambda: ROPE.at_length(0), ValueError, "`seq_len` is 0; it must be at least 1"),
    "fractional length": (lambda: ROPE.at_length(1.5), TypeError, "`seq_len` is 1.5; it must be an integer"),
    "no length": (lambda: ROPE.at_length([]), ValueError, "`seq_len` is empty"),
    "table dtype": (lambda: ROPE.cos_sin([1], dtype=int), TypeError, "`dtype` is <class .int.>; it must be float32"),
    "inv_freq shape": (lambda: RotaryEmbedding.from_inv_freq(zeros(1, 1, 1, 1)), ValueError, "`inv_freq` has shape"),
    "no pairs": (lambda: RotaryEmbedding.from_inv_freq([]), ValueError, "`inv_freq` has shape .0,."),
    "inv_freq values": (lambda: RotaryEmbedding.from_inv_freq([1, np.nan]), ValueError, "`inv_freq` holds nan"),
    "inv_freq dtype": (lambda: RotaryEmbedding.from_inv_freq([1j]), TypeError, "`inv_freq` has dtype complex128"),
    "narrow head": (lambda: RotaryEmbedding.from_inv_freq([1, 2], head_dim=3), ValueError, "`head_dim` is 3, but `inv_freq` rotates 4"),
    "head_dim type": (lambda: RotaryEmbedding.from_inv_freq([1], head_dim=2.0), TypeError, "`head_dim` is 2.0"),
    "factor": (lambda: RotaryEmbedding.from_inv_freq([1], attention_factor=0), ValueError, "`attention_factor` is 0"),
    "blocks": (lambda: RotaryEmbedding.from_inv_freq([1, 2, 3], blocks=2), ValueError, "`blocks` is 2, which does not divide 3 pairs"),
    "odd blocks": (lambda: RotaryEmbedding.from_inv_freq([1, 2, 3], blocks=(3, 3)), ValueError, "widths must be even"),
    "blocks and pairs": (lambda: RotaryEmbedding.from_inv_freq([1, 2, 3], blocks=(2, 2)), ValueError, "add up to rotary_dim 6"),
    "interleaved": (lambda: RotaryEmbedding.from_inv_freq([1], interleaved="no"), TypeError, "`interleaved` is 'no'"),
    "threads": (lambda: rope_cpu.set_num_threads(0), ValueError, "`n` is 0; it must be at least 1"),
    "too many threads": (lambda: rope_cpu.set_num_threads(10**6), ValueError, "`n` is 1000000; it must be at most [0-9]+, the cores"),
    "ids outside the table": (lambda: apply_rotary(X, TABLE, TABLE, [0, 1, 10]), ValueError, "`position_ids` holds 10, but `cos` has rows 0 to 9"),
    "negative ids": (lambda: apply_rotary(X, TABLE, TABLE, [0, -1, 2]), ValueError, "`position_ids` holds -1"),
    "fractional ids": (lambda: apply_rotary(X, TABLE, TABLE, [0.0, 1.0, 2.0]), TypeError, "`position_ids` has dtype float64"),
    "ids shape": (lambda: apply_rotary(X, TABLE, TABLE, [[[0]]]), ValueError, "`position_ids` has shape .1, 1, 1."),
    "table rank": (lambda: apply_rotary(X, zeros(2), zeros(2)), ValueError, "`cos` has shape .2,."),
    "table and ids": (lambda: apply_rotary(X, zeros(2, 3, 2), zeros(2, 3, 2), [0, 1, 2]), ValueError, "it must be .table, pairs."),
    "integer table": (lambda: apply_rotary(X, zeros(3, 2, dtype=int), TABLE), TypeError, "`cos` has dtype int64"),
    "list table": (lambda: apply_rotary(X, TABLE, [1]), TypeError, "`sin` is a list"),
    "unlike tables": (lambda: apply_rotary(X, zeros(3, 2), zeros(3, 3)), ValueError, "`cos` is float32 .3, 2., but `sin` is float32 .3, 3."),
    "wide table": (lambda: apply_rotary(X, zeros(3, 4), zeros(3, 4)), ValueError, "`x` has head_dim 6, but `cos` .* rotates 8"),
    "batch of lengths": (lambda: LENGTHS.rotate(X), ValueError, "`x` has batch 2 .*lengths are given for 3"),
    "packed tokens of several lengths": (lambda: LENGTHS.plan([0, 1], layout="thd"), ValueError, "lengths are given for 3 batch rows, but packed tokens"),
    "tokens of a shift": (lambda: ROPE.shift(X, [1, 2]), ValueError, "`keys` has 3 tokens .*`delta` is given for 2"),
    "tokens of looked up rows": (lambda: apply_rotary(X, TABLE, TABLE, [0, 1]), ValueError, "`x` has 3 tokens .*`position_ids` are for 2"),
    "batch of looked up rows": (lambda: apply_rotary(X, TABLE, TABLE, [[0, 1, 2]] * 3), ValueError, "`x` has batch 2 .*`position_ids` are for 3"),
    "array of fractional offsets": (lambda: ROPE.rotate(X, offset=np.array([1.0, 2.0])), TypeError, "`offset` is float64 of shape .2,.; it must be an integer"),
    "table length": (lambda: apply_rotary(X, zeros(4, 2), zeros(4, 2)), ValueError, "`x` has 3 tokens .*`cos` and `sin` are for 4"),
}  # fmt: skip
Y, Z = zeros(2, 3, 4, 6), zeros(2, 3, 4, 6)
LENGTHS = RotaryEmbedding(
    6, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}
).at_length([3, 9, 12])  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refused(case):
    call, error, message = WRONG[case]
    watched = (X, Y, Z, OVERLAP, BUFFER)
    for array in watched:
        array[...] = 1
    with pytest.raises(error, match=message):
        call()
    assert all((array == 1).all() for array in watched)


def test_the_largest_position_is_accepted():
    assert ROPE.plan([2**53, -(2**53)]) is not None
    assert ROPE.rotate(zeros(1, 1, 1, 6), offset=2**53).shape == (1, 1, 1, 6)
