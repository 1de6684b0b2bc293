"""`rope-cpu export --attention`: the model's own attention, and refusals."""

import json
import re

import numpy as np
import onnx
import pytest
from safetensors_files import write_safetensors

from rope_cpu import export
from rope_cpu.cli.command_line import UsageError
from rope_cpu.export.targets.ort import runtime_takes_query_lengths

HEADS = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 6,
}
LLAMA = {**HEADS, "model_type": "llama"}
LLAMA48 = LLAMA | {"max_position_embeddings": 48}
GEMMA2 = {**HEADS, "model_type": "gemma2"}
GEMMA3 = {**HEADS, "model_type": "gemma3_text"}
COHERE2 = {**HEADS, "model_type": "cohere2"}
GPT_OSS = {**HEADS, "model_type": "gpt_oss"}
TELECHAT = {**HEADS, "model_type": "telechat3", "rope_theta": 1e4}
UNKNOWN = TELECHAT | {"model_type": "mymodel"}
GEMMA4 = {
    **HEADS,
    "model_type": "gemma4_text",
    "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}},
}
GEMMA4_GLOBAL = GEMMA4 | {"num_global_key_value_heads": 4, "attention_k_eq_v": True}


def options_of(file):
    """The options of the export in a file's metadata."""
    return json.loads(metadata_of(file)["rope_cpu.export"])


def metadata_of(file):
    model = onnx.load(file, load_external_data=False)
    return {entry.key: entry.value for entry in model.metadata_props}


def inputs_of(file):
    return [value.name for value in onnx.load(file, load_external_data=False).graph.input]


QWEN2 = {**HEADS, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}
QWEN3 = {**HEADS, "model_type": "qwen3", "rms_norm_eps": 1e-5}
MISTRAL = {**HEADS, "model_type": "mistral", "sliding_window": 7}
NULLS = {**GEMMA2, "attn_logit_softcapping": None, "query_pre_attn_scalar": None}
GEMMA3_NORMS = {"qk_norm": "input", "norm_epsilon": 1e-6, "norm_offset": 1.0}
QWEN3_NORMS = {"qk_norm": "input", "norm_epsilon": 1e-5, "norm_offset": 0.0}
ATTENTIONS = [
    (LLAMA, "", {"window": None, "softcap": None, "scale": 32**-0.5}),
    ({**LLAMA, "attention_multiplier": 0.5}, "", {"scale": 0.5}),
    (MISTRAL, "", {"window": 7}),
    (GEMMA2, "--layer=0", {"window": 4096, "softcap": 50.0, "scale": 256**-0.5, "qk_norm": "none"}),
    (GEMMA2, "--layer=1", {"window": None, "softcap": 50.0}),
    (GEMMA3, "--layer-type=full_attention", {"window": None, **GEMMA3_NORMS}),
    (GEMMA3, "--layer=4", {"window": 4096}),
    (COHERE2, "", {"window": 4096}),  # its rotated layers are alike
    (QWEN3, "", {"window": None, **QWEN3_NORMS}),
    (GPT_OSS, "--layer=0", {"window": 128, "sinks": "input"}),
    (QWEN2, "", {"window": None}),
    (NULLS, "--layer=1", {"softcap": None, "scale": 32**-0.5}),
]


@pytest.mark.parametrize(("config", "layer", "expected"), ATTENTIONS)
def test_the_attention_is_that_of_the_config(export_config, config, layer, expected):
    code, file = export_config(config, "--attention", *layer.split())
    assert code == 0
    found = options_of(file)
    assert {name: found[name] for name in expected} == expected
    assert "rope_cpu.departures" not in metadata_of(file)


@pytest.mark.parametrize(
    ("config", "arguments", "rows"),
    [
        (LLAMA48, ("--target", "ort"), 48),
        (LLAMA48, ("--target", "ort", "--cache", "shared"), 48),
        (LLAMA48, ("--target", "onnx", "--cache", "shared"), None),
        (LLAMA48, ("--target", "ort", "--max-positions", "40"), 40),
        (LLAMA48, ("--target", "onnx"), None),
        (TELECHAT, ("--target", "ort"), None),
    ],
)
def test_tables_have_a_row_for_each_position_of_the_model(export_config, config, arguments, rows):
    code, file = export_config(config, "--attention", *arguments)
    assert code == 0
    assert options_of(file)["max_positions"] == rows


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ("", "onnx"),
        ("--cache growing", "onnx"),
        ("--cache shared", "ort"),
        ("--cache shared --cache-dtype int8", "ort"),
        ("--cache shared --target primitive", "primitive"),
        ("--cache shared --target onnx", "onnx"),
    ],
)
def test_a_shared_cache_takes_target_ort_by_default(export_config, arguments, target):
    code, file = export_config(LLAMA, "--attention", *arguments.split())
    assert (code, options_of(file)["target"]) == (0, target)


