"""`rope-cpu export --attention`: the model's own attention, and refusals of any other."""

import json
import re

import numpy as np
import onnx
import onnx.compose
import pytest
from safetensors_files import write_safetensors

from rope_cpu.cli import main
from rope_cpu.command_line import UsageError

HEADS = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 6,
}
LLAMA = {**HEADS, "model_type": "llama"}
GEMMA2 = {**HEADS, "model_type": "gemma2"}
GEMMA3 = {**HEADS, "model_type": "gemma3_text"}
COHERE2 = {**HEADS, "model_type": "cohere2"}
GPT_OSS = {**HEADS, "model_type": "gpt_oss"}
GEMMA4 = {
    **HEADS,
    "model_type": "gemma4_text",
    "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}},
}


def options_of(file):
    """The options of the export in a file's metadata."""
    return json.loads(metadata_of(file)["rope_cpu.export"])


def metadata_of(file):
    model = onnx.load(file, load_external_data=False)
    return {entry.key: entry.value for entry in model.metadata_props}


def inputs_of(file):
    return [value.name for value in onnx.load(file, load_external_data=False).graph.input]


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        pytest.param(LLAMA, (), {"window": None, "softcap": None, "scale": 32**-0.5}, id="llama"),
        pytest.param({**LLAMA, "attention_multiplier": 0.5}, (), {"scale": 0.5}, id="multiplier"),
        pytest.param(
            {**HEADS, "model_type": "mistral", "sliding_window": 7}, (), {"window": 7}, id="mistral"
        ),
        pytest.param(
            GEMMA2,
            ("--layer", "0"),
            {"window": 4096, "softcap": 50.0, "scale": 256**-0.5, "qk_norm": "none"},
            id="gemma2, a layer with a window",
        ),
        pytest.param(GEMMA2, ("--layer", "1"), {"window": None, "softcap": 50.0}, id="one without"),
        pytest.param(
            GEMMA3,
            ("--layer-type", "full_attention"),
            {"window": None, "qk_norm": "input", "norm_epsilon": 1e-6, "norm_offset": 1.0},
            id="gemma3, a layer type",
        ),
        pytest.param(GEMMA3, ("--layer", "4"), {"window": 4096}, id="gemma3, a layer"),
        pytest.param(COHERE2, (), {"window": 4096}, id="cohere2, whose rotated layers are alike"),
        pytest.param(
            {**HEADS, "model_type": "qwen3", "rms_norm_eps": 1e-5},
            (),
            {"window": None, "qk_norm": "input", "norm_epsilon": 1e-5, "norm_offset": 0.0},
            id="qwen3",
        ),
        pytest.param(GPT_OSS, ("--layer", "0"), {"window": 128, "sinks": "input"}, id="gpt_oss"),
        pytest.param(
            {**HEADS, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32},
            (),
            {"window": None},
            id="a window that is not used",
        ),
        pytest.param(
            {**GEMMA2, "attn_logit_softcapping": None, "query_pre_attn_scalar": None},
            ("--layer", "1"),
            {"softcap": None, "scale": 32**-0.5},
            id="nulls",
        ),
    ],
)
def test_the_attention_is_that_of_the_config(export_config, config, arguments, expected):
    code, file = export_config(config, "--attention", *arguments)
    assert code == 0
    found = options_of(file)
    assert {name: found[name] for name in expected} == expected
    assert "rope_cpu.departures" not in metadata_of(file)


def test_norms_and_sinks_are_inputs(export_config):
    _, file = export_config(GEMMA3, "--attention", "--layer", "0")
    assert inputs_of(file)[-2:] == ["q_norm_weight", "k_norm_weight"]
    _, file = export_config(GPT_OSS, "--attention", "--layer", "0")
    assert inputs_of(file)[-1] == "sinks"


