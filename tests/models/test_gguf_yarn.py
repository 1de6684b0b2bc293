"""YaRN of GGUF files against ggml's arithmetic, pair by pair; the attention factor; heads."""

from __future__ import annotations

import math

import gguf_files
import numpy as np
import pytest
from gguf_files import ggml_frequency

from rope_cpu import RotaryEmbedding
from rope_cpu.models.reader import read

WIDTH = {"attention.key_length": 64}


def of(folder, architecture, base=1e4, original_context_length=4096, **scaling):
    """Return the rotary embedding of a file with YaRN; keys: those of "rope.scaling."."""
    scaling |= {"type": "yarn", "original_context_length": original_context_length}
    values = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    return gguf_files.rotary(folder, architecture, WIDTH | {"rope.freq_base": base} | values)


def heads(folder, architecture, values, *layer_type):
    """Return the numbers of heads of a file."""
    path = gguf_files.write(folder / "model.gguf", architecture, WIDTH | values)
    return read(path).heads(*layer_type)


@pytest.mark.parametrize(
    ("base", "original", "fast", "slow", "strength"),
    [
        (1e4, 4096, 32.0, 1.0, 1.0),
        (1e4, 64, 32.0, 1.0, 1.0),  # the ramp begins before the first pair
        (4.0, 2**20, 2.0**17, 1.0, 1.0),  # the ramp ends behind the last one
        (1e4, 4096, 8.0, 2.0, 0.5),
        (5e5, 2**20, 1.0, 1.0, 1.0),
    ],
)
def test_frequencies_are_those_of_ggml(base, original, fast, slow, strength, tmp_path):
    ramp = {"yarn_beta_fast": fast, "yarn_beta_slow": slow, "yarn_ext_factor": strength}
    rope = of(tmp_path, "grok", base, original, factor=16.0, **ramp)
    expected = [
        ggml_frequency(pair, 64, base, 16.0, original, fast, slow, strength) for pair in range(32)
    ]
    # A power, two products and a sum: some roundings of float64.
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-14, atol=0)


def test_grok_has_a_default_of_its_own(tmp_path):
    rope = of(tmp_path, "grok", factor=16.0)
    expected = [ggml_frequency(pair, 64, 1e4, 16.0, 4096, 8.0, 1.0, 1.0) for pair in range(32)]
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("strength", [-1.0, 1.0])
def test_a_negative_strength_stands_for_the_default(strength, tmp_path):
    assert of(tmp_path, "grok", factor=16.0, yarn_ext_factor=strength) == of(
        tmp_path, "grok", factor=16.0
    )


def m(factor, mscale=1.0):
    """YaRN's function of the attention factor."""
    return 0.1 * mscale * math.log(factor) + 1


@pytest.mark.parametrize(
    ("architecture", "scaling", "expected"),
    [
        ("qwen3", {"factor": 16.0}, m(16)),
        ("qwen3", {"factor": 0.5}, 1.0),
        ("qwen3", {"factor": 16.0, "attn_factor": 0.5}, 0.5 * m(16)),
        ("mistral3", {"factor": 16.0, "yarn_log_multiplier": 0.5}, m(16) / m(16, 0.5)),
        ("deepseek32", {"factor": 40.0, "yarn_log_multiplier": 0.1}, 1.0),
        ("mistral4", {"factor": 40.0, "yarn_log_multiplier": 0.05}, m(40) / m(40, 0.5)),
        ("deepseek2", {"factor": 40.0, "yarn_log_multiplier": 0.0707}, 1.0),  # V2-Lite
        ("deepseek2", {"factor": 40.0}, m(40)),
        ("grok", {"factor": 16.0, "yarn_attn_factor": 3.0}, m(16)),
        (
            "grok",
            {"factor": 16.0, "yarn_ext_factor": 0.0, "yarn_attn_factor": 3.0, "attn_factor": 0.5},
            1.5,
        ),
        ("glm-dsa", {"factor": 16.0}, m(16)),
    ],
)
def test_attention_factor(architecture, scaling, expected, tmp_path):
    rope = of(tmp_path, architecture, **scaling)
    # Numbers of a file are float32.
    assert rope.attention_factor == pytest.approx(expected, rel=1e-7)


def test_a_factor_of_0_stands_for_none(tmp_path):
    rope = gguf_files.rotary(tmp_path, "llama", WIDTH | {"rope.scaling.factor": 0.0})
    np.testing.assert_array_equal(rope.inv_freq, RotaryEmbedding(64).inv_freq)
    assert rope.rope_type == "default"


def test_heads_of_latent_attention_share_one_key(tmp_path):
    values = {"attention.key_length": 576, "rope.dimension_count": 64}
    values |= {"attention.head_count": 128, "attention.head_count_kv": 128}
    assert heads(tmp_path, "deepseek2", values) == (128, 1)
    assert gguf_files.rotary(tmp_path, "deepseek2", values).head_dim == 64


def test_heads_by_layer_type(tmp_path):
    values = {
        "attention.head_count": 8,
        "attention.head_count_kv": [4, 1, 4, 0],
        "attention.sliding_window_pattern": [True, False, True, True],
    }
    assert heads(tmp_path, "gemma4", values, "sliding_attention") == (8, 4)
    assert heads(tmp_path, "gemma4", values, "full_attention") == (8, 1)
    with pytest.raises(ValueError, match=r"whose attention.head_count_kv are \[4, 1\]"):
        heads(tmp_path, "gemma4", values)


@pytest.mark.parametrize("pattern", [{}, {"attention.sliding_window_pattern": 6}])
def test_heads_by_layer_without_layer_types(pattern, tmp_path):
    """A pattern may be a period, from which llama.cpp's code has the types."""
    values = pattern | {"attention.head_count": [8, 0, 8], "attention.head_count_kv": [4, 0, 2]}
    path = gguf_files.write(tmp_path / "model.gguf", "llama", WIDTH | values)
    with pytest.raises(ValueError, match=r"whose attention.head_count_kv are \[4, 2\]"):
        read(path).heads()


def test_heads_that_a_file_lacks(tmp_path):
    with pytest.raises(TypeError, match="`num_attention_heads` is missing"):
        heads(tmp_path, "llama", {})
    assert heads(tmp_path, "llama", {"attention.head_count": 8}) == (8, 8)