@pytest.mark.skipif(not runtime_takes_query_lengths(), reason="the export refuses it")
def test_chunks_of_a_batch_are_an_option(export_config, capsys):
    options = ("--attention", "--target", "ort", "--cache", "shared")
    for given in (False, True):
        code, file = export_config(LLAMA, *options, *["--batch-chunks"] * given)
        assert (code, options_of(file)["batch_chunks"]) == (0, given)
        assert ("chunks of a batch" in capsys.readouterr().out) == given


@pytest.mark.parametrize("arguments", [(), ("--attention",)])
@pytest.mark.parametrize(
    ("config", "name", "key_heads"),
    [
        (GEMMA3, "full_attention", 2),
        (GEMMA3, "sliding_attention", 2),
        (GEMMA4_GLOBAL, "full_attention", 4),
    ],
)
def test_a_model_of_one_layer_type_needs_no_layer(
    export_config, arguments, config, name, key_heads
):
    departures = ("--set", "v_norm=none") if arguments and config is GEMMA4_GLOBAL else ()
    code, file = export_config(config | {"layer_types": [name] * 6}, *arguments, *departures)
    assert code == 0
    assert options_of(file)["num_kv_heads"] == key_heads


STATED = {"causal": "true", "window": "none", "softcap": "none", "sinks": "none"}
STATED |= {"qk_norm": "none", "scale": "none"}
STATED_ENTRY = {"causal": True} | dict.fromkeys(list(STATED)[1:])


def settings(stated):
    """The options of the command for these statements."""
    return [word for name, value in stated.items() for word in ("--set", f"{name}={value}")]


