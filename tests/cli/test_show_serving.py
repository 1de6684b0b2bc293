"""The calls of a server in `rope-cpu show`, checked by hand against the models' code."""

import pytest

from rope_cpu.cli.show_serving import serving_lines
from rope_cpu.configs import reader
from rope_cpu.configs.attention_facts import FACTS
from rope_cpu.configs.vision import REFUSED
from rope_cpu.frequencies.rope_types import ROPE_TYPES, RopeType, dynamic
from rope_cpu.rotation.embedding import RotaryEmbedding

OVER_PROJECTION = [
    "plan.append(q, k, v, cache, batch)",
    "without q_norm and k_norm: norm q and k before, as the model's norms are",
    "over the whole projection",
]
BARE = ["plan.append(q, k, v, cache, batch)"]


def serving(shown, config, *options):
    """Return the lines about serving, of the first layer type."""
    lines = shown(config, *options)
    start = lines.index("serving") + 1
    ends = ("attention factor", "at ")
    end = next(n for n in range(start, len(lines)) if lines[n].startswith(ends))
    return lines[start:end]


def with_norms(q_norm, k_norm, more=""):
    return [
        "plan.append(q, k, v, cache, batch,",
        f"q_norm={q_norm},",
        f"k_norm={k_norm}{more})",
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"model_type": "llama"}, BARE, id="llama"),
        pytest.param(
            {"model_type": "qwen3", "rms_norm_eps": 1e-5},
            with_norms("RMSNorm(q_weight, 1e-05)", "RMSNorm(k_weight, 1e-05)"),
            id="qwen3",
        ),
        pytest.param(
            {"model_type": "lfm2", "norm_eps": 1e-5},
            with_norms("RMSNorm(q_weight, 1e-05)", "RMSNorm(k_weight, 1e-05)"),
            id="lfm2, eps under another key",
        ),
        pytest.param(
            {"model_type": "gemma3_text"},
            with_norms("RMSNorm(q_weight, 1e-06, offset=1)", "RMSNorm(k_weight, 1e-06, offset=1)"),
            id="gemma3",
        ),
        pytest.param(
            {"model_type": "plamo3", "rope_theta": 1e6, "rope_local_theta": 1e4},
            with_norms("RMSNorm(q_weight, eps, offset=1)", "RMSNorm(k_weight, eps, offset=1)"),
            id="plamo3, by hand",
        ),
        pytest.param({"model_type": "olmo2"}, OVER_PROJECTION, id="olmo2"),
        pytest.param({"model_type": "minimax_m2"}, OVER_PROJECTION, id="minimax_m2"),
        pytest.param(
            {"model_type": "hunyuan_v1_dense"},
            [
                *with_norms("RMSNorm(None, 1e-05)", "RMSNorm(None, 1e-05)"),
                "without weights, as the model's norms follow the rotation:",
                "multiply q_rot by q_weight * k_weight, and leave the keys",
            ],
            id="hunyuan",
        ),
        pytest.param(
            {"model_type": "llama4_text"},
            with_norms("RMSNorm(None, 1e-05)", "RMSNorm(None, 1e-05)"),
            id="llama4, whose norms have no weights and may precede the rotation",
        ),
        pytest.param(
            {"model_type": "cohere", "use_qk_norm": True},
            [*OVER_PROJECTION[:2], "LayerNorm, which subtracts the mean"],
            id="cohere with norms",
        ),
        pytest.param({"model_type": "cohere"}, BARE, id="cohere without norms"),
        pytest.param(
            {"model_type": "gemma3n_text", "rms_norm_eps": 1e-6, "num_kv_shared_layers": 15},
            [
                *with_norms(
                    "RMSNorm(q_weight, 1e-06)",
                    "RMSNorm(k_weight, 1e-06)",
                    ", v_norm=RMSNorm(None, 1e-06)",
                ),
                "plan.rotate(q, norm=…) in the last 15 layers: they share keys",
            ],
            id="gemma3n",
        ),
        pytest.param(
            {"model_type": "deepseek_v3"},
            [
                "plan.rotate, and the server's own writes to its cache:",
                "latent attention caches compressed keys and values",
            ],
            id="deepseek_v3",
        ),
        pytest.param(
            {"model_type": "deepseek_v4"},
            [
                "plan.rotate, and the server's own writes to its cache:",
                "one vector is key and value, and the output is rotated back",
            ],
            id="deepseek_v4",
        ),
        pytest.param(
            {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
            [*BARE, "position ids (tokens, 2) of the model, not batch.cache_position"],
            id="two axes",
        ),
    ],
)
def test_calls(config, expected, shown):
    if config["model_type"] == "qwen2_vl":
        config = {**config, "hidden_size": 12, "num_attention_heads": 2}
    assert serving(shown, config) == expected


