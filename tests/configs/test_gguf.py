"""GGUF files against the config.json of the same model: frequencies, pairing, rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import gguf_files
import numpy as np
import pytest

from rope_cpu import RotaryEmbedding

# Factors and some numbers of a file are float32: half a unit in the last place, 2^-24 of the value,
# and as much again for a product of two.
TOLERANCE = 1e-7


@dataclass(frozen=True)
class Model:
    """One model: its config in part, and what a converter writes into a GGUF file.

    values: metadata by key without the architecture. pairing: (file, config), True for adjacent
    pairs. layer_types: the layer types that differ.
    """

    architecture: str
    config: dict[str, Any]
    values: dict[str, Any]
    tensors: dict[str, Any] = field(default_factory=dict)
    pairing: tuple[bool, bool] = (False, False)
    layer_types: tuple[str | None, ...] = (None,)
    length: int | None = None

    def file(self, folder):
        return gguf_files.write(folder / "model.gguf", self.architecture, self.values, self.tensors)


def shape(hidden, heads, key_length=None, **values):
    """Return metadata of widths; keys with dots are written with two underscores."""
    found = {"embedding_length": hidden, "attention.head_count": heads}
    if key_length is not None:
        found["attention.key_length"] = key_length
    return found | {key.replace("__", "."): value for key, value in values.items()}


def yarn(**values):
    return {"rope.scaling.type": "yarn"} | {
        f"rope.scaling.{key}": value for key, value in values.items()
    }


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHORT = np.linspace(1.0, 2.8, 48).tolist()
LONG = np.linspace(1.07, 64.0, 48).tolist()
STOPPED = [1.0] * 64 + [1e30] * 192

MODELS = {
    "llama-2": Model(
        "llama",
        {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32},
        shape(4096, 32, rope__dimension_count=128, context_length=4096),
        pairing=(True, False),
    ),
    "llama-3.1": Model(
        "llama",
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3,
        },
        shape(4096, 32, rope__freq_base=5e5, rope__dimension_count=128, context_length=131072),
        {gguf_files.FREQS: gguf_files.llama3_factors(5e5, 128, LLAMA3)},
        pairing=(True, False),
    ),
    "mistral-nemo": Model(
        "llama",
        {
            "model_type": "mistral",
            "hidden_size": 5120,
            "num_attention_heads": 32,
            "head_dim": 128,
            "rope_theta": 1000000.0,
        },
        shape(5120, 32, 128, rope__freq_base=1e6, rope__dimension_count=128),
        pairing=(True, False),
    ),
    "granite-3.3": Model(
        "granite",
        {
            "model_type": "granite",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "rope_theta": 10000000.0,
        },
        shape(4096, 32, rope__freq_base=1e7, rope__dimension_count=128),
        pairing=(True, False),
    ),
    "exaone-3.5": Model(
        "exaone",
        {
            "model_type": "exaone",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "rope_scaling": LLAMA3,
        },
        shape(4096, 32, 128, rope__freq_base=1e6, rope__dimension_count=128),
        {gguf_files.FREQS: gguf_files.llama3_factors(1e6, 128, LLAMA3)},
    ),
    "qwen2": Model(
        "qwen2",
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "rope_theta": 1000000.0,
        },
        shape(3584, 28, rope__freq_base=1e6),
    ),
    "qwen3 with yarn": Model(
        "qwen3",
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "head_dim": 128,
            "rope_theta": 1000000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        shape(1024, 16, 128, rope__freq_base=1e6) | yarn(factor=4.0, original_context_length=32768),
    ),
    "qwen2-vl": Model(
        "qwen2vl",
        {
            "model_type": "qwen2_vl",
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        shape(1536, 12, rope__freq_base=1e6, rope__dimension_sections=[16, 24, 24, 0]),
    ),
    "paddleocr": Model(
        "paddleocr",
        {
            "model_type": "paddleocr_vl",
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "head_dim": 128,
            "rope_theta": 500000,
            "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]},
        },
        shape(1024, 16, 128, rope__freq_base=5e5, rope__dimension_sections=[16, 24, 24, 0]),
    ),
    "qwen3-vl": Model(
        "qwen3vl",
        {
            "model_type": "qwen3_vl_text",
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "head_dim": 128,
            "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
        },
        shape(2048, 16, 128, rope__freq_base=5e6, rope__dimension_sections=[24, 20, 20, 0]),
    ),
    "qwen3.5": Model(
        "qwen35",
        {
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "num_attention_heads": 24,
            "head_dim": 256,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            },
        },
        shape(
            5120,
            24,
            256,
            rope__freq_base=1e7,
            rope__dimension_count=64,
            rope__dimension_sections=[11, 11, 10, 0],
        ),
    ),
    "gemma-2": Model(
        "gemma2",
        {"model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 256},
        shape(2304, 8, 256, attention__sliding_window=4096),
    ),
    "gemma-3": Model(
        "gemma3",
        {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        shape(5376, 32, 128, rope__freq_base=1e6, attention__sliding_window=1024)
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        layer_types=("full_attention", "sliding_attention"),
    ),
    "gemma-4": Model(
        "gemma4",
        {
            "model_type": "gemma4_text",
            "hidden_size": 2816,
            "num_attention_heads": 16,
            "head_dim": 256,
            "global_head_dim": 512,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        shape(
            2816,
            16,
            512,
            attention__key_length_swa=256,
            rope__dimension_count=512,
            rope__dimension_count_swa=256,
            rope__freq_base=1e6,
            rope__freq_base_swa=1e4,
            attention__sliding_window=1024,
        ),
        {gguf_files.FREQS: STOPPED},
        layer_types=("full_attention", "sliding_attention"),
    ),
    "mimo-v2-flash": Model(
        "mimo2",
        {
            "model_type": "mimo_v2_flash",
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "head_dim": 192,
            "rope_theta": 5000000,
            "swa_rope_theta": 10000,
            "partial_rotary_factor": 0.334,
        },
        shape(4096, 64, 192, rope__dimension_count=64, rope__freq_base=5e6),
        layer_types=("full_attention", "sliding_attention"),
    ),
    "phi-3, short": Model(
        "phi3",
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "num_attention_heads": 32,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        },
        shape(3072, 32, rope__dimension_count=96, attention__sliding_window=262144)
        | {
            "context_length": 131072,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(32) / math.log(4096)),
        },
        {gguf_files.SHORT: SHORT, gguf_files.LONG: LONG},
        length=4096,
    ),
    "gpt-oss, ends of the ramp rounded": Model(
        "gpt-oss",
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "head_dim": 64,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
            },
        },
        shape(2880, 64, 64, rope__freq_base=150000.0, attention__sliding_window=128)
        | yarn(factor=32.0, original_context_length=4096, yarn_beta_fast=32.0, yarn_beta_slow=1.0),
    ),
    "deepseek-v3": Model(
        "deepseek2",
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "rope_theta": 10000,
            "qk_rope_head_dim": 64,
            "rope_scaling": {
                "type": "yarn",
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
        shape(7168, 128, 576, attention__key_length_mla=192, rope__dimension_count=64)
        | yarn(factor=40.0, original_context_length=4096, yarn_log_multiplier=0.1),
        pairing=(True, True),
    ),
    "devstral-2": Model(
        "mistral3",
        {
            "model_type": "ministral3",
            "hidden_size": 5120,
            "num_attention_heads": 32,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "factor": 48.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": 8192,
                "rope_theta": 100000000.0,
            },
        },
        shape(5120, 32, 128, rope__freq_base=1e8)
        | yarn(
            factor=48.0,
            original_context_length=8192,
            yarn_beta_fast=16.0,
            yarn_beta_slow=2.0,
            yarn_log_multiplier=0.5,
        ),
        pairing=(True, False),
    ),
    "glm-4.5": Model(
        "glm4moe",
        {
            "model_type": "glm4_moe",
            "hidden_size": 5120,
            "num_attention_heads": 96,
            "head_dim": 128,
            "rope_theta": 1000000,
            "partial_rotary_factor": 0.5,
        },
        shape(5120, 96, 128, rope__freq_base=1e6, rope__dimension_count=64),
    ),
    "stablelm-2": Model(
        "stablelm",
        {
            "model_type": "stablelm",
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "partial_rotary_factor": 0.25,
        },
        shape(2048, 16, rope__dimension_count=32, rope__freq_base=1e4),
    ),
    "command-r": Model(
        "command-r",
        {
            "model_type": "cohere",
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "rope_theta": 8000000.0,
        },
        shape(8192, 64, rope__freq_base=8e6),
        pairing=(True, True),
    ),
}
MODELS["phi-3, long"] = Model(**{**vars(MODELS["phi-3, short"]), "length": 4097})

EACH = [
    pytest.param(model, layer_type, id=f"{name} {layer_type or ''}".strip())
    for name, model in MODELS.items()
    for layer_type in model.layer_types
]


def both(model, layer_type, folder):
    """Return the rotary embeddings of a model's file and of its config."""
    from_file = RotaryEmbedding.from_gguf(model.file(folder), layer_type=layer_type)
    from_config = RotaryEmbedding.from_config(model.config, layer_type=layer_type)
    if model.length is None:
        return from_file, from_config
    return from_file.at_length(model.length), from_config.at_length(model.length)