SHARED = LLAMA | {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
RULE = "; it must be window, softcap, scale with a number above 0 or none, causal with true or fal"


@pytest.mark.parametrize(
    ("config", "arguments", "text"),
    [
        (
            LLAMA,
            ("--cache", "shared", "--dtype", "float16"),
            "whole shared cache to float32 at every step; targets 'primitive' and 'onnx'",
        ),
        (LLAMA | {"max_position_embeddings": 0}, ("--target", "ort"), "`max_position_embeddings`"),
        (
            SHARED,
            ("--weights", "a", "--layer", "3"),
            "`layer` is 3; it must be below 2, the number of layers with keys",
        ),
        (LLAMA, ("--seq-len", "5"), "`seq_len` is 5; it must be left out: rope type 'default' is"),
        (UNKNOWN, settings(STATED), "`model_type` is 'mymodel', so the pairing is not known"),
        ({"model_type": "gpt2"}, (), "`model_type` is 'gpt2': its positions are added to"),
        (GEMMA3, (), "`layer_type` selects layers whose rope parameters are"),
        (GEMMA2, (), "layers whose windows are [4096, None]"),
        (LLAMA, ("--set", "rope_theta=1"), f"--set is 'rope_theta=1'{RULE}"),
        (LLAMA, ("--set", "window=many"), f"--set is 'window=many'{RULE}"),
        (LLAMA, ("--set", "window=0"), f"--set is 'window=0'{RULE}"),
        (LLAMA, ("--set", "softcap=inf"), "`softcap` is inf; it must be finite and above 0"),
        (LLAMA, ("--set", "scale=nan"), f"--set is 'scale=nan'{RULE}"),
        (LLAMA, ("--set", "sinks=3"), f"--set is 'sinks=3'{RULE}"),
        (LLAMA, ("--set", "causal=none"), f"--set is 'causal=none'{RULE}"),
        (LLAMA, ("--set", "window=none"), "--set window is none, but the model has no window; d"),
        (LLAMA, ("--set", "v_norm=none"), "--set v_norm is none, but the model has no v_norm; d"),
        (LLAMA, ("--set", "window=4", "--set", "window=5"), "--set window is given twice"),
    ],
)
def test_refusals(export_config, tmp_path, config, arguments, text):
    """Each names one reason; no file is written."""
    with pytest.raises(UsageError, match=re.escape(text)) as error:
        export_config(config, "--attention", *arguments)
    assert "(1)" not in str(error.value)
    assert not (tmp_path / "out.onnx").exists()


DIFFLLAMA = {**HEADS, "model_type": "diffllama"}
DEPARTURES = [
    (COHERE2, "window=none", {"window": None}, {"window": None}),
    (GEMMA2, "window=none", {"window": None}, {"window": None}),
    (LLAMA, "window=16", {"window": 16}, {"window": 16}),
    (LLAMA, "scale=1", {"scale": 1.0}, {"scale": 1.0}),
    (LLAMA, "softcap=5", {"softcap": 5.0}, {"softcap": 5.0}),
    (GPT_OSS, "sinks=none", {"sinks": None}, {"sinks": "none"}),
    (QWEN3, "qk_norm=none", {"qk_norm": None}, {"qk_norm": "none"}),
    (DIFFLLAMA, "other=none", {"other": None}, {}),
]


@pytest.mark.parametrize(("config", "setting", "entry", "expected"), DEPARTURES)
def test_a_departure_from_the_model_is_written_into_the_metadata(
    export_config, config, setting, entry, expected
):
    layer = () if config in (LLAMA, COHERE2, GEMMA2) else ("--layer", "1")
    code, file = export_config(config, "--attention", *layer, "--set", setting)
    assert code == 0
    assert json.loads(metadata_of(file)["rope_cpu.departures"]) == entry
    found = options_of(file)
    assert {name: found[name] for name in expected} == expected


def of_type(model_type, **values):
    return {**LLAMA, "model_type": model_type, **values}


CLIPPED = {"kv_n_heads": 2, "clip_qkv": 8.0}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 16}
BETA = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
NOT_WRITTEN = [
    (of_type("llama4_text", attention_chunk_size=8192), "chunks of 8192 tokens"),
    (of_type("hunyuan_v1_dense"), "norms of queries and keys after the rotation"),
    (of_type("olmo2"), "over the whole projection"),
    (of_type("cohere", use_qk_norm=True), "LayerNorm, which subtracts the mean"),
    (of_type("olmo", clip_qkv=8.0), "it bounds queries, keys and values (`clip_qkv`)"),
    (of_type("dbrx", attn_config=CLIPPED), "it bounds queries, keys and values (`clip_qkv`)"),
    (of_type("gemma3_text", attn_logit_softcapping=50.0), "ignores `attn_logit_softcapping`"),
    (of_type("moshi"), "counts in flash attention alone"),
    (of_type("blt_local_decoder"), "`local_attention_window_len` of the whole model"),
    (of_type("neucodec"), "each head is rotated by its index"),
    (of_type("wav2vec2-conformer", position_embeddings_type="rotary"), "rotates the hidden states"),
    (of_type("roformer", rotary_value=True), "it rotates values, too"),
    (of_type("diffllama"), "it subtracts one attention from another"),
    (of_type("deepseek_v2", **LATENT), "latent"),
    (of_type("llama", kv_lora_rank=16), "latent attention (kv_lora_rank)"),
    (of_type("falcon", alibi=True), "alibi"),
    (of_type("mimo_v2_flash"), "attention_value_scale"),
    (of_type("llama", rope_parameters=BETA), "queries scaled by their position"),
]


MLLAMA = of_type("mllama_text_model", cross_attention_layers=[1, 4])
DFLASH = of_type("qwen3", architectures=["DFlashDraftModel"], dflash_config={"mask_token_id": 5})
IMAGE = "bidirectional attention among tokens of an image"
NOT_WRITTEN += [
    (DFLASH, "`architectures` has 'DFlashDraftModel', no class of model type qwen3"),
    (
        of_type("qwen3", dflash_config={"mask_token_id": 5}),
        "tokens of a block attend to each other",
    ),
    (of_type("llama", architectures=["LlamaBidirectionalModel"]), "'LlamaBidirectionalModel'"),
    ({"model_type": "gemma3", "text_config": GEMMA3}, f"{IMAGE} (for causal attention"),
    ({"model_type": "paligemma", "text_config": of_type("gemma")}, "tokens of image and prompt"),
    ({"model_type": "colpali", "vlm_config": {"text_config": of_type("gemma")}}, "--set causal=f"),
    (of_type("hrm_text"), "bidirectional attention among tokens of the prompt"),
    (of_type("ministral3"), "by 1 + llama_4_scaling_beta·ln(1 + ⌊position"),
    (of_type("qwen"), "max(1, ln(position + 1) / ln(seq_length))"),
]


