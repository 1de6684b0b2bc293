"""The rules of a scaling section: its keys, the arguments beside it, and refusals."""

import numpy as np
import pytest
from refusals import assert_refused

from rope_cpu import RotaryEmbedding as R

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 4.0,
}
LONGROPE["original_max_position_embeddings"] = 16


def proportional(share):
    return R(8, scaling={"rope_type": "proportional", "partial_rotary_factor": share})


def test_equal_values_may_be_given_twice():
    assert R(8, rope_theta=5e5, scaling={"rope_theta": 500000}) == R(8, rope_theta=5e5)


def test_lengths_of_numpy_are_lengths():
    lengths = {"original_max_position_embeddings": 64, "factor": 2.0}
    ours, theirs = (
        R(8, scaling=LONGROPE | lengths | {"original_max_position_embeddings": kind(64)})
        for kind in (int, np.int64)
    )
    assert ours.at_length(65) == theirs.at_length(np.int64(65))


def test_an_error_names_the_length_that_was_given():
    """Not the longest one of the same frequencies, for which they are computed."""
    rope = R(
        8, rope_theta=1e300, scaling={"rope_type": "dynamic_powers"}, max_position_embeddings=1
    )
    with pytest.raises(ValueError, match=f"`seq_len` {2**53 - 1}:"):
        rope.at_length(2**53 - 1)


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


