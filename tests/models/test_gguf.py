"""GGUF files against the config.json of the same model: frequencies, pairing, rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import gguf_files
import numpy as np
import pytest
from gguf_files import rotary

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


def model(architecture, model_type, widths, theta=None, config=None, values=None, **facts):
    """Return a model whose config and file agree on widths and base.

    widths: (hidden size, heads, and width of a head unless it is their quotient). config, values:
    what the two hold beside that.
    """
    given = {"model_type": model_type}
    given |= zip(("hidden_size", "num_attention_heads", "head_dim"), widths, strict=False)
    held = shape(*widths)
    if theta is not None:
        given["rope_theta"] = theta
        held["rope.freq_base"] = float(theta)
    return Model(architecture, given | (config or {}), held | (values or {}), **facts)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MLA_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEVSTRAL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100000000.0,
    "factor": 48.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
QWEN3_VL = {"mrope_interleaved": True, "rope_type": "default"}
SHORT = np.linspace(1.0, 2.8, 48).tolist()
LONG = np.linspace(1.07, 64.0, 48).tolist()
STOPPED = [1.0] * 64 + [1e30] * 192
DIMENSIONS = "rope.dimension_count"
SECTIONS = "rope.dimension_sections"
WINDOW = "attention.sliding_window"
QWEN3_5 = {
    "config": {
        "rope_parameters": QWEN3_VL
        | {"mrope_section": [11, 11, 10], "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    },
    "values": {"rope.freq_base": 1e7, DIMENSIONS: 64, SECTIONS: [11, 11, 10, 0]},
}
PERMUTED = {"pairing": (True, False)}
TWO_TYPES = {"layer_types": ("full_attention", "sliding_attention")}


def llama3_factors(theta):
    return {gguf_files.FREQS: gguf_files.llama3_factors(theta, 128, LLAMA3)}


MODELS = {
    "llama-2": model(
        *("llama", "llama", (4096, 32)),
        values={DIMENSIONS: 128, "context_length": 4096},
        **PERMUTED,
    ),
    "llama-3.1": model(
        *("llama", "llama", (4096, 32), 5e5),
        config={"num_key_value_heads": 8, "rope_scaling": LLAMA3},
        values={DIMENSIONS: 128, "context_length": 131072},
        tensors=llama3_factors(5e5),
        **PERMUTED,
    ),
    "mistral-nemo": model(
        "llama", "mistral", (5120, 32, 128), 1e6, {}, {DIMENSIONS: 128}, **PERMUTED
    ),
    "granite-3.3": model("granite", "granite", (4096, 32), 1e7, {}, {DIMENSIONS: 128}, **PERMUTED),
    "exaone-3.5": model(
        *("exaone", "exaone", (4096, 32, 128), 1e6),
        config={"rope_scaling": LLAMA3},
        values={DIMENSIONS: 128},
        tensors=llama3_factors(1e6),
    ),
    "qwen2": model("qwen2", "qwen2", (3584, 28), 1e6),
    "qwen3 with yarn": model(
        *("qwen3", "qwen3", (1024, 16, 128), 1000000),
        config={
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
        values=yarn(factor=4.0, original_context_length=32768),
    ),
    "qwen2-vl": model(
        *("qwen2vl", "qwen2_vl", (1536, 12), 1e6),
        config={"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        values={SECTIONS: [16, 24, 24, 0]},
    ),
    "paddleocr": model(
        *("paddleocr", "paddleocr_vl", (1024, 16, 128), 500000),
        config={"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        values={SECTIONS: [16, 24, 24, 0]},
    ),
    "qwen3-vl": model(
        *("qwen3vl", "qwen3_vl_text", (2048, 16, 128), 5000000),
        config={"rope_scaling": QWEN3_VL | {"mrope_section": [24, 20, 20]}},
        values={SECTIONS: [24, 20, 20, 0]},
    ),
    "qwen3.5": model("qwen35", "qwen3_5_text", (5120, 24, 256), **QWEN3_5),
    "qwen3.8 flash next": model("qwen4exp", "qwen4_exp_text", (2048, 24, 256), **QWEN3_5),
    "gemma-2": model("gemma2", "gemma2", (2304, 8, 256), values={WINDOW: 4096}),
    "gemma-3": model(
        *("gemma3", "gemma3_text", (5376, 32, 128), 1e6),
        config={
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        values={WINDOW: 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        **TWO_TYPES,
    ),
    "gemma-4": model(
        *("gemma4", "gemma4_text", (2816, 16)),
        config={
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
        values={
            "attention.key_length": 512,
            "attention.key_length_swa": 256,
            DIMENSIONS: 512,
            f"{DIMENSIONS}_swa": 256,
            WINDOW: 1024,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
        tensors={gguf_files.FREQS: STOPPED},
        **TWO_TYPES,
    ),
    "mimo-v2-flash": model(
        *("mimo2", "mimo_v2_flash", (4096, 64, 192), 5000000),
        config={"swa_rope_theta": 10000, "partial_rotary_factor": 0.334},
        values={DIMENSIONS: 64},
        **TWO_TYPES,
    ),
    "phi-3, short": model(
        *("phi3", "phi3", (3072, 32)),
        config={
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        },
        values={
            DIMENSIONS: 96,
            WINDOW: 262144,
            "context_length": 131072,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(32) / math.log(4096)),
        },
        tensors={gguf_files.SHORT: SHORT, gguf_files.LONG: LONG},
        length=4096,
    ),
    "gpt-oss, ends of the ramp rounded": model(
        *("gpt-oss", "gpt_oss", (2880, 64, 64), 150000),
        config={
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
        },
        values={WINDOW: 128}
        | yarn(factor=32.0, original_context_length=4096, yarn_beta_fast=32.0, yarn_beta_slow=1.0),
    ),
    "deepseek-v3": model(
        *("deepseek2", "deepseek_v3", (7168, 128)),
        config={"rope_theta": 10000, "qk_rope_head_dim": 64, "rope_scaling": MLA_YARN},
        values={"attention.key_length": 576, "attention.key_length_mla": 192, DIMENSIONS: 64}
        | yarn(factor=40.0, original_context_length=4096, yarn_log_multiplier=0.1),
        pairing=(True, True),
    ),
    "devstral-2": model(
        *("mistral3", "ministral3", (5120, 32, 128)),
        config={"rope_parameters": DEVSTRAL_YARN},
        values={"rope.freq_base": 1e8}
        | yarn(factor=48.0, original_context_length=8192, yarn_log_multiplier=0.5)
        | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        **PERMUTED,
    ),
    "glm-4.5": model(
        *("glm4moe", "glm4_moe", (5120, 96, 128), 1000000),
        config={"partial_rotary_factor": 0.5},
        values={DIMENSIONS: 64},
    ),
    "stablelm-2": model(
        *("stablelm", "stablelm", (2048, 16)),
        config={"partial_rotary_factor": 0.25},
        values={DIMENSIONS: 32, "rope.freq_base": 1e4},
    ),
    "command-r": model("command-r", "cohere", (8192, 64), 8e6, pairing=(True, True)),
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
    for name in ("head_dim", "rotary_dim", "axes"):
        assert getattr(from_file, name) == getattr(from_config, name)
    assert from_file.spec.pair_axis == from_config.spec.pair_axis
    for name in ("inv_freq", "attention_factor"):
        values = getattr(from_file, name), getattr(from_config, name)
        np.testing.assert_allclose(*values, rtol=TOLERANCE, atol=0)


def test_a_dozen_architectures_and_all_kinds_of_scaling_are_compared():
    assert len({model.architecture for model in MODELS.values()}) >= 12
    tensors = {tensor for model in MODELS.values() for tensor in model.tensors}
    assert tensors == {gguf_files.FREQS, gguf_files.SHORT, gguf_files.LONG}


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


def test_windowed_layers_have_one_rotation_with_the_others_unless_they_differ(tmp_path):
    path = MODELS["gpt-oss, ends of the ramp rounded"].file(tmp_path)
    windowed = RotaryEmbedding.from_gguf(path, layer_type="sliding_attention")
    assert windowed == RotaryEmbedding.from_gguf(path, layer_type="full_attention")
    with pytest.raises(ValueError, match="one of None, 'full_attention', 'sliding_attention'"):
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
    assert rotary(tmp_path, "qwen2", values) == RotaryEmbedding(16, rope_theta=10000.0)
    assert rotary(tmp_path, "qwen2", values | {"attention.key_length": 32}).rotary_dim == 32


def test_the_key_of_older_files_and_the_type_none(tmp_path):
    values = {"attention.key_length": 64, "rope.scale_linear": 4.0}
    linear = RotaryEmbedding(64, scaling={"rope_type": "linear", "factor": 4.0})
    np.testing.assert_array_equal(rotary(tmp_path, "llama", values).inv_freq, linear.inv_freq)
    rope = rotary(tmp_path, "llama", values | {"rope.scaling.type": "none"})
    np.testing.assert_array_equal(rope.inv_freq, RotaryEmbedding(64).inv_freq)


def test_alpha_of_hunyuan_raises_the_base(tmp_path):
    values = {"attention.key_length": 128, "rope.freq_base": 1e4, "rope.scaling.alpha": 1000.0}
    expected = RotaryEmbedding(128, scaling={"rope_type": "dynamic", "alpha": 1000.0}).inv_freq
    rope = rotary(tmp_path, "hunyuan-dense", values)
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("architecture", ["olmo2", "mellum", "laguna"])
def test_windowed_layers_without_scaling(architecture, tmp_path):
    """Those of OLMo 3, Mellum and Laguna: the base of the others, without their YaRN."""
    values = shape(1024, 8, 128, rope__freq_base=5e5, attention__sliding_window=4096)
    values |= yarn(factor=8.0, original_context_length=8192)
    windowed = rotary(tmp_path, architecture, values, layer_type="sliding_attention")
    assert windowed == RotaryEmbedding(128, rope_theta=5e5)
    full = rotary(tmp_path, architecture, values, layer_type="full_attention")
    assert full.attention_factor == pytest.approx(0.1 * math.log(8) + 1, rel=TOLERANCE)


def test_glm_with_sections_has_three_axes_and_the_other_pairing(tmp_path):
    values = shape(4096, 32, 128, rope__dimension_count=64)
    assert rotary(tmp_path, "glm4", values).interleaved
    rope = rotary(tmp_path, "glm4", values | {SECTIONS: [8, 12, 12, 0]})
    assert not rope.interleaved
    assert rope.spec.pair_axis == (0,) * 8 + (1,) * 12 + (2,) * 12


def test_sections_repeat_where_they_are_too_short(tmp_path):
    rope = rotary(tmp_path, "qwen2vl", shape(128, 2) | {SECTIONS: [4, 4, 0, 0]})
    assert rope.spec.pair_axis == 4 * ((0,) * 4 + (1,) * 4)


def test_inverted_ramp_of_yarn_leaves_all_pairs_unscaled(tmp_path):
    """ggml, unlike transformers, takes a ramp whose end comes before its start for a step."""
    scaling = yarn(factor=8.0, original_context_length=2**31)
    rope = rotary(tmp_path, "qwen3", shape(512, 8, rope__freq_base=2.0) | scaling)
    expected = RotaryEmbedding(64, rope_theta=2.0).inv_freq
    np.testing.assert_array_equal(rope.inv_freq, expected)


def test_factors_in_float16(tmp_path):
    factors = np.linspace(1, 4, 32).astype(np.float16)
    rope = rotary(tmp_path, "llama", shape(512, 8), {gguf_files.FREQS: factors})
    expected = RotaryEmbedding(64).inv_freq / factors.astype(np.float64)
    np.testing.assert_array_equal(rope.inv_freq, expected)


def test_long_and_short_factors_beside_another_scaling(tmp_path):
    """llama.cpp divides by the factors first, then scales; no converter writes both."""
    tensors = {gguf_files.SHORT: np.linspace(1, 4, 32), gguf_files.LONG: np.linspace(2, 9, 32)}
    values = shape(512, 8, context_length=64, rope__scaling__factor=8.0)
    rope = rotary(tmp_path, "phi3", values, tensors)
    yarn_values = values | yarn(factor=8.0, attn_factor=0.5)
    with_yarn = rotary(tmp_path, "phi3", yarn_values, tensors)
    unscaled = RotaryEmbedding(64).inv_freq
    plain_yarn = rotary(tmp_path, "phi3", yarn_values)
    for length, name in ((64, gguf_files.SHORT), (65, gguf_files.LONG)):
        factors = tensors[name].astype(np.float32)
        found = rope.at_length(length), with_yarn.at_length(length)
        expected = unscaled / 8 / factors, plain_yarn.inv_freq / factors
        for found_rope, inv_freq in zip(found, expected, strict=True):
            # Two quotients and a product on the way: a few roundings of float64.
            np.testing.assert_allclose(found_rope.inv_freq, inv_freq, rtol=8 * 2.0**-53, atol=0)
        assert with_yarn.at_length(length).attention_factor == plain_yarn.attention_factor


def test_split_models_have_factors_in_any_file(tmp_path):
    """`--no-tensor-first-split` puts all tensors into later files."""
    names = [tmp_path / f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    contents = ((shape(512, 8), {}), ({}, {}), ({}, {gguf_files.FREQS: np.full(32, 2.0)}))
    for number, (name, content) in enumerate(zip(names, contents, strict=True)):
        split = {"split.no": number, "split.count": 3}
        gguf_files.write(name, "llama", *content, general=split)
    rope = RotaryEmbedding.from_gguf(names[0])
    np.testing.assert_array_equal(rope.inv_freq, RotaryEmbedding(64).inv_freq / 2)
    with pytest.raises(ValueError, match=r"be 1 unless `path` ends in -00001-of-00003\.gguf"):
        RotaryEmbedding.from_gguf(names[1])
    names[1].unlink()
    with pytest.raises(ValueError, match=r"No such file.*model-00002-of-00003\.gguf"):
        RotaryEmbedding.from_gguf(names[0])
