"""`rope-cpu export`: its files and output; a failure leaves no file."""

import argparse
import json
import re

import onnx
import pytest

from rope_cpu import RotaryEmbedding, export
from rope_cpu.command_line import UsageError
from rope_cpu.export import cli

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture
def export_to(tmp_path):
    """A function that runs the command on CONFIG, or on `config`; it returns exit code and file."""

    def call(*arguments, config=CONFIG):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        file = tmp_path / "out.onnx"
        return cli.run(parser.parse_args([str(folder), "-o", str(file), *arguments])), file

    return call


def test_a_bidirectional_model_type_is_written_so(export_to):
    config = {"model_type": "roformer", "hidden_size": 64, "num_attention_heads": 4}
    code, file = export_to("--attention", config=config)
    (node,) = (node for node in onnx.load(file).graph.node if node.op_type == "Attention")
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    assert code == 0
    assert attributes["is_causal"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--target", "primitive", "--dtype", "float64", "--layout", "bshd"),
        ("--target", "ort", "--dtype", "bfloat16", "--max-positions", "4096"),
        ("--positions", "offset", "--inverse", "--opset", "24"),
        ("--attention", "--target", "onnx", "--mask", "padding", "--window", "16"),
        ("--attention", "--target", "ort", "--max-positions", "128", "--softcap", "30"),
        ("--attention", "--target", "primitive", "--positions", "position_ids", "--scale", "0.2"),
    ],
)
def test_export_writes_a_validated_file(export_to, capsys, arguments):
    code, file = export_to(*arguments)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "passed" in printed
    assert f"{file} is written" in printed
    rope = RotaryEmbedding.from_config(CONFIG)
    assert export.validate(file, rope).passed
    metadata = {
        entry.key: entry.value for entry in onnx.load(file, load_external_data=False).metadata_props
    }
    assert json.loads(metadata["rope_cpu.config"]) == CONFIG


def test_a_reader_that_has_seen_enough_costs_no_file(export_to, monkeypatch, tmp_path):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(BrokenPipeError):
        export_to()
    assert (tmp_path / "out.onnx").is_file()


def test_no_file_where_validation_fails(export_to, capsys, monkeypatch, tmp_path):
    """A model that is wrong: its rotation is swapped for another one after the export."""
    right = export.validate
    monkeypatch.setattr(
        export, "validate", lambda model, rope, seed: right(model, RotaryEmbedding(32), seed=seed)
    )
    code, file = export_to("--max-positions", "64")
    assert code == 1
    assert "FAILED" in capsys.readouterr().out
    assert not file.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--dtype", "float64"), "target 'primitive' can express it"),
        (("--window", "4"), "--window is an option of attention; give --attention as well"),
        (("--normed",), "--normed is an option of attention; give --attention as well"),
        (("--attention", "--inverse"), "attention rotates forward"),
        (("--attention", "--layout", "thd"), "with --attention it is one of bhsd, bshd, bsd"),
        (("--attention", "--target", "ort"), "`max_positions` is None"),
        (("--opset", "7"), "`opset` is 7"),
        (
            ("--seq-len", "50"),
            "--seq-len is 50, but rope type 'llama3' is the same at every length",
        ),
        (("--positions", "past"), "--positions past is an option of attention"),
        (("--seed", "-1"), "`seed` is -1; it must be at least 0"),
        (("--attention", "--scale", "0"), "`scale` is 0.0; it must be finite and above 0"),
        (
            ("--max-positions", "999999999999"),
            "`max_positions` is 999999999999; it must be at most",
        ),
    ],
)
def test_bad_usage_is_one_line(export_to, arguments, text):
    with pytest.raises(UsageError, match=text):
        export_to(*arguments)


