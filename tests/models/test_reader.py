"""Configs in every format: old and new, flat and nested, sparse and wrong."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import inv_freq
from text_configs import LLAMA, of, read

from rope_cpu import RotaryEmbedding
from rope_cpu.models import reader


def test_path_folder_and_dict_are_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 5e5}))
    rope = read(LLAMA, {"rope_theta": 5e5})
    for path in (tmp_path, str(tmp_path / "config.json")):
        assert RotaryEmbedding.from_config(path) == rope


def test_old_and_new_forms_are_alike() -> None:
    old = read(LLAMA, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    section = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert old == read(LLAMA, {"rope_parameters": section})
    np.testing.assert_allclose(old.inv_freq, inv_freq(128, 5e5) / 4, rtol=1e-14)


OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("scaling", [OLD_YARN, {**OLD_YARN, "rope_theta": 5e5, "beta_fast": None}])
def test_two_sections_that_say_the_same_are_one(scaling: dict[str, Any]) -> None:
    both = {"rope_theta": 5e5, "rope_parameters": YARN | BASE, "rope_scaling": scaling}
    assert read(LLAMA, both) == read(LLAMA, {"rope_parameters": YARN | BASE})


OF_QUIRKS = [
    of("chatglm", rope_ratio=50),
    of("phi3", hidden_size=128, num_attention_heads=4, original_max_position_embeddings=64),
    of("hunyuan_v1_dense", hidden_size=128, num_attention_heads=4, head_dim=32),
]


@pytest.mark.parametrize("keys", OF_QUIRKS, ids=lambda keys: str(keys["model_type"]))
def test_two_equal_sections_of_a_type_whose_code_changes_them_are_one(keys: dict[str, Any]) -> None:
    sections: dict[str, dict[str, Any]] = {
        "chatglm": BASE,
        "phi3": {"rope_type": "yarn", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
        "hunyuan_v1_dense": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0},
    }
    section = sections[keys["model_type"]]
    one = read(keys, {"rope_parameters": section})
    assert read(keys, {"rope_parameters": section, "rope_scaling": section}) == one


def test_a_base_beside_a_null_counts() -> None:
    assert read(LLAMA, BASE, {"rope_parameters": NO_BASE}) == read(LLAMA, BASE)


def test_the_file_given_is_not_written_to() -> None:
    given = {**LLAMA, "rope_parameters": {"rope_type": "default"}}
    read(given)
    assert given == {**LLAMA, "rope_parameters": {"rope_type": "default"}}


def test_the_language_model_of_a_multimodal_config_is_followed() -> None:
    inner = {**LLAMA, "rope_theta": 7e5}
    assert read({"model_type": "llava", "text_config": inner, "rope_theta": 1.0}) == read(inner)
    assert read({"model_type": "somevlm", "llm_config": inner}) == read(inner)
    text = {"rope_theta": 5e5, "max_position_embeddings": 8}
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": text}
    assert read({"model_type": "qwen2_5_omni", "thinker_config": thinker}).axes == 3
    gemma = {"model_type": "gemma", "head_dim": 64}
    paligemma = {"model_type": "paligemma", "text_config": gemma}
    for whole in ("colpali", "pi0"):
        assert read({"model_type": whole, "vlm_config": paligemma}) == read(gemma)
    assert read({"model_type": "t5gemma", "decoder": {"head_dim": 64}}) == read(gemma)
    with pytest.raises(ValueError, match=r"`model_type` is 'blt'.*rotations of their own"):
        read({"model_type": "blt"})
    nameless = {"model_type": "gemma3", "text_config": {"head_dim": 64, "rope_theta": 1e6}}
    assert read(nameless, layer_type="full_attention").head_dim == 64


def test_a_spec_made_of_another_is_read_only_too() -> None:
    spec = read(LLAMA).spec
    for made in (spec, replace(spec, inv_freq=-spec.inv_freq), pickle.loads(pickle.dumps(spec))):
        assert not made.inv_freq.flags.writeable
        assert not made.attention_factor.flags.writeable


def llama(**keys: Any) -> dict[str, Any]:
    return LLAMA | keys


def scaled(**section: Any) -> dict[str, Any]:
    return LLAMA | {"rope_scaling": section}


LINEAR = {"rope_type": "linear"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
BASE = {"rope_theta": 5e5}
NO_BASE = {"rope_theta": None}
DEFAULT = {"rope_type": "default", **BASE}
ROTARY = {"position_embedding_type": "rotary"}


def beside_a_section(**keys: Any) -> dict[str, Any]:
    section = {"full_attention": {"rope_type": "default"}} | keys
    return llama(rope_parameters=section, layer_types=["full_attention"])


def step(bases: list[float]) -> dict[str, Any]:
    layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    return of("step3p5", rope_theta=bases, layer_types=layer_types)


REFUSALS: list[tuple[Any, type[Exception], str]] = [
    (17, TypeError, "`config` is a int"),
    ("/no/such/folder", ValueError, "`config` is '/no/such/folder'"),
    (llama(rope_scaling=[1]), TypeError, "`rope_scaling` is"),
    (scaled(rope_type=["linear"]), ValueError, "it must be a rope type"),
    (llama(model_type=["llama"]), TypeError, r"`model_type` is \['llama'\]; it must be a string"),
    (llama(layer_types=3), TypeError, "`layer_types` is 3; it must be a list"),
    ({"text_config": llama(layer_types=3)}, TypeError, "`layer_types` is 3; it must be a list"),
    (of("dbrx", attn_config=[1]), TypeError, r"`attn_config` is \[1\]; it must be an object"),
    ({"_class_name": ["Flux"]}, TypeError, r"`_class_name` is \['Flux'\]; it must be a string"),
    (of("yuan", no_rope_layer_interval=4), TypeError, "`num_hidden_layers` is None"),
    (llama(no_rope_layer_interval="4\x1b"), ValueError, r"_interval` is '4\\x1b'; it must"),
    (scaled(type="ntk-by-parts"), ValueError, "`rope_type` is 'ntk-by-parts'; it must"),
    (scaled(type="llama-3"), ValueError, "`rope_type` is 'llama-3'; .* llama3"),
    (llama(model_type="mystery"), ValueError, "`model_type` is 'mystery', so"),
    ("meta-llama/Llama-3.1-8B", ValueError, "meta-llama/Llama-3.1-8B'; it must .*is downloaded"),
    ("", ValueError, "`config` is ''; it must be a file, or"),
    (scaled(type="linear"), ValueError, "`factor` is missing"),
    (scaled(type="linear", factor=2.0, x=1), ValueError, "`x` is not a key"),
    (llama(rope_theta=0), ValueError, "`rope_theta` is 0"),
    (llama(num_attention_heads=0), ValueError, "`num_attention_heads` is 0"),
    (of("roformer", hidden_size="768"), TypeError, "`hidden_size` is '768'"),
    (of("llama", head_dim=128.0), TypeError, "`head_dim` is 128.0"),
    (of("falcon", alibi=True), ValueError, "`alibi` is True.*ALiBi"),
    (of("esm"), ValueError, "`position_embedding_type` is 'absolute'"),
    (of("esm", rope_parameters=LINEAR, **ROTARY), ValueError, "`rope_parameters` is .*knows no"),
    (of("chatglm", position_encoding_2d=True), ValueError, "`position_encoding_2d` is True"),
    (of("qwen2_vl_text", head_dim=64), ValueError, "`mrope_section` adds up to 64"),
    (of("nemotron_h"), ValueError, "not rotated"),
    (of("gemma4_text", rope_scaling={"factor": 2.0}), ValueError, "`rope_scaling` is one section"),
    (of("gemma4_text", rope_parameters={"factor": 2.0}), ValueError, "`rope_parameters` is one se"),
    (of("chatglm", rope_ratio="2"), TypeError, "`rope_ratio` is '2'; it must be a number"),
    (of("chatglm", rope_scaling={"rope_theta": "2"}), TypeError, "`rope_theta` is '2'"),
    (of("gpt2"), ValueError, "`model_type` is 'gpt2': its positions are added"),
    (of("xlnet"), ValueError, "`model_type` is 'xlnet': its positions are relative"),
    (of("udop"), ValueError, "`model_type` is 'udop': .*inputs and relative ones to its scores"),
    (of("rwkv6"), ValueError, "`model_type` is 'rwkv6': its linear layers have a state"),
    (of("inkling2", text_config=of("inkling2_text")), ValueError, "not rotated"),
    (of("olmo_hybrid", rope_parameters={"rope_theta": None}), ValueError, "is None.*not rot"),
    (of("olmo_hybrid", rope_theta=None), ValueError, "`rope_theta` is None"),
    (llama(rope_parameters=YARN | NO_BASE), ValueError, "_theta` is missing.*transformers 5"),
    (llama(rope_parameters=NO_BASE), ValueError, "`rope_theta` is missing"),
    (
        of("gemma3_text", rope_parameters={"full_attention": NO_BASE}),
        ValueError,
        "`rope_theta` is m",
    ),
    (
        of("modernbert", rope_parameters={"full_attention": NO_BASE}),
        ValueError,
        "`rope_theta` is missing",
    ),
    (llama(rope_parameters=DEFAULT, rope_scaling=YARN), ValueError, "`rope_scaling` differs"),
    ({"text_config": llama(rope_parameters=DEFAULT, rope_scaling=YARN)}, ValueError, "differs"),
    (llama(rope_parameters=YARN | BASE, rope_scaling=YARN), ValueError, "`rope_scaling` differs"),
    (beside_a_section(rope_theta=5e5), ValueError, "`rope_theta` is 500000.0; .* in a section of"),
    (of("step3p5", rope_theta=[5e6, 1e4]), ValueError, "`rope_theta` is .* each of the layers in"),
    (step([5e6, 1e4]), ValueError, "`rope_theta` is .* have a value for each of the layers in"),
    (step([5e6, 1e4, 77]), ValueError, "`rope_theta` is .*, and one for each type"),
    (beside_a_section(factor=8.0), ValueError, "`factor` is 8.0; it must be in a section of"),
]


@pytest.mark.parametrize(("given", "kind", "words"), REFUSALS, ids=[row[2] for row in REFUSALS])
def test_refusals(given: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        reader.read(given).spec()


@pytest.mark.parametrize(
    ("text", "words"), [("[]", "holds a list"), ("{", "config.json' is not valid JSON")]
)
def test_what_is_no_object_is_no_config(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        reader.read(tmp_path)


MISSPELT = {"mistal": "mistral", "LLaMA": "llama", "gptneox": "gpt_neox", "Qwen-3": "qwen3"}
OTHER_MODELS = ["minimax_m9", "llama5", "llama_3", "cohere_asr", "aimv3_text_model"]


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_a_misspelt_model_type_is_recognised(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        reader.read(llama(model_type=name)).spec()


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_no_misspelling(name: str) -> None:
    with pytest.raises(ValueError, match=f"`model_type` is '{name}', so the pairing"):
        reader.read(llama(model_type=name)).spec()


META = {"dim": 2048, "n_layers": 16, "n_heads": 32, "multiple_of": 256, "use_scaled_rope": True}
MISTRAL = {"dim": 4096, "n_layers": 32, "n_heads": 32, "head_dim": 128, "hidden_dim": 14336}
DECODER = {"head_size": 128, "hidden_size": 4096, "num_attention_heads": 32}
MEGATRON = {"num_layers": 32, "kv_channels": 128, "rotary_base": 500000, "rotary_percent": 1.0}
KERAS_LLAMA = {
    "num_query_heads": 32,
    "hidden_dim": 4096,
    "rope_max_wavelength": 500000,
    "rope_frequency_adjustment_factor": 8.0,
}
KERAS = {
    "module": "keras_hub.src.models.llama3.llama3_backbone",
    "class_name": "Llama3Backbone",
    "config": KERAS_LLAMA,
    "registered_name": "keras_hub>Llama3Backbone",
}
LITGPT = {"name": "Llama-3.1-8B", "padded_vocab_size": 128256, "rope_condense_ratio": 1}
CTRANSLATE2 = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "layer_norm_epsilon": 1e-5,
}
MOSHI = {"dim": 4096, "num_heads": 32, "n_q": 16, "text_card": 32000, "max_period": 10000}
OLMO_CORE = {"d_model": 4096, "block": {"attention": {"n_heads": 32}}, "lm_head": {}}

# Objects of other files, each with the name of its file and the words that tell it apart.
FOREIGN_OBJECTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "adapter_config.json",
        {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"},
        "an adapter .PEFT.*base model, which `base_model_name_or_path` names$",
    ),
    ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True}, "quantisation"),
    ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4}, "quantisation"),
    ("hf_quant_config.json", {"producer": {}, "quantization": {}}, "quantisation of weights"),
    (
        "genai_config.json",
        {"model": {"type": "llama", "decoder": DECODER}, "search": {}},
        "GenAI, which lacks `rope_theta`; .*built from$",
    ),
    ("params.json", META, "Meta's own format; .*interleaved=True.*: 32 in .* 1B and 3B, 8 in"),
    ("params.json", {**MISTRAL, "yarn": {"factor": 16}}, "Mistral's own .*interleaved=True.*yarn"),
    ("config.json", KERAS, "KerasHub.*llama3"),
    ("config.json", of("llama", **KERAS["config"]), "KerasHub.*`rope_frequency_adjustment_factor`"),
    ("lit_config.json", LITGPT, "LitGPT; give the config.json beside it"),
    ("config.json", of("llama", **CTRANSLATE2), "CTranslate2.*model.bin"),
    ("config.json", of("moshi", **MOSHI), "moshi.*max_period, interleaved=True"),
    ("config.json", {"model": OLMO_CORE, "dataset": {}, "trainer": {}}, "OLMo-core.*to_hf_config$"),
    ("config.json", of("olmo2", **OLMO_CORE), "OLMo-core"),
    ("open_clip_config.json", {"model_cfg": {}, "preprocess_cfg": {}}, "OpenCLIP"),
    ("model_index.json", {"_class_name": "FluxPipeline", "scheduler": ["a", "b"]}, "transformer"),
    ("config.json", {"architecture": "eva02_base", "pretrained_cfg": {}}, "timm"),
    ("config.json", {"word_embedding_dimension": 768}, "a config of Sentence Transformers"),
    ("config.json", {"pretrained_config": {}, "build_config": {}}, "TensorRT-LLM"),
    ("args.json", MEGATRON, "the arguments of Megatron-LM or NeMo; .*`rotary_base`"),
    (
        "mlc-chat-config.json",
        of("llama", model_config={}, quantization="q4f16_1", context_window_size=4096),
        "a config of MLC",
    ),
    ("tokenizer_config.json", {"added_tokens_decoder": {}}, "the config of a tokenizer"),
    ("preprocessor_config.json", {"image_processor_type": "X"}, "the config of a processor"),
    ("processor_config.json", {"processor_class": "X"}, "the config of a processor"),
    ("model.safetensors.index.json", {"weight_map": {}}, "the index of a checkpoint"),
]


@pytest.mark.parametrize(("name", "held", "words"), FOREIGN_OBJECTS)
def test_objects_of_other_files_are_told_apart(
    tmp_path: Path, name: str, held: dict[str, Any], words: str
) -> None:
    (tmp_path / name).write_text(json.dumps(held))
    for given in (held, tmp_path / name):
        with pytest.raises(ValueError, match=words):
            RotaryEmbedding.from_config(given, interleaved=False)


def test_a_folder_without_a_config_names_the_other_file(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match=r"adapter_config\.json' is the config of an ada"):
        reader.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert RotaryEmbedding.from_config(tmp_path) == read(LLAMA)


# Files that their names tell apart.
FOREIGN_FILES: list[tuple[str, bytes, str]] = [
    ("generation_config.json", b'{"do_sample": true}', "a config of text generation"),
    ("scheduler_config.json", b'{"_class_name": "DDIMScheduler"}', "a diffusers scheduler"),
    ("config_sentence_transformers.json", b'{"prompts": {}}', "Sentence Transformers"),
    ("modules.json", b"[]", "the list of modules of Sentence Transformers"),
    ("tokenizer.json", b"{}", "a file of a tokenizer"),
    ("model.yaml", b"hidden_size: 64", "no JSON file"),
    ("weights.bin", b"\0" * 20, "a checkpoint or another file of arrays; give the config.json"),
    ("model.safetensors", b"", "a checkpoint; give the config.json beside it"),
    ("model.onnx", b"", "an ONNX model; give the config.json .* that it was exported from"),
    ("renamed", b"\x08\x0a\x12\x07pytorch", "not valid JSON"),
    ("renamed", b"\x93NUMPY\x01\0", "not valid JSON"),
]


@pytest.mark.parametrize(("name", "held", "words"), FOREIGN_FILES)
def test_other_files_are_told_apart(tmp_path: Path, name: str, held: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(held)
    with pytest.raises(ValueError, match=f"{name}' is .*{words}"):
        reader.read(tmp_path / name)


def test_a_config_may_have_the_name_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(LLAMA))
    assert RotaryEmbedding.from_config(tmp_path / "params.json") == read(LLAMA)
