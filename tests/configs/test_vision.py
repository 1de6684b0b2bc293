"""Vision, video and diffusers configurations against the closed forms of their models, written out pair by pair."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding, positions
from rope_cpu.configs import reader, vision

RANDOM = np.random.default_rng(2)

FLUX = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0.dev0", "attention_head_dim": 128}
CHROMA = {"_class_name": "ChromaTransformer2DModel", "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
QWEN_IMAGE = {**CHROMA, "_class_name": "QwenImageTransformer2DModel"}
WAN = {"_class_name": "WanModel", "_diffusers_version": "0.30.0", "dim": 5120, "num_heads": 40, "model_type": "t2v"}
WAN_DIFFUSERS = {"_class_name": "WanTransformer3DModel", "attention_head_dim": 128, "num_attention_heads": 12}
HUNYUAN = {
    "_class_name": "HunyuanVideo15Transformer3DModel",
    "attention_head_dim": 128,
    "rope_axes_dim": [16, 56, 56],
    "rope_theta": 256.0,
}
COGVIDEOX = {"attention_head_dim": 64, "num_attention_heads": 48, "use_rotary_positional_embeddings": True}
LTX2 = {
    "_class_name": "LTX2VideoTransformer3DModel",
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "rope_theta": 10000.0,
    "rope_type": "interleaved",
}
LTX = {"_class_name": "LTXVideoTransformer3DModel", "num_attention_heads": 32, "attention_head_dim": 64}


ERNIE = {"model_type": "ernie4_5_vl_moe_text", "head_dim": 128}


def turned(x, angles):
    """Rotate adjacent pairs of x (tokens, ..., width) by angles (tokens, ..., width / 2), in complex numbers."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def axis_by_axis(ids, widths, theta):
    """The angle of each pair of a token: its coordinate times theta^(-2i/width), axis after axis."""
    return np.array(
        [
            [p[axis] * math.pow(theta, -2 * i / width) for axis, width in enumerate(widths) for i in range(width // 2)]
            for p in np.asarray(ids).tolist()
        ]
    )


# Configuration, widths of time, row and column, base, positions.
FORMS = {
    "Flux": (FLUX, (16, 56, 56), 1e4, positions.grid((1, 5, 7))),
    "Chroma": (CHROMA, (16, 56, 56), 1e4, positions.grid((1, 5, 7))),
    "Wan": (WAN, (44, 42, 42), 1e4, positions.grid((4, 5, 7))),
    "Wan in diffusers": (WAN_DIFFUSERS, (44, 42, 42), 1e4, positions.grid((4, 5, 7))),
    "HunyuanVideo": (HUNYUAN, (16, 56, 56), 256.0, positions.grid((4, 5, 7))),
    "HunyuanVideo by default": ({"_class_name": "HunyuanVideoTransformer3DModel"}, (16, 56, 56), 256.0, [[3, 4, 5]]),
    # Sampled at half the training resolution: rows and columns are 0, 2, 4, …; fractional for other ratios.
    "CogVideoX": (COGVIDEOX, (16, 24, 24), 1e4, positions.grid((4, 5, 7), scale=(1, 1.875, 2))),
    # The middle of the image is 0: rows -(n - n // 2) … n // 2 - 1.
    "Qwen-Image": (QWEN_IMAGE, (16, 56, 56), 1e4, positions.grid((1, 5, 8), start=(0, -3, -4))),
    "FLUX.2": ({"_class_name": "Flux2Transformer2DModel"}, (32, 32, 32, 32), 2e3, positions.grid((1, 5, 7, 2))),
    "HunyuanImage": ({"_class_name": "HunyuanImageTransformer2DModel"}, (64, 64), 256.0, positions.grid((5, 7))),
    "HunyuanImage's refiner": (
        {"_class_name": "HunyuanImageTransformer2DModel", "rope_axes_dim": [16, 56, 56]},
        (16, 56, 56),
        256.0,
        positions.grid((1, 5, 7)),
    ),
    "FramePack": (
        {"_class_name": "HunyuanVideoFramepackTransformer3DModel"},
        (16, 56, 56),
        256.0,
        positions.grid((4, 5, 7)),
    ),
    "ConsisID": (
        {**COGVIDEOX, "_class_name": "ConsisIDTransformer3DModel"},
        (16, 24, 24),
        1e4,
        positions.grid((4, 5, 7)),
    ),
    **{
        name: ({"_class_name": name}, (16, 56, 56), 1e4, positions.grid((1, 5, 7)))
        for name in (
            *("FluxControlNetModel", "BriaTransformer2DModel", "LongCatImageTransformer2DModel"),
            *("OvisImageTransformer2DModel", "QwenImageControlNetModel"),
        )
    },
    **{
        name: ({**WAN_DIFFUSERS, "_class_name": name}, (44, 42, 42), 1e4, positions.grid((4, 5, 7)))
        for name in (
            *("WanVACETransformer3DModel", "WanAnimateTransformer3DModel"),
            *("SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"),
        )
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_video_and_image_models_equal_their_closed_form(name):
    config, widths, theta, ids = FORMS[name]
    rope = RotaryEmbedding.from_config(config)
    assert rope.interleaved
    x = RANDOM.normal(size=(len(ids), 2, sum(widths)))
    exact = turned(x, axis_by_axis(ids, widths, theta)[:, None])
    np.testing.assert_allclose(rope.rotate(x[None], ids)[0], exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("config", "width"), [(LTX2, 4096), (LTX, 2048)])
def test_ltx_turns_all_heads_as_one_vector(config, width):
    """Frequency k of n on the three axes in turn, from the end of what three axes cannot share, before heads part."""
    rope = RotaryEmbedding.from_config(config)
    ids = RANDOM.uniform(-1, 1, size=(10, 3))
    count, heads = width // 6, config["num_attention_heads"]
    spare = width // 2 - 3 * count
    assert spare == 2048 - 2046 if width == 4096 else spare == 1
    frequencies = [float(np.float32(math.pi / 2 * 10000.0 ** (k / (count - 1)))) for k in range(count)]
    angles = np.array([[0.0] * spare + [w * p[axis] for w in frequencies for axis in range(3)] for p in ids])
    x = RANDOM.normal(size=(10, width))
    exact = turned(x, angles).reshape(1, 10, heads, width // heads)
    ours = rope.rotate(x.reshape(1, 10, heads, width // heads), ids)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-10)


def test_ltx2_split_pairs_halves_of_each_head():
    split = reader.read({**LTX2, "rope_type": "split"}).spec()
    assert not split.interleaved
    assert np.array_equal(split.inv_freq, reader.read(LTX2).spec().inv_freq)


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
        (tower("qwen2_5_vl_vision"), [(0, 1), (0, 1 / 4), (0, 1 / 16), (0, 1 / 64)] * 1),
        (tower("step3p5_vision"), [(1, 1), (1, 1 / 4), (1, 1 / 16), (1, 1 / 64)]),
        (tower("kimi_k25_vision"), [(1, 1), (0, 1), (1, 1 / 4), (0, 1 / 4)]),
        (tower("pixtral"), [(0, 1), (0, 1 / 4), (0, 1 / 16), (0, 1 / 64)]),
        (tower("dinov3_vit"), [(0, 2 * math.pi), (0, math.pi / 2), (0, math.pi / 8), (0, math.pi / 32)]),
    ],
)
def test_who_owns_the_first_pairs(config, expected):
    config["rope_parameters"] = {"rope_type": "axial", "rope_theta": 256.0}
    found = pairs_of(config)[:4]
    assert [axis for axis, _ in found] == [axis for axis, _ in expected]
    assert [frequency for _, frequency in found] == pytest.approx([frequency for _, frequency in expected], rel=1e-14)


def test_pixtral_alternates_over_the_whole_head():
    found = pairs_of(tower("pixtral", rope_theta=256.0))
    assert found == [
        (axis, pytest.approx(256 ** (-(2 * i + axis) / 8), rel=1e-14)) for axis in range(2) for i in range(4)
    ]


def test_gemma4_rotates_each_half_in_itself():
    spec = reader.read(tower("gemma4_vision")).spec()
    assert spec.blocks == (8, 8)
    assert spec.inv_freq[0, 1, 0].tolist() == pytest.approx([0, 0, 0, 0, *(100 ** (-2 * i / 8) for i in range(4))])


def test_minimax_leaves_what_three_axes_cannot_share():
    spec = reader.read(tower("minimax_m3_vl_vision")).spec()
    assert (spec.axes, spec.head_dim, spec.rotary_dim) == (3, 16, 12)


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        ({"model_type": "qwen2_vl", "vision_config": {"patch_size": 14}}, "qwen2_vl_vision"),
        ({"model_type": "qwen2_vl", "vision_config": {"model_type": "qwen2_vl", "patch_size": 14}}, "qwen2_vl_vision"),
        ({"model_type": "qwen2_5_omni", "vision_config": {"patch_size": 14}}, "qwen2_5_omni_vision_encoder"),
        ({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}, "pixtral"),
    ],
)
def test_the_vision_part_of_a_whole_model(config, model_type):
    assert vision.tower(config)["model_type"] == model_type


QWEN = {"depth": 24, "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}


@pytest.mark.parametrize(
    ("part", "head_dim"),
    [
        ({"model_type": "qwen3_vl", "hidden_size": 1024, **QWEN}, 64),
        ({"hidden_size": 1536, "embed_dim": 1280, **QWEN}, 80),
        ({"hidden_size": 1280, **QWEN}, 80),
        ({"model_type": "", "patch_size": 14, "vt_hidden_size": 1152, "vt_num_attention_heads": 16}, 72),
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "vjepa2"}, "no rotation"),
        ({"model_type": "hunyuan_vl"}, "no rotation"),
        ({"model_type": "siglip_vision_model"}, "nothing is rotated"),
        ({"model_type": "lightglue"}, "its frequencies are weights"),
        ({"model_type": "qwen2_5_vl_vision", "num_heads": 4}, "`config` has no `hidden_size`"),
        ({"model_type": "qwen2_5_vl_vision", "hidden_size": 64}, "`config` has no `num_attention_heads`"),
        ({"model_type": "sam2_video"}, "`config` has no `memory_attention_hidden_size`"),
        (tower("pixtral", rope_scaling={"type": "linear", "factor": 2.0}), "vision towers take no scaling"),
        (tower("pixtral", rope_parameters={"rope_type": "axial", "factor": 2.0}), "`rope_parameters` holds ['factor']"),
        ({**COGVIDEOX, "use_rotary_positional_embeddings": False}, "adds sinusoidal embeddings"),
        ({"_class_name": "Transformer2DModel", "_diffusers_version": "0.27.2"}, "does not determine a rotation"),
        ({**FLUX, "axes_dims_rope": [16, 56, 64]}, "`attention_head_dim` is 128"),
        ({**FLUX, "axes_dims_rope": [64, 64]}, "`axes_dims_rope` gives the axes the widths [64, 64]"),
        ({**HUNYUAN, "rope_axes_dim": [17, 55, 56]}, "`rope_axes_dim` gives the axes the widths [17, 55, 56]"),
        ({**HUNYUAN, "rope_axes_dim": [16, "56", 56]}, "`rope_axes_dim` gives the axes the widths [16, '56', 56]"),
        ({**WAN_DIFFUSERS, "attention_head_dim": 5}, "`attention_head_dim` gives the axes the widths (5, 0, 0)"),
        ({**WAN_DIFFUSERS, "attention_head_dim": -6}, "`attention_head_dim` is -6"),
        ({**WAN, "num_heads": 1024}, "`dim` gives the axes the widths (5, 0, 0)"),
        ({**COGVIDEOX, "attention_head_dim": 60}, "`attention_head_dim` gives the axes the widths (15, 21, 21)"),
        ({**LTX2, "rope_type": "mixed"}, "`rope_type` is 'mixed'"),
        ({**LTX2, "attention_head_dim": 15}, "`attention_head_dim` is 15; it must be even"),
        ({"_class_name": "WanModel", "dim": 5120}, "`config` has no `num_heads`"),
        ({**ERNIE, "rope_parameters": {"mrope_section": [8, 8, 8]}}, "`mrope_section` is [8, 8, 8]; it must split 64"),
        ({**ERNIE, "rope_parameters": {"mrope_section": [32, 32]}}, "`mrope_section` is [32, 32]; it must split 64"),
        ({**ERNIE, "rope_scaling": {"type": "linear", "factor": 2.0}}, "`rope_type` is 'linear'"),
        (tower("pixtral", rope_scaling={"factor": 2.0}), "`rope_scaling` holds ['factor']"),
        (tower("pixtral", hidden_size=65), "`hidden_size` is 65, which 4 heads cannot share equally"),
        ({**ERNIE, "rope_parameters": {"mrope_section": 64}}, "`mrope_section` is 64; it must be a sequence"),
        (tower("pixtral", rope_theta="1e4"), "`rope_theta` is '1e4'; it must be a number"),
        (tower("pixtral", rope_scaling=["linear"]), "`rope_scaling` is ['linear']; it must be an object"),
        ({"model_type": "efficientloftr", "hidden_size": "256"}, "`hidden_size` is '256'"),
    ],
)
def test_refusals(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        reader.read(config).spec()


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (tower("pixtral"), "rope_theta"),
        (FLUX, "axes_dims_rope"),
        (FLUX, "rope_theta"),
        (LTX2, "rope_theta"),
        ({**ERNIE, "hidden_size": 2560, "num_attention_heads": 20}, "text_config"),
        ({**ERNIE, "hidden_size": 2560, "num_attention_heads": 20}, "rope_theta"),
    ],
)
def test_null_says_nothing(config, key):
    assert (
        reader.read({**config, key: None}).spec() == reader.read({k: v for k, v in config.items() if k != key}).spec()
    )


def test_what_kind_a_configuration_is_goes_by_its_keys():
    part = {"hidden_size": 1024, "num_heads": 16, "deepstack_visual_indexes": [5], "patch_size": None}
    for null in ({}, {"model_type": "qwen3_vl"}):
        assert vision.model_type({**part, **null}) == vision.model_type({**part, **null, "patch_size": 14})
        assert vision.is_vision({**part, **null}) == vision.is_vision({**part, **null, "patch_size": 14})
    with pytest.raises(ValueError, match="is None: this CogVideoX adds sinusoidal embeddings"):
        reader.read({**COGVIDEOX, "use_rotary_positional_embeddings": None}).spec()
    with pytest.raises(ValueError, match="`_class_name` is None, which does not determine a rotation"):
        reader.read({"_diffusers_version": None, "attention_head_dim": 64}).spec()


def test_heads_of_projections_of_their_own_width_are_floored():
    """As in the code of these two models, whose projections are heads · (hidden_size // heads) wide."""
    assert reader.read(tower("llama4_vision_model", hidden_size=65)).spec().head_dim == 16
    ernie = {"hidden_size": 257, "num_attention_heads": 2, "rope_parameters": {"mrope_section": [22, 22, 20]}}
    assert reader.read({"model_type": "ernie4_5_vl_moe_text", **ernie}).spec().head_dim == 128
