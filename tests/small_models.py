"""Small models of every model type of transformers that this library knows."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import transformers
from attention_modules import module_calls, random_weights, seeded
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

TOKENS = 12
LAYERS = 6
WIDTH = 128

SMALL = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
# Keys that are set where a config class has them: they must be read from the config.
READ = {
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 0.03,
    "norm_eps": 0.03,
    "rotary_dim": 16,
    "attn_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 40,
    "attention_multiplier": 0.3,
    "attention_bias": True,
}


def rope_section(*sections: int, **more: Any) -> dict[str, Any]:
    """Return the keys of a rotation whose pairs are split among axes."""
    section = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}
    return {"rope_parameters": section}


MROPE = rope_section(6, 5, 5)
HALF_MROPE = rope_section(2, 3, 3, partial_rotary_factor=0.5)
QUARTER_MROPE = rope_section(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25)
EQUAL_HEADS = {"num_key_value_heads": 4}
NO_WINDOW = {"sliding_window": None}
FEW_LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 32, "index_n_heads": 2}
NO_DROPOUT = {"dropout_rate": 0.0, "attention_dropout": 0.0}
FLOW_HEAD = {
    "flow_head_config": {"hidden_size": 32, "num_hidden_layers": 1, "condition_dim": WIDTH},
}
FULL, SLIDING = "full_attention", "sliding_attention"
NARROW = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
SMALL_PART = NARROW | {"num_hidden_layers": 1}
BYTES = SMALL | {"hidden_size_global": WIDTH}
AUDIO = NARROW | {"num_blocks": 1, "ext_pw_out_channel": 32, "nemo_conv_channels": 32}
SMALL_VISION = transformers.ViTConfig(**SMALL_PART, image_size=8, patch_size=4)
# A key with this value is left out.
OMITTED = object()

# Keys beside the general ones that a model type needs to be built small, or to have a rotation.
KEYS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "patcher_config": SMALL,
        "encoder_config": BYTES,
        "decoder_config": BYTES,
        "global_config": SMALL,
        "encoder_hash_byte_group_vocab": 16,
        "local_attention_window_len": READ["sliding_window"],
    },
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys((FULL, SLIDING), *MROPE.values())},
    "cosmos3_edge_text": MROPE,
    "dbrx": {
        "d_model": WIDTH,
        "n_heads": 4,
        "n_layers": LAYERS,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 0.5},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * LAYERS},
    "deepseek_v32": FEW_LATENTS,
    "dia_decoder": {
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 4,
        "cross_head_dim": 32,
        "cross_hidden_size": 32,
        "num_channels": 2,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_audio_encoder": {
        **EQUAL_HEADS,
        "adapter_input_size": WIDTH,
        "adapter_out_dim": WIDTH,
        "downsample_hidden_size": 32,
    },
    "dots3_note_text": {
        **EQUAL_HEADS,
        **FEW_LATENTS,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_kv_lora_rank": 32,
        "swa_q_lora_rank": 32,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], **rope_section(6, 6, 4)},
    "esm": {"position_embedding_type": "rotary"},
    "esmc": EQUAL_HEADS,
    "evolla": {
        "protein_encoder_config": SMALL_PART,
        "resampler_depth": 1,
        "aligner_num_add_layers": 1,
    },
    "falcon": {"head_dim": OMITTED},
    "gemma3_text": {"attn_logit_softcapping": None},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 16},
    "gemma4_text": {"vocab_size_per_layer_input": 16},
    **dict.fromkeys(("glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text"), HALF_MROPE),
    "glm_moe_dsa": FEW_LATENTS,
    "gradium_phonon_tts": FLOW_HEAD,
    "granitemoehybrid": {"position_embedding_type": "rope", "layer_types": [FULL] * LAYERS},
    "idefics": {"vision_config": SMALL_PART | {"embed_dim": 32}, "cross_layer_interval": 3},
    "internlm3": {"attention_bias": OMITTED},
    "kyutai_speech_to_text": {"audio_vocab_size": 16, "audio_pad_token_id": 3},
    "lasr_encoder": {"num_mel_bins": 16, "conv_kernel_size": 31},
    "glmasr_encoder": {"num_mel_bins": 16},
    "lfm2_moe": {"layer_types": ["conv", FULL] * (LAYERS // 2)},
    "moonshine_streaming": EQUAL_HEADS,
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 3},
    "nemotron3_diarization_audio": EQUAL_HEADS,
    "neucodec": EQUAL_HEADS,
    "paddleocr_vl_text": MROPE,
    "pe_video_encoder": {"vision_config": SMALL_VISION},
    "pe_audio_video_encoder": {
        "audio_config": SMALL_PART,
        "video_config": SMALL_PART | {"vision_config": SMALL_VISION},
    },
    "phi4_multimodal": {"vision_config": SMALL_PART, "audio_config": AUDIO},
    "pocket_tts": FLOW_HEAD,
    "qwen2_5_omni_talker": MROPE | {"embedding_size": WIDTH},
    **dict.fromkeys(("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"), MROPE),
    "qwen3_5_moe_text": QUARTER_MROPE,
    "qwen3_5_text": QUARTER_MROPE,
    "qwen3_omni_moe_talker_code_predictor": NO_WINDOW,
    "qwen3_omni_moe_talker_text": MROPE | NO_WINDOW | {"shared_expert_intermediate_size": 32},
    "qwen3_omni_moe_text": MROPE | NO_WINDOW,
    "qwen3_vl_moe_text": MROPE | NO_WINDOW,
    "qwen3_vl_text": MROPE,
    "qwen4_exp_text": {
        **QUARTER_MROPE,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"attention_window_size": READ["sliding_window"]},
    "t5gemma2_decoder": NO_DROPOUT,
    "t5gemma2_text": NO_DROPOUT | {"attn_logit_softcapping": None},
    "t5_gemma_module": NO_DROPOUT,
    "wav2vec2-bert": {"position_embeddings_type": "rotary"},
    "wav2vec2-conformer": {"position_embeddings_type": "rotary"},
    "xcodec2": EQUAL_HEADS,
    "zamba2": {"use_mem_rope": True, "layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2)},
    "zaya": {"num_experts_per_tok": 1},
}

MIMI = ("mimi", "mimi_decoder", "mimi_encoder")
POCKET = tuple(f"pocket_tts_audio_tokenizer{part}" for part in ("", "_decoder", "_encoder"))
TRANSFORMERS = MIMI + POCKET

# Classes of model types whose class in the auto mapping is missing, or is built around others.
CLASSES = {
    "csm": "CsmBackboneModel",
    **dict.fromkeys(MIMI, "MimiTransformerModel"),
    "neucodec": "NeuCodecDecoder",
    **dict.fromkeys(POCKET, "PocketTTSAudioTokenizerTransformerModel"),
    "t5_gemma_module": "T5GemmaEncoder",
    "voxtral_realtime_text": "VoxtralRealtimeTextModel",
    "xcodec2": "Xcodec2Decoder",
}

# Keys that a config has as properties, and that its file must have for the layers to be known.
ADDED = {"bamba": "layers_block_type", "recurrent_gemma": "layers_block_type"}

# Changes of names in state dicts: (pattern, its replacement); tensors without a name are left out.
RENAMED = {
    "dia_decoder": (".*cross_attention.*", ""),
    "evolla": (".*(protein_encoder|adapter).*", ""),
    "pe_audio_video_encoder": ("embedder.*", ""),
}

# Model types that run only within another one: (its model type, name of the part in it).
PARTS = {
    "blt_global_transformer": ("blt", "global_transformer"),
    "blt_local_decoder": ("blt", "local_decoder"),
    "blt_local_encoder": ("blt", "local_encoder"),
}

# Shapes of the inputs of model types that take others than token ids; a number stands for itself.
HIDDEN = (1, TOKENS, WIDTH)
IDS = {"input_ids": (1, TOKENS)}
INPUTS: dict[str, dict[str, tuple[int, ...] | int]] = {
    "csm": {"input_ids": (1, TOKENS, 32)},
    "dia_decoder": {"input_ids": (1, TOKENS, 2), "encoder_hidden_states": (1, TOKENS, 32)},
    "dots3_note_audio_encoder": {
        "input_features": (1, 128, 8 * TOKENS),
        "chunk_sample_lengths": 8 * TOKENS * 160,
    },
    "glmasr_encoder": {"input_features": (1, 16, 2 * TOKENS)},
    "idefics": {
        **IDS,
        "image_encoder_embeddings": (1, 1, 4, 32),
        "image_attention_mask": (1, TOKENS, 1),
    },
    "lasr_encoder": {"input_features": (1, 4 * TOKENS + 12, 16)},
    "nemotron3_diarization_audio": {"inputs_embeds": HIDDEN},
    "neucodec": {"hidden_states": (1, TOKENS, WIDTH + 1024)},
    "pe_audio_encoder": {"input_values": (1, 1, 1920 * TOKENS)},
    "pe_audio_video_encoder": {
        "input_values": (1, 1, 1920 * TOKENS),
        "pixel_values_videos": (1, TOKENS, 3, 8, 8),
    },
    "pe_video_encoder": {"pixel_values_videos": (1, TOKENS, 3, 8, 8)},
    **{name: {"hidden_states": HIDDEN} for name in TRANSFORMERS},
    "qwen3_omni_moe_talker_code_predictor": {"inputs_embeds": HIDDEN},
    "qwen3_omni_moe_talker_text": {"inputs_embeds": HIDDEN},
    "voxtral_realtime_text": IDS | {"t_cond": (1, 1, WIDTH)},
    "voxtral_realtime_encoder": {"inputs_embeds": HIDDEN},
    "xcodec2": {"hidden_states": (1, TOKENS, WIDTH + 1024)},
}


class SmallModel(NamedTuple):
    """A model with random weights, or a part of one.

    whole: the model that runs, on the inputs. part: name of the model in it, "" for the whole.
    """

    model: Any
    whole: Any
    part: str
    inputs: dict[str, Any]

    def config(self, model_type: str) -> dict[str, Any]:
        """Return the content of its config file."""
        content = json.loads(json.dumps(self.model.config.to_dict(), default=str))
        if model_type in ADDED:
            content[ADDED[model_type]] = getattr(self.model.config, ADDED[model_type])
        return content | {"model_type": model_type}

    def state(self, model_type: str) -> dict[str, Any]:
        """Return its state dict, with names as a checkpoint must have them to be read."""
        pattern, replacement = RENAMED.get(model_type, ("", ""))
        named = {
            re.sub(pattern, replacement, name): tensor
            for name, tensor in self.model.state_dict().items()
        }
        named.pop("", None)
        return named

    def calls(self) -> dict[str, Any]:
        """Run the model once and return the arguments of its attention modules, by name."""
        calls = module_calls(self.whole, self.inputs)
        prefix = f"{self.part}." if self.part else ""
        own = {name: call for name, call in calls.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): call for name, call in own.items()}


def small_config(model_type: str, more: Mapping[str, Any]) -> Any:
    """Return the config of a small model; more: keys that beat those of the tables."""
    default = CONFIG_MAPPING[model_type]()
    read = {name: value for name, value in READ.items() if name in vars(default)}
    keys = SMALL | EXPERTS | read | KEYS.get(model_type, {}) | dict(more)
    kept = {name: value for name, value in keys.items() if value is not OMITTED}
    return CONFIG_MAPPING[model_type](**kept)


def model_class(config: Any) -> Any:
    """Return the class of a model: that of the auto mapping, or the first with this config class.

    Classes of sub-models are not in the auto mapping.
    """
    code = type(config).__module__.replace("configuration_", "modeling_")
    if config.model_type in CLASSES:
        return getattr(importlib.import_module(code), CLASSES[config.model_type])
    if type(config) in MODEL_MAPPING:
        found = MODEL_MAPPING[type(config)]
        return found[0] if isinstance(found, tuple) else found
    for value in vars(importlib.import_module(code)).values():
        is_model = inspect.isclass(value) and issubclass(value, transformers.PreTrainedModel)
        if is_model and value.config_class is type(config) and "PreTrained" not in value.__name__:
            return value
    raise LookupError(f"no model has the config class {type(config).__name__}")


def small_model(model_type: str, **more: Any) -> SmallModel:
    """Return a small model of a type; more: further keys of its config."""
    whole_type, part = PARTS.get(model_type, (model_type, ""))
    generator = seeded(whole_type)
    config = small_config(whole_type, more)
    whole = random_weights(model_class(config), config, generator)
    model = whole.get_submodule(part)
    if not part:
        model.config = config  # some classes of layers lack it
    return SmallModel(model, whole, part, random_inputs(whole_type, generator))


def random_inputs(model_type: str, generator: torch.Generator) -> dict[str, Any]:
    """Return inputs of a model type: whole numbers for ids, real ones for all others."""
    inputs: dict[str, Any] = {}
    for name, shape in INPUTS.get(model_type, IDS).items():
        if isinstance(shape, int):
            inputs[name] = torch.tensor([shape])
        elif name.endswith("ids"):
            inputs[name] = torch.randint(3, 16, shape, generator=generator)
        else:
            inputs[name] = torch.randn(shape, generator=generator)
    return inputs
