"""Frequencies of several axes against closed forms written out here, element by element."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from oracle import inv_freq
from refusals import assert_refused

from rope_cpu import RotaryEmbedding as R
from rope_cpu.frequencies import axes


def matrix(spec):
    assert spec.inv_freq.shape[0] == spec.inv_freq.shape[2] == 1
    return spec.inv_freq[0, :, 0]


@pytest.mark.parametrize(
    ("head_dim", "count"), [(4, 2), (64, 2), (12, 3), (96, 3), (32, 4), (40, 5), (2, 1)]
)
@pytest.mark.parametrize("span", ["axis", "head"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_axial_shares_equally(head_dim, count, span, interleaved):
    spec = axes.axial(head_dim, count, span=span, interleaved=interleaved, rope_theta=100.0)
    width = head_dim // count
    expected = np.zeros((count, head_dim // 2))
    for axis in range(count):
        expected[axis, axis * width // 2 : (axis + 1) * width // 2] = inv_freq(width, 100.0)
    np.testing.assert_allclose(matrix(spec), expected, rtol=1e-14)
    assert spec.blocks == ((width,) * count if span == "axis" and not interleaved else (head_dim,))
    assert (spec.axes, spec.rotary_dim, spec.interleaved) == (count, head_dim, interleaved)


def test_unequal_shares_and_bases():
    spec = axes.axial(128, 3, axis_dims=(16, 56, 56), rope_theta=(256.0, 1e4, 1e6))
    rows = matrix(spec)
    np.testing.assert_allclose(rows[0, :8], inv_freq(16, 256.0), rtol=1e-14)
    np.testing.assert_allclose(rows[1, 8:36], inv_freq(56, 1e4), rtol=1e-14)
    np.testing.assert_allclose(rows[2, 36:], inv_freq(56, 1e6), rtol=1e-14)
    assert np.count_nonzero(rows) == 64
    assert spec.blocks == (16, 56, 56)


def test_elements_past_the_shares_are_not_rotated():
    spec = axes.axial(80, 3, axis_dims=(26, 26, 26))
    assert (spec.head_dim, spec.rotary_dim) == (80, 78)


@pytest.mark.parametrize("section", [(16, 24, 24), (1, 0, 3), (2, 2)])
def test_chunked_mrope_owns_runs(section):
    pairs = sum(section)
    spec = axes.mrope(2 * pairs, section, rope_theta=1e6)
    frequencies = inv_freq(2 * pairs, 1e6)
    owner = [axis for axis, count in enumerate(section) for _ in range(count)]
    for axis in range(len(section)):
        expected = [w if o == axis else 0.0 for w, o in zip(frequencies, owner, strict=True)]
        np.testing.assert_allclose(matrix(spec)[axis], expected, rtol=1e-14)
    assert spec.shared_id


@pytest.mark.parametrize("section", [(24, 20, 20), (11, 11, 10), (2, 1, 1)])
def test_interleaved_mrope_gives_pairs_to_axes_by_turns(section):
    pairs = sum(section)
    rows = matrix(axes.mrope(2 * pairs, section, rope_theta=5e6, mrope_interleaved=True))
    for pair, frequency in enumerate(inv_freq(2 * pairs, 5e6)):
        if pair % 3 == 1 and pair < 3 * section[1]:
            owner = 1
        elif pair % 3 == 2 and pair < 3 * section[2]:
            owner = 2
        else:
            owner = 0
        assert rows[owner, pair] == pytest.approx(frequency, rel=1e-14)
        assert np.count_nonzero(rows[:, pair]) == 1


def test_axes_of_mrope_add_up_to_text():
    """A token with one id on all axes rotates as in a model of one axis."""
    text = axes.base_frequencies(1e4, 64)
    for interleaved in (False, True):
        spec = axes.mrope(64, (12, 10, 10), rope_theta=1e4, mrope_interleaved=interleaved)
        assert np.array_equal(matrix(spec).sum(axis=0), text)
        assert np.array_equal(matrix(spec)[spec.pair_axis, np.arange(32)], text)


def test_scaled_mrope():
    """Linear scaling slows down every pair, on its own axis; yarn brings its attention factor."""
    plain, slow = (
        axes.mrope(64, (12, 10, 10), rope_theta=1e6, scaling=s)
        for s in (None, {"type": "linear", "factor": 4.0})
    )
    np.testing.assert_allclose(matrix(slow), matrix(plain) / 4, rtol=1e-15)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = axes.mrope(64, (12, 10, 10), rope_theta=1e6, mrope_interleaved=True, scaling=yarn)
    assert spec.attention_factor.tolist() == pytest.approx([0.1 * math.log(4) + 1], rel=1e-15)
    assert spec.shared_id


def test_sections_of_files_may_repeat_the_shares():
    section = {"type": "mrope", "mrope_section": [8, 12, 12], "mrope_interleaved": False}
    assert axes.mrope(64, (8, 12, 12), rope_theta=1e6, scaling=section) == axes.mrope(
        64, [8, 12, 12], rope_theta=1e6
    )
    with pytest.raises(ValueError, match=r"`mrope_section` is .*; .* `scaling`, .8, 12, 12."):
        axes.mrope(64, (16, 8, 8), rope_theta=1e6, scaling=section)


def test_partial_mrope():
    spec = axes.mrope(128, (8, 12, 12), rope_theta=1e4, interleaved=True)
    assert (spec.rotary_dim, spec.head_dim, spec.interleaved) == (64, 128, True)


class Stretch:
    """A length rule: frequencies fall in proportion to the length."""

    original_length = 1

    def frequencies(self, length: int):
        return np.arange(1.0, 5.0) / length, 2.0

    def __eq__(self, other):
        return isinstance(other, Stretch)

    def __hash__(self):
        return 7


def test_length_rules_are_spread_too():
    text = axes.from_inv_freq(np.arange(1.0, 5.0), length_rule=Stretch())
    spec = axes.to_mrope(text, (2, 1, 1), False)
    at = spec.at_length([2, 4])
    assert spec.needs_length
    assert not at.needs_length
    assert at.inv_freq[:, :, 0].tolist() == [
        [[0.5, 1, 0, 0], [0, 0, 1.5, 0], [0, 0, 0, 2]],
        [[0.25, 0.5, 0, 0], [0, 0, 0.75, 0], [0, 0, 0, 1]],
    ]
    assert at.attention_factor.tolist() == [2.0, 2.0]
    assert pickle.loads(pickle.dumps(spec)) == spec


def mrope(shares=(2, 1, 1), rope_theta=1e4, **options):
    return R.mrope(8, shares, rope_theta=rope_theta, **options)


def test_a_section_may_repeat_the_arguments_of_mrope():
    held = {"rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    assert mrope(mrope_interleaved=True, scaling=held) == mrope(mrope_interleaved=True)


REFUSED = [
    (lambda: R.axial(64, 3), ValueError, "head_dim"),
    (lambda: R.axial(64, 0), ValueError, "axes"),
    (lambda: R.axial(64, 2, span="block"), ValueError, "span"),
    (lambda: R.axial(64, 2, axis_dims=(16, 24, 24)), ValueError, "axis_dims"),
    (lambda: R.axial(64, 2, axis_dims=(31, 33)), ValueError, "axis_dims"),
    (lambda: R.axial(64, 2, axis_dims=(32, 34)), ValueError, "axis_dims"),
    (lambda: R.axial(64, 2, rope_theta=(1e4, 1e4, 1e4)), ValueError, "rope_theta"),
    (lambda: R.axial(64, 2, rope_theta=-1.0), ValueError, "rope_theta"),
    (lambda: R.axial(64, 2, rope_theta="1e4"), TypeError, "rope_theta"),
    (lambda: R.axial(64.0, 2), TypeError, "head_dim"),
    (lambda: R.mrope(64, (8, 12, 16), rope_theta=1e4), ValueError, "mrope_section"),
    (lambda: R.mrope(64, (), rope_theta=1e4), ValueError, "mrope_section"),
    (lambda: R.mrope(64, (8, -2, 26), rope_theta=1e4), ValueError, "mrope_section"),
    (
        lambda: axes.to_mrope(axes.from_inv_freq(range(1, 9)), (2, 2, 2), False),
        ValueError,
        "mrope_section",
    ),
    (lambda: axes.mrope_pair_axis((1, 3, 4), True), ValueError, "mrope_section"),
    (lambda: mrope(scaling=[]), TypeError, "scaling"),
    (lambda: mrope(mrope_interleaved="no"), TypeError, "mrope_interleaved"),
    (lambda: mrope(mrope_interleaved=1), TypeError, "mrope_interleaved"),
    (lambda: mrope(scaling={"mrope_interleaved": 0}), TypeError, "mrope_interleaved"),
    (lambda: mrope(scaling={"mrope_interleaved": True}), ValueError, "mrope_interleaved"),
    (lambda: mrope(rope_theta=None), TypeError, "rope_theta"),
    (lambda: mrope(rope_theta=None, scaling={"rope_theta": 1e4}), TypeError, "rope_theta"),
    (lambda: mrope(scaling={"rope_theta": 5.0}), ValueError, "rope_theta"),
    (lambda: mrope([4, 1, 1]), ValueError, "mrope_section"),
    (lambda: mrope(None), TypeError, "mrope_section"),
    (lambda: mrope(None, scaling={"mrope_section": [2, 1, 1]}), TypeError, "mrope_section"),
    (
        lambda: mrope(mrope_interleaved=None, scaling={"mrope_interleaved": True}),
        TypeError,
        "mrope_interleaved",
    ),
    (lambda: mrope(4), TypeError, "mrope_section"),
    (lambda: mrope(scaling={"mrope_section": 4}), TypeError, "mrope_section"),
    (lambda: R.axial(8, axis_dims=4), TypeError, "axis_dims"),
    (lambda: R.axial(8, axis_dims="44"), TypeError, "axis_dims"),
    (lambda: R.axial(8, rope_theta=None), TypeError, "rope_theta"),
    (lambda: R.axial(8, rope_theta=np.array(1e4)), TypeError, "rope_theta"),
    (lambda: R.axial(8, span=np.array(["axis", "head"])), ValueError, "span"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals(call, error, argument):
    assert_refused(call, error, argument)
