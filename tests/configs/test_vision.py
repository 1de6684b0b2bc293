"""Vision configs: the pairs of each axis, written out, and refusals."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.configs import reader, vision

ERNIE = {"model_type": "ernie4_5_vl_moe_text", "head_dim": 128}


def pairs_of(config):
    """Return {pair: (axis, frequency)} of a tower, each pair on exactly one axis."""
    matrix = reader.read(config).spec().inv_freq[0, :, 0]
    assert (np.count_nonzero(matrix, axis=0) == 1).all()
    return [(int(np.argmax(column != 0)), float(column.sum())) for column in matrix.T]


def tower(model_type, **values):
    return {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, **values}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # head_dim 16, 8 pairs; base 16 makes base^(-2i/8) = 2^-2i and base^(-2i/16) = 2^-i/2.
        (tower("qwen2_5_vl_vision"), [(0, 1), (0, 1 / 4), (0, 1 / 16), (0, 1 / 64)]),
        (tower("step3p5_vision"), [(1, 1), (1, 1 / 4), (1, 1 / 16), (1, 1 / 64)]),
        (tower("kimi_k25_vision"), [(1, 1), (0, 1), (1, 1 / 4), (0, 1 / 4)]),
        (tower("pixtral"), [(0, 1), (0, 1 / 4), (0, 1 / 16), (0, 1 / 64)]),
        (
            tower("dinov3_vit"),
            [(0, 2 * math.pi), (0, math.pi / 2), (0, math.pi / 8), (0, math.pi / 32)],
        ),
    ],
)
def test_who_owns_the_first_pairs(config, expected):
    config["rope_parameters"] = {"rope_type": "axial", "rope_theta": 256.0}
    found = pairs_of(config)[:4]
    assert [axis for axis, _ in found] == [axis for axis, _ in expected]
    assert [frequency for _, frequency in found] == pytest.approx(
        [frequency for _, frequency in expected], rel=1e-14
    )


def test_pixtral_alternates_over_the_whole_head():
    found = pairs_of(tower("pixtral", rope_theta=256.0))
    assert found == [
        (axis, pytest.approx(256 ** (-(2 * i + axis) / 8), rel=1e-14))
        for axis in range(2)
        for i in range(4)
    ]


def test_gemma4_rotates_each_half_in_itself():
    spec = reader.read(tower("gemma4_vision")).spec()
    assert spec.blocks == (8, 8)
    rotated = [100 ** (-2 * i / 8) for i in range(4)]
    assert spec.inv_freq[0, 1, 0].tolist() == pytest.approx([0, 0, 0, 0, *rotated], rel=1e-14)


def test_minimax_leaves_what_three_axes_cannot_share():
    spec = reader.read(tower("minimax_m3_vl_vision")).spec()
    assert (spec.axes, spec.head_dim, spec.rotary_dim) == (3, 16, 12)


PATCHES = {"patch_size": 14}


@pytest.mark.parametrize(
    ("whole", "part", "model_type"),
    [
        ("qwen2_vl", PATCHES, "qwen2_vl_vision"),
        ("qwen2_vl", {"model_type": "qwen2_vl", **PATCHES}, "qwen2_vl_vision"),
        ("qwen2_5_omni", PATCHES, "qwen2_5_omni_vision_encoder"),
        ("llava", {"model_type": "pixtral"}, "pixtral"),
    ],
)
def test_the_vision_part_of_a_whole_model(whole, part, model_type):
    config = {"model_type": whole, "vision_config": part}
    assert vision.tower(config)["model_type"] == model_type


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
    assert not vision.is_vision(config)


def ernie(**section):
    return ERNIE | {"rope_parameters": section}


AXIAL = {"rope_type": "axial", "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "vjepa2"}, "no rotation"),
        ({"model_type": "hunyuan_vl"}, "no rotation"),
        ({"model_type": "siglip_vision_model"}, "nothing is rotated"),
        ({"model_type": "lightglue"}, "its frequencies are weights"),
        ({"model_type": "qwen2_5_vl_vision", "num_heads": 4}, "`config` has no `hidden_size`"),
        ({"model_type": "qwen2_5_vl_vision", "hidden_size": 64}, "no `num_attention_heads`"),
        ({"model_type": "sam2_video"}, "`config` has no `memory_attention_hidden_size`"),
        ({"model_type": "efficientloftr", "hidden_size": "256"}, "`hidden_size` is '256'"),
        (tower("pixtral", rope_scaling={"type": "linear", "factor": 2.0}), "take no scaling"),
        (tower("pixtral", rope_parameters=AXIAL), "`rope_parameters` holds ['factor']"),
        (tower("pixtral", rope_scaling={"factor": 2.0}), "`rope_scaling` holds ['factor']"),
        (tower("pixtral", rope_scaling=["linear"]), "`rope_scaling` is ['linear']; it must be an"),
        (tower("pixtral", rope_theta="1e4"), "`rope_theta` is '1e4'; it must be a number"),
        (tower("pixtral", hidden_size=65), "`hidden_size` is 65, which 4 heads cannot share"),
        (ernie(mrope_section=[8, 8, 8]), "`mrope_section` adds up to 24; it must add up to 64"),
        (ernie(mrope_section=[32, 32]), "`mrope_section` is [32, 32]; it must be three numbers"),
        (ernie(mrope_section=64), "`mrope_section` is 64; it must be a sequence"),
        (ERNIE | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "`rope_type` is 'linear'"),
    ],
)
def test_refusals(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        reader.read(config).spec()


SMALL_ERNIE = {**ERNIE, "hidden_size": 2560, "num_attention_heads": 20}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (tower("pixtral"), "rope_theta"),
        (SMALL_ERNIE, "text_config"),
        (SMALL_ERNIE, "rope_theta"),
    ],
)
def test_null_is_like_a_missing_key(config, key):
    without = {name: value for name, value in config.items() if name != key}
    assert reader.read({**config, key: None}).spec() == reader.read(without).spec()


def test_a_vision_part_is_known_by_its_keys():
    part = {"hidden_size": 1024, "num_heads": 16, "deepstack_visual_indexes": [5]}
    for named in ({}, {"model_type": "qwen3_vl"}):
        null, given = ({**part, **named, "patch_size": size} for size in (None, 14))
        assert vision.model_type(null) == vision.model_type(given)
        assert vision.is_vision(null) == vision.is_vision(given)


def test_heads_of_projections_of_their_own_width_are_floored():
    """The projections of both models are heads · (hidden_size // heads) wide."""
    assert reader.read(tower("llama4_vision_model", hidden_size=65)).spec().head_dim == 16
    keys = {"model_type": "ernie4_5_vl_moe_text", "hidden_size": 257, "num_attention_heads": 2}
    keys |= {"rope_parameters": {"mrope_section": [22, 22, 20]}}
    assert reader.read(keys).spec().head_dim == 128
