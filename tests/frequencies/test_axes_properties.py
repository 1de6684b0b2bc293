"""Properties of rotary position embeddings: the same tests for one, two and more axes."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

from rope_cpu import RotaryEmbedding, positions
from rope_cpu.frequencies import axes, generators, spec
from rope_cpu.models import reader


def commuting(rng, count, size):
    basis = np.linalg.qr(rng.normal(size=(size, size)))[0]
    blocks = np.zeros((count, size, size))
    even = np.arange(0, size, 2)
    blocks[:, even + 1, even] = rng.normal(size=(count, size // 2))
    return basis @ (blocks - blocks.transpose(0, 2, 1)) @ basis.T


# Specs, some of them drawn.
SPECS = {
    "1-D": lambda rng: spec.from_inv_freq(oracle.inv_freq(64)),
    "1-D, partial, interleaved": lambda rng: spec.from_inv_freq(
        oracle.inv_freq(32), head_dim=48, interleaved=True
    ),
    "2-D, blocks": lambda rng: axes.axial(64, 2),
    "2-D, head": lambda rng: axes.axial(64, 2, span="head"),
    "2-D, interleaved": lambda rng: axes.axial(64, 2, interleaved=True),
    "3-D, unequal": lambda rng: axes.axial(128, 3, axis_dims=(16, 56, 56)),
    "3-D, partial": lambda rng: axes.axial(80, 3, axis_dims=(26, 26, 26), interleaved=True),
    "3-D, bases of their own": lambda rng: axes.axial(
        48, 3, rope_theta=(100.0, 1e4, 1e6), span="head"
    ),
    "4-D": lambda rng: axes.axial(64, 4),
    "M-RoPE": lambda rng: axes.mrope(64, (8, 12, 12), rope_theta=1e6),
    "M-RoPE, interleaved": lambda rng: axes.mrope(
        64, (12, 10, 10), rope_theta=1e6, mrope_interleaved=True
    ),
    "mixed": lambda rng: spec.from_inv_freq(rng.normal(size=(2, 32))),
    "mixed, by head": lambda rng: spec.from_inv_freq(rng.normal(size=(2, 3, 16)), interleaved=True),
    "generators": lambda rng: generators.solve(commuting(rng, 3, 24))[0],
    "Gemma-4 vision": lambda rng: reader.read(
        {"model_type": "gemma4_vision", "head_dim": 64}
    ).spec(),
    "LTX": lambda rng: reader.read(
        {
            "_class_name": "LTXVideoTransformer3DModel",
            "num_attention_heads": 3,
            "attention_head_dim": 64,
        }
    ).spec(),
}


@pytest.fixture(params=SPECS)
def rope(request, rng):
    return RotaryEmbedding.from_spec(SPECS[request.param](rng))


@pytest.fixture
def ids_for(rope, rng):
    """Positions of some tokens, that are fractional and negative, too."""

    def draw(tokens):
        ids = rng.uniform(-300.0, 300.0, size=(tokens, rope.axes))
        return ids if rope.axes > 1 else ids[:, 0]

    return draw


@pytest.fixture
def vectors(rope, rng):
    """Random vectors of some tokens."""
    return lambda tokens, dtype=np.float64: rng.normal(size=(1, tokens, 6, rope.head_dim)).astype(
        dtype
    )


def slack(rope):
    """Bound of the rounding between positions added as numbers and as angles, for pairs up to 6.

    A sum of two coordinates up to 300 errs by half an ulp of 600; the angle errs by the product of
    that and the frequency.
    """
    return 6 * (np.abs(rope.spec.inv_freq).sum(axis=1).max() * 600 * 2**-53 + 16 * 2**-53)


def test_rotation_is_the_oracles(rope, ids_for, vectors):
    """Each pair rotates by the sum of coordinate times frequency; the oracle uses 200 bits."""
    ids, x = ids_for(5), vectors(5)
    matrix = rope.spec.inv_freq[0]
    group = 6 // matrix.shape[1]
    exact = np.empty_like(x)
    for head in range(6):
        cos, sin = oracle.cos_sin_axes(np.reshape(ids, (5, rope.axes)), matrix[:, head // group])
        one = x[:, :, head : head + 1]
        exact[:, :, head : head + 1] = oracle.rotate(one, cos, sin, rope.interleaved, rope.blocks)[
            0
        ]
    np.testing.assert_allclose(rope.rotate(x, ids), exact, rtol=0, atol=8 * 2**-53 * 6)


def test_inverse_undoes_it(rope, ids_for, vectors):
    x, ids = vectors(7), ids_for(7)
    np.testing.assert_allclose(
        rope.rotate(rope.rotate(x, ids), ids, inverse=True), x, rtol=0, atol=1e-14
    )


def test_keys_move_by_an_offset_on_each_axis(rope, ids_for, vectors):
    keys, ids, delta = vectors(7), ids_for(7), ids_for(1)[0]
    moved = rope.shift(rope.rotate(keys, ids), delta)
    np.testing.assert_allclose(moved, rope.rotate(keys, ids + delta), rtol=0, atol=slack(rope))


def test_layouts_dtypes_and_plans_agree(rope, ids_for, vectors):
    """One plan, every layout and dtype, in place and not: the same bits."""
    ids = ids_for(11)
    for dtype in (np.float32, np.float16):
        x = vectors(11, dtype)
        whole = rope.rotate(x, ids)
        for layout in ("bhsd", "sbhd", "thd"):
            result = rope.plan(ids, layout=layout).rotate(oracle.to_layout(x, layout))
            assert np.array_equal(oracle.from_layout(result, layout), whole)
        again = x.copy()
        assert rope.rotate(again, ids, out=again) is again
        assert np.array_equal(again, whole)


def test_tokens_in_front_and_behind_stay_as_they_are(rope, vectors):
    if rope.axes == 1:
        pytest.skip("prefix tokens belong to grids")
    ids = positions.with_unrotated(positions.grid((3,) * rope.axes, start=1), before=5, after=2)
    x = vectors(len(ids), np.float32)
    rotated = rope.rotate(x, ids)
    assert np.array_equal(rotated[:, :5], x[:, :5])
    assert np.array_equal(rotated[:, -2:], x[:, -2:])
    assert np.abs(rotated - x)[:, 5:-2].max() > 0.1


def test_generators_with_their_basis_are_relative(vectors, rng):
    """Q·R(p)·Qᵀ is the operator: scores of folded queries and keys depend on differences only."""
    family = commuting(rng, 2, 16)
    described, basis = generators.solve(family)
    rope = RotaryEmbedding.from_spec(described)
    q, k = rng.normal(size=(2, 1, 5, 2, 16))
    m, n = rng.uniform(-3, 3, size=(2, 5, 2))
    folded = (rope.rotate(q @ basis, m) * rope.rotate(k @ basis, n)).sum(-1)
    alone = (q * (rope.rotate(k @ basis, n - m) @ basis.T)).sum(-1)
    # Products of 16 terms, and angles of up to 100 radians, err by a share of both vectors.
    reach = np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max()
    np.testing.assert_allclose(folded, alone, rtol=0, atol=16 * 16 * 2.0**-52 * reach)