@pytest.mark.parametrize(
    ("config", "arguments", "text", "right"),
    [
        pytest.param(
            COHERE2,
            ("--window", "0"),
            "--window is 0, but it is 4096 (sliding_window 4096) in layers of type "
            "sliding_attention of model type cohere2; drop it or give --window 4096",
            ("--window", "4096"),
            id="cohere2",
        ),
        pytest.param(
            GEMMA2,
            ("--layer-type", "full_attention", "--window", "16"),
            "--window is 16, but there is no window in layers of type full_attention",
            ("--layer-type", "full_attention", "--window", "0"),
            id="gemma2, full",
        ),
        pytest.param(
            GEMMA3,
            ("--layer-type", "full_attention", "--window", "16"),
            "--window is 16, but there is no window in layers of type full_attention",
            ("--layer", "5", "--window", "0"),
            id="gemma3, full",
        ),
        pytest.param(
            GEMMA2,
            ("--layer-type", "sliding_attention", "--window", "0"),
            "give --window 4096",
            ("--layer", "2", "--window", "4096"),
            id="gemma2, sliding",
        ),
        pytest.param(
            {**HEADS, "model_type": "mistral"},
            ("--window", "0"),
            "it is 4096 (sliding_window 4096) in model type mistral; drop it or give --window 4096",
            ("--window", "4096"),
            id="mistral",
        ),
        pytest.param(
            LLAMA,
            ("--window", "16"),
            "there is no window in model type llama; drop it or give --window 0",
            ("--window", "0"),
            id="llama, window",
        ),
        pytest.param(
            LLAMA,
            ("--softcap", "5"),
            "there is no softcap in model type llama; drop it or give --softcap 0",
            ("--softcap", "0"),
            id="llama, softcap",
        ),
        pytest.param(
            LLAMA,
            ("--scale", "1"),
            "it is 0.176777 in model type llama; drop it or give --scale 0.176777",
            ("--scale", "0.176777"),
            id="llama, scale",
        ),
        pytest.param(
            GEMMA2,
            ("--layer", "0", "--softcap", "30", "--scale", "0.5"),
            "(1) --softcap is 30, but it is 50 (attn_logit_softcapping 50.0) in model type gemma2",
            ("--layer", "0", "--softcap", "50", "--scale", "0.0625"),
            id="gemma2, softcap and scale",
        ),
    ],
)
def test_an_option_that_contradicts_the_model_is_refused(
    export_config, config, arguments, text, right
):
    with pytest.raises(UsageError, match=re.escape(text)):
        export_config(config, "--attention", *arguments)
    assert export_config(config, "--attention", *right)[0] == 0


def test_all_reasons_come_in_one_message(export_config):
    arguments = ("--inverse", "--layout", "thd", "--softcap", "3", "--scale", "9")
    with pytest.raises(UsageError) as caught:
        export_config(GEMMA3, "--attention", *arguments)
    text = str(caught.value)
    for part in (
        "(1) --inverse and --attention are both given",
        "(2) --layout is thd",
        "(3) `layer_type` is None; it must be one of 'sliding_attention', 'full_attention'",
        "(4) --softcap is 3, but there is no softcap in model type gemma3_text",
        "(5) --scale is 9, but it is 0.0625 (query_pre_attn_scalar 256)",
    ):
        assert part in text


@pytest.mark.parametrize("option", [("--softcap", "nan"), ("--window", "-4")])
def test_no_departure_is_offered_that_would_be_refused(export_config, option):
    with pytest.raises(UsageError, match=f"{option[0]} is {option[1]}, but there is no") as error:
        export_config(LLAMA, "--attention", *option)
    assert "--set" not in str(error.value)


def test_refusals_of_the_target_come_with_those_of_the_model(export_config):
    with pytest.raises(UsageError, match=r"\(1\) --scale is 9.*\(2\) `max_positions` is None"):
        export_config(LLAMA, "--attention", "--scale", "9", "--target", "ort")


