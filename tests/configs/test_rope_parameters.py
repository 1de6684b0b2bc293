"""Sections of scaling and partial rotation, under all the names that they have in files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import inv_freq
from text_configs import LLAMA, read

# Keys, what they are added to, rotated width, head_dim and base.
PARTIAL = [
    ({"model_type": "glm4", "partial_rotary_factor": 0.25}, 32, 128, 1e4),
    ({"model_type": "stablelm", "rope_parameters": {"partial_rotary_factor": 0.5}}, 64, 128, 1e4),
    ({"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 2e4}, 32, 128, 2e4),
    ({"model_type": "gptj", "n_embd": 2048, "n_head": 16, "rotary_dim": 64}, 64, 128, 1e4),
    ({"model_type": "codegen", "n_embd": 2048, "n_head": 16, "rotary_dim": 32}, 32, 128, 1e4),
    (
        {"model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64, "rope_theta": 5e6},
        64,
        128,
        5e6,
    ),
    ({"model_type": "stablelm_epoch", "rope_pct": 0.25}, 32, 128, 1e4),
    ({"model_type": "chatglm", "kv_channels": 128, "rope_ratio": 50}, 64, 128, 5e5),
    (
        {"model_type": "llama", "partial_rotary_factor": 0.25},
        128,
        128,
        1e4,
    ),  # its default type takes no notice
    (
        {
            "model_type": "llama",
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
        128,
        128,
        1e4,
    ),
]


@pytest.mark.parametrize(
    ("keys", "rotary_dim", "head_dim", "theta"), PARTIAL, ids=lambda value: str(value)[:60]
)
def test_partial_rotary_under_all_its_names(
    keys: dict[str, Any], rotary_dim: int, head_dim: int, theta: float
) -> None:
    rope = read({"hidden_size": 2048, "num_attention_heads": 16}, keys)
    assert (rope.rotary_dim, rope.head_dim) == (rotary_dim, head_dim)
    np.testing.assert_allclose(rope.inv_freq, inv_freq(rotary_dim, theta), rtol=1e-13)


def test_a_scaled_type_of_llama_honours_partial_rotary() -> None:
    assert (
        read(
            LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}
        ).rotary_dim
        == 64
    )


def test_a_share_beside_a_section_fills_it_but_not_the_default_section() -> None:
    keys = {"model_type": "moonshine_streaming", "head_dim": 40, "partial_rotary_factor": 0.5}
    assert (
        read(keys, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}).rotary_dim
        == 20
    )
    assert read(keys).rotary_dim == 32


@pytest.mark.parametrize("model_type", ["ministral3", "mistral4"])
def test_a_length_of_the_file_counts_for_the_models_own_section(model_type: str) -> None:
    keys = {"model_type": model_type, "hidden_size": 256, "num_attention_heads": 4}
    assert read(keys, {"max_position_embeddings": 4096}) == read(
        keys
    )  # yarn, which goes by the original length


def test_sections_of_several_axes() -> None:
    keys = {
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "rope_theta": 1e6,
    }
    rope = read(keys, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}})
    assert (rope.axes, rope.rope_type, rope.interleaved) == (3, "default", False)
    np.testing.assert_allclose(rope.inv_freq.sum(axis=0), inv_freq(128, 1e6), rtol=1e-14)
    assert np.flatnonzero(rope.inv_freq[1]).tolist() == list(range(16, 40))
    keys = {"model_type": "qwen3_vl_text", "head_dim": 128}
    section = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    assert np.flatnonzero(read(keys, {"rope_scaling": section}).inv_freq[1]).tolist() == list(
        range(1, 60, 3)
    )


def test_mrope_interleaved_under_both_names() -> None:
    keys = {"model_type": "qwen3_vl_text", "head_dim": 128}
    plain = {"mrope_section": [24, 20, 20]}
    both = {**plain, "interleaved": True, "mrope_interleaved": True}
    assert read(keys, {"rope_scaling": both}) == read(keys, {"rope_scaling": plain})
    with pytest.raises(ValueError, match=r"`mrope_interleaved`=False contradicts .*=True"):
        read(keys, {"rope_scaling": {**plain, "mrope_interleaved": False}})
    unknown = {**keys, "model_type": "llama"}
    assert read(unknown, {"rope_scaling": both}) == read(
        keys, {"rope_scaling": plain, "rope_theta": 1e4}
    )


def test_longrope_under_the_names_that_phi3_has_for_it() -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    keys = {
        "model_type": "phi3",
        "hidden_size": 128,
        "num_attention_heads": 4,
        "original_max_position_embeddings": 64,
    }
    for name in ("su", "yarn", "longrope"):
        rope = read(
            keys, {"max_position_embeddings": 4096, "rope_scaling": {"type": name, **factors}}
        )
        assert rope.rope_type == "longrope"
        assert rope.attention_factor == pytest.approx(
            np.sqrt(1 + np.log(64) / np.log(64)), rel=1e-15
        )
        np.testing.assert_allclose(rope.at_length(65).inv_freq, inv_freq(32, 1e4) / 2, rtol=1e-14)


def test_qwen_doubles_its_base_with_the_length() -> None:
    rope = read(
        {
            "model_type": "qwen",
            "use_dynamic_ntk": True,
            "seq_length": 1000,
            "rotary_emb_base": 10000,
        }
    )
    for length, alpha in ((1000, 1), (1001, 3), (2000, 3), (2001, 7), (4000, 7), (4001, 15)):
        expected = inv_freq(128, 1e4 * alpha ** (128 / 126))
        np.testing.assert_allclose(rope.at_length(length).inv_freq, expected, rtol=1e-13)
    assert not read(
        {"model_type": "qwen", "use_dynamic_ntk": False, "seq_length": 1000}
    ).spec.needs_length
