"""The commands take a GGUF file where they take a config.json."""

from __future__ import annotations

import gguf_files
import numpy as np
import onnx
import pytest

from rope_cpu.cli import main as cli

LLAMA = {
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 4096,
    "rope.freq_base": 5e5,
}


@pytest.fixture
def run(capsys):
    """Run `rope-cpu` with these words; return the exit code and the lines, with single spaces."""

    def run(*words):
        code = cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        text = printed.out if code == 0 else printed.err
        return code, [" ".join(line.split()) for line in text.splitlines()]

    return run


@pytest.fixture
def model(tmp_path):
    tensors = {gguf_files.FREQS: np.linspace(1, 8, 8)}
    return gguf_files.write(tmp_path / "model.gguf", "llama", LLAMA, tensors)


def test_show_says_which_pairing_it_is(run, model):
    code, lines = run("show", model)
    assert code == 0
    assert lines[:2] == ["llama, all layers", "pairs 8: (2i, 2i+1), interleaved"]
    note = "unlike config.json: the converter to GGUF reorders q and k"
    assert " ".join(lines[2:4]) == note
    assert "rope type rope_freqs" in lines
    assert "rope_theta 500000.0" in lines


def test_show_says_nothing_of_architectures_that_are_not_reordered(run, tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", "qwen2", LLAMA)
    _, lines = run("show", path)
    assert "pairs 8: (i, i+8), half-split" in lines
    assert not any("reorder" in line for line in lines)


@pytest.mark.parametrize(("sections", "is_named"), [([24, 20, 20, 0], True), ([22, 21, 21], False)])
def test_show_names_pairs_that_llama_cpp_leaves_unrotated(run, tmp_path, sections, is_named):
    values = {
        "embedding_length": 512,
        "attention.head_count": 4,
        "rope.dimension_sections": sections,
    }
    _, lines = run("show", gguf_files.write(tmp_path / "model.gguf", "qwen3vl", values))
    words = "61, 62: as in transformers by the first axis; llama.cpp leaves them unrotated for text"
    assert (words in " ".join(lines)) is is_named


def test_show_has_the_lengths_of_yarn_and_each_layer_type(run, tmp_path):
    values = LLAMA | {
        "attention.sliding_window": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 512,
    }
    _, lines = run("show", gguf_files.write(tmp_path / "model.gguf", "olmo2", values))
    assert "olmo2, full_attention" in lines
    assert "olmo2, sliding_attention" in lines
    assert "original_max_position_embeddings 512" in lines


def test_export_writes_the_rotation(run, model, tmp_path):
    code, lines = run("export", model, "-o", tmp_path / "rope.onnx")
    assert code == 0
    assert lines[-1] == f"{tmp_path / 'rope.onnx'} is written"
    exported = onnx.load(tmp_path / "rope.onnx")
    metadata = {entry.key: entry.value for entry in exported.metadata_props}
    assert '"llama.rope.freq_base": 500000.0' in metadata["rope_cpu.config"]


def test_export_of_attention_needs_the_config(run, model, tmp_path):
    code, lines = run("export", model, "--attention", "-o", tmp_path / "attention.onnx")
    assert code == 2
    assert "a GGUF file has not all of the attention" in " ".join(lines)


@pytest.mark.usefixtures("brief_verify")
def test_verify_takes_the_heads_of_the_file(run, model):
    code, lines = run("verify", model)
    assert code == 0
    assert "q (4 heads)" in " ".join(lines)  # wherever the lines wrap


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_damaged_files_are_usage_errors(command, run, model, tmp_path):
    model.write_bytes(model.read_bytes()[:100])
    output = ["-o", tmp_path / "rope.onnx"] if command == "export" else []
    code, lines = run(command, model, *output)
    assert code == 2
    assert "model.gguf" in " ".join(lines)
    assert "ends after 100 bytes" in " ".join(lines)
    assert "`CONFIG`" in " ".join(lines)  # the word of --help for the argument `path`


def test_an_option_that_contradicts_the_architecture(run, model):
    code, lines = run("show", model, "--half")
    assert code == 2
    text = "--half is given; it must be left out, as `interleaved` of this model is True"
    assert text in " ".join(lines)
