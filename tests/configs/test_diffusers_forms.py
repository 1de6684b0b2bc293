"""Rotations of diffusers' classes, written out pair by pair: axis, frequency and elements."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from rope_cpu.configs import reader


def runs(*axes, theta=1e4, scales=(1, 1, 1, 1)):
    """Return (axis, frequency) of each pair, if each axis has a run of pairs."""
    return [
        (axis, theta ** (-2 * i / width) / scales[axis])
        for axis, width in enumerate(axes)
        for i in range(width // 2)
    ]


def one_axis(width, theta):
    return runs(width, theta=theta)


def sections(width, theta, height_pairs, width_pairs):
    """Return pairs that go to three axes by turns, and to the first where another has its share."""
    ends = (width, 3 * height_pairs, 3 * width_pairs)
    return [(j % 3 if j < ends[j % 3] else 0, theta ** (-2 * j / width)) for j in range(width // 2)]


def cosmos(widths, scales):
    """Return runs whose bases are those of NTK scaling: 10000 s^(w/(w-2))."""
    found = []
    for axis, (width, scale) in enumerate(zip(widths, scales, strict=True)):
        theta = 1e4 * scale ** (width / (width - 2))
        found += [(axis, theta ** (-2 * i / width)) for i in range(width // 2)]
    return found


def adjacent(pairs):
    return [(2 * i, 2 * i + 1) for i in range(pairs)]


def split(pairs):
    return [(i, i + pairs) for i in range(pairs)]


def split_thirds(pairs):
    third = pairs // 3
    return [(2 * third * a + i, 2 * third * a + third + i) for a in range(3) for i in range(third)]


# Of each class: a config, (axis, frequency) of each pair, the elements of pairs, head_dim.
FORMS = {
    "Flux3Transformer2DModel": ({}, runs(32, 32, 32, 32), adjacent, 128),
    "Krea2Transformer2DModel": ({}, runs(32, 48, 48, theta=1e3), adjacent, 128),
    "BriaFiboTransformer2DModel": ({}, runs(16, 56, 56), adjacent, 128),
    "BriaFibo2Transformer2DModel": ({}, runs(32, 48, 48, theta=256), adjacent, 128),
    "ZImageTransformer2DModel": (
        {"dim": 3840, "n_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512]},
        runs(32, 48, 48, theta=256),
        adjacent,
        128,
    ),
    "HiDreamImageTransformer2DModel": (
        {"axes_dims_rope": [64, 32, 32], "attention_head_dim": 128},
        runs(64, 32, 32),
        adjacent,
        128,
    ),
    "Lumina2Transformer2DModel": ({}, runs(32, 32, 32), adjacent, 96),
    "QwenImage21Transformer2DModel": ({}, runs(16, 56, 56), adjacent, 128),
    "NucleusMoEImageTransformer2DModel": ({}, runs(16, 56, 56), adjacent, 128),
    "MotifVideoTransformer3DModel": ({}, runs(16, 56, 56, theta=256), adjacent, 128),
    "JoyImageEditTransformer3DModel": ({}, runs(16, 56, 56, theta=256), adjacent, 128),
    "JoyImageEditPlusTransformer3DModel": (
        {"theta": 500, "hidden_size": 4096, "num_attention_heads": 32},
        runs(16, 56, 56, theta=500),
        adjacent,
        128,
    ),
    "PRXTransformer2DModel": ({"axes_dim": None}, runs(32, 32), adjacent, 64),
    "HeliosTransformer3DModel": ({}, runs(44, 42, 42), adjacent, 128),
    "Kandinsky5Transformer3DModel": ({}, runs(16, 24, 24), adjacent, 64),
    "Kandinsky6Transformer3DModel": ({}, runs(32, 48, 48, scales=(1, 2, 2)), adjacent, 128),
    "Kandinsky6SRTransformer3DModel": (
        {"scale_factor": [2.0, 1.0, 4.0]},
        runs(16, 24, 24, scales=(2, 1, 4)),
        adjacent,
        64,
    ),
    **dict.fromkeys(
        (
            "AnyFlowTransformer3DModel",
            "AnyFlowFARTransformer3DModel",
            "SanaVideoTransformer3DModel",
        ),
        ({"attention_head_dim": 112}, runs(40, 36, 36), adjacent, 112),
    ),
    "WanAnimate2Transformer3DModel": (
        {"dim": 5120, "num_heads": 40},
        runs(44, 42, 42),
        adjacent,
        128,
    ),
    "SanaWMTransformer3DModel": ({}, runs(40, 36, 36), adjacent, 112),
    "EasyAnimateTransformer3DModel": ({}, runs(16, 24, 24), adjacent, 64),
    "HunyuanDiT2DModel": ({}, runs(44, 44), adjacent, 88),
    "HunyuanDiT2DControlNetModel": ({"attention_head_dim": 64}, runs(32, 32), adjacent, 64),
    "CogView4Transformer2DModel": ({}, runs(20, 20), split, 40),
    "GlmImageTransformer2DModel": ({"attention_head_dim": 64}, runs(32, 32), split, 64),
    "AllegroTransformer3DModel": ({}, runs(32, 32, 32, scales=(2.2, 2, 2)), split_thirds, 96),
    "CosmosTransformer3DModel": ({}, cosmos((44, 42, 42), (2, 1, 1)), split, 128),
    "CosmosControlNetModel": (
        {"rope_scale": [1.0, 3.0, 3.0], "attention_head_dim": 64},
        cosmos((24, 20, 20), (1, 3, 3)),
        split,
        64,
    ),
    "MiniMaxH3Transformer3DModel": ({}, runs(32, 32, 32), split, 128),
    "AceStepTransformer1DModel": ({}, one_axis(128, 1e6), split, 128),
    "LongCatAudioDiTTransformer": ({}, one_axis(64, 1e5), split, 64),
    "MiniMaxMusic3Transformer1DModel": ({}, one_axis(32, 1e4), split, 64),
    "StableAudioDiTModel": ({}, one_axis(32, 1e4), split, 64),
    "StableAudio3DiTModel": ({}, one_axis(32, 1e4), split, 64),
    "Ideogram4Transformer2DModel": ({}, sections(256, 5e6, 20, 20), split, 256),
    "Cosmos3OmniTransformer": (
        {"rope_scaling": {"mrope_section": [40, 14, 10]}},
        sections(128, 5e6, 14, 10),
        split,
        128,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_pairs_have_their_axis_frequency_and_elements(name):
    config, pairs, elements, head_dim = FORMS[name]
    spec = reader.read({"_class_name": name, "_diffusers_version": "0.42.1", **config}).spec()
    expected = np.zeros((spec.axes, len(pairs)))
    for pair, (axis, frequency) in enumerate(pairs):
        expected[axis, pair] = frequency
    # A power, its exponent and inverse, and a division: a few roundings, times ln(5e6) = 15.
    np.testing.assert_allclose(spec.inv_freq[0, :, 0], expected, rtol=20 * 2.0**-53)
    assert [*zip(*(side.tolist() for side in spec.pair_elements()), strict=True)] == elements(
        len(pairs)
    )
    assert spec.head_dim == head_dim
    assert spec.attention_factor == 1


FACTORS = [1 + i / 16 for i in range(48)]
OMNIGEN = {
    "_class_name": "OmniGenTransformer2DModel",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "rope_base": 10000,
    "rope_scaling": {"type": "su", "short_factor": FACTORS, "long_factor": FACTORS[::-1]},
}


@pytest.mark.parametrize(("length", "factors"), [(4096, FACTORS), (4097, FACTORS[::-1])])
def test_omnigen_has_longrope(length, factors):
    spec = reader.read(OMNIGEN).spec().at_length([length])
    expected = [1 / (factor * 1e4 ** (-2 * -i / 96)) for i, factor in enumerate(factors)]
    np.testing.assert_allclose(spec.inv_freq[0, 0, 0], expected, rtol=20 * 2.0**-53)
    attention_factor = math.sqrt(1 + math.log(131072 / 4096) / math.log(4096))
    np.testing.assert_allclose(spec.attention_factor, attention_factor, rtol=4 * 2.0**-53)
    assert not spec.interleaved


def test_sana_wm_refiner_rotates_like_ltx2():
    config = {"num_attention_heads": 4, "attention_head_dim": 32, "rope_theta": 500.0}
    refiner, ltx2 = (
        reader.read({"_class_name": name, **config}).spec()
        for name in ("SanaWMLTX2RefinerTransformer3DModel", "LTX2VideoTransformer3DModel")
    )
    assert refiner == ltx2


def named(name, **values):
    return {"_class_name": name, **values}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            named("ErnieImageTransformer2DModel"),
            "`_class_name` is 'ErnieImageTransformer2DModel': its two elements of a pair have "
            "different angles, which is no rotation",
        ),
        (named("MochiTransformer3DModel"), "its frequencies are weights, not in the config"),
        (named("LuminaNextDiT2DModel"), "its pipeline gives it cos and sin"),
        (named("ZImageControlNetModel"), "it uses the rotation of the transformer"),
        (named("HiDreamImageTransformer2DModel"), "`config` has no `axes_dims_rope`"),
        (
            named("HiDreamImageTransformer2DModel", axes_dims_rope=[32, 32]),
            "`axes_dims_rope` gives the axes the widths [32, 32]; they must be 3 even",
        ),
        (
            named(
                "HiDreamImageTransformer2DModel",
                axes_dims_rope=[32, 16, 16],
                attention_head_dim=128,
            ),
            "`attention_head_dim` is 128, but the widths of the axes, [32, 16, 16], add up to 64",
        ),
        (
            named("ZImageTransformer2DModel", dim=3840, n_heads=32),
            "`dim` / `n_heads` is 120, but the widths of the axes, [32, 48, 48], add up to 128",
        ),
        (
            named("FluxTransformer2DModel", rope_theta=256.0),
            "`rope_theta` is 256.0, but this class has the base 10000.0",
        ),
        (
            named(
                "LTXVideoTransformer3DModel",
                attention_head_dim=64,
                num_attention_heads=32,
                rope_theta=256.0,
            ),
            "`rope_theta` is 256.0, but this class has the base 10000.0",
        ),
        (
            named("Kandinsky6Transformer3DModel", scale_factor=[1.0, 2.0]),
            "`scale_factor` is [1.0, 2.0]; it must be 3 numbers, one for each axis",
        ),
        (named("Kandinsky6Transformer3DModel", scale_factor=2.0), "`scale_factor` is 2.0; it"),
        (
            named("AllegroTransformer3DModel", interpolation_scale_h=0),
            "`interpolation_scale_h` is 0; it must be finite and above 0",
        ),
        (
            named("AllegroTransformer3DModel", interpolation_scale_h=5e-324),
            "`inv_freq` holds inf",
        ),
        (
            named("CosmosTransformer3DModel", attention_head_dim=10),
            "`rope_scale` needs widths above 2",
        ),
        (
            named("CosmosTransformer3DModel", rope_scale=[1e300, 1e300, 1e300]),
            "`rope_theta` is inf; it must be finite",
        ),
        (named("MiniMaxH3Transformer3DModel", rope_freq_dim=22), "`head_dim` is 128; it"),
        (named("MiniMaxMusic3Transformer1DModel", rotary_dim=66), "`rotary_dim` is 66"),
        (
            named("Ideogram4Transformer2DModel", mrope_section=[24, 20]),
            "`mrope_section` is (24, 20); it must be 3 numbers",
        ),
        (
            named("Ideogram4Transformer2DModel", mrope_section=[0, 100, 100]),
            "`mrope_section` is (0, 100, 100); it must be 3 numbers, and the last two",
        ),
        (
            named("OmniGenTransformer2DModel"),
            "`rope_scaling` is None; it must be an object with the factors",
        ),
        (
            {**OMNIGEN, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "`rope_scaling` has the type 'yarn'; this class has longrope",
        ),
        ({**OMNIGEN, "rope_scaling": {"type": "su"}}, "`short_factor` is missing"),
        (
            {**OMNIGEN, "hidden_size": 4096},
            "`short_factor` has 48 entries; it must have one for each of 64 pairs",
        ),
        (named("LongCatAudioDiTTransformer", dit_dim=1), "`head_dim` is 0"),
    ],
)
def test_refusals(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        reader.read(config).spec()
