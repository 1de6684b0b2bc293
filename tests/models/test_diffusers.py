"""Rotations of diffusers' classes, written out pair by pair: axis, frequency and elements."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.models import reader


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


IMAGE = "Transformer2DModel"
VIDEO = "Transformer3DModel"
AUDIO = "Transformer1DModel"
THREE = runs(16, 56, 56)
SANA = runs(40, 36, 36)
HEADS = "attention_head_dim"
WAN = {HEADS: 128, "num_attention_heads": 12}
COGVIDEOX = {HEADS: 64, "num_attention_heads": 48, "use_rotary_positional_embeddings": True}
LIKE_FLUX = (f"Flux{IMAGE}", "FluxControlNetModel", f"Bria{IMAGE}", f"LongCatImage{IMAGE}")
LIKE_FLUX += (f"OvisImage{IMAGE}", f"QwenImage{IMAGE}", "QwenImageControlNetModel")
LIKE_FLUX += (
    f"Chroma{IMAGE}",
    f"BriaFibo{IMAGE}",
    f"QwenImage21{IMAGE}",
    f"NucleusMoEImage{IMAGE}",
)
LIKE_HUNYUAN = [f"Hunyuan{kind}{VIDEO}" for kind in ("Video", "Video15", "VideoFramepack")]
LIKE_WAN = [
    f"{kind}{VIDEO}" for kind in ("Wan", "WanVACE", "WanAnimate", "SkyReelsV2", "ChronoEdit")
]

# Of each class: (axis, frequency) of each pair, the elements of pairs, head_dim, its config.
FORMS = {
    **dict.fromkeys(LIKE_FLUX, (THREE, adjacent, 128)),
    **dict.fromkeys(LIKE_HUNYUAN, (runs(16, 56, 56, theta=256), adjacent, 128)),
    **dict.fromkeys(LIKE_WAN, (runs(44, 42, 42), adjacent, 128, WAN)),
    "WanModel": (runs(44, 42, 42), adjacent, 128, {"dim": 5120, "num_heads": 40}),
    "no class": (runs(16, 24, 24), adjacent, 64, COGVIDEOX | {"_class_name": None}),
    f"ConsisID{VIDEO}": (runs(16, 24, 24), adjacent, 64, COGVIDEOX),
    f"HunyuanImage{IMAGE}": (runs(64, 64, theta=256), adjacent, 128),
    "HunyuanImage of three axes": (
        *(runs(16, 56, 56, theta=256), adjacent, 128),
        {"_class_name": f"HunyuanImage{IMAGE}", "rope_axes_dim": [16, 56, 56]},
    ),
    f"Flux2{IMAGE}": (runs(32, 32, 32, 32, theta=2e3), adjacent, 128),
    f"Flux3{IMAGE}": (runs(32, 32, 32, 32), adjacent, 128),
    f"Krea2{IMAGE}": (runs(32, 48, 48, theta=1e3), adjacent, 128),
    f"BriaFibo2{IMAGE}": (runs(32, 48, 48, theta=256), adjacent, 128),
    f"ZImage{IMAGE}": (
        *(runs(32, 48, 48, theta=256), adjacent, 128),
        {"dim": 3840, "n_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512]},
    ),
    f"HiDreamImage{IMAGE}": (
        *(runs(64, 32, 32), adjacent, 128),
        {"axes_dims_rope": [64, 32, 32], HEADS: 128},
    ),
    f"Lumina2{IMAGE}": (runs(32, 32, 32), adjacent, 96),
    f"MotifVideo{VIDEO}": (runs(16, 56, 56, theta=256), adjacent, 128),
    f"JoyImageEdit{VIDEO}": (runs(16, 56, 56, theta=256), adjacent, 128),
    f"JoyImageEditPlus{VIDEO}": (
        *(runs(16, 56, 56, theta=500), adjacent, 128),
        {"theta": 500, "hidden_size": 4096, "num_attention_heads": 32},
    ),
    f"PRX{IMAGE}": (runs(32, 32), adjacent, 64, {"axes_dim": None}),
    f"Helios{VIDEO}": (runs(44, 42, 42), adjacent, 128),
    f"Kandinsky5{VIDEO}": (runs(16, 24, 24), adjacent, 64),
    f"Kandinsky6{VIDEO}": (runs(32, 48, 48, scales=(1, 2, 2)), adjacent, 128),
    f"Kandinsky6SR{VIDEO}": (
        *(runs(16, 24, 24, scales=(2, 1, 4)), adjacent, 64),
        {"scale_factor": [2.0, 1.0, 4.0]},
    ),
    f"AnyFlow{VIDEO}": (SANA, adjacent, 112, {HEADS: 112}),
    f"AnyFlowFAR{VIDEO}": (SANA, adjacent, 112, {HEADS: 112}),
    f"SanaVideo{VIDEO}": (SANA, adjacent, 112, {HEADS: 112}),
    f"WanAnimate2{VIDEO}": (runs(44, 42, 42), adjacent, 128, {"dim": 5120, "num_heads": 40}),
    f"SanaWM{VIDEO}": (SANA, adjacent, 112),
    f"EasyAnimate{VIDEO}": (runs(16, 24, 24), adjacent, 64),
    "HunyuanDiT2DModel": (runs(44, 44), adjacent, 88),
    "HunyuanDiT2DControlNetModel": (runs(32, 32), adjacent, 64, {HEADS: 64}),
    f"CogView4{IMAGE}": (runs(20, 20), split, 40),
    f"GlmImage{IMAGE}": (runs(32, 32), split, 64, {HEADS: 64}),
    f"Allegro{VIDEO}": (runs(32, 32, 32, scales=(2.2, 2, 2)), split_thirds, 96),
    f"Cosmos{VIDEO}": (cosmos((44, 42, 42), (2, 1, 1)), split, 128),
    "CosmosControlNetModel": (
        *(cosmos((24, 20, 20), (1, 3, 3)), split, 64),
        {"rope_scale": [1.0, 3.0, 3.0], HEADS: 64},
    ),
    f"MiniMaxH3{VIDEO}": (runs(32, 32, 32), split, 128),
    f"AceStep{AUDIO}": (one_axis(128, 1e6), split, 128),
    "LongCatAudioDiTTransformer": (one_axis(64, 1e5), split, 64),
    f"MiniMaxMusic3{AUDIO}": (one_axis(32, 1e4), split, 64),
    "StableAudioDiTModel": (one_axis(32, 1e4), split, 64),
    "StableAudio3DiTModel": (one_axis(32, 1e4), split, 64),
    f"Ideogram4{IMAGE}": (sections(256, 5e6, 20, 20), split, 256),
    "Cosmos3OmniTransformer": (
        *(sections(128, 5e6, 14, 10), split, 128),
        {"rope_scaling": {"mrope_section": [40, 14, 10]}},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_pairs_have_their_axis_frequency_and_elements(name):
    pairs, elements, head_dim, *config = FORMS[name]
    named = {"_class_name": name, "_diffusers_version": "0.42.1"}
    spec = reader.read(named | dict(*config)).spec()
    expected = np.zeros((spec.axes, len(pairs)))
    for pair, (axis, frequency) in enumerate(pairs):
        expected[axis, pair] = frequency
    # A power, its exponent and inverse, and a division: a few roundings, times ln(5e6) = 15.
    np.testing.assert_allclose(spec.inv_freq[0, :, 0], expected, rtol=20 * 2.0**-53)
    first, second = (side.tolist() for side in spec.pair_elements())
    assert [*zip(first, second, strict=True)] == elements(len(pairs))
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


COSMOS3 = {"_class_name": "Cosmos3OmniTransformer"}


def test_the_own_sections_of_cosmos_take_precedence():
    section = {"rope_scaling": {"mrope_section": [40, 14, 10], "mrope_interleaved": True}}
    own = {"rope_axes_dim": [24, 20, 20]}
    assert reader.read(COSMOS3 | section | own).spec() == reader.read(COSMOS3).spec()
    assert reader.read(COSMOS3 | section).spec() != reader.read(COSMOS3).spec()


LTX = {"_class_name": f"LTXVideo{VIDEO}", "num_attention_heads": 32, HEADS: 64}
LTX2 = LTX | {"_class_name": f"LTX2Video{VIDEO}", HEADS: 128, "rope_theta": 1e4}
LTX2["rope_type"] = "interleaved"


def rotated(x, angles):
    """Rotate adjacent pairs of x (tokens, ..., width) by angles (tokens, ..., width / 2)."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


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