@pytest.mark.parametrize(
    ("config", "arguments", "texts"),
    [
        pytest.param(
            LLAMA,
            (
                *("--mask", "bool", "--cache", "shared", "--cache-dtype", "int8"),
                *("--opset", "99", "--dtype", "float64", "--name-prefix", "a b"),
                *("--max-positions", "0", "--seed", "-1"),
            ),
            (
                "`--seed` is -1; it must be at least 0",
                "`--dtype` is float64, which ai.onnx RotaryEmbedding has no kernel for",
                "`--max-positions` is 0; it must be at least 1",
                "`--opset` is 99; target 'onnx' is written in opsets 24 to 24",
                "`--name-prefix` is 'a b'; it must be at most",
                "`--mask` is 'bool', but `--cache` is 'shared'",
                "`--cache-dtype` is int8, which target 'onnx' cannot attend to; target 'ort' can",
            ),
            id="options of the graph",
        ),
        pytest.param(
            LLAMA,
            (
                *("--target", "ort", "--cache", "shared", "--dtype", "float16"),
                *("--positions", "position_ids", "--opset", "25"),
            ),
            (
                "`--opset` is 25; target 'ort' is written in opsets 13 to 24",
                "`--positions` is 'position_ids', but com.microsoft GroupQueryAttention reads the",
                "`--max-positions` is not given, but com.microsoft GroupQueryAttention looks cos",
                "`--dtype` is float16, but com.microsoft GroupQueryAttention computes in float32",
            ),
            id="limits of a target",
        ),
        pytest.param(
            {**LLAMA, "head_dim": 24},
            ("--target", "ort", "--max-positions", "8", "--cache-dtype", "int8"),
            (
                "`--cache-dtype` is int8, but `--cache` is 'growing'",
                "`head_dim` is 24, but com.microsoft GroupQueryAttention rotates multiples of 16",
            ),
            id="a head_dim, named once",
        ),
        pytest.param(
            LLAMA,
            (
                *("--set", "window=many", "--scale", "9", "--softcap", "3", "--seq-len", "5"),
                *("--inverse", "--weights", "missing.safetensors", "--opset", "7"),
                *("--target", "ort", "--layout", "bshd"),
            ),
            (
                "--set is 'window=many'",
                "--inverse and --attention are both given",
                "--weights needs the index of a layer",
                "--layout is bshd, but with --weights the input is hidden states",
                "--seq-len is 5, but rope type 'default' is the same at every length",
                "--softcap is 3, but there is no softcap in model type llama",
                "--scale is 9, but it is 0.176777",
                "`--opset` is 7; target 'ort' is written in opsets 13 to 24",
                "`--max-positions` is not given, but",
            ),
            id="options of every kind",
        ),
        pytest.param(
            LLAMA,
            ("--layer", "0", "--weights", "missing.safetensors", "--opset", "7", "--seed", "-1"),
            (
                "`--seed` is -1",
                "--weights missing.safetensors: cannot read 'missing.safetensors': No such file",
                "`--opset` is 7; target 'onnx' is written in opsets 23 to 24",
            ),
            id="a file of weights",
        ),
        pytest.param(
            {**LLAMA, "model_type": "mymodel", "rope_theta": 1e4},
            ("--opset", "7", "--mask", "bool", "--cache", "shared"),
            (
                "`model_type` is 'mymodel', so the pairing is not known; give --interleaved for",
                "`--opset` is 7; target 'onnx' is written in opsets 24 to 24",
                "`--mask` is 'bool', but `--cache` is 'shared'",
            ),
            id="a model type that is not known",
        ),
        pytest.param(
            GEMMA3,
            ("--opset", "7", "--cache-dtype", "int8"),
            (
                "`--layer-type` is not given; it must be one of 'sliding_attention'",
                "`--opset` is 7; target 'onnx' is written in opsets 23 to 24",
                "`--cache-dtype` is int8, but `--cache` is 'growing'",
                "`--cache-dtype` is int8, which target 'onnx' cannot attend to",
            ),
            id="layers that differ",
        ),
        pytest.param(
            {"model_type": "roformer", "hidden_size": 64, "num_attention_heads": 4},
            ("--cache", "shared", "--target", "ort", "--name-prefix", "a b"),
            (
                "`--name-prefix` is 'a b'",
                "`causal` is False; attention over a shared cache is causal; give `--cache grow",
                "`causal` is False, but com.microsoft GroupQueryAttention is causal",
                "`--max-positions` is not given, but",
            ),
            id="a model that is not causal",
        ),
        pytest.param(
            {"model_type": "gpt2"},
            ("--opset", "7", "--set", "window=many", "--inverse"),
            (
                "`model_type` is 'gpt2': its positions are added to its inputs",
                "--set is 'window=many'",
                "--inverse and --attention are both given",
                "`--opset` is 7; target 'onnx' is written in opsets 23 to 24",
            ),
            id="a config without a rotation",
        ),
    ],
)
def test_one_try_shows_all_problems_with_options_by_their_flags(
    tmp_path, monkeypatch, capsys, config, arguments, texts
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["export", "config.json", "--attention", "-o", "a.onnx", *arguments]
    assert main.main(command) == 2
    printed = capsys.readouterr().err
    for number, text in enumerate(texts, 1):
        assert f"({number}) {text}" in printed
    assert f"({len(texts) + 1})" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_layers_that_differ_must_be_chosen(export_config):
    with pytest.raises(UsageError, match=r"layers differ \(full_attention, sliding_attention\)"):
        export_config(GEMMA2, "--attention")


@pytest.mark.parametrize(
    ("config", "setting", "entry", "expected"),
    [
        pytest.param(COHERE2, "window=none", {"window": None}, {"window": None}, id="no window"),
        pytest.param(LLAMA, "window=16", {"window": 16}, {"window": 16}, id="a window"),
        pytest.param(LLAMA, "scale=1", {"scale": 1.0}, {"scale": 1.0}, id="a scale"),
        pytest.param(LLAMA, "softcap=5", {"softcap": 5.0}, {"softcap": 5.0}, id="a softcap"),
        pytest.param(GPT_OSS, "sinks=none", {"sinks": None}, {"sinks": "none"}, id="no sinks"),
        pytest.param(
            {**HEADS, "model_type": "qwen3"},
            "qk_norm=none",
            {"qk_norm": None},
            {"qk_norm": "none"},
            id="no norms",
        ),
        pytest.param(
            {**HEADS, "model_type": "diffllama"}, "other=none", {"other": None}, {}, id="other"
        ),
    ],
)
def test_a_departure_from_the_model_is_written_into_the_metadata(
    export_config, config, setting, entry, expected
):
    layer = () if config in (LLAMA, COHERE2) else ("--layer", "1")
    code, file = export_config(config, "--attention", *layer, "--set", setting)
    assert code == 0
    assert json.loads(metadata_of(file)["rope_cpu.departures"]) == entry
    found = options_of(file)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--set", "rope_theta=1"), "--set is 'rope_theta=1'; its name must be one of window,"),
        (("--set", "window=many"), "the value of window must be a number of keys or none"),
        (("--set", "sinks=3"), "the value of sinks must be none"),
        (("--set", "window=4", "--window", "4"), "--set window and --window are both given"),
        (("--set", "window=none"), "--set window is no departure: the model has that"),
        (("--set", "scale=0.1767767"), "--set scale is no departure"),
        (("--set", "scale=none"), "--set scale is no departure"),
        (("--set", "v_norm=none"), "--set v_norm is no departure"),
        (("--set", "window=4", "--set", "window=5"), "--set window is given twice"),
        (("--weights", "model.safetensors"), "--weights needs the index of a layer; give --layer"),
    ],
)
def test_settings_that_say_nothing_are_refused(export_config, arguments, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        export_config(LLAMA, "--attention", *arguments)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "chunks of 8192 tokens"),
        ({"model_type": "hunyuan_v1_dense"}, "norms of queries and keys after the rotation"),
        ({"model_type": "olmo2"}, "over the whole projection"),
        ({"model_type": "minimax_m2"}, "over the whole projection"),
        ({"model_type": "cohere", "use_qk_norm": True}, "LayerNorm, which subtracts the mean"),
        (
            {"model_type": "olmo", "clip_qkv": 8.0},
            "it bounds queries, keys and values (`clip_qkv`)",
        ),
        (
            {"model_type": "dbrx", "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0}},
            "it bounds queries, keys and values (`clip_qkv`)",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "its code ignores `attn_logit_softcapping`",
        ),
        ({"model_type": "moshi"}, "counts in flash attention alone"),
        ({"model_type": "blt_local_decoder"}, "`local_attention_window_len` of the whole model"),
        ({"model_type": "neucodec"}, "each head is rotated by its index"),
        (
            {"model_type": "wav2vec2-conformer", "position_embeddings_type": "rotary"},
            "it rotates the hidden states, before their projections",
        ),
        ({"model_type": "roformer", "rotary_value": True}, "it rotates values, too"),
        ({"model_type": "diffllama"}, "it subtracts one attention from another"),
        ({"model_type": "deepseek_v2", "kv_lora_rank": 16, "qk_rope_head_dim": 16}, "latent"),
        ({"model_type": "llama", "kv_lora_rank": 16}, "latent attention (kv_lora_rank)"),
        ({"model_type": "falcon", "alibi": True}, "alibi"),
        ({"model_type": "mimo_v2_flash"}, "attention_value_scale"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
            "queries scaled by their position",
        ),
    ],
)
def test_attention_that_cannot_be_written_is_refused_with_the_reason(export_config, changed, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        export_config(LLAMA | changed, "--attention")


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


@pytest.mark.parametrize("shared", [0, 20])
def test_layers_that_share_keys_and_values_are_told_of(export_config, capsys, shared):
    config = GEMMA4 | {"num_kv_shared_layers": shared}
    options = ("--layer-type", "full_attention", "--set", "v_norm=none")
    assert export_config(config, "--attention", *options)[0] == 0
    text = f"num_kv_shared_layers is {shared}: the last {shared} layers take an earlier one's k"
    out = capsys.readouterr().out
    assert (text in out) == bool(shared)
    assert ("num_kv_shared_layers" in out) == bool(shared)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"window": None, "scale": 32**-0.5}),
        (("--scale", "0.2", "--window", "16"), {"window": 16, "scale": 0.2}),
    ],
)
def test_an_unknown_model_type_takes_options_and_says_its_assumptions(
    export_config, capsys, options, expected
):
    unknown = {
        "somebody's own": 'model type "somebody\'s own" is not known',
        None: "the config has no model_type",
    }
    for model_type, text in unknown.items():
        config = LLAMA | {"model_type": model_type, "rope_theta": 1e4}
        code, file = export_config(config, "--attention", "--half", *options)
        assert code == 0
        out = capsys.readouterr().out
        assert f"{text}; assumed: q and k are not normed, no attention sinks" in out
        assert ("scores scaled by head_dim^-½" in out) == (not options)
        found = options_of(file)
        assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("model_type", ["llama", "somebody's own"])