@pytest.mark.parametrize(
    ("changed", "text", "arguments"),
    [
        (
            {"sliding_window": 32},
            "sliding_window 32; give --window 32, or --window 0 for layers",
            ("--window", "0"),
        ),
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0; give --softcap 50$",
            ("--softcap", "50"),
        ),
        (
            {"query_pre_attn_scalar": 64},
            "query_pre_attn_scalar 64; give --scale 0.125",
            ("--scale", "0.125"),
        ),
        (
            {"attention_multiplier": 0.5},
            "attention_multiplier 0.5; give --scale 0.5",
            ("--scale", "0.5"),
        ),
    ],
)
def test_settings_of_a_config_must_be_given_as_options(export_to, changed, text, arguments):
    with pytest.raises(UsageError, match=text):
        export_to("--attention", config=CONFIG | changed)
    assert export_to("--attention", *arguments, config=CONFIG | changed)[0] == 0
    assert export_to(config=CONFIG | changed)[0] == 0
    with pytest.raises(UsageError, match=text):  # another value than that of the config
        export_to("--attention", arguments[0], "7", config=CONFIG | changed)
    unused = {"sliding_window": 32, "use_sliding_window": False, "query_pre_attn_scalar": 32}
    assert export_to("--attention", config=CONFIG | unused)[0] == 0


def test_settings_of_a_model_type_must_be_given_where_its_config_is_silent(export_to):
    silent = CONFIG | {"model_type": "gemma2", "head_dim": 64, "rope_scaling": None}
    options = ("--attention",)
    for text, option in (
        ("sliding_window 4096; give --window 4096", ("--window", "0")),
        ("attn_logit_softcapping 50.0; give --softcap 50", ("--softcap", "50")),
        ("query_pre_attn_scalar 256; give --scale 0.0625", ("--scale", "0.0625")),
    ):
        with pytest.raises(UsageError, match=text):
            export_to(*options, config=silent)
        options = (*options, *option)
    assert export_to(*options, config=silent)[0] == 0
    nulls = dict.fromkeys(("sliding_window", "attn_logit_softcapping", "query_pre_attn_scalar"))
    assert export_to("--attention", config=silent | nulls)[0] == 0


@pytest.mark.parametrize("shared", [0, 20])
def test_layers_that_share_keys_and_values_are_told_of(export_to, capsys, shared):
    config = CONFIG | {
        "model_type": "gemma4_text",
        "rope_scaling": None,
        "num_kv_shared_layers": shared,
    }
    config |= {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}}
    options = (
        "--attention",
        "--normed",
        "--scale",
        "1",
        "--window",
        "0",
        "--layer-type",
        "full_attention",
    )
    assert export_to(*options, config=config)[0] == 0
    text = (
        f"num_kv_shared_layers is {shared}: the last {shared} layers take an earlier one's k and v"
    )
    out = capsys.readouterr().out
    assert (text in out) == bool(shared)
    assert ("num_kv_shared_layers" in out) == bool(shared)


def test_latent_attention_is_refused(export_to):
    deepseek = {
        **CONFIG,
        "model_type": "deepseek_v2",
        "rope_scaling": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
    }
    with pytest.raises(UsageError, match="the config has latent attention"):
        export_to("--attention", config=deepseek)
    with pytest.raises(UsageError, match="the config has latent attention"):
        export_to("--attention", config={**CONFIG, "kv_lora_rank": 16})
    for changed in ({"use_mla": False}, {"use_mla": False, "kv_lora_rank": None}):
        assert export_to("--attention", config=deepseek | changed)[0] == 0


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"model_type": "gpt_oss"},
            "the config has attention sinks: --attention cannot write it (model type gpt_oss)",
        ),
        ({"model_type": "llama4_text"}, "norms of q and k after the rotation"),
        (
            {"model_type": "llama4_text", "use_qk_norm": False, "attention_chunk_size": 8192},
            "chunks of 8192 tokens",
        ),
        ({"model_type": "hunyuan_v1_dense"}, "norms of q and k after the rotation"),
        (
            {"model_type": "diffllama"},
            "an attention of its own: it subtracts one attention from another",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
            "queries scaled by their position",
        ),
    ],
)
def test_what_the_file_would_leave_out_is_refused_by_name(export_to, changed, text):
    config = {**CONFIG, "rope_scaling": None, **changed}
    for more in ((), ("--normed",)):
        with pytest.raises(UsageError, match=re.escape(text)):
            export_to("--attention", *more, config=config)
    assert export_to(config=config)[0] == 0  # the rotation alone leaves nothing out


