"""Vision configs: the model type of a vision part, its keys, and refusals.

`tests/peers/test_whole_towers.py` compares the rotations with those of the towers.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.models import reader, vision

ERNIE = {"model_type": "ernie4_5_vl_moe_text", "head_dim": 128}


def tower(model_type, **values):
    return {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, **values}


def test_moonvit_is_the_tower_of_kimi_with_pairs_as_published():
    """Its own code pairs neighbours; transformers reorders the weights of kimi_k25_vision."""
    own = reader.read(tower("moonvit")).spec()
    other = reader.read(tower("kimi_k25_vision")).spec()
    assert (own.interleaved, other.interleaved) == (True, False)
    np.testing.assert_array_equal(own.inv_freq, other.inv_freq)
    whole = {"model_type": "kimi_vl", "vision_config": {"model_type": "moonvit"}}
    assert vision.tower(whole)["model_type"] == "moonvit"


def test_minimax_leaves_what_three_axes_cannot_share():
    spec = reader.read(tower("minimax_m3_vl_vision")).spec()
    assert (spec.axes, spec.head_dim, spec.rotary_dim) == (3, 16, 12)


QWEN = {"depth": 24, "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2}
KIMI = {"patch_size": 14, "vt_hidden_size": 1152, "vt_num_attention_heads": 16}


@pytest.mark.parametrize(
    ("part", "head_dim"),
    [
        ({"model_type": "qwen3_vl", "hidden_size": 1024, "temporal_patch_size": 2, **QWEN}, 64),
        ({"hidden_size": 1536, "embed_dim": 1280, "temporal_patch_size": 2, **QWEN}, 80),
        ({"hidden_size": 1280, "temporal_patch_size": 2, **QWEN}, 80),
        ({"model_type": "", **KIMI}, 72),
    ],
)
def test_a_vision_part_is_never_taken_for_its_language_model(part, head_dim):
    rope = RotaryEmbedding.from_config(part)
    assert (rope.axes, rope.head_dim, rope.rope_type) == (2, head_dim, "axial")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_size": 64},
        {"hidden_size": 64},
        {"model_type": "qwen3_vl", "vision_config": QWEN},
    ],
)
def test_other_configurations_are_left_to_others(config):
    assert vision.parse(config) is None


def ernie(**section):
    return ERNIE | {"rope_parameters": section}


AXIAL = {"rope_type": "axial", "factor": 2.0}
LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "vjepa2"}, "no rotation"),
        ({"model_type": "hunyuan_vl"}, "no rotation"),
        (
            LLAMA | {"model_type": "foo", "text_config": LLAMA | {"model_type": "neomme"}},
            "of their own",
        ),
        (LLAMA | {"architectures": ["NeommeModel"]}, "bases of their own"),
        (
            {"architectures": ["HunYuanVLForConditionalGeneration"], "text_config": LLAMA},
            "no rotation",
        ),
        ({"model_type": "siglip_vision_model"}, "nothing is rotated"),
        ({"model_type": "lightglue"}, "its frequencies are weights"),
        ({"model_type": "efficientloftr", "hidden_size": "256"}, "`hidden_size` is '256'"),
        (
            tower("pixtral", rope_scaling={"type": "linear"}),
            "be 'axial' or 'default', as 'pix",
        ),
        (tower("pixtral", num_heads=8), "`num_heads` is 8; it must equal `num_attention_heads`, 4"),
        (tower("pixtral", head_dim=10), "gives a head of 10 elements the widths [4, 4]"),
        (tower("pixtral", rope_parameters=AXIAL), "`rope_parameters.factor` is 2.0; it must"),
        (
            tower("pixtral", rope_scaling={"factor": 2.0}),
            "`rope_scaling.factor` is 2.0; it must be",
        ),
        (tower("pixtral", rope_scaling=["linear"]), "`rope_scaling` is ['linear']; it must be an"),
        (tower("pixtral", rope_theta="1e4"), "`rope_theta` is '1e4'; it must be a number"),
        (tower("pixtral", hidden_size=65), "`hidden_size` is 65, which 4 heads cannot share"),
        (ernie(mrope_section=[8, 8, 8]), "`mrope_section` adds up to 24; it must add up to 64"),
        (ernie(mrope_section=[32, 32]), "`mrope_section` is [32, 32]; it must have three numbers"),
        (ernie(mrope_section=64), "`mrope_section` is 64; it must be a sequence"),
        (ERNIE | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "`rope_type` is 'linear'"),
    ],
)
def test_refusals(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        reader.read(config).spec()


def test_a_vision_part_is_known_by_its_keys():
    part = {"hidden_size": 1024, "num_heads": 16, "deepstack_visual_indexes": [5]}
    for named in ({}, {"model_type": "qwen3_vl"}):
        null, given = ({**part, **named, "patch_size": size} for size in (None, 14))
        assert vision.model_type(null) == vision.model_type(given)


def test_heads_of_projections_of_their_own_width_are_floored():
    """The projections of both models are heads · (hidden_size // heads) wide."""
    assert reader.read(tower("llama4_vision_model", hidden_size=65)).spec().head_dim == 16
    keys = {"model_type": "ernie4_5_vl_moe_text", "hidden_size": 257, "num_attention_heads": 2}
    keys |= {"rope_parameters": {"mrope_section": [22, 22, 20]}}
    assert reader.read(keys).spec().head_dim == 128


# Files of vision parts as transformers saves them: without the defaults of their class, some with
# the type of the whole model. The numbers are those of the class, from its configuration.
SAVED = [
    ({"model_type": "qwen2_vl", "hidden_size": 1536, "in_chans": 3, "spatial_patch_size": 14}, 80),
    ({"model_type": "qwen2_5_vl", "hidden_size": 1280, "in_chans": 3, "tokens_per_second": 2}, 80),
    ({"model_type": "qwen2_vl_vision"}, 80),
    ({"model_type": "qwen3_vl", "depth": 27}, 72),
    ({"model_type": "glm46v", "image_size": 336}, 128),
    ({"model_type": "mistral3", "hidden_size": 1536, "image_size": 1540}, 96),
    ({"model_type": "llama4", "hidden_size": 1408, "image_size": 336}, 88),
    ({"model_type": "gemma4_vision", "hidden_size": 1152, "num_attention_heads": 16}, 64),
    ({"model_type": "step3p7", "patch_size": 14}, 96),
    ({"model_type": "sam2_video"}, 256),
    ({"model_type": "chmv2", "backbone_config": {"model_type": "dinov3_vit"}}, 64),
    ({"model_type": "sam3_vision_model", "backbone_config": {"model_type": "sam3_vit_model"}}, 64),
]


@pytest.mark.parametrize(("config", "head_dim"), SAVED)
def test_a_saved_vision_part_has_the_defaults_of_its_class(config, head_dim):
    spec = reader.read(config).spec()
    assert (spec.axes, spec.head_dim, spec.rope_type) == (2, head_dim, "axial")


@pytest.mark.parametrize(
    ("whole", "own", "model_type"),
    [
        ("qwen2_vl", None, "qwen2_vl_vision"),
        ("qwen2_vl", "qwen2_vl", "qwen2_vl_vision"),
        ("qwen2_5_omni", None, "qwen2_5_omni_vision_encoder"),
        ("llava", "pixtral", "pixtral"),
        ("mystery", "qwen2_vl", "qwen2_vl_vision"),
        ("qwen2_vl", "mystery", "qwen2_vl_vision"),
        ("lighton_ocr", None, "pixtral"),
        ("glmga", None, "glm4v_vision"),
        ("qwen3_omni_moe_thinker", None, "qwen3_omni_moe_vision_encoder"),
        ("llava", None, "clip_vision_model"),
        ("sam2_video", None, "sam2_vision_model"),
    ],
)
def test_the_model_type_of_the_vision_part_of_a_whole_model(whole, own, model_type):
    whole = {"model_type": whole, "vision_config": {"model_type": own, "patch_size": 14}}
    assert vision.tower(whole)["model_type"] == model_type
    assert vision.tower({"model_type": "outer", "thinker_config": whole}) == vision.tower(whole)


def test_the_old_key_of_the_base_of_a_memory_attention():
    old = {"model_type": "sam2_video", "memory_attention_rope_theta": 500.0}
    new = {"model_type": "sam2_video", "rope_parameters": {"rope_theta": 500.0}}
    assert reader.read(old).spec() == reader.read(new).spec()
    with pytest.raises(ValueError, match=r"`memory_attention_rope_theta` is 500.0; it must equal"):
        reader.read({**old, **new, "rope_parameters": {"rope_theta": 1e4}})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit", "hidden_size": 768, "num_attention_heads": 12},
        {"model_type": "llava", "hidden_size": 1024, "image_size": 336},
        {"model_type": "depth_anything", "backbone_config": {"model_type": "dinov2"}},
        vision.tower({"model_type": "gemma3", "vision_config": {"hidden_size": 1152}}),
        vision.tower({"model_type": "llava", "vision_config": {"model_type": "clip"}}),
    ],
)
def test_encoders_that_rotate_nothing_are_told_apart(config):
    with pytest.raises(
        ValueError, match=r"^`model_type` is '\w+': its class .* nothing is rotated"
    ):
        reader.read(config)


@pytest.mark.parametrize("config", [[], 5, None, {"model_type": ["llava"], "vision_config": {}}])
def test_the_config_of_a_tower_is_an_object(config):
    with pytest.raises(TypeError, match=r"`(config|model_type)` is"):
        vision.tower(config)
