"""Every refusal of a constructor names the argument, its value and the rule."""

import re

import numpy as np
import pytest

import rope_cpu
from rope_cpu import RotaryEmbedding, sinusoidal

R = RotaryEmbedding
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
X, TABLE = np.zeros((2, 3, 4), np.float32), np.zeros((8, 4), np.float32)


def proportional(share):
    return R(8, scaling={"rope_type": "proportional", "partial_rotary_factor": share})


def mrope(shares=(2, 1, 1), rope_theta=1e4, **options):
    return R.mrope(8, shares, rope_theta=rope_theta, **options)


WRONG = {
    # A section: what it is, and what its keys hold, whatever the type.
    "section is a list": (lambda: R(8, scaling=[]), TypeError, "`scaling` is []; it must be None or a dict"),
    "section is empty text": (lambda: R(8, scaling=""), TypeError, "`scaling` is ''"),
    "section is 0": (lambda: R(8, scaling=0), TypeError, "`scaling` is 0"),
    "section is a name": (lambda: R(8, scaling="llama3"), TypeError, "`scaling` is 'llama3'; it must be None or a dict in Hugging Face form"),
    "section of M-RoPE": (lambda: mrope(scaling=[]), TypeError, "`scaling` is []"),
    "unused length": (lambda: R(8, scaling={"max_position_embeddings": 16.5}), TypeError, "`max_position_embeddings` is 16.5; it must be an integer"),
    "unused length as text": (lambda: R(8, scaling={"max_position_embeddings": "abc"}), TypeError, "`max_position_embeddings` is 'abc'"),
    "unused original length": (lambda: R(8, scaling={"original_max_position_embeddings": -3}), ValueError, "`original_max_position_embeddings` is -3; it must be at least 1"),
    "unused beta": (lambda: R(8, scaling={"llama_4_scaling_beta": "x"}), TypeError, "`llama_4_scaling_beta` is 'x'"),
    "unused flag": (lambda: R(8, scaling={"finetuned": 1}), TypeError, "`finetuned` is 1; it must be True or False"),
    "factor of no scaling": (lambda: R(8, scaling={"factor": True}), TypeError, "`factor` is True"),
    "length said twice": (
        lambda: R(8, scaling={**DYNAMIC, "max_position_embeddings": 16}, max_position_embeddings=32),
        ValueError,
        "`max_position_embeddings` is 32, but `scaling` says 16; say it once",
    ),
    "length": (lambda: R(8, max_position_embeddings=0), ValueError, "`max_position_embeddings` is 0"),
    "proportional above 1": (lambda: proportional(3.0), ValueError, "`partial_rotary_factor` is 3.0; it must be above 0 and at most 1"),
    "proportional of 0": (lambda: proportional(0.0), ValueError, "`partial_rotary_factor` is 0.0; it must be above 0"),
    "proportional of no pair": (lambda: proportional(0.2), ValueError, "`partial_rotary_factor` is 0.2; of head_dim 8 it rotates nothing"),
    # Widths.
    "odd head": (lambda: R(5), ValueError, "`rotary_dim` is 5, that of the whole head; it must be even"),
    "odd share": (lambda: R(7, scaling={"partial_rotary_factor": 1.0}), ValueError, "`rotary_dim` is 7, that of the whole head; it must be even"),
    "odd proportional": (lambda: R(5, scaling={"rope_type": "proportional"}), ValueError, "`rotary_dim` is 5"),
    # Bases, and frequencies that are none.
    "array of bases": (lambda: R(8, rope_theta=np.array([1.0, 2.0]), scaling={"rope_theta": 1e4}), TypeError, "`rope_theta` is array([1., 2.])"),
    "array of bases in the section": (lambda: R(8, rope_theta=1e4, scaling={"rope_theta": np.ones(2)}), TypeError, "`rope_theta` is array"),
    "base beyond float64": (lambda: R(8, rope_theta=10**400), ValueError, "it must be finite and above 0"),
    "base beyond float32": (lambda: R(8, rope_theta=1e300, angle_dtype="float32"), ValueError, "`rope_theta` 1e+300: a frequency comes to 0.0 in float32"),
    "base below float32": (lambda: R(8, rope_theta=1e-300, angle_dtype="float32"), ValueError, "`rope_theta` 1e-300: a frequency comes to inf in float32"),
    "base of too fast pairs": (lambda: R(8, rope_theta=1e-30), ValueError, "frequencies must be finite, above 0 and at most 2^40"),
    "factor beyond float32": (
        lambda: R(8, scaling={"rope_type": "linear", "factor": 1e300}, angle_dtype="float32"),
        ValueError,
        "`rope_theta` 10000.0, `factor` 1e+300: a frequency comes to 0.0",
    ),
    "factor of proportional": (
        lambda: R(8, scaling={"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 1e300}, angle_dtype="float32"),
        ValueError,
        "a frequency comes to 0.0",
    ),
    "overflow": (lambda: R(8, scaling={"rope_type": "dynamic", "alpha": 1e300}), ValueError, "`alpha` 1e+300: values overflow in float64"),
    "length that overflows": (
        lambda: R(8, scaling=DYNAMIC, max_position_embeddings=16, angle_dtype="float32").at_length(10**60),
        ValueError,
        "`seq_len` 1",
    ),
    "too fast": (lambda: R.from_inv_freq([1.0, -(2.0**41)]), ValueError, "`inv_freq` holds -2199023255552.0, which is beyond ±2^40 radians per position"),
    "too fast generators": (lambda: R.from_generators([[0.0, 1e200], [-1e200, 0.0]]), ValueError, "`generators`[0] reaches 1e+200, which is beyond ±2^40"),
    # LongRoPE says what is wrong with the long length when it is made.
    "no logarithm": (lambda: R(8, scaling={**LONGROPE, "original_max_position_embeddings": 1}), ValueError, "`original_max_position_embeddings` is 1; rope type 'longrope' divides by its logarithm, so it must be > 1"),
    "no logarithm at the long length": (
        lambda: R(8, scaling={**LONGROPE, "original_max_position_embeddings": 1, "short_mscale": 1.0}),
        ValueError,
        "`original_max_position_embeddings` is 1",
    ),
    "no factor at the long length": (lambda: R(8, scaling={**LONGROPE, "factor": None, "short_mscale": 1.0}), ValueError, "`factor` is missing"),
    "long factors": (lambda: R(8, scaling={**LONGROPE, "long_factor": [1.0]}), ValueError, "`long_factor` has 1 entries; it needs one for each of 4 pairs"),
    "long factors are text": (lambda: R(8, scaling={**LONGROPE, "long_factor": ["a"] * 4}), TypeError, "`long_factor` is 'a'"),
    # from_inv_freq and from_spec.
    "factor is text": (lambda: R.from_inv_freq([1], attention_factor="2"), TypeError, "`attention_factor` is '2'; it must be a number"),
    "factor is a name": (lambda: R.from_inv_freq([1], attention_factor="abc"), TypeError, "`attention_factor` is 'abc'"),
    "factor is a bool": (lambda: R.from_inv_freq([1], attention_factor=True), TypeError, "`attention_factor` is True"),
    "factor is none": (lambda: R.from_inv_freq([1], attention_factor=None), TypeError, "`attention_factor` is None"),
    "factor is an array": (lambda: R.from_inv_freq([1], attention_factor=np.ones(2)), TypeError, "`attention_factor` is array([1., 1.])"),
    "masked frequencies": (lambda: R.from_inv_freq(np.ma.array([1.0])), TypeError, "`inv_freq` is a masked array"),
    "factor beyond the range of float32": (lambda: R.from_inv_freq([1], attention_factor=1e39), ValueError, "`attention_factor` is 1e+39; it must be from 2^-126"),
    "inverse beyond float32": (lambda: R.from_inv_freq([1], attention_factor=1e-39), ValueError, "`attention_factor` is 1e-39"),
    "infinite factor": (lambda: R.from_inv_freq([1], attention_factor=np.inf), ValueError, "`attention_factor` is inf"),
    "ragged": (lambda: R.from_inv_freq([[1.0], [1.0, 2.0]]), ValueError, "`inv_freq` is a list of unequal rows; it must be a regular array"),
    "ragged generators": (lambda: R.from_generators([[1.0], [1.0, 2.0]]), ValueError, "`generators` is a list of unequal rows"),
    "array of a block": (lambda: R.from_inv_freq([1, 2], blocks=np.array(2)), TypeError, "`blocks` is array(2); it must be an integer"),
    "array of blocks": (lambda: R.from_inv_freq([1, 2], blocks=np.ones((1, 2), int)), TypeError, "`blocks` is array([[1, 1]]); it must be a sequence of integers"),
    "ragged blocks": (lambda: R.from_inv_freq([1, 2], blocks=[[2], [1, 1]]), TypeError, "`blocks` is [2]; it must be an integer"),
    "array of pairings": (lambda: R.from_inv_freq([1], interleaved=np.array([1, 2])), TypeError, "`interleaved` is array([1, 2]); it must be True or False"),
    "angle_dtype": (lambda: R(8, angle_dtype=np.array(["a", "b"])), ValueError, "`angle_dtype` is array"),
    "spec": (lambda: R.from_spec("x"), TypeError, "`spec` is 'x'; it must be a RopeSpec"),
    # Several axes.
    "dealt out": (lambda: mrope(mrope_interleaved="no"), TypeError, "`mrope_interleaved` is 'no'; it must be True or False"),
    "dealt out by 1": (lambda: mrope(mrope_interleaved=1), TypeError, "`mrope_interleaved` is 1"),
    "dealt out in the section": (lambda: mrope(scaling={"mrope_interleaved": 0}), TypeError, "`mrope_interleaved` is 0"),
    "dealt out twice": (lambda: mrope(scaling={"mrope_interleaved": True}), ValueError, "`mrope_interleaved` is False, but `scaling` says True; say it once"),
    "no base": (lambda: mrope(rope_theta=None), TypeError, "`rope_theta` is None; it must be a number"),
    "no base, but the section's": (lambda: mrope(rope_theta=None, scaling={"rope_theta": 1e4}), TypeError, "`rope_theta` is None"),
    "two bases": (lambda: mrope(scaling={"rope_theta": 5.0}), ValueError, "`rope_theta` is 10000.0, but `scaling` says 5.0"),
    "shares beyond the head": (lambda: mrope([4, 1, 1]), ValueError, "`mrope_section` is (4, 1, 1), 6 pairs; head_dim 8 has 4"),
    "no shares": (lambda: mrope(None), TypeError, "`mrope_section` is None; it must be a sequence of integers"),
    "no shares, but the section's": (lambda: mrope(None, scaling={"mrope_section": [2, 1, 1]}), TypeError, "`mrope_section` is None"),
    "dealt out by none": (lambda: mrope(mrope_interleaved=None, scaling={"mrope_interleaved": True}), TypeError, "`mrope_interleaved` is None"),
    "one share": (lambda: mrope(4), TypeError, "`mrope_section` is 4; it must be a sequence of integers"),
    "one share in the section": (lambda: mrope(scaling={"mrope_section": 4}), TypeError, "`mrope_section` is 4"),
    "one width": (lambda: R.axial(8, axis_dims=4), TypeError, "`axis_dims` is 4; it must be a sequence of integers"),
    "width as text": (lambda: R.axial(8, axis_dims="44"), TypeError, "`axis_dims` is '44'"),
    "no base of an axis": (lambda: R.axial(8, rope_theta=None), TypeError, "`rope_theta` is None"),
    "array of one base": (lambda: R.axial(8, rope_theta=np.array(1e4)), TypeError, "`rope_theta` is array(10000.)"),
    "span": (lambda: R.axial(8, span=np.array(["axis", "head"])), ValueError, "`span` is array"),
    # Sinusoidal tables, and compiling ahead.
    "table of integers": (lambda: sinusoidal(3, 4, dtype=int), TypeError, "`dtype` is <class 'int'>; it must be float32"),
    "table of no dtype": (lambda: sinusoidal(3, 4, dtype=None), TypeError, "`dtype` is None"),
    "pairing of a table": (lambda: sinusoidal(3, 4, interleaved="no"), TypeError, "`interleaved` is 'no'; it must be True or False"),
    "base of a table": (lambda: sinusoidal(3, 4, base="2"), TypeError, "`base` is '2'; it must be a number"),
    "fast base of a table": (lambda: sinusoidal(3, 8, base=1e-300), ValueError, "`base` is 1e-300; its frequencies must be at most 2^40"),
    "nothing to compile": (lambda: rope_cpu.warmup(None), TypeError, "`dtypes` holds None; each must be one of float32"),
    "nothing among dtypes": (lambda: rope_cpu.warmup(["float32", None]), TypeError, "`dtypes` holds None"),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", WRONG)
def test_refused(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_length_that_plays_no_part_changes_nothing():
    """Configs always say it."""
    assert R(8, max_position_embeddings=4096) == R(8)
    assert R(8, scaling={"max_position_embeddings": 4096}, max_position_embeddings=4096) == R(8)


def test_the_length_may_stand_in_the_section_alone():
    for section in (DYNAMIC, {**YARN, "original_max_position_embeddings": None}):
        inside = R(8, scaling={**section, "max_position_embeddings": 16})
        assert inside == R(8, scaling=section, max_position_embeddings=16)


def test_a_section_may_repeat_what_mrope_is_told():
    held = {"rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    assert mrope(mrope_interleaved=True, scaling=held) == mrope(mrope_interleaved=True)


def test_the_fastest_frequency_is_accepted():
    assert R.from_inv_freq([2.0**40, -(2.0**40)]).inv_freq.tolist() == [2.0**40, -(2.0**40)]


def test_odd_widths_below_the_head_are_accepted():
    """Their exponents are over the odd width, and one more element turns, as in transformers."""
    assert R(10, scaling={"partial_rotary_factor": 0.5}).rotary_dim == 6


def test_longrope_with_a_scale_for_each_length_needs_no_factor():
    section = {**LONGROPE, "factor": None, "short_mscale": 1.25, "long_mscale": 1.5}
    rope = R(8, scaling=section)
    assert (rope.at_length(16).attention_factor, rope.at_length(17).attention_factor) == (1.25, 1.5)


def test_tables_of_bfloat16_are_rounded_once():
    table, exact = sinusoidal(3000, 16, dtype="bfloat16"), sinusoidal(3000, 16, dtype=np.float64)
    # Half a unit in the last of 8 bits, of values up to 1: rounding by way of float32 would go beyond it.
    half = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-100))) - 8)
    assert (np.abs(table.astype(np.float64) - exact) <= half).all()
