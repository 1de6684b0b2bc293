"""Configs of diffusers: closed forms of their models, written out pair by pair, and refusals."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding, positions
from rope_cpu.models import reader


def named(name, **values):
    return {"_class_name": name, **values}


FLUX = named("FluxTransformer2DModel", _diffusers_version="0.30.0.dev0", attention_head_dim=128)
CHROMA = named("ChromaTransformer2DModel", attention_head_dim=128, axes_dims_rope=[16, 56, 56])
WAN = named("WanModel", _diffusers_version="0.30.0", dim=5120, num_heads=40, model_type="t2v")
WAN_DIFFUSERS = named("WanTransformer3DModel", attention_head_dim=128, num_attention_heads=12)
HUNYUAN = named(
    "HunyuanVideo15Transformer3DModel",
    attention_head_dim=128,
    rope_axes_dim=[16, 56, 56],
    rope_theta=256.0,
)
COGVIDEOX = {
    "attention_head_dim": 64,
    "num_attention_heads": 48,
    "use_rotary_positional_embeddings": True,
}
LTX2 = named(
    "LTX2VideoTransformer3DModel",
    num_attention_heads=32,
    attention_head_dim=128,
    rope_theta=10000.0,
    rope_type="interleaved",
)
LTX = named("LTXVideoTransformer3DModel", num_attention_heads=32, attention_head_dim=64)


def rotated(x, angles):
    """Rotate adjacent pairs of x (tokens, ..., width) by angles (tokens, ..., width / 2)."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def axis_by_axis(ids, widths, theta):
    """Return the angle of each pair: coordinate times theta^(-2i/width), axis after axis."""
    return np.array(
        [
            [
                p[axis] * math.pow(theta, -2 * i / width)
                for axis, width in enumerate(widths)
                for i in range(width // 2)
            ]
            for p in np.asarray(ids).tolist()
        ]
    )


IMAGE = positions.grid((1, 5, 7))
VIDEO = positions.grid((4, 5, 7))

# Configuration, widths of time, row and column, base, positions.
MODELS = [
    (FLUX, (16, 56, 56), 1e4, IMAGE),
    (CHROMA, (16, 56, 56), 1e4, IMAGE),
    (WAN, (44, 42, 42), 1e4, VIDEO),
    (HUNYUAN, (16, 56, 56), 256.0, VIDEO),
    (named("HunyuanVideoTransformer3DModel"), (16, 56, 56), 256.0, [[3, 4, 5]]),
    # Sampled at half the training resolution: rows and columns are 0, 2, 4, …; other ratios make
    # them fractional.
    (COGVIDEOX, (16, 24, 24), 1e4, positions.grid((4, 5, 7), scale=(1, 1.875, 2))),
    # The middle of the image is 0: rows -(n - n // 2) … n // 2 - 1.
    (
        CHROMA | {"_class_name": "QwenImageTransformer2DModel"},
        *((16, 56, 56), 1e4, positions.grid((1, 5, 8), start=(0, -3, -4))),
    ),
    (named("Flux2Transformer2DModel"), (32, 32, 32, 32), 2e3, positions.grid((1, 5, 7, 2))),
    (named("HunyuanImageTransformer2DModel"), (64, 64), 256.0, positions.grid((5, 7))),
    (
        named("HunyuanImageTransformer2DModel", rope_axes_dim=[16, 56, 56]),
        *((16, 56, 56), 256.0, IMAGE),
    ),
    (named("HunyuanVideoFramepackTransformer3DModel"), (16, 56, 56), 256.0, VIDEO),
    (COGVIDEOX | {"_class_name": "ConsisIDTransformer3DModel"}, (16, 24, 24), 1e4, VIDEO),
]
LIKE_FLUX = (
    *("FluxControlNetModel", "BriaTransformer2DModel", "LongCatImageTransformer2DModel"),
    *("OvisImageTransformer2DModel", "QwenImageControlNetModel"),
)
LIKE_WAN = (
    *("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"),
    *("SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"),
)
MODELS += [(named(name), (16, 56, 56), 1e4, IMAGE) for name in LIKE_FLUX]
MODELS += [(WAN_DIFFUSERS | named(name), (44, 42, 42), 1e4, VIDEO) for name in LIKE_WAN]


@pytest.mark.parametrize(
    ("config", "widths", "theta", "ids"),
    MODELS,
    ids=[row[0].get("_class_name", "CogVideoX") for row in MODELS],
)
def test_video_and_image_models_equal_their_closed_form(config, widths, theta, ids, rng):
    rope = RotaryEmbedding.from_config(config)
    assert rope.interleaved
    x = rng.normal(size=(len(ids), 2, sum(widths)))
    exact = rotated(x, axis_by_axis(ids, widths, theta)[:, None])
    np.testing.assert_allclose(rope.rotate(x[None], ids)[0], exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("config", "width"), [(LTX2, 4096), (LTX, 2048)])
def test_ltx_rotates_all_heads_as_one_vector(config, width, rng):
    """Frequency k of n on each axis, then k + 1, after the pairs that three axes cannot share.

    The heads are split afterwards.
    """
    rope = RotaryEmbedding.from_config(config)
    ids = rng.uniform(-1, 1, size=(10, 3))
    count, heads = width // 6, config["num_attention_heads"]
    spare = width // 2 - 3 * count
    assert spare == 2048 - 2046 if width == 4096 else spare == 1
    frequencies = [
        float(np.float32(math.pi / 2 * 10000.0 ** (k / (count - 1)))) for k in range(count)
    ]
    angles = np.array(
        [[0.0] * spare + [w * p[axis] for w in frequencies for axis in range(3)] for p in ids]
    )
    x = rng.normal(size=(10, width))
    exact = rotated(x, angles).reshape(1, 10, heads, width // heads)
    ours = rope.rotate(x.reshape(1, 10, heads, width // heads), ids)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-10)


def test_ltx2_split_pairs_halves_of_each_head():
    split = reader.read({**LTX2, "rope_type": "split"}).spec()
    assert not split.interleaved
    assert np.array_equal(split.inv_freq, reader.read(LTX2).spec().inv_freq)


ROTARY = "use_rotary_positional_embeddings"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (COGVIDEOX | {ROTARY: False}, "adds sinusoidal embeddings"),
        (COGVIDEOX | {ROTARY: None}, f"`{ROTARY}` is False: this CogVideoX adds sinusoidal"),
        (
            named("Transformer2DModel", _diffusers_version="0.27.2"),
            "'Transformer2DModel'; it must be",
        ),
        ({"_diffusers_version": None, "attention_head_dim": 64}, "`_class_name` is None; it must"),
        (FLUX | {"axes_dims_rope": [16, 56, 64]}, "`attention_head_dim` is 128"),
        (FLUX | {"axes_dims_rope": [64, 64]}, "`axes_dims_rope` gives the axes the widths (64,"),
        (HUNYUAN | {"rope_axes_dim": [17, 55, 56]}, "`rope_axes_dim` gives the axes the widths"),
        (HUNYUAN | {"rope_axes_dim": [16, "56", 56]}, "`rope_axes_dim` is '56'; it must be an"),
        (WAN_DIFFUSERS | {"attention_head_dim": 5}, "gives the axes the widths (5, 0, 0)"),
        (WAN_DIFFUSERS | {"attention_head_dim": -6}, "`attention_head_dim` is -6"),
        (WAN | {"num_heads": 1024}, "`dim // num_heads` gives the axes the widths (5, 0, 0)"),
        (COGVIDEOX | {"attention_head_dim": 60}, "gives the axes the widths (15, 21, 21)"),
        (LTX2 | {"rope_type": "mixed"}, "`rope_type` is 'mixed'"),
        (LTX2 | {"attention_head_dim": 15}, "`attention_head_dim` is 15; it must be even"),
        (named("WanModel", dim=5120), "`config` has no `num_heads`"),
    ],
)
def test_refusals(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        reader.read(config).spec()


@pytest.mark.parametrize(
    ("config", "key"), [(FLUX, "axes_dims_rope"), (FLUX, "rope_theta"), (LTX2, "rope_theta")]
)
def test_null_is_like_a_missing_key(config, key):
    without = {name: value for name, value in config.items() if name != key}
    assert reader.read({**config, key: None}).spec() == reader.read(without).spec()
