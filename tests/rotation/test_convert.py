"""Conversion between pairings: equal scores, round trips, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rope_cpu import RotaryEmbedding, convert_weight

HEADS = 6
KV_HEADS = 2
HIDDEN = 10
SEQ = 7


def scores(q: np.ndarray, k: np.ndarray, rope: RotaryEmbedding) -> np.ndarray:
    """Return q·k of every query head and its key head, rotated in float64.

    q, k: (1, seq, heads, head_dim).
    """
    q_rot, k_rot = rope(q, k)
    return np.einsum("bqhd,bkhd->bhqk", q_rot, np.repeat(k_rot, HEADS // KV_HEADS, axis=2))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (8, 4), (12, 10), (2, 2)])
@pytest.mark.parametrize("to", ["half", "interleaved"])
def test_scores_are_unchanged(
    rng: np.random.Generator, to: str, head_dim: int, rotary_dim: int
) -> None:
    x = rng.standard_normal((SEQ, HIDDEN))
    w_q = rng.standard_normal((HEADS * head_dim, HIDDEN))
    b_q = rng.standard_normal(HEADS * head_dim)
    w_k = rng.standard_normal((KV_HEADS * head_dim, HIDDEN))
    b_k = rng.standard_normal(KV_HEADS * head_dim)
    norm = rng.standard_normal(head_dim)

    def project(*weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        *projections, norm = weights
        q, k = (
            (x @ w.T + b).reshape(1, SEQ, -1, head_dim) * norm
            for w, b in (projections[:2], projections[2:])
        )
        return q, k

    def converted(w: np.ndarray, heads: int) -> np.ndarray:
        return convert_weight(w, heads, to=to, rotary_dim=rotary_dim)

    before = RotaryEmbedding(head_dim, rotary_dim=rotary_dim, interleaved=to == "half")
    after = RotaryEmbedding(head_dim, rotary_dim=rotary_dim, interleaved=to == "interleaved")
    old = project(w_q, b_q, w_k, b_k, norm)
    new = project(
        *(
            converted(w, n)
            for w, n in ((w_q, HEADS), (b_q, HEADS), (w_k, KV_HEADS), (b_k, KV_HEADS))
        ),
        converted(norm, 1),
    )
    np.testing.assert_allclose(scores(*new, after), scores(*old, before), rtol=0, atol=1e-12)

    keys = convert_weight(before.rotate(old[1]), 1, to=to, rotary_dim=rotary_dim, axis=-1)
    np.testing.assert_allclose(keys, after.rotate(new[1]), rtol=0, atol=1e-14)


@given(
    heads=st.integers(1, 4),
    pairs=st.integers(1, 5),
    passed=st.integers(0, 3),
    axis=st.integers(-3, 2),
    to=st.booleans(),
)
def test_there_and_back_is_the_identity(
    heads: int, pairs: int, passed: int, axis: int, to: bool
) -> None:
    shape = [2, 3, 4]
    shape[axis] = heads * (2 * pairs + passed)
    w = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    names = ("half", "interleaved") if to else ("interleaved", "half")
    widths = {"rotary_dim": 2 * pairs, "head_dim": 2 * pairs + passed}
    there = convert_weight(w, heads, to=names[0], **widths, axis=axis)
    back = convert_weight(there, heads, to=names[1], rotary_dim=2 * pairs, axis=axis)
    np.testing.assert_array_equal(back, w)
    assert there.dtype == w.dtype
    assert pairs == 1 or not np.array_equal(there, w)


def test_order_by_hand() -> None:
    w = np.array([10, 11, 12, 13, 14, 20, 21, 22, 23, 24])
    expected = [10, 12, 11, 13, 14, 20, 22, 21, 23, 24]
    assert convert_weight(w, 2, to="half", rotary_dim=4).tolist() == expected


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"to": "neox"}, ValueError, "`to` is 'neox'"),
        ({"num_heads": 3}, ValueError, "`num_heads` is 3"),
        ({"num_heads": 0}, ValueError, "`num_heads` is 0"),
        ({"rotary_dim": 3}, ValueError, "`rotary_dim` is 3"),
        ({"rotary_dim": 6}, ValueError, "`rotary_dim` is 6"),
        ({"axis": 2}, ValueError, "`axis` is 2"),
        ({"axis": True}, TypeError, "`axis` is True"),
        ({"num_heads": 8}, ValueError, "`rotary_dim` is 1"),
        ({"num_heads": 9}, ValueError, "`num_heads` is 9, of head_dim 0; .* make the 8"),
        ({"w": None}, TypeError, "`w` is a NoneType"),
        ({"w": {0: 1}}, TypeError, "`w` is a dict"),
        # The whole model has 4 heads of 4, this shard 2 of them.
        ({"num_heads": 4, "head_dim": 4}, ValueError, "`num_heads` is 4, of head_dim 4; .* shard"),
        ({"head_dim": 3}, ValueError, "`num_heads` is 2, of head_dim 3; .* make the 8"),
        ({"head_dim": 4.0}, TypeError, "`head_dim` is 4.0"),
        ({"head_dim": 0}, ValueError, "`head_dim` is 0"),
    ],
)
def test_refusals(arguments: dict[str, object], kind: type[Exception], words: str) -> None:
    given = {"w": np.zeros((8, 3)), "num_heads": 2, "to": "half", **arguments}
    with pytest.raises(kind, match=words):
        convert_weight(**given)