@pytest.mark.parametrize("layer", [1, 4, 0, 5])
def test_a_layer_of_cross_attention_is_refused(export_config, layer):
    options = ("--attention", "--layer", str(layer))
    if layer in MLLAMA["cross_attention_layers"]:
        with pytest.raises(UsageError, match="of type 'cross_attention' is not known"):
            export_config(MLLAMA, *options)
    else:
        assert export_config(MLLAMA, *options)[0] == 0


GEMMA3_VISION = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {}}
WITH_MASK = ("--set", "causal=false", "--set", "window=none")


def test_bidirectional_tokens_are_written_with_a_mask_or_left_out_on_purpose(export_config):
    options = ("--attention", "--layer", "0")
    with pytest.raises(UsageError, match="--set causal=false needs a mask of these tokens"):
        export_config(GEMMA3_VISION, *options, *WITH_MASK, "--mask", "padding")
    with pytest.raises(UsageError, match=r"keys on both sides; a mask can hold it \(--set window"):
        export_config(GEMMA3_VISION, *options, "--set", "causal=false", "--mask", "bool")
    code, file = export_config(GEMMA3_VISION, *options, *WITH_MASK, "--mask", "bool")
    found = options_of(file)
    assert (code, found["causal"], found["mask"], found["window"]) == (0, False, "bool", None)
    code, file = export_config(GEMMA3_VISION, *options, "--set", "bidirectional_tokens=none")
    assert (code, options_of(file)["causal"]) == (0, True)
    assert json.loads(metadata_of(file)["rope_cpu.departures"]) == {"bidirectional_tokens": None}


