"""The rules of a scaling section: its keys, the arguments beside it, and refusals."""

import re

import numpy as np
import pytest
from refusals import assert_refused
from text_configs import LLAMA3_SCALING

from rope_cpu import RotaryEmbedding as R

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 4.0,
}
LONGROPE["original_max_position_embeddings"] = 16


PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5}


def test_equal_values_may_be_given_twice():
    assert R(8, rope_theta=5e5, scaling={"rope_theta": 500000}) == R(8, rope_theta=5e5)


def test_lengths_of_numpy_are_lengths():
    lengths = {"original_max_position_embeddings": 64, "factor": 2.0}
    ours, theirs = (
        R(8, scaling=LONGROPE | lengths | {"original_max_position_embeddings": kind(64)})
        for kind in (int, np.int64)
    )
    assert ours.at_length(65) == theirs.at_length(np.int64(65))


def test_a_length_that_plays_no_part_changes_nothing():
    """Every config has it."""
    assert R(8, max_position_embeddings=4096) == R(8)
    assert R(8, scaling={"max_position_embeddings": 4096}, max_position_embeddings=4096) == R(8)


def test_the_length_may_stand_in_the_section_alone():
    for section in (DYNAMIC, {**YARN, "factor": 4.0, "original_max_position_embeddings": None}):
        inside = R(8, scaling={**section, "max_position_embeddings": 16})
        assert inside == R(8, scaling=section, max_position_embeddings=16)


def test_odd_widths_below_the_head_are_accepted():
    """Their exponents are over the odd width, and one more element turns, as in transformers."""
    assert R(10, scaling={"partial_rotary_factor": 0.5}).rotary_dim == 6


def test_longrope_with_a_scale_for_each_length_needs_no_factor():
    section = {**LONGROPE, "factor": None, "short_mscale": 1.25, "long_mscale": 1.5}
    rope = R(8, scaling=section)
    assert (rope.at_length(16).attention_factor, rope.at_length(17).attention_factor) == (1.25, 1.5)


def test_an_unknown_key_is_refused_with_the_known_ones():
    known = "it must be one of factor, partial_rotary_factor, rope_type, type, rope_theta$"
    with pytest.raises(ValueError, match=f"`x` is not a key .*{known}"):
        R(8, scaling={"rope_type": "proportional", "x": 1})


LINEAR = {"rope_type": "linear", "factor": 2.0}
SCALED_YARN = {**YARN, "factor": 2.0}
POWERS = {"rope_type": "dynamic_powers"}
SHARE = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"

REFUSED_SECTIONS = [
    ({"rope_type": "ntk-by-parts"}, ValueError, "rope_type"),
    ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, ValueError, "rope_type"),
    ({"rope_type": "linear"}, ValueError, "factor"),
    ({**YARN, "attn_factor": 0.5}, ValueError, "attn_factor"),
    ({**YARN, "extrapolation_factor": 2}, ValueError, "extrapolation_factor"),
    ({**YARN, "rope_type": "telechat3-yarn", "mscale": 0.7}, ValueError, "mscale"),
    ({**YARN, "video_rope": True}, ValueError, "video_rope"),
    ({"rope_type": "ntk"}, ValueError, "factor"),
    ({**LINEAR, "beta": 1.0}, ValueError, "beta"),
    ({**LINEAR, "beta_fast": 1.0}, ValueError, "beta_fast"),
    ({**LINEAR, "factor": 0}, ValueError, "factor"),
    ({**LINEAR, "factor": float("nan")}, ValueError, "factor"),
    ({**LINEAR, "factor": "2"}, TypeError, "factor"),
    ({**LINEAR, "factor": True}, TypeError, "factor"),
    (DYNAMIC, ValueError, "max_position_embeddings"),
    ({"rope_type": "dynamic", "max_position_embeddings": 4}, ValueError, "factor"),
    ({"rope_type": "yarn", "factor": 2.0}, ValueError, ORIGINAL),
    (YARN, ValueError, "factor"),
    ({**SCALED_YARN, "truncate": 1}, TypeError, "truncate"),
    ({**SCALED_YARN, "rope_theta": 1.0}, ValueError, "rope_theta"),
    ({**LONGROPE, "short_factor": [1.0]}, ValueError, "short_factor"),
    ({**LONGROPE, "long_factor": [1.0]}, ValueError, "long_factor"),
    ({**LONGROPE, "long_factor": [1.0], "factor": 1.0}, ValueError, "long_factor"),
    ({**LONGROPE, "long_factor": ["a"] * 4}, TypeError, "long_factor"),
    ({**LONGROPE, "short_factor": [-1.0] * 4}, ValueError, "short_factor"),
    ({**LONGROPE, "short_factor": 1.0}, TypeError, "short_factor"),
    ({**LONGROPE, ORIGINAL: 1}, ValueError, ORIGINAL),
    ({**LONGROPE, ORIGINAL: 1, "short_mscale": 1.0}, ValueError, ORIGINAL),
    ({**LONGROPE, "factor": None, "short_mscale": 1.0}, ValueError, "factor"),
    ({**LLAMA3_SCALING, "low_freq_factor": 5.0}, ValueError, "high_freq_factor"),
    ({"mrope_section": [8, 12, 12]}, ValueError, "mrope_section"),
    ({"rope_theta": -5.0}, ValueError, "rope_theta"),
    ({"partial_rotary_factor": 1.5}, ValueError, "partial_rotary_factor"),
    ([], TypeError, "scaling"),
    ("llama3", TypeError, "scaling"),
    (0, TypeError, "scaling"),
    ({"max_position_embeddings": 16.5}, TypeError, "max_position_embeddings"),
    ({ORIGINAL: -3}, ValueError, ORIGINAL),
    ({"llama_4_scaling_beta": "x"}, TypeError, "llama_4_scaling_beta"),
    ({"finetuned": 1}, TypeError, "finetuned"),
    ({"factor": True}, TypeError, "factor"),
    ({**PROPORTIONAL, SHARE: 3.0}, ValueError, SHARE),
    ({**PROPORTIONAL, SHARE: 0.0}, ValueError, SHARE),
    ({**PROPORTIONAL, SHARE: 0.2}, ValueError, SHARE),
]