@pytest.mark.parametrize(("model", "layer_type"), EACH)
def test_equals_the_config(model, layer_type, tmp_path):
    from_file, from_config = both(model, layer_type, tmp_path)
    assert (from_file.interleaved, from_config.interleaved) == model.pairing
    assert from_file.head_dim == from_config.head_dim
    assert from_file.rotary_dim == from_config.rotary_dim
    assert from_file.axes == from_config.axes
    assert from_file.spec.pair_axis == from_config.spec.pair_axis
    np.testing.assert_allclose(from_file.inv_freq, from_config.inv_freq, rtol=TOLERANCE, atol=0)
    np.testing.assert_allclose(
        from_file.attention_factor, from_config.attention_factor, rtol=TOLERANCE, atol=0
    )


def test_a_dozen_architectures_and_all_kinds_of_scaling_are_compared():
    assert len({model.architecture for model in MODELS.values()}) >= 12
    assert {tensor for model in MODELS.values() for tensor in model.tensors} == {
        gguf_files.FREQS,
        gguf_files.SHORT,
        gguf_files.LONG,
    }


@pytest.mark.parametrize(("model", "layer_type"), EACH)
def test_rotates_permuted_weights_to_equal_vectors(model, layer_type, tmp_path, rng):
    """Queries from weights in the order of the file are those of the config, in that order."""
    from_file, from_config = both(model, layer_type, tmp_path)
    heads, tokens, hidden = 2, 5, 16
    width = from_config.head_dim
    weight = rng.standard_normal((heads * width, hidden))
    x = rng.standard_normal((1, tokens, hidden))
    reorders = from_file.interleaved != from_config.interleaved
    own_weight = gguf_files.permuted(weight, heads) if reorders else weight
    ids = np.arange(tokens)
    if from_config.axes > 1:
        ids = rng.integers(0, tokens, (tokens, from_config.axes))
    expected = from_config.rotate((x @ weight.T).reshape(1, tokens, heads, width), ids)
    if reorders:
        rows = expected.reshape(tokens, heads * width).T
        expected = gguf_files.permuted(rows, heads).T.reshape(expected.shape)
    rotated = from_file.rotate((x @ own_weight.T).reshape(1, tokens, heads, width), ids)
    # The angle is at most `tokens`, and its relative error that of the frequency.
    largest = np.abs(expected).max() * from_config.attention_factor
    np.testing.assert_allclose(
        rotated, expected, rtol=0, atol=2 * (tokens + 1) * TOLERANCE * largest
    )