@pytest.mark.parametrize(("config", "text"), NOT_WRITTEN)
def test_attention_that_cannot_be_written_is_refused_with_the_reason(export_config, config, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        export_config(config, "--attention")


def test_norms_without_weights_may_follow_the_rotation(export_config):
    """A rotation keeps the mean of squares."""
    config = LLAMA | {"model_type": "llama4_text", "attention_chunk_size": None}
    config["no_rope_layers"] = [1] * 6
    _, file = export_config(config, "--attention")
    assert options_of(file)["qk_norm"] == "initializer"
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config["rope_scaling"] = section
    with pytest.raises(UsageError, match=r"follow a rotation with an attention factor of 1\.13863"):
        export_config(config, "--attention")


@pytest.mark.parametrize("use_mla", [{"use_mla": False}, {"use_mla": False, "kv_lora_rank": None}])
def test_latent_attention_that_is_switched_off(export_config, use_mla):
    config = LLAMA | {"model_type": "deepseek_v2", "kv_lora_rank": 16, "qk_rope_head_dim": 16}
    assert export_config(config | use_mla, "--attention")[0] == 0


@pytest.mark.parametrize("model_type", ["somebody's own", None])
@pytest.mark.parametrize("missing", [*STATED, None])
def test_all_of_an_unknown_types_attention_must_be_stated(export_config, model_type, missing):
    config = UNKNOWN | {"model_type": model_type, "use_qk_norm": True}
    stated = {name: value for name, value in STATED.items() if name != missing}
    options = ("--attention", "--half", *settings(stated))
    if missing is not None:
        with pytest.raises(UsageError, match=f"attention is not known.*--set {missing}="):
            export_config(config, *options)
        return
    code, file = export_config(config, *options)
    assert code == 0
    assert json.loads(metadata_of(file)["rope_cpu.departures"]) == STATED_ENTRY
    found = options_of(file)
    assert (found["causal"], found["window"], found["scale"]) == (True, None, 32**-0.5)


def test_what_is_stated_of_an_unknown_type_is_written(export_config):
    stated = STATED | {"causal": "false", "scale": "0.2", "softcap": "5"}
    _, file = export_config(UNKNOWN, "--attention", "--half", *settings(stated))
    found = options_of(file)
    assert (found["causal"], found["scale"], found["softcap"]) == (False, 0.2, 5)


def test_a_window_of_which_layers_is_not_known(export_config):
    config = LLAMA | {"sliding_window": 7}
    with pytest.raises(UsageError, match="not known which layers have the window of 7 keys"):
        export_config(config, "--attention")
    for text, window in {"none": None, "7": 7}.items():
        _, file = export_config(config, "--attention", "--set", f"window={text}")
        assert options_of(file)["window"] == window


def test_the_layer_is_in_the_metadata(export_config):
    _, file = export_config(GEMMA2, "--attention", "--layer", "3")
    assert json.loads(metadata_of(file)["rope_cpu.layer"]) == {"layer": 3}
    _, file = export_config(GEMMA2, "--layer-type", "full_attention")
    assert json.loads(metadata_of(file)["rope_cpu.layer"]) == {"layer_type": "full_attention"}


def test_layers_with_weights_are_written_and_merge(export_config, rng, tmp_path):
    """Files of the layers of one model, with a window in the first and sinks left out."""
    rows = {"q_proj": (128, 64), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (64, 128)}
    tensors = {}
    for layer in range(2):
        module = f"model.layers.{layer}.self_attn."
        for name, shape in rows.items():
            tensors[f"{module}{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
        tensors[f"{module}sinks"] = np.zeros(4, np.float32)
    weights = tmp_path / "model.safetensors"
    write_safetensors(weights, tensors)
    config = GPT_OSS | {"hidden_size": 64}
    models = []
    for layer in range(2):
        options = ("--layer", str(layer), "--name-prefix", f"layer{layer}_", "--set", "sinks=none")
        code, file = export_config(config, "--attention", "--weights", str(weights), *options)
        assert code == 0
        models.append(onnx.load(file))
    merged = export.merge(models, links={"layer1_hidden": "layer0_attention"})
    names = [value.name for value in merged.graph.input]
    assert names[0] == "layer0_hidden"
    assert not any(name.endswith("sinks") for name in names)
    entries = {entry.key: entry.value for entry in merged.metadata_props}
    assert json.loads(entries["layer1_rope_cpu.layer"]) == {"layer": 1}
    assert json.loads(entries["layer0_rope_cpu.departures"]) == {"sinks": None}
    initializers = {tensor.name for tensor in merged.graph.initializer}
    assert {"layer0_q_weight", "layer1_o_weight"} <= initializers


@pytest.mark.parametrize("layers", [(0,), (3,), (0, 3)])
def test_weights_of_the_only_layer_need_no_index(export_config, rng, tmp_path, layers):
    rows = {"q_proj": (128, 64), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (64, 128)}
    weights = tmp_path / "model.safetensors"
    tensors = {
        f"model.layers.{layer}.self_attn.{name}.weight": rng.standard_normal(shape)
        for layer in layers
        for name, shape in rows.items()
    }
    write_safetensors(weights, tensors)
    options = ("--attention", "--weights", str(weights))
    if len(layers) > 1:
        with pytest.raises(
            UsageError, match=r"holds \d attention modules of layer None, .*, chosen by"
        ):
            export_config(LLAMA, *options)
        with pytest.raises(UsageError, match="layers whose windows are"):
            export_config(GEMMA2, *options)
        return
    for path in (weights, tmp_path):
        for config, chosen in ((LLAMA, []), (GEMMA2, ["--layer-type", "full_attention"])):
            code, file = export_config(config, "--attention", "--weights", str(path), *chosen)
            assert (code, inputs_of(file)[0]) == (0, "hidden")


def test_a_checkpoint_that_does_not_fit_is_bad_usage(export_config, tmp_path):
    weights = tmp_path / "model.safetensors"
    write_safetensors(weights, {"lm_head.weight": np.zeros((2, 2), np.float32)})
    options = ("--attention", "--layer", "0", "--weights")
    with pytest.raises(UsageError, match=r"`tensors` holds 0 attention modules of layer 0"):
        export_config(LLAMA, *options, str(weights))
    index = tmp_path / "q3.json"
    index.write_text("{}")
    with pytest.raises(UsageError, match=r"q3\.json' has no `weight_map`"):
        export_config(LLAMA, *options, str(index))


def test_weights_that_cannot_be_read_are_bad_usage(export_config, tmp_path):
    """A missing file, and an index that lists a tensor in a file without it."""
    name = "model.layers.0.self_attn.q_proj.weight"
    write_safetensors(tmp_path / "part.safetensors", {"a": np.zeros(3)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: "part.safetensors"}}))
    options = ("--attention", "--layer", "0", "--weights")
    lacks = r"part\.safetensors' cannot be read as safetensors: .*q_proj\.weight"
    with pytest.raises(UsageError, match=lacks):
        export_config(LLAMA, *options, str(index))
    folder = tmp_path / "empty"
    folder.mkdir()
    for path in (tmp_path / "missing.safetensors", folder):
        with pytest.raises(FileNotFoundError, match=r"\.safetensors"):
            export_config(LLAMA, *options, str(path))
