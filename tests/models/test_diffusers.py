"""Configs of diffusers' classes: which keys decide, and refusals.

`tests/peers/test_diffusers_classes.py` compares the rotations with those of the classes.
"""

from __future__ import annotations

import re

import pytest

from rope_cpu.models import reader

IMAGE = "Transformer2DModel"
VIDEO = "Transformer3DModel"
AUDIO = "Transformer1DModel"
HEADS = "attention_head_dim"
WAN = {HEADS: 128, "num_attention_heads": 12}
COGVIDEOX = {HEADS: 64, "num_attention_heads": 48, "use_rotary_positional_embeddings": True}


FACTORS = [1 + i / 16 for i in range(48)]
OMNIGEN = {
    "_class_name": "OmniGenTransformer2DModel",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "rope_base": 10000,
    "rope_scaling": {"type": "su", "short_factor": FACTORS, "long_factor": FACTORS[::-1]},
}
COSMOS3 = {"_class_name": "Cosmos3OmniTransformer"}


def test_the_own_sections_of_cosmos_take_precedence():
    section = {"rope_scaling": {"mrope_section": [40, 14, 10], "mrope_interleaved": True}}
    own = {"rope_axes_dim": [24, 20, 20]}
    assert reader.read(COSMOS3 | section | own).spec() == reader.read(COSMOS3).spec()
    assert reader.read(COSMOS3 | section).spec() != reader.read(COSMOS3).spec()


LTX = {"_class_name": f"LTXVideo{VIDEO}", "num_attention_heads": 32, HEADS: 64}
LTX2 = LTX | {"_class_name": f"LTX2Video{VIDEO}", HEADS: 128, "rope_theta": 1e4}
LTX2["rope_type"] = "interleaved"


ROTARY = "use_rotary_positional_embeddings"


def image(name, **values):
    return {"_class_name": f"{name}{IMAGE}", **values}


def video(name, **values):
    return {"_class_name": f"{name}{VIDEO}", **values}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (COGVIDEOX | {ROTARY: None}, f"`{ROTARY}` is False; it must be True, as 'CogVid"),
        (COGVIDEOX | {HEADS: 60}, "gives a head of 60 elements the widths [14, 21, 21]"),
        ({"_diffusers_version": None, HEADS: 64}, "`_class_name` is None; it must"),
        ({"_class_name": IMAGE, "_diffusers_version": "0.27"}, f"'{IMAGE}'; it must be"),
        (image("Flux", axes_dims_rope=[16, 56, 64], **WAN), "gives a head of 128 elements the"),
        (
            video("HunyuanVideo", rope_axes_dim=[16, "56", 56]),
            "`rope_axes_dim` is '56'; it must be",
        ),
        (video("Wan", attention_head_dim=-6), "`attention_head_dim` is -6"),
        ({"_class_name": "WanModel", "dim": 5120}, "`num_heads` is None; it must be an integer"),
        (
            {"_class_name": "WanModel", "dim": 5120, "num_heads": 1024},
            "`dim // num_heads` gives a head of 5 elements the widths [5, 0, 0]",
        ),
        (LTX2 | {"rope_type": "mixed"}, "`rope_type` is 'mixed'"),
        (LTX2 | {HEADS: 15}, "`attention_head_dim` is 15; it must be even"),
        (image("ErnieImage"), "have different angles, which is no rotation"),
        (image("HiDreamImage"), "`axes_dims_rope` is None; it must be a seq"),
        (image("HiDreamImage", axes_dims_rope=[32, 32]), "[32, 32]; it must give each of 3 axes"),
        (image("ZImage", dim=3840, n_heads=32), "`axes_dims` gives a head of 120 elements the"),
        (image("Flux", rope_theta=256.0), "`rope_theta` is 256.0; it must be 10000.0, as 'Flux"),
        (image("Flux", head_dim=1), "`head_dim` is 1; it must be left out, as 'Flux"),
        (image("Flux", rope_theta=1.0), "`rope_theta` is 1.0; it must be 10000.0, as 'Flux"),
        (image("Flux", yarn_factor=1e4), "`yarn_factor` is 10000.0; it must be left out"),
        (video("Kandinsky6", scale_factor=[1.0, 2.0]), "`scale_factor` is [1.0, 2.0]; it must be"),
        (video("Kandinsky6", scale_factor=2.0), "`scale_factor` is 2.0; it"),
        (video("Allegro", interpolation_scale_h=0), "`interpolation_scale_h` is 0; it must be"),
        (video("Allegro", interpolation_scale_h=5e-324), "`inv_freq` holds inf"),
        (
            video("Cosmos", attention_head_dim=10),
            "[6, 2, 2]; it must give each of 3 axes an even width from 4",
        ),
        (video("Cosmos", rope_scale=[1e300, 1e300, 1e300]), "`rope_theta` is inf; it must be"),
        (image("Ideogram4", mrope_section=[24, 20]), "`mrope_section` is (24, 20); it must be 3"),
        (image("Ideogram4", mrope_section=[0, 100, 100]), "it must be 3 numbers, the last two of"),
        (image("Ideogram4", mrope_section=[]), "`mrope_section` is []; it must name the pairs"),
        (image("Flux2", rope_scaling=False), "`rope_scaling` is False; it must be an object"),
        (COSMOS3 | {"rope_scaling": ["linear"]}, "`rope_scaling` is ['linear']; it must be an"),
        (image("OmniGen"), "`short_factor` is missing"),
        (
            OMNIGEN | {"rope_scaling": OMNIGEN["rope_scaling"] | {"type": "yarn"}},
            "`rope_scaling.rope_type` is 'yarn'; it must be 'longrope' or 'su', as 'Omni",
        ),
        (
            COSMOS3 | {"rope_scaling": {"factor": 2}},
            "`rope_scaling.factor` is 2; it must be left out",
        ),
        (OMNIGEN | {"hidden_size": 4096}, "`short_factor` has 48 entries; it must have one for"),
    ],
)
def test_refusals(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        reader.read(config).spec()


def test_keys_of_positions_and_values_without_effect_are_accepted():
    keys = {"rope_theta": 10000.0, "rope_scaling": None, "use_rope": True, "rope_factor": 1.0}
    keys |= {"rope_parameters": {"rope_type": "default"}}
    ignored = {"rope_max_seq_len": 2048, "rope_temporal_skip_len": 4}
    wan = video("ChronoEdit", attention_head_dim=128)
    assert reader.read(wan | keys | ignored).spec() == reader.read(wan).spec()


def test_heads_under_the_keys_of_the_class():
    z_image = image("ZImage", dim=3840, n_heads=30, n_kv_heads=30)
    assert reader.read(z_image).heads() == (30, 30)
    assert reader.read({"_class_name": "LongCatAudioDiTTransformer"}).heads() == (24, 24)