@pytest.mark.parametrize(
    ("changed", "which"),
    [
        ({"model_type": "qwen3"}, "q and k"),
        ({"model_type": "cohere", "use_qk_norm": True}, "q and k"),
        ({"model_type": "gemma3n_text", "layer_types": ["full_attention"]}, "q, k and v"),
    ],
)
def test_norms_before_the_rotation_must_be_asked_for(export_to, changed, which):
    config = {**CONFIG, "rope_scaling": None, **changed}
    layers = ("--layer-type", "full_attention") if "layer_types" in changed else ()
    with pytest.raises(
        UsageError, match=f"norms {which} before the rotation; give --normed, and feed them normed"
    ):
        export_to("--attention", *layers, config=config)
    if layers:
        layers = (*layers, "--window", "0")
        with pytest.raises(UsageError, match=r"model type gemma3n_text .*give --scale 1"):
            export_to("--attention", "--normed", *layers, config=config)
        layers = (*layers, "--scale", "1")
    assert export_to("--attention", "--normed", *layers, config=config)[0] == 0


def test_norms_that_a_model_type_does_not_have_are_refused(export_to):
    with pytest.raises(
        UsageError, match="--normed is given, but model type llama does not norm q and k"
    ):
        export_to("--attention", "--normed")


@pytest.mark.parametrize(
    ("options", "assumed"),
    [
        (
            (),
            "q and k are not normed, no attention sinks, chunks or latent attention, "
            "scores scaled by head_dim^-½",
        ),
        (("--normed", "--scale", "0.2"), "no attention sinks, chunks or latent attention, causal"),
    ],
)
def test_a_file_for_an_unknown_model_type_says_what_it_assumed(export_to, capsys, options, assumed):
    unknown = {
        "somebody's own": 'model type "somebody\'s own" is not known',
        None: "the config has no model_type",
    }
    for model_type, text in unknown.items():
        config = CONFIG | {"model_type": model_type}
        assert export_to("--attention", "--half", *options, config=config)[0] == 0
        assert f"{text}; assumed: {assumed}" in capsys.readouterr().out


def test_seq_len_is_asked_for(export_to):
    config = CONFIG | {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 64,
    }
    with pytest.raises(UsageError, match="depends on the sequence length; give it with --seq-len"):
        export_to(config=config)
    code, _ = export_to("--seq-len", "256", config=config)
    assert code == 0


def test_a_pairing_is_asked_for(export_to):
    config = CONFIG | {"model_type": "somebody's own"}
    with pytest.raises(UsageError, match="choose with --half or --interleaved"):
        export_to(config=config)
    assert export_to("--interleaved", config=config)[0] == 0


def test_a_missing_folder_is_refused(tmp_path):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(UsageError, match="there is no folder"):
        cli.run(parser.parse_args(["-o", str(tmp_path / "missing" / "rope.onnx")]))


def test_a_folder_instead_of_a_file_is_refused(export_to, tmp_path, monkeypatch):
    (tmp_path / "out.onnx").mkdir()
    monkeypatch.setattr(export, "validate", None)  # it is refused before that
    with pytest.raises(UsageError, match=r"cannot write .*out.onnx: it is a folder"):
        export_to()


def test_a_suffix_of_another_format_is_refused_before_the_work(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    monkeypatch.setattr(export, "validate", None)
    with pytest.raises(UsageError, match=r"`output` is .*a\.txt'; .*\.onnx"):
        cli.run(parser.parse_args(["-o", str(tmp_path / "a.txt")]))
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_is_refused_before_the_work(export_to, tmp_path, monkeypatch):
    (tmp_path / "out.onnx").symlink_to(tmp_path / "real.onnx")
    monkeypatch.setattr(export, "validate", None)
    with pytest.raises(UsageError, match=r"out\.onnx' exists and is not a regular file"):
        export_to()


def test_a_file_that_cannot_be_written_is_bad_usage(export_to, monkeypatch):
    def full(model, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save", full)
    with pytest.raises(UsageError, match=r"cannot write .*out.onnx: No space left on device"):
        export_to("--max-positions", "8")