def test_a_window_of_which_layers_is_not_known(export_config, model_type):
    config = LLAMA | {"model_type": model_type, "rope_theta": 1e4, "sliding_window": 7}
    half = ("--attention", "--half")
    with pytest.raises(UsageError, match="not known which layers have the window of 7 keys"):
        export_config(config, *half)
    for window in (0, 7):
        _, file = export_config(config, *half, "--window", str(window))
        assert options_of(file)["window"] == (window or None)
    with pytest.raises(UsageError, match="not known which layers have the window"):
        export_config(config, *half, "--window", "5")


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
    links = [("layer0_attention", "layer1_hidden")]
    merged = onnx.compose.merge_models(*models, io_map=links)
    names = [value.name for value in merged.graph.input]
    assert names[0] == "layer0_hidden"
    assert not any(name.endswith("sinks") for name in names)
    entries = {entry.key: entry.value for entry in merged.metadata_props}
    assert json.loads(entries["layer1_rope_cpu.layer"]) == {"layer": 1}
    assert json.loads(entries["layer0_rope_cpu.departures"]) == {"sinks": None}
    initializers = {tensor.name for tensor in merged.graph.initializer}
    assert {"layer0_q_weight", "layer1_o_weight"} <= initializers


def test_a_checkpoint_that_does_not_fit_is_bad_usage(export_config, tmp_path):
    weights = tmp_path / "model.safetensors"
    write_safetensors(weights, {"lm_head.weight": np.zeros((2, 2), np.float32)})
    options = ("--attention", "--layer", "0", "--weights", str(weights))
    with pytest.raises(UsageError, match="--weights holds no query projection of layer 0"):
        export_config(LLAMA, *options)