REFUSED = [
    (lambda: R(8, scaling={"rope_type": "ntk-by-parts"}), ValueError, "rope_type"),
    (
        lambda: R(8, scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0}),
        ValueError,
        "rope_type",
    ),
    (lambda: R(8, scaling={"rope_type": "linear"}), ValueError, "factor"),
    (lambda: R(8, scaling=YARN | {"attn_factor": 0.5}), ValueError, "attn_factor"),
    (lambda: R(8, scaling=YARN | {"extrapolation_factor": 2}), ValueError, "extrapolation_factor"),
    (
        lambda: R(8, scaling=YARN | {"rope_type": "telechat3-yarn", "mscale": 0.7}),
        ValueError,
        "mscale",
    ),
    (lambda: R(8, scaling=YARN | {"video_rope": True}), ValueError, "video_rope"),
    (lambda: R(8, scaling={"rope_type": "ntk"}), ValueError, "factor"),
    (
        lambda: R(8, scaling={"rope_type": "ntk", "factor": 8.0, "mixed_b": 1e4}),
        ValueError,
        "rope_theta",
    ),
    (lambda: R(8, scaling={"rope_type": "linear", "factor": 2.0, "beta": 1.0}), ValueError, "beta"),
    (
        lambda: R(8, scaling={"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0}),
        ValueError,
        "beta_fast",
    ),
    (lambda: R(8, scaling={"rope_type": "linear", "factor": 0}), ValueError, "factor"),
    (lambda: R(8, scaling={"rope_type": "linear", "factor": float("nan")}), ValueError, "factor"),
    (lambda: R(8, scaling={"rope_type": "linear", "factor": "2"}), TypeError, "factor"),
    (lambda: R(8, scaling={"rope_type": "linear", "factor": True}), TypeError, "factor"),
    (
        lambda: R(8, scaling={"rope_type": "dynamic", "factor": 2.0}),
        ValueError,
        "max_position_embeddings",
    ),
    (
        lambda: R(8, scaling={"rope_type": "dynamic"}, max_position_embeddings=4),
        ValueError,
        "factor",
    ),
    (
        lambda: R(8, scaling={"rope_type": "yarn", "factor": 2.0}),
        ValueError,
        "original_max_position_embeddings",
    ),
    (lambda: R(8, scaling=YARN), ValueError, "factor"),
    (lambda: R(8, scaling={**YARN, "factor": 2.0, "truncate": 1}), TypeError, "truncate"),
    (lambda: R(8, scaling={**YARN, "factor": 2.0, "rope_theta": 1.0}), ValueError, "rope_theta"),
    (lambda: R(8, scaling={**LONGROPE, "short_factor": [1.0]}), ValueError, "short_factor"),
    (
        lambda: R(8, scaling={**LONGROPE, "long_factor": [1.0], "factor": 1.0}),
        ValueError,
        "long_factor",
    ),
    (lambda: R(8, scaling={**LONGROPE, "short_factor": [-1.0] * 4}), ValueError, "short_factor"),
    (lambda: R(8, scaling={**LONGROPE, "short_factor": 1.0}), TypeError, "short_factor"),
    (lambda: R(8, scaling={**LLAMA3, "low_freq_factor": 5.0}), ValueError, "high_freq_factor"),
    (
        lambda: R(8, scaling={"rope_type": "dynamic", "alpha": 2.0}, rotary_dim=2),
        ValueError,
        "rotary_dim",
    ),
    (
        lambda: R(
            8, scaling={"rope_type": "dynamic_powers"}, rotary_dim=2, max_position_embeddings=8
        ),
        ValueError,
        "rotary_dim",
    ),
    (lambda: R(8, scaling={"mrope_section": [8, 12, 12]}), ValueError, "mrope_section"),
    (lambda: R(8, scaling={"rope_theta": 5.0}, rope_theta=6.0), ValueError, "rope_theta"),
    (lambda: R(8, scaling={"rope_theta": -5.0}), ValueError, "rope_theta"),
    (lambda: R(8, scaling={"partial_rotary_factor": 0.5}, rotary_dim=2), ValueError, "rotary_dim"),
    (lambda: R(8, scaling={"partial_rotary_factor": 1.5}), ValueError, "partial_rotary_factor"),
    (lambda: R(8, scaling={"rope_type": "proportional"}, rotary_dim=2), ValueError, "rotary_dim"),
    (lambda: R(8, rotary_dim=7), ValueError, "rotary_dim"),
    (lambda: R(8, rotary_dim=10), ValueError, "rotary_dim"),
    (lambda: R(8, max_position_embeddings=1.5), TypeError, "max_position_embeddings"),
    (lambda: R(8, angle_dtype="float16"), ValueError, "angle_dtype"),
    (lambda: R(8, scaling=[]), TypeError, "scaling"),
    (lambda: R(8, scaling=""), TypeError, "scaling"),
    (lambda: R(8, scaling=0), TypeError, "scaling"),
    (lambda: R(8, scaling="llama3"), TypeError, "scaling"),
    (lambda: R(8, scaling={"max_position_embeddings": 16.5}), TypeError, "max_position_embeddings"),
    (
        lambda: R(8, scaling={"max_position_embeddings": "abc"}),
        TypeError,
        "max_position_embeddings",
    ),
    (
        lambda: R(8, scaling={"original_max_position_embeddings": -3}),
        ValueError,
        "original_max_position_embeddings",
    ),
    (lambda: R(8, scaling={"llama_4_scaling_beta": "x"}), TypeError, "llama_4_scaling_beta"),
    (lambda: R(8, scaling={"finetuned": 1}), TypeError, "finetuned"),
    (lambda: R(8, scaling={"factor": True}), TypeError, "factor"),
    (
        lambda: R(
            8, scaling={**DYNAMIC, "max_position_embeddings": 16}, max_position_embeddings=32
        ),
        ValueError,
        "max_position_embeddings",
    ),
    (lambda: R(8, max_position_embeddings=0), ValueError, "max_position_embeddings"),
    (lambda: proportional(3.0), ValueError, "partial_rotary_factor"),
    (lambda: proportional(0.0), ValueError, "partial_rotary_factor"),
    (lambda: proportional(0.2), ValueError, "partial_rotary_factor"),
    (lambda: R(5), ValueError, "head_dim"),
    (lambda: R(7, scaling={"partial_rotary_factor": 1.0}), ValueError, "head_dim"),
    (lambda: R(5, scaling={"rope_type": "proportional"}), ValueError, "head_dim"),
    (
        lambda: R(8, rope_theta=np.array([1.0, 2.0]), scaling={"rope_theta": 1e4}),
        TypeError,
        "rope_theta",
    ),
    (lambda: R(8, rope_theta=1e4, scaling={"rope_theta": np.ones(2)}), TypeError, "rope_theta"),
    (lambda: R(8, rope_theta=10**400), ValueError, "rope_theta"),
    (lambda: R(8, rope_theta=1e300, angle_dtype="float32"), ValueError, "rope_theta"),
    (lambda: R(8, rope_theta=1e-300, angle_dtype="float32"), ValueError, "rope_theta"),
    (lambda: R(8, rope_theta=1e-30), ValueError, "rope_theta"),
    (
        lambda: R(8, scaling={"rope_type": "linear", "factor": 1e300}, angle_dtype="float32"),
        ValueError,
        "rope_theta",
    ),
    (
        lambda: R(
            8,
            scaling={"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 1e300},
            angle_dtype="float32",
        ),
        ValueError,
        "rope_theta",
    ),
    (lambda: R(8, scaling={"rope_type": "dynamic", "alpha": 1e300}), ValueError, "rope_theta"),
    (
        lambda: R(
            8, rope_theta=1e30, scaling=DYNAMIC, max_position_embeddings=16, angle_dtype="float32"
        ).at_length(10**15),
        ValueError,
        "rope_theta",
    ),
    (
        lambda: R(8, scaling={**LONGROPE, "original_max_position_embeddings": 1}),
        ValueError,
        "original_max_position_embeddings",
    ),
    (
        lambda: R(
            8, scaling={**LONGROPE, "original_max_position_embeddings": 1, "short_mscale": 1.0}
        ),
        ValueError,
        "original_max_position_embeddings",
    ),
    (lambda: R(8, scaling={**LONGROPE, "factor": None, "short_mscale": 1.0}), ValueError, "factor"),
    (lambda: R(8, scaling={**LONGROPE, "long_factor": [1.0]}), ValueError, "long_factor"),
    (lambda: R(8, scaling={**LONGROPE, "long_factor": ["a"] * 4}), TypeError, "long_factor"),
    (lambda: R(8, angle_dtype=np.array(["a", "b"])), ValueError, "angle_dtype"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals(call, error, argument):
    assert_refused(call, error, argument)