def test_sana_wm_refiner_rotates_like_ltx2():
    config = {"num_attention_heads": 4, "attention_head_dim": 32, "rope_theta": 500.0}
    refiner, ltx2 = (
        reader.read({"_class_name": name, **config}).spec()
        for name in ("SanaWMLTX2RefinerTransformer3DModel", "LTX2VideoTransformer3DModel")
    )
    assert refiner == ltx2


ROTARY = "use_rotary_positional_embeddings"


def image(name, **values):
    return {"_class_name": f"{name}{IMAGE}", **values}


def video(name, **values):
    return {"_class_name": f"{name}{VIDEO}", **values}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (COGVIDEOX | {ROTARY: False}, "adds sinusoidal embeddings"),
        (COGVIDEOX | {ROTARY: None}, f"`{ROTARY}` is False: this CogVideoX adds sinusoidal"),
        (COGVIDEOX | {HEADS: 60}, "gives the axes the widths (15, 21, 21)"),
        ({"_diffusers_version": None, HEADS: 64}, "`_class_name` is None; it must"),
        ({"_class_name": IMAGE, "_diffusers_version": "0.27"}, f"'{IMAGE}'; it must be"),
        (image("Flux", axes_dims_rope=[16, 56, 64], **WAN), "`attention_head_dim` is 128"),
        (image("Flux", axes_dims_rope=[64, 64]), "`axes_dims_rope` gives the axes the widths (64,"),
        (video("HunyuanVideo", rope_axes_dim=[17, 55, 56]), "`rope_axes_dim` gives the axes the"),
        (
            video("HunyuanVideo", rope_axes_dim=[16, "56", 56]),
            "`rope_axes_dim` is '56'; it must be",
        ),
        (video("Wan", attention_head_dim=5), "gives the axes the widths (5, 0, 0)"),
        (video("Wan", attention_head_dim=-6), "`attention_head_dim` is -6"),
        ({"_class_name": "WanModel", "dim": 5120}, "`config` has no `num_heads`"),
        (
            {"_class_name": "WanModel", "dim": 5120, "num_heads": 1024},
            "`dim // num_heads` gives the axes the widths (5, 0, 0)",
        ),
        (LTX2 | {"rope_type": "mixed"}, "`rope_type` is 'mixed'"),
        (LTX2 | {HEADS: 15}, "`attention_head_dim` is 15; it must be even"),
        (image("ErnieImage"), "have different angles, which is no rotation"),
        (video("Mochi"), "its frequencies are weights, not in the config"),
        ({"_class_name": "LuminaNextDiT2DModel"}, "its pipeline gives it cos and sin"),
        ({"_class_name": "ZImageControlNetModel"}, "it uses the rotation of the transformer"),
        (image("HiDreamImage"), "`config` has no `axes_dims_rope`"),
        (image("HiDreamImage", axes_dims_rope=[32, 32]), "(32, 32); it must give 3 axes even"),
        (
            image("HiDreamImage", axes_dims_rope=[32, 16, 16], attention_head_dim=128),
            "`attention_head_dim` is 128; it must fit the widths of the axes, (32, 16, 16)",
        ),
        (image("ZImage", dim=3840, n_heads=32), "`dim // n_heads` is 120; it must fit the widths"),
        (image("Flux", rope_theta=256.0), "`rope_theta` is 256.0; it must be left out, as 'Flux"),
        (
            video("LTXVideo", attention_head_dim=64, num_attention_heads=32, rope_theta=256.0),
            "`rope_theta` is 256.0; it must be left out, as 'LTXVideo",
        ),
        (video("Kandinsky6", scale_factor=[1.0, 2.0]), "`scale_factor` is [1.0, 2.0]; it must be"),
        (video("Kandinsky6", scale_factor=2.0), "`scale_factor` is 2.0; it"),
        (video("Allegro", interpolation_scale_h=0), "`interpolation_scale_h` is 0; it must be"),
        (video("Allegro", interpolation_scale_h=5e-324), "`inv_freq` holds inf"),
        (video("Cosmos", attention_head_dim=10), "`rope_scale` needs widths above 2"),
        (video("Cosmos", rope_scale=[1e300, 1e300, 1e300]), "`rope_theta` is inf; it must be"),
        (video("MiniMaxH3", rope_freq_dim=22), "`attention_head_dim` is 128; it must fit"),
        (
            {"_class_name": f"MiniMaxMusic3{AUDIO}", "rotary_dim": 66},
            "`attention_head_dim` is 64; it must fit",
        ),
        (image("Ideogram4", mrope_section=[24, 20]), "`mrope_section` is (24, 20); it must be 3"),
        (image("Ideogram4", mrope_section=[0, 100, 100]), "it must be 3 numbers, the last two of"),
        (image("Ideogram4", mrope_section=[]), "`mrope_section` is []; it must name the pairs"),
        (image("Flux2", rope_scaling=False), "`rope_scaling` is False; it must be an object"),
        (COSMOS3 | {"rope_scaling": ["linear"]}, "`rope_scaling` is ['linear']; it must be an"),
        (image("OmniGen"), "`short_factor` is missing"),
        (
            OMNIGEN | {"rope_scaling": OMNIGEN["rope_scaling"] | {"type": "yarn"}},
            "`rope_scaling.rope_type` is 'yarn': its class has the factors of longrope",
        ),
        (OMNIGEN | {"rope_scaling": {"type": "su"}}, "`short_factor` is missing"),
        (
            OMNIGEN | {"rope_scaling": OMNIGEN["rope_scaling"] | {"factor": 8.0}},
            "rope_scaling.factor",
        ),
        (
            COSMOS3 | {"rope_scaling": {"factor": 2}},
            "`rope_scaling.factor` is 2; it must be left out",
        ),
        (
            COSMOS3 | {"rope_scaling": {"rope_type": "yarn"}},
            "`rope_scaling.rope_type` is 'yarn'; it",
        ),
        (OMNIGEN | {"hidden_size": 4096}, "`short_factor` has 48 entries; it must have one for"),
        ({"_class_name": "LongCatAudioDiTTransformer", "dit_dim": 1}, "the widths (0,)"),
    ],
)
def test_refusals(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        reader.read(config).spec()


def test_keys_of_positions_and_values_without_effect_are_accepted():
    keys = {"rope_theta": 10000.0, "rope_scaling": None, "use_rope": True, "rope_factor": 1.0}
    ignored = {"rope_max_seq_len": 2048, "rope_temporal_skip_len": 4}
    wan = video("ChronoEdit", attention_head_dim=128)
    assert reader.read(wan | keys | ignored).spec() == reader.read(wan).spec()


def test_heads_under_the_keys_of_the_class():
    z_image = image("ZImage", dim=3840, n_heads=30, n_kv_heads=30)
    assert reader.read(z_image).heads() == (30, 30)
    assert reader.read({"_class_name": "LongCatAudioDiTTransformer"}).heads() == (24, 24)
