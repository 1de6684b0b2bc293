"""Vision towers and diffusers classes alike: no key of a rotation is ignored without a word."""

from __future__ import annotations

import pytest

from rope_cpu.models import reader, vision

ROWS = {**vision.TOWERS, **vision.CLASSES}

# Keys of rotations in published configs, with values that no class has by default.
KEYS = {
    **dict.fromkeys(("rope_theta", "theta", "rope_base", "local_rope_theta", "rotary_base"), 543.0),
    **dict.fromkeys(("rope_ratio", "rope_factor", "ntk_factor", "xpos_scale_base"), 3.0),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"), 0.375),
    **dict.fromkeys(("rotary_dim", "rope_head_dim", "rope_freq_dim"), 34),
    **dict.fromkeys(("alibi", "use_xpos", "use_scaled_rope", "use_dynamic_ntk"), True),
    **dict.fromkeys(("axes_dims", "axes_dim", "axes_dims_rope", "rope_axes_dim"), (8, 12, 12)),
    **dict.fromkeys(("rope_dim", "rope_dim_list", "mrope_section"), (8, 12, 12)),
    "rope_scaling": {"type": "linear", "factor": 3.0},
    "rope_parameters": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"factor": 3.0},
    "rope_scale": [3.0, 1.0, 1.0],
    "rope_type": "yarn",
    "head_dim": 120,
    "use_ntk": True,
    "use_rope": False,
    "rope_dims": (8, 12, 12),
}

# What classes without defaults need.
WIDTHS = {"attention_head_dim": 128, "num_attention_heads": 4, "dim": 1024, "num_heads": 8}
FACTORS = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def config_of(name):
    """Return a small config of a model type or class."""
    row = ROWS[name]
    if name in vision.TOWERS:
        return {"model_type": name}
    config = {"_class_name": name}
    config |= dict.fromkeys(row.only.keys() & {"use_rotary_positional_embeddings"}, True)
    if row.parts in (6, 8) or row.form == "all heads":
        config |= {key: value for key, value in WIDTHS.items() if key not in row.names[name]}
    if row.scaling:
        config["rope_scaling"] = FACTORS
    if row.widths == "axes_dims_rope":
        config["axes_dims_rope"] = row.names[name]["axes_dims_rope"] or [64, 32, 32]
    return config


@pytest.mark.parametrize("name", ROWS)
def test_no_key_of_a_rotation_is_ignored(name):
    config = config_of(name)
    spec = reader.read(config).spec()
    for key in KEYS.keys() - config.keys() - set(ROWS[name].ignored):
        try:
            assert reader.read({**config, key: KEYS[key]}).spec() != spec, key
        except ValueError as error:
            # Widths of axes may also miss the sum that the width of a head must be.
            assert key in str(error) or "head_dim" in str(error)  # noqa: PT017


FLUX = {"_class_name": "FluxTransformer2DModel", "axes_dims_rope": [16, 56, 56]}
LTX2 = {"_class_name": "LTX2VideoTransformer3DModel", "rope_theta": 1e4, **WIDTHS}
PIXTRAL = {"model_type": "pixtral", "rope_theta": 1e4}
ERNIE = {"model_type": "ernie4_5_vl_moe_text", "hidden_size": 2560, "num_attention_heads": 20}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (FLUX, "axes_dims_rope"),
        (FLUX, "rope_theta"),
        (LTX2, "rope_theta"),
        (PIXTRAL, "rope_theta"),
        (ERNIE, "text_config"),
        (ERNIE, "rope_theta"),
    ],
)
def test_null_is_like_a_missing_key(config, key):
    without = {name: value for name, value in config.items() if name != key}
    assert reader.read({**config, key: None}).spec() == reader.read(without).spec()
