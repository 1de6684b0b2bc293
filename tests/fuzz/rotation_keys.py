"""Keys of rotations in configs, each with two values, of which at most one is a default.

Written from published configs and their models' code, not from the tables of the library.
"""

from __future__ import annotations

import re
from typing import Any

LINEAR_3 = {"rope_type": "linear", "factor": 3.0}
LINEAR_5 = {"rope_type": "linear", "factor": 5.0}

# Keys that stand at the top level or in the object with the rope parameters.
ANYWHERE: list[tuple[Any, Any, str]] = [
    (12345.0, 54321.0, "rope_base rope_freq_base rotary_base rotary_emb_base theta"),
    (12345.0, 54321.0, "rotary_embedding_base rope_embedding_base rope_local_theta"),
    (12345.0, 54321.0, "local_rope_theta global_rope_theta swa_rope_theta rope_local_base_freq"),
    (0.375, 0.75, "partial_rotary_factor rotary_pct rope_pct rotary_percent rotary_percentage"),
    (0.375, 0.75, "rope_percentage rotary_emb_fraction rope_fraction"),
    (3.0, 5.0, "rope_ratio rope_scaling_factor rotary_scaling_factor scaling_factor rope_factor"),
    (3.0, 5.0, "rope_position_scale rope_freq_constant rotary_emb_scale_base xpos_scale_base"),
    (3.0, 5.0, "ntk_alpha ntk_factor alibi_bias_max rotary_seq_len_interpolation_factor"),
    (24, 48, "rotary_dim rotary_ndims rotary_emb_dim rope_dim rope_head_dim qk_rope_head_dim"),
    (True, False, "alibi use_alibi use_rope rope rotary use_rotary use_rotary_embedding"),
    (True, False, "use_rotary_embeddings use_rotary_position_embeddings use_xpos use_mem_rope"),
    (True, False, "use_scaled_rope use_dynamic_ntk use_yarn use_mrope use_3d_rope video_rope"),
    (True, False, "mrope_interleaved rope_interleave rope_interleaved rotary_emb_interleaved"),
    (True, False, "rope_traditional rope_is_neox_style"),
    ("linear", "yarn", "rope_scaling_type rope_impl"),
    ("alibi", "absolute", "position_embedding_type"),
    ([8, 12, 12], [6, 1, 1], "mrope_section"),
    (LINEAR_3, LINEAR_5, "yarn rope_config"),
]
TOP_LEVEL_ALONE: list[tuple[Any, Any, str]] = [
    (12345.0, 54321.0, "rope_theta compress_rope_theta"),
    ("linear", "yarn", "rope_type"),
    ([12345.0] * 8, [0] * 8, "layer_rope_theta"),
    ([0, 1] * 4, [1, 0] * 4, "no_rope_layers"),
    (2, 3, "no_rope_layer_interval"),
    (LINEAR_3, LINEAR_5, "rope_scaling rope_parameters compress_rope_parameters"),
]
IN_SECTION_ALONE: list[tuple[Any, Any, str]] = [
    (3.0, 5.0, "factor alpha base mscale mscale_all_dim attention_factor beta_fast beta_slow"),
    (3.0, 5.0, "low_freq_factor high_freq_factor"),
    ([3.0] * 32, [5.0] * 32, "long_factor short_factor"),
    ("linear", "yarn", "type"),
    (True, False, "truncate"),
]


def by_key(rows: list[tuple[Any, Any, str]]) -> dict[str, tuple[Any, Any]]:
    """Return the two values of each key."""
    return {key: (first, second) for first, second, keys in rows for key in keys.split()}


IN_SECTION = by_key(ANYWHERE + IN_SECTION_ALONE)
TOP_LEVEL = by_key(ANYWHERE + TOP_LEVEL_ALONE)

# Keys that no config has yet, named like those of rotations.
OF_ROTATIONS = re.compile("rope|rotar|theta|yarn|ntk|alibi|xpos|partial")
PREFIXES = ("decoder_", "global_", "local_", "sliding_", "text_")
NEW = {
    prefix + key: values
    for key, values in TOP_LEVEL.items()
    if OF_ROTATIONS.search(key)
    for prefix in PREFIXES
}