def test_scores_of_both_pairings_are_equal(tmp_path, rng):
    """q·k from permuted weights with the file's pairing, and from the model's with the config's."""
    from_file, from_config = both(MODELS["llama-3.1"], None, tmp_path)
    query, key = rng.standard_normal((2, 128, 16))
    x = rng.standard_normal((1, 7, 16))

    def scores(rope, q_rows, k_rows):
        q, k = rope((x @ q_rows.T).reshape(1, 7, 1, 128), (x @ k_rows.T).reshape(1, 7, 1, 128))
        return q[0, :, 0] @ k[0, :, 0].T

    expected = scores(from_config, query, key)
    own = scores(from_file, gguf_files.permuted(query, 1), gguf_files.permuted(key, 1))
    np.testing.assert_allclose(own, expected, rtol=0, atol=14 * TOLERANCE * np.abs(expected).max())
    wrong = scores(from_config, gguf_files.permuted(query, 1), gguf_files.permuted(key, 1))
    assert np.abs(wrong - expected).max() > 0.1 * np.abs(expected).max()


def test_windowed_layers_have_one_rotation_with_the_others_unless_they_differ(tmp_path):
    path = MODELS["gpt-oss, ends of the ramp rounded"].file(tmp_path)
    windowed = RotaryEmbedding.from_gguf(path, layer_type="sliding_attention")
    assert windowed == RotaryEmbedding.from_gguf(path, layer_type="full_attention")
    with pytest.raises(ValueError, match="one rotation for all layers"):
        RotaryEmbedding.from_gguf(path, layer_type="chunked_attention")


