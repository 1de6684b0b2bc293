"""The indexers of sparse attention, and rotations of a part of the heads or of their last elements.

`tests/peers/test_indexers.py` compares them with the classes of transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding

V32 = {"model_type": "deepseek_v32"}
GLM = {"model_type": "glm_moe_dsa"}
V4 = {"model_type": "deepseek_v4"}
DOTS = {"model_type": "dots3_note_text"}


def turned(config: dict[str, Any], **options: Any) -> tuple[list[int], bool]:
    """Return the first and the last element that the indexer of a config rotates; its pairing."""
    rope = RotaryEmbedding.from_config(config, part="indexer", **options)
    x = np.ones((1, 1, rope.head_dim), np.float32)
    moved = np.flatnonzero(rope.rotate(x, [3], layout="thd")[0, 0] != 1)
    return [rope.head_dim, moved[0], moved[-1]], rope.interleaved


@pytest.mark.parametrize(
    ("config", "elements", "interleaved"),
    [
        (V32, [128, 0, 63], False),
        (V32 | {"indexer_rope_interleave": True}, [128, 0, 63], True),
        (V32 | {"index_head_dim": 64}, [64, 0, 63], False),
        (GLM, [128, 0, 63], True),
        (GLM | {"indexer_rope_interleave": False}, [128, 0, 63], False),
        (V4, [128, 64, 127], True),
        ({"model_type": "hy_v4"}, [128, 64, 127], False),
        ({"model_type": "hy_v4", "index_head_dim": 64}, [64, 0, 63], False),
    ],
)
def test_elements_that_an_indexer_rotates(config, elements, interleaved) -> None:
    assert turned(config) == (elements, interleaved)
    assert turned(config, interleaved=True)[1]


def test_an_indexer_has_the_frequencies_of_its_layers() -> None:
    rope = RotaryEmbedding.from_config(DOTS, part="indexer")
    attention = RotaryEmbedding.from_config(DOTS, layer_type="indexed_attention")
    assert np.array_equal(rope.inv_freq, attention.inv_freq)
    compressed = RotaryEmbedding.from_config(V4, layer_type="compress").inv_freq
    indexer = RotaryEmbedding.from_config(V4, part="indexer").inv_freq
    assert np.array_equal(indexer[32:], compressed[-32:])


MIXED = {**DOTS, "layer_types": ["sliding_attention", "indexed_attention"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        ({"model_type": "llama"}, {}, "no indexer of `model_type` 'llama' is known"),
        ({"model_type": "qwen2_vl_vision"}, {}, "no indexer of `model_type`"),
        ({"model_type": "glm5_next_text"}, {}, "are not rotated"),
        ({"model_type": "qwen4_exp_text"}, {}, "`index_head_dim` is missing"),
        (V32 | {"index_head_dim": 32}, {}, "`index_head_dim` is 32; it must be even, and at le"),
        (DOTS, {"layer_type": "sliding_attention"}, "with an indexer, 'indexed_attention'"),
        (MIXED, {"layer": 0}, "with an indexer, 'indexed_attention'"),
        (V32 | {"indexer_rope_interleave": 2}, {}, "`indexer_rope_interleave`"),
        ({"model_type": "hy_v4", "rope_scaling": YARN}, {}, "an attention factor"),
    ],
)
def test_refused_indexers(config, options, text) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        RotaryEmbedding.from_config(config, part="indexer", **options)


def test_only_indexers_are_parts() -> None:
    with pytest.raises(ValueError, match="`part` is 'vision'"):
        RotaryEmbedding.from_config(V32, part="vision")


def test_deepseek_v4_rotates_the_last_elements_of_a_whole_head() -> None:
    rope = RotaryEmbedding.from_config({**V4, "head_dim": 256}, layer_type="main")
    x = np.ones((1, 1, 256), np.float32)
    moved = np.flatnonzero(rope.rotate(x, [3], layout="thd")[0, 0] != 1)
    assert (moved[0], moved[-1]) == (224, 255)


DIT = {"model_type": "qwen2_5_omni_dit", "dim": 1024, "heads": 16, "depth": 22, "head_dim": 64}


def test_the_transformer_of_qwen_omni_rotates_one_head() -> None:
    """The published form, with `dim` and `heads`; pairs are neighbours."""
    rope = RotaryEmbedding.from_config(DIT)
    assert rope == RotaryEmbedding.from_config({"model_type": "qwen2_5_omni_dit"})
    x = np.random.default_rng(0).standard_normal((5, 16, 64)).astype(np.float32)
    y = rope.rotate(x, np.arange(5), layout="thd")
    alone = RotaryEmbedding(64, interleaved=True).rotate(x[:, :1], np.arange(5), layout="thd")
    assert np.array_equal(y[:, :1], alone)
    assert np.array_equal(y[:, 1:], x[:, 1:])
    with pytest.raises(ValueError, match="heads"):
        rope.rotate(x[:, :1], np.arange(5), layout="thd")
    with pytest.raises(ValueError, match="attention factor"):
        RotaryEmbedding.from_config({**DIT, "rope_scaling": YARN})


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("xcodec2", "by its index"),
        ("neucodec", "by its index"),
        ("mistral_large4", r"exp\(alpha\)"),
    ],
)
def test_rotations_that_a_config_does_not_hold(model_type, text) -> None:
    with pytest.raises(ValueError, match=text):
        RotaryEmbedding.from_config({"model_type": model_type})