def test_weights_that_cannot_be_read_are_bad_usage(export_config, tmp_path):
    """A missing file, a folder, and an index that lists a tensor in a file without it."""
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    name = "model.layers.0.self_attn.q_proj.weight"
    write_safetensors(tmp_path / "part.safetensors", {"a": np.zeros(3)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: "part.safetensors"}}))
    texts = {
        folder: "cannot read .*: Is a directory",
        tmp_path / "missing.safetensors": "cannot read .*: No such file",
        index: rf"part\.safetensors' lacks '{name}', which the index says is in it",
    }
    for file, text in texts.items():
        options = ("--attention", "--layer", "0", "--weights", str(file))
        with pytest.raises(UsageError, match=f"--weights {file}: .*{text}"):
            export_config(LLAMA, *options)


def test_a_window_of_layers_that_differ_is_not_called_wrong(export_config):
    """Without a layer the right value is not known, and no other value is claimed to be right."""
    config = LLAMA | {"model_type": "gemma2", "sliding_window": 32}
    with pytest.raises(UsageError, match="layers differ") as error:
        export_config(config, "--attention", "--window", "7", "--softcap", "3")
    assert "--softcap is 3, but it is 50" in str(error.value)
    assert "--window" not in str(error.value)
    code, file = export_config(config, "--attention", "--set", "window=none")
    assert code == 0
    assert json.loads(metadata_of(file)["rope_cpu.departures"]) == {"window": None}


@pytest.mark.parametrize("setting", ["window=-1", "softcap=-1", "softcap=nan", "scale=0"])
def test_values_of_settings_out_of_range_are_refused(export_config, setting):
    with pytest.raises(UsageError, match=rf"--set is '{setting}'; the value of \w+ must be a num"):
        export_config(LLAMA, "--attention", "--set", setting)


def test_each_problem_is_named_once(export_config):
    options = ("--layout", "sbhd", "--scale", "1")
    with pytest.raises(UsageError) as error:
        export_config(LLAMA, "--attention", *options)
    assert str(error.value).count("layout") == 1
    assert "(2)" in str(error.value)
    assert not str(error.value).endswith(".")