def test_layers_that_differ_need_a_layer_type(tmp_path):
    with pytest.raises(ValueError, match="'full_attention', 'sliding_attention'"):
        RotaryEmbedding.from_gguf(MODELS["gemma-3"].file(tmp_path))


def test_from_config_reads_a_gguf_file_as_well(tmp_path):
    path = MODELS["llama-3.1"].file(tmp_path)
    assert RotaryEmbedding.from_config(path) == RotaryEmbedding.from_gguf(path)
    renamed = path.rename(tmp_path / "model.bin")
    assert RotaryEmbedding.from_config(renamed) == RotaryEmbedding.from_gguf(renamed)


def test_metadata_that_are_missing(tmp_path):
    values = {"embedding_length": 64, "attention.head_count": 4}
    path = gguf_files.write(tmp_path / "model.gguf", "qwen2", values)
    assert RotaryEmbedding.from_gguf(path) == RotaryEmbedding(16, rope_theta=10000.0)
    path = gguf_files.write(tmp_path / "wide.gguf", "qwen2", {**values, "attention.key_length": 32})
    assert RotaryEmbedding.from_gguf(path).rotary_dim == 32


def test_the_key_of_older_files_and_the_type_none(tmp_path):
    values = {"attention.key_length": 64, "rope.scale_linear": 4.0}
    path = gguf_files.write(tmp_path / "old.gguf", "llama", values)
    linear = {"rope_type": "linear", "factor": 4.0}
    np.testing.assert_array_equal(
        RotaryEmbedding.from_gguf(path).inv_freq, RotaryEmbedding(64, scaling=linear).inv_freq
    )
    path = gguf_files.write(
        tmp_path / "none.gguf", "llama", {**values, "rope.scaling.type": "none"}
    )
    np.testing.assert_array_equal(
        RotaryEmbedding.from_gguf(path).inv_freq, RotaryEmbedding(64).inv_freq
    )


def test_alpha_of_hunyuan_raises_the_base(tmp_path):
    values = {"attention.key_length": 128, "rope.freq_base": 1e4, "rope.scaling.alpha": 1000.0}
    path = gguf_files.write(tmp_path / "model.gguf", "hunyuan-dense", values)
    scaling = {"rope_type": "dynamic", "alpha": 1000.0}
    np.testing.assert_allclose(
        RotaryEmbedding.from_gguf(path).inv_freq,
        RotaryEmbedding(128, scaling=scaling).inv_freq,
        rtol=1e-14,
        atol=0,
    )


