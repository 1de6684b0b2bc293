"""`rope-cpu show`: its text, checked by hand."""

import pytest

from rope_cpu.command_line import UsageError

LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 64,
    "rope_scaling": LONGROPE,
}


def test_llama3(shown):
    lines = shown(LLAMA3)
    assert lines[:3] == [
        "llama, all layers",
        "pairs 64: (i, i+64), half-split",
        "widths 128 of 128 elements of a head are rotated",
    ]
    # Wavelengths 2π·b^(2i/d): below 8192/4 nothing is scaled, i < 28.2…;
    # above 8192 all is, i > 34.9…
    assert "pairs 0-28: unscaled" in lines
    assert "pairs 35-63: 8 times as long" in lines
    assert "rope_theta 500000.0" in lines
    assert "attention factor 1" in lines


def test_both_sides_of_longrope(shown):
    lines = shown(PHI3)
    assert lines.index("pairs 0-15: unscaled") > lines.index("at 64 tokens")
    assert lines.index("pairs 0-15: 2 times as long") > lines.index("at 4096 tokens")
    assert "short_factor 16 values, 1.0 … 1.0" in lines
    assert lines.count("attention factor 1.41421") == 2


def test_pairs_that_are_not_rotated(shown):
    assert "pairs 64-255: not rotated" in shown({"model_type": "gemma4_text"})


def test_layers_that_are_not_rotated_get_one_line(shown):
    assert "beam, full_attention: not rotated" in shown({"model_type": "beam"})


def test_several_axes(shown):
    text = {"model_type": "qwen2_vl_text", "hidden_size": 1536, "num_attention_heads": 12}
    assert "axes 3, which rotate 16, 24, 24 pairs" in shown(text)
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "head_dim": 64,
    }
    assert any(line.startswith("axes 2") for line in shown(vision))


def test_a_rotation_backwards_is_named(shown):
    assert "direction backwards: the angle is minus position times frequency" in shown(
        {"model_type": "nanochat"}
    )
    assert not any("direction" in line for line in shown(LLAMA3))


def test_a_model_without_a_type(shown):
    assert (
        shown({"hidden_size": 64, "num_attention_heads": 2}, "--half")[0]
        == "unknown model type, all layers"
    )


def test_an_unknown_model_type_needs_the_pairing(shown):
    unknown = {**LLAMA3, "model_type": "mymodel"}
    with pytest.raises(UsageError, match="`interleaved`"):
        shown(unknown)
    assert "pairs 64: (2i, 2i+1), interleaved" in shown(unknown, "--interleaved")
    assert "pairs 64: (i, i+64), half-split" in shown(unknown, "--half")