@pytest.mark.parametrize(
    ("rope_type", "when"),
    [
        ("dynamic", "at every token past the original length"),
        ("dynamic_powers", "at each doubling of the original length"),
        ("longrope", "once, at the original length"),
    ],
)
def test_where_cached_keys_are_rotated_anew(rope_type, when, shown):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    parameters = {"dynamic": {"factor": 4.0}, "dynamic_powers": {}, "longrope": factors}
    config = by_length(rope_type, **parameters[rope_type])
    assert serving(shown, config) == [
        *BARE,
        "rope.at_length(lengths).plan(…, cu_seqlens=batch.cu_seqlens)",
        f"rerotate_plan(…).rotate_cached(…) {when}",
    ]


def by_length(rope_type, **parameters):
    """Return a config of a rope type that depends on the length."""
    original = {"original_max_position_embeddings": 64}
    section = {"rope_theta": 1e4, "rope_type": rope_type, **original, **parameters}
    return {
        "model_type": "llama",
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rope_parameters": section,
    }


def test_a_new_rope_type_is_one_row_of_the_table(monkeypatch, shown):
    row = RopeType(dynamic, depends_on_length=lambda parameters: True)
    monkeypatch.setitem(ROPE_TYPES, "new", row)
    config = by_length("new", factor=4.0)
    assert serving(shown, config)[-1] == "rerotate_plan(…).rotate_cached(…) at every token"
    assert "at 256 tokens" in shown(config)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param({"model_type": "modernbert"}, (), id="an encoder"),
        pytest.param(
            {"model_type": "new", "head_dim": 64, "rope_theta": 1e4}, ("--half",), id="unknown"
        ),
        pytest.param(
            {
                "_class_name": "FluxTransformer2DModel",
                "_diffusers_version": "0.33.0",
                "attention_head_dim": 128,
            },
            (),
            id="a diffusion model",
        ),
    ],
)
def test_models_without_a_cache_and_unknown_ones_have_no_line(config, options, shown):
    assert "serving" not in shown(config, *options)


def test_norms_after_a_rotation_with_a_factor_fit_no_call(shown):
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = {"model_type": "hunyuan_v1_dense", "rope_parameters": {"rope_theta": 1e4, **section}}
    assert serving(shown, config) == [
        "plan(q, k), then the model's norms and the server's own writes:",
        "the norms follow the rotation, which has an attention factor",
    ]


NORMED = {*FACTS["qk_norm_before_rotation"], *FACTS["qk_norm_after_rotation"], *FACTS["own_cache"]}


@pytest.mark.parametrize("model_type", sorted(NORMED - set(REFUSED)))
def test_lines_fit_a_terminal(model_type):
    """Each is printed after four spaces."""
    keys = {key: True for key, _ in FACTS["qk_norm_key"].values()}
    config = reader.read({"model_type": model_type, "rms_norm_eps": 1e-06, **keys})
    rope = RotaryEmbedding(64)
    assert all(len(line) <= 76 for line in serving_lines(config, rope))