@pytest.mark.parametrize("architecture", ["olmo2", "mellum", "laguna"])
def test_windowed_layers_without_scaling(architecture, tmp_path):
    """Those of OLMo 3, Mellum and Laguna: the base of the others, without their YaRN."""
    values = shape(1024, 8, 128, rope__freq_base=5e5, attention__sliding_window=4096)
    path = gguf_files.write(
        tmp_path / "model.gguf",
        architecture,
        values | yarn(factor=8.0, original_context_length=8192),
    )
    windowed = RotaryEmbedding.from_gguf(path, layer_type="sliding_attention")
    assert windowed == RotaryEmbedding(128, rope_theta=5e5)
    full = RotaryEmbedding.from_gguf(path, layer_type="full_attention")
    assert full.attention_factor == pytest.approx(0.1 * math.log(8) + 1, rel=TOLERANCE)


def test_glm_with_sections_has_three_axes_and_the_other_pairing(tmp_path):
    values = shape(4096, 32, 128, rope__dimension_count=64)
    path = gguf_files.write(tmp_path / "text.gguf", "glm4", values)
    assert RotaryEmbedding.from_gguf(path).interleaved
    sections = {"rope.dimension_sections": [8, 12, 12, 0]}
    path = gguf_files.write(tmp_path / "vision.gguf", "glm4", values | sections)
    rope = RotaryEmbedding.from_gguf(path)
    assert not rope.interleaved
    assert rope.spec.pair_axis == (0,) * 8 + (1,) * 12 + (2,) * 12


def test_sections_repeat_where_they_are_too_short(tmp_path):
    values = shape(128, 2, rope__dimension_sections=[4, 4, 0, 0])
    path = gguf_files.write(tmp_path / "model.gguf", "qwen2vl", values)
    assert RotaryEmbedding.from_gguf(path).spec.pair_axis == 4 * ((0,) * 4 + (1,) * 4)


def test_inverted_ramp_of_yarn_leaves_all_pairs_unscaled(tmp_path):
    """ggml, unlike transformers, takes a ramp whose end comes before its start for a step."""
    values = shape(512, 8, rope__freq_base=2.0)
    scaling = yarn(factor=8.0, original_context_length=2**31)
    path = gguf_files.write(tmp_path / "model.gguf", "qwen3", values | scaling)
    np.testing.assert_array_equal(
        RotaryEmbedding.from_gguf(path).inv_freq, RotaryEmbedding(64, rope_theta=2.0).inv_freq
    )


def test_factors_in_float16(tmp_path):
    factors = np.linspace(1, 4, 32).astype(np.float16)
    path = gguf_files.write(
        tmp_path / "model.gguf", "llama", shape(512, 8), {gguf_files.FREQS: factors}
    )
    expected = RotaryEmbedding(64).inv_freq / factors.astype(np.float64)
    np.testing.assert_array_equal(RotaryEmbedding.from_gguf(path).inv_freq, expected)


def test_split_models_have_factors_in_any_file(tmp_path):
    """`--no-tensor-first-split` puts all tensors into later files."""
    values = shape(512, 8)
    factors = {gguf_files.FREQS: np.full(32, 2.0)}
    names = [tmp_path / f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        gguf_files.write(
            name,
            "llama",
            values if number == 0 else {},
            factors if number == 2 else {},
            general={"split.no": number, "split.count": 3},
        )
    np.testing.assert_array_equal(
        RotaryEmbedding.from_gguf(names[0]).inv_freq, RotaryEmbedding(64).inv_freq / 2
    )
    with pytest.raises(ValueError, match="not the first one of a split model"):
        RotaryEmbedding.from_gguf(names[1])
    names[1].unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.gguf' is missing"):
        RotaryEmbedding.from_gguf(names[0])
