"""`rope-cpu export`: its files and output; a failure leaves no file."""

import argparse
import json

import onnx
import pytest
from text_configs import LLAMA3_SCALING

from rope_cpu import RotaryEmbedding, export
from rope_cpu.cli import export as command
from rope_cpu.cli.command_line import UsageError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "rope_theta": 5e5,
    "rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": 64},
}


@pytest.fixture
def export_to(export_config):
    """A function that runs the command on CONFIG, or on `config`; it returns exit code and file."""

    def call(*arguments, config=CONFIG):
        return export_config(config, *arguments)

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
        ("--attention", "--target", "onnx", "--mask", "padding", "--set", "window=16"),
        ("--attention", "--target", "ort", "--max-positions", "128", "--set", "softcap=30"),
        ("--attention", "--target", "primitive", "--positions", "position_ids", "--layer", "0"),
        ("--attention", "--target", "primitive", "--cache", "shared", "--max-positions", "64"),
        ("--attention", "--cache", "window", "--set", "window=16"),
        (
            *("--attention", "--target", "ort", "--cache", "shared", "--cache-dtype", "int8"),
            *("--max-positions", "64", "--name-prefix", "layer0_"),
        ),
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
    def closed(*_, **__):
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
        (("--set", "window=none"), "`set` is given; it must be left out without --attention"),
        (("--layer", "4"), "`layer` is 4; it must be below 4"),
        (("--cache-dtype", "int8"), "`cache_dtype` is given; it must be left out without"),
        (("--batch-chunks",), "`batch_chunks` is given; it must be left out without"),
        (("--weights", "a"), "`weights` is given; it must be left out without"),
        (("--attention", "--inverse"), "`inverse` is given; it must be left out with --attention"),
        (("--opset", "7"), "`opset` is 7"),
        (
            ("--seq-len", "50"),
            "`seq_len` is 50; it must be left out: rope type 'llama3' is the same at every length",
        ),
        (("--positions", "past"), "`positions` is 'past'; it must be one of position_ids"),
        (("--seed", "-1"), "`seed` is -1; it must be at least 0"),
        (("--attention", "--set", "scale=-1"), "--set is 'scale=-1'; it must be window, softcap"),
    ],
)
def test_bad_usage_is_one_line(export_to, arguments, text):
    with pytest.raises(UsageError, match=text):
        export_to(*arguments)


FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LONGROPE = FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": 48}


@pytest.mark.parametrize(
    ("section", "ranges"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "up to 64 one base, from 65 another at every"),
        (LONGROPE, "up to 48 the short factors, from 49 the long ones"),
    ],
)
def test_seq_len_is_asked_for(export_to, section, ranges):
    config = CONFIG | {"rope_scaling": section, "max_position_embeddings": 64}
    text = f"`seq_len` is None; it must be given, as rope type .* depends on it: {ranges}"
    with pytest.raises(UsageError, match=text):
        export_to(config=config)
    code, _ = export_to("--seq-len", "256", config=config)
    assert code == 0


def test_a_pairing_is_asked_for(export_to):
    config = CONFIG | {"model_type": "somebody's own"}
    with pytest.raises(UsageError, match="so the pairing is not known"):
        export_to(config=config)
    assert export_to("--interleaved", config=config)[0] == 0


def test_a_missing_folder_is_refused(tmp_path):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(UsageError, match="it must be a file in a folder that exists"):
        command.run(parser.parse_args(["-o", str(tmp_path / "missing" / "rope.onnx")]))


def test_a_folder_instead_of_a_file_is_refused(export_to, tmp_path, monkeypatch):
    (tmp_path / "out.onnx").mkdir()
    monkeypatch.setattr(export, "validate", None)  # it is refused before that
    with pytest.raises(UsageError, match=r"cannot write .*out.onnx: it must be a file"):
        export_to()


def test_a_suffix_of_another_format_is_refused_before_the_work(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    monkeypatch.setattr(export, "validate", None)
    with pytest.raises(UsageError, match=r"`output` is .*a\.txt'; .*\.onnx"):
        command.run(parser.parse_args(["-o", str(tmp_path / "a.txt")]))
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
