"""`from_gguf(..., overrides=...)`: the metadata that flags of llama.cpp replace."""

from __future__ import annotations

import gguf_files
import numpy as np
import pytest
from gguf_files import ggml_frequency

from rope_cpu import RotaryEmbedding

WIDTH = {"attention.key_length": 64, "rope.freq_base": 5e5, "context_length": 4096}
FACTOR = "rope.scaling.factor"
ORIGINAL = "rope.scaling.original_context_length"
TYPE = "rope.scaling.type"
YARN = {TYPE: "yarn", FACTOR: 4.0}
ATTENTION = "rope.scaling.yarn_attn_factor"


def overridden(folder, overrides, architecture="llama", values=WIDTH, tensors=None, **arguments):
    """Return the rotary embedding of a file whose metadata are replaced."""
    arguments["overrides"] = overrides
    return gguf_files.rotary(folder, architecture, values, tensors, **arguments)


@pytest.mark.parametrize(
    ("overrides", "theta", "scaling"),
    [
        ({}, 5e5, None),
        ({"rope.freq_base": 1e6}, 1e6, None),
        ({FACTOR: 8.0}, 5e5, {"rope_type": "linear", "factor": 8.0}),
        ({TYPE: "none"}, 5e5, None),
        ({"rope.freq_base": None, FACTOR: None}, 5e5, None),
        ({"rope.freq_base": 2e4, FACTOR: 2}, 2e4, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_base_and_scale(overrides, theta, scaling, tmp_path):
    values = WIDTH | {FACTOR: 1.0}
    rope = overridden(tmp_path, overrides, values=values)
    expected = RotaryEmbedding(64, rope_theta=theta, scaling=scaling)
    np.testing.assert_array_equal(rope.inv_freq, expected.inv_freq)
    assert rope.interleaved  # still the pairs of the file


@pytest.mark.parametrize("architecture", ["llama", "grok", "qwen3"])
def test_yarn_of_every_architecture(architecture, tmp_path):
    """No file of llama or qwen3 can hold these numbers, but the flags apply."""
    ramp = {"yarn_ext_factor": 0.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    overrides = YARN | {ORIGINAL: 2048} | {f"rope.scaling.{key}": ramp[key] for key in ramp}
    rope = overridden(tmp_path, overrides, architecture)
    expected = [ggml_frequency(i, 64, 5e5, 4.0, 2048, 16.0, 2.0, 0.5) for i in range(32)]
    # A power, two products and a sum: some roundings of float64.
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-14, atol=0)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1, rel=1e-15)


def test_the_attention_factor_counts_without_yarn(tmp_path):
    values = WIDTH | {"rope.scaling.attn_factor": 0.5}
    assert overridden(tmp_path, {ATTENTION: 3.0}, values=values).attention_factor == 1.5


def test_factors_of_the_file_stay(tmp_path):
    factors = {gguf_files.FREQS: np.linspace(1, 8, 32)}
    rope = overridden(tmp_path, {"rope.freq_base": 1e6}, tensors=factors)
    expected = RotaryEmbedding(64, rope_theta=1e6).inv_freq / np.linspace(1, 8, 32, dtype="f4")
    np.testing.assert_array_equal(rope.inv_freq, expected)


def test_layers_with_a_window_are_not_overridden(tmp_path):
    """They keep base and scale of the file in llama.cpp, but take the other numbers."""
    values = WIDTH | {"attention.sliding_window": 128}
    overrides = {"rope.freq_base": 1e6}
    rope = overridden(tmp_path, overrides, "gpt-oss", values, layer_type="full_attention")
    assert rope == RotaryEmbedding(64, rope_theta=1e6)
    for layer_type in (None, "sliding_attention"):
        with pytest.raises(ValueError, match="must be one of 'full_attention'"):
            overridden(tmp_path, overrides, "gpt-oss", values, layer_type=layer_type)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"rope.freq_bse": 1e6}, "`llama.rope.freq_bse` is 1000000.0; it must be left out"),
        ({"llama.rope.freq_base": 1e6}, "`llama.llama.rope.freq_base` is"),
        ({7: 1e6}, "`llama.7` is"),
        ({"rope.freq_base": "1e6"}, "must be a number"),
        ({"rope.freq_base": 0}, "above 0"),
        ({"rope.freq_base": 10**400}, "finite"),
        ({ATTENTION: 10**400} | YARN, "it must be left out"),
        ({TYPE: "ntk"}, "must be one of none, linear"),
        # Without effect in llama.cpp, beside the other numbers.
        ({ORIGINAL: 2048}, f"`llama.{ORIGINAL}` is 2048; it must be left out"),
        ({FACTOR: 4.0, TYPE: "none"}, f"`llama.{FACTOR}` is 4.0; it must be left out"),
        ({"rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast` is 16.0; it must be left out"),
        (YARN | {ATTENTION: 3.0}, f"`llama.{ATTENTION}` is 3.0; it must be left out"),
        (YARN | {"rope.scaling.yarn_beta_fast": 0}, "above 0"),
        ({"context_length": 8192}, "`llama.context_length` is 8192; it must be left out"),
    ],
)
def test_overrides_without_effect_or_out_of_range(overrides, text, tmp_path):
    with pytest.raises(ValueError, match=r"model\.gguf'") as caught:
        overridden(tmp_path, overrides)
    assert text in str(caught.value)


def test_overrides_are_a_dict(tmp_path):
    with pytest.raises(TypeError, match="`overrides` is a list"):
        overridden(tmp_path, ["rope.freq_base"])
