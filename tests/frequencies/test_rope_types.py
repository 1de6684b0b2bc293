"""Every rope type against its formula in 40 digits, at every length."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpmath import mp, mpf
from text_configs import LLAMA3_SCALING

from rope_cpu import RotaryEmbedding
from rope_cpu.frequencies.rope_types import ROPE_TYPES
from rope_cpu.frequencies.scaling import scaled

mp.dps = 40

WIDTH = 64
PAIRS = WIDTH // 2
SHORT = [1 + i / 7 for i in range(PAIRS)]
LONG = [2 + i / 3 for i in range(PAIRS)]


def plain(theta: Any, width: int = WIDTH) -> list[Any]:
    return [mpf(theta) ** (-mpf(2 * i) / width) for i in range(width // 2)]


def yarn(
    theta: Any, s: Any, original: int, fast: Any = 32, slow: Any = 1, truncate: bool = True
) -> list[Any]:
    def pair(revolutions: Any) -> Any:
        return WIDTH * mp.log(original / (2 * mp.pi * revolutions)) / (2 * mp.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = mp.floor(low), mp.ceil(high)
    low, high = max(low, 0), min(high, WIDTH - 1)
    high = high + mpf("0.001") if low == high else high
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(PAIRS)]
    return [w / s * g + w * (1 - g) for w, g in zip(plain(theta), ramp, strict=True)]


def llama3(theta: Any, s: Any, low: Any, high: Any, original: int) -> list[Any]:
    result = []
    for w in plain(theta):
        wavelength = 2 * mp.pi / w
        t = (original / wavelength - low) / (high - low)
        if wavelength < mpf(original) / high:
            result.append(w)
        elif wavelength > mpf(original) / low:
            result.append(w / s)
        else:
            result.append((1 - t) * (w / s) + t * w)
    return result


def ntk(theta: Any, s: Any, original: int, length: int) -> list[Any]:
    exponent = mpf(WIDTH) / (WIDTH - 2)
    return plain(theta * (s * mpf(max(length, original)) / original - (s - 1)) ** exponent)


def fixed_ntk(theta: Any, s: Any, mixed_b: Any = None) -> list[Any]:
    """Su, kexue.fm/archives/9706: equation 6, and 10 to 13 with an exponent."""
    if mixed_b is None:
        return [w / mpf(s) ** (mpf(2) / WIDTH) for w in plain(theta * mpf(s))]
    a = mp.log(s) / mpf(WIDTH // 2) ** mpf(mixed_b)
    return [w / mp.exp(a * mpf(m) ** mpf(mixed_b)) for m, w in enumerate(plain(theta), 1)]


def yarn_factor(s: Any, mscale: Any = 1) -> Any:
    return mpf(mscale) / 10 * mp.log(s) + 1


YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 2048,
    "rope_theta": 50000.0,
}
YARN_4 = YARN | {"factor": 4.0}
WIDE_YARN = YARN_4 | {"original_max_position_embeddings": 10**6, "rope_theta": 50.0}
OTHER_RAMP = {"beta_fast": 20.0, "beta_slow": 3.0}
MSCALES = OTHER_RAMP | {"mscale": 0.7, "mscale_all_dim": 0.3}
DEEPSEEK = YARN | {"rope_type": "deepseek_yarn"}

LLAMA3 = LLAMA3_SCALING | {"rope_theta": 5e5}

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 4096,
}
LONGROPE_FACTOR = mp.sqrt(1 + mp.log(32) / mp.log(4096))

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 2048}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 1e6}
NTK = {"rope_type": "ntk", "factor": 8.0}


def divided(frequencies: list[Any], extensions: Any) -> list[Any]:
    return [w / mpf(e) for w, e in zip(frequencies, extensions, strict=True)]


class Case(NamedTuple):
    """A section with the expected frequencies and attention factor at a sequence length."""

    section: dict[str, Any]
    inv_freq: list[Any]
    attention_factor: Any
    length: int


def case(section: Any, inv_freq: Any, factor: Any = 1, length: int = 1, /, **keys: Any) -> Case:
    """Return the case of a section with more keys."""
    return Case(section | keys, inv_freq, factor, length)


ORIGINAL = "original_max_position_embeddings"
SLOWED = divided(plain(10000), [3.5] * PAIRS)
RAMPED = yarn(50000, 16, 2048)
BOTH_MSCALES = yarn_factor(16, "0.7") / yarn_factor(16, "0.3")
ALPHA = plain(10000 * mpf(1000) ** (mpf(WIDTH) / (WIDTH - 2)))
QUARTER_EXT = [
    (mixed + 3 * unscaled / 16) / 4 for mixed, unscaled in zip(RAMPED, plain(50000), strict=True)
]
STEP = [w if 2 * mp.pi / w <= 8192 else w / 8 for w in plain(500000)]
NINE_PAIRS = [w / 2 if i < 9 else 0 for i, w in enumerate(plain(1000000))]
LENGTHS = {"attention_factor": 1.25, "max_position_embeddings": 10240}
REACHED = {ORIGINAL: None, "max_position_embeddings": 2048}
MSCALE_BY_LENGTH = {"short_mscale": 1.1, "long_mscale": 1.3, "factor": 4.0}
SU = {"rope_type": "su", "max_position_embeddings": 131072}
ONE_PAIR = {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}
TELECHAT = YARN | {"rope_type": "telechat3-yarn", "mscale": 1}
FAR = YARN_4 | {ORIGINAL: 131072, "rope_theta": 1e4}
CASES = {
    "default": case({}, plain(12345), rope_theta=12345.0),
    "10000 where none is given": case({}, plain(10000)),
    "linear": case({"rope_type": "linear"}, SLOWED, factor=3.5),
    "old name": case({"type": "linear"}, SLOWED, factor=3.5),
    "dynamic, short": case(DYNAMIC, plain(10000), 1, 2048),
    "dynamic, long": case(DYNAMIC, ntk(10000, 4, 2048, 5000), 1, 5000),
    "dynamic, alpha": case({"rope_type": "dynamic"}, ALPHA, 1, 10**6, alpha=1000.0),
    "yarn": case(YARN, RAMPED, yarn_factor(16)),
    "yarn, all of it": case(
        YARN | MSCALES, yarn(50000, 16, 2048, 20, 3, False), BOTH_MSCALES, truncate=False
    ),
    "yarn, factor from lengths": case(YARN | LENGTHS, yarn(50000, 5, 2048), 1.25, factor=None),
    "yarn, nothing stretched": case(YARN, plain(50000), factor=1.0),
    "yarn, ramp of one pair": case(
        YARN_4 | ONE_PAIR, yarn(50000, 4, 2048, 1, 1, False), yarn_factor(4)
    ),
    "yarn, ramp from the first pair": case(
        YARN_4 | {ORIGINAL: 64}, yarn(50000, 4, 64), yarn_factor(4)
    ),
    "yarn, ramp that ends past the last pair": case(FAR, yarn(10000, 4, 131072), yarn_factor(4)),
    "yarn, ramp cut off at the width": case(
        WIDE_YARN, yarn(50, 4, 10**6, 10**4), yarn_factor(4), beta_fast=1e4
    ),
    "yarn, ramp that would begin behind the width": case(
        WIDE_YARN, yarn(50, 4, 10**6), yarn_factor(4)
    ),
    "yarn, one mscale is none": case(YARN, RAMPED, yarn_factor(16), mscale=0.7),
    "yarn, original length from the reached one": case(YARN | REACHED, RAMPED, yarn_factor(16)),
    "yarn, its defaults said": case(
        YARN, RAMPED, yarn_factor(16), attn_factor=1.0, extrapolation_factor=1
    ),
    "yarn of llama.cpp": case(YARN, QUARTER_EXT, yarn_factor(16), ext_factor=0.25),
    "yarn of llama.cpp, a step behind the width": case(
        WIDE_YARN, plain(50), yarn_factor(4), ext_factor=1.0
    ),
    "deepseek_yarn": case(DEEPSEEK, RAMPED, yarn_factor(16)),
    "deepseek_yarn, one mscale is enough": case(
        DEEPSEEK, RAMPED, yarn_factor(16, "0.7"), mscale=0.7
    ),
    "deepseek_yarn, all of it": case(
        DEEPSEEK | MSCALES, yarn(50000, 16, 2048, 20, 3), BOTH_MSCALES, attn_factor=1
    ),
    "telechat3-yarn": case(TELECHAT, RAMPED, yarn_factor(16, "0.7")),
    "telechat3-yarn, another ramp": case(
        TELECHAT | OTHER_RAMP, yarn(50000, 16, 2048, 20, 3), yarn_factor(16, "0.7")
    ),
    "ntk": case(NTK, fixed_ntk(20000, 8), rope_theta=20000.0),
    "ntk, mixed": case(NTK, fixed_ntk(10000, 8, "0.625"), mixed_b=0.625),
    "ntk, mixed with the exponent 0": case(NTK, divided(plain(10000), [8] * 32), mixed_b=0),
    "longrope, short": case(
        LONGROPE, divided(plain(10000), SHORT), LONGROPE_FACTOR, 4096, factor=32.0
    ),
    "longrope, long": case(LONGROPE | SU, divided(plain(10000), LONG), LONGROPE_FACTOR, 4097),
    "longrope, mscale by length": case(
        LONGROPE | MSCALE_BY_LENGTH, divided(plain(10000), LONG), 1.3, 5000
    ),
    "llama3": case(LLAMA3, llama3(500000, 8, 1, 4, 8192)),
    "llama3, a step": case(LLAMA3, STEP, high_freq_factor=1.0),
    "proportional": case(PROPORTIONAL, NINE_PAIRS, factor=2.0),
    "partial": case({"partial_rotary_factor": 0.5}, plain(1000000, 32), rope_theta=1e6),
}


@pytest.mark.parametrize("name", CASES)
def test_formula(name: str) -> None:
    section, inv_freq, attention_factor, length = CASES[name]
    rope = RotaryEmbedding(WIDTH, scaling=section).at_length(length)
    expected = np.array(inv_freq, dtype=np.float64)
    # Each frequency is a handful of float64 operations; theta^e itself has the error of its
    # exponent, |e·ln θ| · 2^-53.
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=64 * 2.0**-53, atol=0)
    factor = pytest.approx(float(attention_factor), rel=8 * 2.0**-53)
    assert rope.attention_factor == factor


@pytest.mark.parametrize("name", CASES)
def test_float32_is_near_float64(name: str) -> None:
    section, exact, _, length = CASES[name]
    rope = RotaryEmbedding(WIDTH, scaling=section, angle_dtype="float32")
    inv_freq = rope.at_length(length).inv_freq
    assert np.array_equal(inv_freq, inv_freq.astype(np.float32))
    expected = np.array(exact, dtype=np.float64)
    # A dozen float32 operations, one of which is a power with exponent up to 1: ln θ ≤ 16 roundings
    # of it.
    np.testing.assert_allclose(inv_freq, expected, rtol=32 * 2.0**-24, atol=0)


def test_yarn_widens_a_ramp_of_no_width_by_a_thousandth() -> None:
    """The ramp begins 0.0005 before pair 18, which is halfway up one that is 0.001 wide."""
    revolutions = float(2048 / (2 * mp.pi) / mpf(50000) ** (2 * mpf("17.9995") / WIDTH))
    section = YARN | {
        "factor": 4.0,
        "beta_fast": revolutions,
        "beta_slow": revolutions,
        "truncate": False,
    }
    exact = np.array(yarn(50000, 4, 2048, revolutions, revolutions, False), dtype=np.float64)
    assert 0.4 < exact[18] / (plain(50000)[18] * (1 + 1 / 4) / 2) < 1.6
    found = RotaryEmbedding(WIDTH, scaling=section).inv_freq
    # The start of the ramp errs by some roundings of 18, and the ramp is only 0.001 wide.
    np.testing.assert_allclose(found, exact, rtol=8 * 18 * 2.0**-53 / 0.001, atol=0)


def test_float32_of_llama3_is_frozen() -> None:
    # Llama 3.1 8B: the float32 frequencies of transformers 5.23, exactly.
    rope = RotaryEmbedding(128, scaling=LLAMA3, angle_dtype="float32")
    found = rope.inv_freq[[1, 27, 28, 29, 34, 36, 63]].astype(np.float32).view(np.uint32)
    expected = "1062243009 998321717 995260192 990772486 960179666 950223245 883213055"
    assert " ".join(map(str, found)) == expected


@pytest.mark.parametrize(
    "section", [LONGROPE | {"factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}]
)
def test_length_dependent_types(section: dict[str, Any]) -> None:
    rope = RotaryEmbedding(WIDTH, scaling=section, max_position_embeddings=4096)
    assert rope.spec.needs_length
    assert np.array_equal(rope.inv_freq, rope.at_length(17).inv_freq)
    rows = rope.at_length([100, 9000])
    assert np.array_equal(rows.inv_freq[0], rope.at_length(100).inv_freq)
    assert np.array_equal(rows.inv_freq[1], rope.at_length(9000).inv_freq)
    assert not np.array_equal(rows.inv_freq[0], rows.inv_freq[1])
    assert rope.at_length(9000) == rope.at_length(100).at_length(9000), (
        "no call may depend on an earlier one"
    )
    again = RotaryEmbedding(WIDTH, scaling=dict(section), max_position_embeddings=4096)
    assert (again, hash(again)) == (rope, hash(rope))
    assert pickle.loads(pickle.dumps(rope)) == rope
    assert len(pickle.dumps(rope)) < 100_000


@pytest.mark.parametrize(
    "section",
    [LONGROPE, *({"rope_type": name} for name in ("dynamic", "dynamic_powers"))],
    ids=lambda s: s["rope_type"],
)
def test_representatives_have_the_frequencies_of_their_lengths(section: dict[str, Any]) -> None:
    """Frequencies are computed once for all lengths that share them."""
    factor = {} if section["rope_type"] == "dynamic_powers" else {"factor": 3.0}
    for original in (64, 100, 4096):
        rule = scaled(WIDTH, scaling=section | factor, max_position_embeddings=original).length_rule
        around = {
            original * 2**k // part + by for k in range(8) for part in (1, 3) for by in (-1, 0, 1)
        }
        for length in sorted(around | {1, 2, 10**7, 2**40}):
            (representative,) = rule.representatives([length])
            kept, computed = rule.frequencies(representative), rule.frequencies(length)
            assert np.array_equal(kept[0], computed[0])
            assert kept[1] == computed[1]


def test_a_factor_for_long_sequences_is_checked_when_they_come() -> None:
    lengths = {
        "original_max_position_embeddings": 64,
        "factor": 2.0,
        "short_mscale": 1.0,
        "long_mscale": 1e39,
    }
    rope = RotaryEmbedding(WIDTH, scaling=LONGROPE | lengths)
    with pytest.raises(ValueError, match=r"`attention_factor` is 1e\+39"):
        rope.at_length(65)


def test_every_type_names_its_source() -> None:
    assert all("References\n" in str(row.compute.__doc__) for row in ROPE_TYPES.values())
