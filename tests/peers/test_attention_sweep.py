"""The layers of every model type of transformers: written right, or refused with the reason.

A small model of the type runs once; `attention_options`, `attention_weights` and `export_attention`
see its config and state dict alone. Each layer that they write must agree with the module of
transformers in float64, to the error that the module itself has in float32; so must all targets and
caches in float32, where they can express the layer. Every model type is in one of the tables RIGHT
and REFUSED.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attention_modules import Module, attention_module  # noqa: E402
from peers import numpy_layers  # noqa: E402
from small_models import TOKENS, SmallModel, small_model  # noqa: E402

import rope_cpu  # noqa: E402
from rope_cpu import RotaryEmbedding, export  # noqa: E402
from rope_cpu.export.targets import TARGETS  # noqa: E402
from rope_cpu.export.validation.session import open_session  # noqa: E402
from rope_cpu.models.model_types import model_facts  # noqa: E402
from rope_cpu.models.tensors import open_tensors, read_tensor  # noqa: E402

pytestmark = pytest.mark.peers

# Tokens that follow the prefill one by one, and rows of shared caches.
STEPS = 4
CAPACITY = 64

# Targets, caches and positions: GroupQueryAttention does not rotate where positions are inputs.
WAYS = [
    *itertools.product(TARGETS, ("growing", "shared"), ["past"]),
    *itertools.product(["ort"], ("growing", "shared"), ["position_ids"]),
]

# Model types of which at least one layer must be written, and agree.
RIGHT = (
    *("apertus", "apertus1p5_text", "arcee", "aria_text", "bamba", "blt_global_transformer"),
    *("blt_patcher", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text"),
    *("cosmos3_edge_text", "csm", "csm_depth_decoder_model", "cwm", "deepseek_ocr2_text"),
    *("dia_decoder", "dia_encoder", "dots1", "dots3_note_audio_encoder", "emu3_text_model"),
    *("ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text", "esm", "eurobert", "evolla", "exaone"),
    *("exaone4", "exaone_moe"),
    *("falcon", "falcon_h1", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("glm4_moe", "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text"),
    *("glmasr_encoder", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "gradium_phonon_tts"),
    *("granite", "granite4_vision_text", "granite_docling_text", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "gte", "helium"),
    *("higgs_audio_v2", "hy_v3", "hyperclovax", "idefics", "internlm3", "iquestcoder", "jais2"),
    *("jina_embeddings_v3", "kolibri1", "lara_mini", "lasr_encoder"),
    *("lfm2", "lfm2_moe", "llama", "mellum", "mimi", "mimi_decoder", "mimi_encoder", "minimax"),
    *("ministral", "mistral", "mixtral", "mllama_text_model", "nanochat", "nemotron"),
    *("nemotron3_diarization_audio", "nomic_bert", "olmo", "paddleocr_vl_text"),
    *("pe_audio_encoder", "pe_audio_video_encoder", "pe_video_encoder", "phi", "phi3"),
    *("phi4_multimodal", "phimoe", "pocket_tts", "pocket_tts_audio_tokenizer"),
    *("pocket_tts_audio_tokenizer_decoder", "pocket_tts_audio_tokenizer_encoder", "qwen2"),
    *("qwen2_5_omni_talker", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe"),
    *("qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_omni_moe_talker_code_predictor"),
    *("qwen3_omni_moe_talker_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
    *("recurrent_gemma", "roformer", "sarvam_moe", "seed_oss", "smollm3", "solar_open"),
    *("stablelm", "starcoder2", "t5_gemma_module", "t5gemma2_text", "vaultgemma"),
    *("voxtral_realtime_encoder", "voxtral_realtime_text"),
)

# Words of the reason to refuse a type, and the model types that must be refused with them.
REFUSED = {
    "latent attention (kv_lora_rank)": (
        *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
        *("deepseek_v4", "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "hy_v4"),
        *("hy_v4_vl_text", "longcat_flash", "minicpm3", "sarvam_mla", "youtu"),
    ),
    "holds gate_proj.weight": ("afmoe",),
    "scaled by `qk_scale_factor`": ("muse_glimmer_text", "muse_spark_text"),
    "holds gate_bias, gate_proj.weight": ("beam",),
    "holds attn_sub_norm.weight": ("bitnet",),
    "holds g_proj.weight": ("laguna", "lfm3", "step3p5"),
    "no other part of it, such as a gate": ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    "whose order of rows in the fused projection": ("codegen",),
    "its parts have rotations of their own": ("blt",),
    "`local_attention_window_len` of the whole model": ("blt_local_decoder", "blt_local_encoder"),
    "LayerNorm, which subtracts the mean": (
        *("chameleon", "nemotron3_5_transcribe_asr_audio"),
        *("nemotron3_5_transcribe_word_timestamp", "persimmon"),
    ),
    "LayerNorm over the whole projection": ("esmc",),
    "each head: over the whole projection, which": (
        *("flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmo_hybrid", "olmoe"),
    ),
    "over the whole projection, unless": ("molmo2_text",),
    "division by the norm": ("dory", "zaya"),
    "queries and keys after the rotation": ("hunyuan_v1_dense", "hunyuan_v1_moe", "timesfm2_5"),
    "norms of values": (
        *("diffusion_gemma_text", "embedding_gemma2_text", "gemma3n_text", "gemma4_text"),
        "gemma4_unified_text",
    ),
    "it bounds queries, keys and values (`clip_qkv`)": ("dbrx",),
    "bidirectional attention among tokens of an image": ("deepseek_ocr2_encoder",),
    "it subtracts one attention from another": ("diffllama",),
    "its mask is computed from the values": ("doge",),
    "bidirectional attention among tokens of the prompt": ("hrm_text",),
    "doubled sections": ("hunyuan_vl_text",),
    "its keys are tiled over the experts' queries": ("jetmoe",),
    "chunks of 8192 tokens": ("llama4_text",),
    "attention_value_scale": ("mimo_v2_flash",),
    "an indexer chooses the keys": ("minimax_m3_vl_text", "qwen4_exp_text"),
    "queries scaled by their position": ("ministral3", "mistral4"),
    "a window of both sides": ("modernbert", "ultrabert"),
    "attend to half of `local_attention`": ("modernbert-decoder",),
    "its encoder is bidirectional, its decoder causal": ("moonshine", "moonshine_streaming"),
    "have a window of 5 keys on both sides": ("muse_glimmer_assistant", "openai_privacy_filter"),
    "counts in flash attention alone": ("kyutai_speech_to_text", "moshi"),
    "its kinds of layers have bases of their own": ("neomme",),
    "each head is rotated by its index": ("neucodec", "xcodec2"),
    "alpha is a weight": ("mistral_large4_text",),
    "its mask has blocks": ("qwen2_5_omni_dit",),
    "its attention to the encoder are one": ("t5gemma2_decoder",),
    "its window spares the prefill": ("unlimited_ocr_text",),
    "it rotates the hidden states": ("wav2vec2-bert", "wav2vec2-conformer"),
    "its scores are scaled by (head_dim / 2)^-½": ("zamba2",),
}
# Of these, the model types of which a NumPy server computes layers.
SERVED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text", "llama4_text", "ministral3")
REASONS = {name: words for words, names in REFUSED.items() for name in names}

# Reasons to refuse a layer of the model types in RIGHT: those of any type, and those of one.
NOT_ATTENTION = "the attention of layers of type"  # such as a convolution
NOT_ROTATED = "it must select a layer that is rotated"
NOT_WRITTEN = {
    "gpt_neox_japanese": "dense_bias",
    "t5_gemma_module": "a window of 5 keys on both sides",
    "t5gemma2_text": "a window of 5 keys on both sides",
}


class Setting(NamedTuple):
    """Keys of a config that change its attention; words: of the reason to refuse them, if any."""

    model_type: str
    keys: dict[str, Any]
    words: str = ""


SETTINGS = (
    Setting("cohere", {"use_qk_norm": True}, "LayerNorm, which subtracts the mean"),
    Setting("esm", {"is_decoder": True}),
    Setting("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Setting("falcon", {"multi_query": False}),
    Setting("falcon", {"alibi": True}, "ALiBi"),
    Setting("gemma3_text", {"attn_logit_softcapping": 5.0}, "ignores `attn_logit_softcapping`"),
    Setting("gemma3_text", {"use_bidirectional_attention": True}),
    Setting("glm4_moe", {"use_qk_norm": True}),
    Setting("mistral", {"sliding_window": None}),
    Setting("olmo", {"clip_qkv": 0.5}, "bounds queries, keys and values"),
    Setting("phi", {"qk_layernorm": True}, "LayerNorm, which subtracts the mean"),
    Setting("qwen2", {"use_sliding_window": False}),
    Setting("roformer", {"is_decoder": True}),
    Setting("roformer", {"rotary_value": True}, "rotates values, too"),
    Setting("sarvam_moe", {"use_qk_norm": False}),
    Setting("stablelm", {"qk_layernorm": True}, "LayerNorm, which subtracts the mean"),
)


def model_types() -> list[str]:
    """The model types of transformers that this library knows."""
    named = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    facts = {name: model_facts(name) for name in named}
    return [name for name, known in facts.items() if known is not None and known.part is None]


def test_every_model_type_is_in_one_table() -> None:
    assert sorted([*RIGHT, *REASONS]) == sorted(model_types())


@pytest.mark.parametrize("model_type", RIGHT)
def test_layers_agree(model_type: str) -> None:
    right, reasons = layers(small_model(model_type), model_type)
    allowed = (NOT_ATTENTION, NOT_ROTATED, NOT_WRITTEN.get(model_type, NOT_ROTATED))
    others = [text for text in reasons if not any(words in text for words in allowed)]
    assert right
    assert not others


@pytest.mark.parametrize("model_type", REASONS)
def test_layers_are_refused(model_type: str) -> None:
    right, reasons = layers(small_model(model_type), model_type)
    assert not right
    assert any(REASONS[model_type] in text for text in reasons), reasons


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: f"{one.model_type}-{one.keys}")
def test_setting(setting: Setting) -> None:
    right, reasons = layers(small_model(setting.model_type, **setting.keys), setting.model_type)
    assert bool(right) != bool(setting.words), reasons
    assert all(setting.words in text for text in reasons), reasons


class Layer(NamedTuple):
    """A layer to write: its rotation, the arguments of `export_attention`, and its module."""

    rope: RotaryEmbedding
    arguments: dict[str, Any]
    module: Module


def written_layers(small: SmallModel, model_type: str) -> tuple[list[Layer], list[str]]:
    """Return the layers of a model that can be written, and the reasons for all others."""
    config = small.config(model_type)
    state = small.state(model_type)
    calls: dict[str, Any] = {}
    written = []
    reasons = []
    for layer in range(small.model.config.num_hidden_layers):
        try:
            arguments = export.attention_options(config, layer=layer)
            arguments |= export.attention_weights(state, config, layer)
        except ValueError as error:
            reasons.append(str(error))
            continue
        calls = calls or small.calls()
        module = attention_module(small.model, calls, model_type, layer, state)
        rope = RotaryEmbedding.from_config(config, layer=layer, angle_dtype="float32")
        if rope.spec.needs_length:
            rope = rope.at_length(TOKENS)
        written.append(Layer(rope, arguments, module))
    return written, reasons


def layers(small: SmallModel, model_type: str) -> tuple[int, list[str]]:
    """Return how many layers are written, after comparing them, and the reasons for all others."""
    written, reasons = written_layers(small, model_type)
    for index, (rope, arguments, module) in enumerate(written):
        exported = export.export_attention(
            rope, target="primitive", dtype="float64", past=False, **arguments
        )
        (result,) = open_session(exported).run(None, {"hidden": module.hidden.astype(np.float64)})
        assert np.abs(result - module.result).max() <= module.own_error, index
    return len(written), reasons


@pytest.mark.parametrize("model_type", RIGHT)
def test_targets_and_caches(model_type: str) -> None:
    """In float32, a prefill and single steps; a different order of sums may be 4 times as far off.

    A layer that is not causal has no steps. The printed lines have the figures.
    """
    written, _ = written_layers(small_model(model_type), model_type)
    for target, cache, positions in WAYS:
        errors = []
        for rope, arguments, module in written:
            options = {"target": target, "cache": cache, "max_positions": CAPACITY, **arguments}
            options["positions"] = positions
            words = refusal(arguments["causal"], target, cache)
            if words:
                with pytest.raises(ValueError, match=words):
                    export.export_attention(rope, **options)
                continue
            model = export.export_attention(rope, **options)
            result = in_steps(model, module, cache, STEPS if arguments["causal"] else 0)
            errors.append(np.abs(result - module.result).max())
            assert errors[-1] <= 4 * module.own_error
        print(
            f"{model_type:<40} {target:<10} {cache:<8} {positions:<13} {len(errors)} layers right, "
            f"{len(written) - len(errors)} refused, {max(errors, default=0.0):.1e}"
        )


@pytest.mark.parametrize("model_type", [*RIGHT, *SERVED])
def test_layers_of_a_server(model_type: str) -> None:
    """All causal layers that `attention_layer` reads, those without rotation too, in steps."""
    small = small_model(model_type)
    config = small.config(model_type)
    state = small.state(model_type)
    calls: dict[str, Any] = {}
    for index in range(small.model.config.num_hidden_layers):
        try:
            layer = rope_cpu.attention_layer(config, index)
            weights = layer.weights(state)
        except ValueError:
            continue
        if not layer.causal or weights.o is None:
            continue
        calls = calls or small.calls()
        module = attention_module(small.model, calls, model_type, index, state)
        if layer.rope is not None:
            rope = RotaryEmbedding.from_config(config, layer=index, angle_dtype="float32")
            layer = replace(layer, rope=rope.at_length(TOKENS))
        steps = (module.hidden.shape[1] - STEPS, *[1] * STEPS)
        result = numpy_layers.in_steps(layer, weights, module.hidden, steps)
        assert np.abs(result - module.result[0]).max() <= 4 * module.own_error, index
    assert calls or not layer.causal


def test_rows_of_a_published_file(tmp_path: Path) -> None:
    """A file whose rows transformers permutes on loading; it saves the order of published files."""
    model_type = "gradium_phonon_tts"
    small = small_model(model_type, num_key_value_heads=4)
    small.model.save_pretrained(tmp_path)
    files = open_tensors(tmp_path / "model.safetensors")
    tensors = {name: read_tensor(file, name) for name, file in files.items()}
    state = small.state(model_type)
    module = "layers.1.self_attn."
    projections = [state[f"{module}{name}_proj.weight"].numpy() for name in "qkv"]
    assert (tensors[f"{module}in_proj.weight"] != np.concatenate(projections)).any()
    config = small.config(model_type)
    expected = export.attention_weights(state, config, 1)["weights"]
    published = {f"flow_lm.transformer.{name}": tensors[name] for name in tensors}
    published |= {f"mimi.encoder.{name}": tensors[name] for name in tensors}
    for source in (tmp_path / "model.safetensors", published):
        found = export.attention_weights(source, config, 1)["weights"]
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


def refusal(causal: bool, target: str, cache: str) -> str:
    """Return words of the reason to refuse a layer for a target and a cache, "" to write it."""
    return "" if causal or (target != "ort" and cache == "growing") else "`causal` is False"


def in_steps(model: Any, module: Module, cache: str, steps: int) -> np.ndarray:
    """Run a layer: a prefill, and single steps over its cache."""
    session = open_session(model)
    hidden = module.hidden
    batch, tokens = hidden.shape[:2]
    shapes = {value.name: value.shape for value in session.get_inputs()}
    rows = CAPACITY if cache == "shared" else 0
    past = {
        name: np.zeros((batch, shapes[name][1], rows, shapes[name][3]), np.float32)
        for name in ("past_key", "past_value")
    }
    starts = [0, *range(tokens - steps, tokens)]
    results = []
    for start, end in zip(starts, [*starts[1:], tokens], strict=True):
        feeds = {"hidden": np.ascontiguousarray(hidden[:, start:end])} | past
        if "position_ids" in shapes:
            axes = shapes["position_ids"][2:]
            ids = np.arange(start, end).reshape(1, -1, *[1 for _ in axes])
            feeds["position_ids"] = np.broadcast_to(ids, (batch, end - start, *axes)).copy()
        if cache == "growing":
            result, *present = session.run(None, feeds)
            past = dict(zip(past, present, strict=True))
        else:
            feeds["past_lengths"] = np.full(batch, start)
            result = np.empty((batch, end - start, module.result.shape[2]), np.float32)
            export.bind(session, feeds, {"attention": result})()
        results.append(result)
    return np.concatenate(results, axis=1)
