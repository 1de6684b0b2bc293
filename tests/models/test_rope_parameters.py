"""Sections of scaling and partial rotation, under all the names that they have in files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import inv_freq
from text_configs import LLAMA, of, read

HALF = {"partial_rotary_factor": 0.5}

# Keys, what they are added to, rotated width, head_dim and base.
PARTIAL = [
    (of("glm4", partial_rotary_factor=0.25), 32, 128, 1e4),
    (of("stablelm", rope_parameters=HALF), 64, 128, 1e4),
    (of("gpt_neox", rotary_pct=0.25, rotary_emb_base=2e4), 32, 128, 2e4),
    (of("gptj", n_embd=2048, n_head=16, rotary_dim=64), 64, 128, 1e4),
    (of("codegen", n_embd=2048, n_head=16, rotary_dim=32), 32, 128, 1e4),
    (of("minimax_m2", head_dim=128, rotary_dim=64, rope_theta=5e6), 64, 128, 5e6),
    (of("stablelm_epoch", rope_pct=0.25), 32, 128, 1e4),
    (of("chatglm", kv_channels=128, rope_ratio=50), 64, 128, 5e5),
    # The default type of Llama takes no notice, a scaled one does.
    (of("llama", partial_rotary_factor=0.25), 128, 128, 1e4),
    (of("llama", rope_parameters={"rope_type": "default", **HALF}), 128, 128, 1e4),
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
    section = {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    assert read(LLAMA, {"rope_scaling": section}).rotary_dim == 64


def test_a_share_beside_a_section_fills_it_but_not_the_default_section() -> None:
    keys = of("moonshine_streaming", head_dim=40, partial_rotary_factor=0.5)
    section = {"rope_type": "default", "rope_theta": 1e4}
    assert read(keys, {"rope_parameters": section}).rotary_dim == 20
    assert read(keys).rotary_dim == 32


@pytest.mark.parametrize("model_type", ["ministral3", "mistral4"])
def test_a_length_of_the_file_counts_for_the_models_own_section(model_type: str) -> None:
    keys = of(model_type, hidden_size=256, num_attention_heads=4)
    # It is yarn, which goes by the original length.
    assert read(keys, {"max_position_embeddings": 4096}) == read(keys)


QWEN3_VL = of("qwen3_vl_text", head_dim=128)


def test_sections_of_several_axes() -> None:
    keys = of("qwen2_vl", hidden_size=1536, num_attention_heads=12, rope_theta=1e6)
    rope = read(keys, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}})
    assert (rope.axes, rope.rope_type, rope.interleaved) == (3, "default", False)
    np.testing.assert_allclose(rope.inv_freq.sum(axis=0), inv_freq(128, 1e6), rtol=1e-14)
    assert np.flatnonzero(rope.inv_freq[1]).tolist() == list(range(16, 40))
    section = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    rows = read(QWEN3_VL, {"rope_scaling": section}).inv_freq[1]
    assert np.flatnonzero(rows).tolist() == list(range(1, 60, 3))


def test_interleaved_sections_end_with_the_head() -> None:
    # The slices of transformers, [1:60:3] and [2:60:3] of 32 pairs.
    rows = read(of("qwen3_omni_moe_talker_text")).inv_freq
    assert np.flatnonzero(rows[1]).tolist() == list(range(32))[1:60:3]
    assert np.flatnonzero(rows[2]).tolist() == list(range(32))[2:60:3]
    assert np.flatnonzero(rows[0]).tolist() == list(range(32))[0::3]


def test_mrope_interleaved_under_both_names() -> None:
    plain = {"mrope_section": [24, 20, 20]}
    both = {**plain, "interleaved": True, "mrope_interleaved": True}
    expected = read(QWEN3_VL, {"rope_scaling": plain})
    assert read(QWEN3_VL, {"rope_scaling": both}) == expected
    with pytest.raises(ValueError, match="`mrope_interleaved` is contradicted"):
        read(QWEN3_VL, {"rope_scaling": {**plain, "mrope_interleaved": False}})
    expected = read(QWEN3_VL, {"rope_scaling": plain, "rope_theta": 1e4})
    assert read(of("llama", head_dim=128), {"rope_scaling": both}) == expected


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_under_the_names_that_phi3_has_for_it(name: str) -> None:
    section = {"type": name, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    lengths = {"max_position_embeddings": 4096, "original_max_position_embeddings": 64}
    keys = of("phi3", hidden_size=128, num_attention_heads=4, **lengths)
    rope = read(keys, {"rope_scaling": section})
    assert rope.rope_type == "longrope"
    assert rope.attention_factor == pytest.approx(np.sqrt(1 + np.log(64) / np.log(64)), rel=1e-15)
    np.testing.assert_allclose(rope.at_length(65).inv_freq, inv_freq(32, 1e4) / 2, rtol=1e-14)


def test_qwen_doubles_its_base_with_the_length() -> None:
    keys = of("qwen", seq_length=1000)
    rope = read(keys, {"use_dynamic_ntk": True, "rotary_emb_base": 10000})
    for length, alpha in ((1000, 1), (1001, 3), (2000, 3), (2001, 7), (4000, 7), (4001, 15)):
        expected = inv_freq(128, 1e4 * alpha ** (128 / 126))
        np.testing.assert_allclose(rope.at_length(length).inv_freq, expected, rtol=1e-13)
    assert not read(keys, {"use_dynamic_ntk": False}).spec.needs_length