@pytest.mark.parametrize(("section", "error", "argument"), REFUSED_SECTIONS)
def test_sections_that_are_refused(section, error, argument):
    assert_refused(lambda: R(8, scaling=section), error, argument)


REFUSED = [
    (lambda: R(8, scaling={**DYNAMIC, "alpha": 2.0}, rotary_dim=2), ValueError, "rotary_dim"),
    (lambda: R(2, scaling=POWERS, max_position_embeddings=8), ValueError, "rotary_dim"),
    (lambda: R(8, scaling={"rope_theta": 5.0}, rope_theta=6.0), ValueError, "rope_theta"),
    (lambda: R(8, scaling={"partial_rotary_factor": 0.5}, rotary_dim=2), ValueError, "rotary_dim"),
    (lambda: R(8, scaling={"rope_type": "proportional"}, rotary_dim=2), ValueError, "rotary_dim"),
    (lambda: R(8, rotary_dim=7), ValueError, "rotary_dim"),
    (lambda: R(8, rotary_dim=10), ValueError, "rotary_dim"),
    (lambda: R(8, max_position_embeddings=1.5), TypeError, "max_position_embeddings"),
    (lambda: R(8, max_position_embeddings=0), ValueError, "max_position_embeddings"),
    (lambda: R(8, angle_dtype="float16"), ValueError, "angle_dtype"),
    (lambda: R(8, angle_dtype=np.array(["a", "b"])), ValueError, "angle_dtype"),
    (lambda: R(5), ValueError, "head_dim"),
    (lambda: R(7, scaling={"partial_rotary_factor": 1.0}), ValueError, "head_dim"),
    (lambda: R(5, scaling={"rope_type": "proportional"}), ValueError, "head_dim"),
    (lambda: R(8, rope_theta=np.ones(2), scaling={"rope_theta": 1e4}), TypeError, "rope_theta"),
    (lambda: R(8, rope_theta=1e4, scaling={"rope_theta": np.ones(2)}), TypeError, "rope_theta"),
    (lambda: R(8, rope_theta=10**400), ValueError, "rope_theta"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals(call, error, argument):
    assert_refused(call, error, argument)


def test_a_length_that_differs_from_that_of_the_section_is_refused():
    section = {**DYNAMIC, "max_position_embeddings": 16}
    with pytest.raises(ValueError, match=r"`max_position_embeddings` is 32; .* 16; give it once"):
        R(8, scaling=section, max_position_embeddings=32)


UNUSABLE = [
    ({"rope_theta": 1e300}, "`rope_theta` 1e+300: a frequency comes to 0.0"),
    ({"rope_theta": 1e-300}, "`rope_theta` 1e-300: a frequency comes to inf"),
    ({"rope_theta": 1e-30}, "frequencies must be finite, above 0 and at most 2^40"),
    ({"scaling": {**LINEAR, "factor": 1e300}}, "`factor` 1e+300: a frequency comes to 0.0"),
    ({"scaling": {**PROPORTIONAL, "factor": 1e300}}, "a frequency comes to 0.0"),
    ({"scaling": {"rope_type": "dynamic", "alpha": 1e300}}, "`alpha` 1e+300: values overflow"),
    ({"scaling": {"rope_type": "ntk", "factor": 8.0, "mixed_b": 1e4}}, "`mixed_b` 10000.0"),
]


@pytest.mark.parametrize(("arguments", "finding"), UNUSABLE)
def test_frequencies_that_are_out_of_range_are_refused(arguments, finding):
    with pytest.raises(ValueError, match=re.escape(finding)):
        R(8, angle_dtype="float32", **arguments)


def test_frequencies_of_a_length_that_are_out_of_range_are_refused():
    lengths = {"max_position_embeddings": 16, "angle_dtype": "float32"}
    rope = R(8, rope_theta=1e30, scaling=DYNAMIC, **lengths)
    with pytest.raises(ValueError, match="`seq_len` 1"):
        rope.at_length(10**15)
