"""What `from_gguf` refuses: decisions of llama.cpp's code, unused keys, values out of range."""

from __future__ import annotations

import json
from importlib import resources

import gguf
import gguf_files
import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.models.gguf import ARCHITECTURES, TABLE

WIDTH = {"attention.key_length": 64, "context_length": 4096}


def refusal(folder, architecture, values, tensors=None, **arguments):
    """Return the text of the error, which names the file."""
    with pytest.raises(ValueError, match=r"model\.gguf'") as caught:
        gguf_files.rotary(folder, architecture, values, tensors, **arguments)
    assert len(str(caught.value)) < 2000
    return str(caught.value)


REFUSED = [
    name for name, row in ARCHITECTURES.items() if "refused" in row and "condition" not in row
]


def test_each_architecture_has_one_row():
    """JSON keeps the last of several rows silently."""
    text = resources.files("rope_cpu.models.data").joinpath("gguf.json").read_text("utf-8")
    pairs = json.loads(text, object_pairs_hook=list)
    rows = dict(pairs)["architectures"]
    assert len(rows) == len(ARCHITECTURES)


def test_all_architectures_of_the_package_gguf_are_known():
    """A later release of gguf may have more: then the table is made anew."""
    assert ARCHITECTURES.keys() >= set(gguf.MODEL_ARCH_NAMES.values())


PAIRINGS = {"norm", "neox", "mrope", "imrope", "norm_or_mrope", "neox_or_mrope"}
FLAGS = {"permuted", "latent", "factors", "alpha", "windowed", "yarn"}
YARN_FACTS = {"reads", "beta_fast", "log_unit", "equal_mscales"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_have_facts_of_architectures_that_rotate(name):
    row = ARCHITECTURES[name]
    if name in REFUSED:
        assert row.keys() == {"refused"}
        return
    assert row["pairing"] in PAIRINGS
    assert row.keys() <= {"pairing", "refused", "condition"} | FLAGS
    assert row.get("yarn", TABLE["yarn"]).keys() == YARN_FACTS
    assert row.get("windowed", {}).keys() <= {"own", "values", "without", "always"}
    # The converter reorders for adjacent pairs alone.
    assert row["pairing"] == "norm" or "permuted" not in row


@pytest.mark.parametrize("architecture", REFUSED)
def test_architectures_whose_code_decides_or_that_do_not_rotate(architecture, tmp_path):
    assert f"`general.architecture` is '{architecture}'" in refusal(tmp_path, architecture, WIDTH)


def test_unknown_architectures(tmp_path):
    text = refusal(tmp_path, "lama", WIDTH)
    assert "`general.architecture` is 'lama'; it must be in llama.cpp b10256" in text


@pytest.mark.parametrize(
    ("architecture", "refused", "answered"),
    [
        ("llama4", {}, {"attention.sliding_window": 0}),
        ("llama4", {"attention.sliding_window": 8192}, {"attention.sliding_window": 0}),
        ("smallthinker", {"attention.sliding_window": 4096}, {}),
        ("exaone4", {"block_count": 64}, {"block_count": 30}),
        ("baichuan", {"block_count": 40}, {"block_count": 32}),
        ("granite", {"rope.scaling.finetuned": False}, {"rope.scaling.finetuned": True}),
        ("granitehybrid", {"rope.scaling.finetuned": False}, {}),
    ],
)
def test_values_with_which_the_code_leaves_layers_unrotated(
    architecture, refused, answered, tmp_path
):
    text = refusal(tmp_path, architecture, WIDTH | refused)
    assert f"`general.architecture` is '{architecture}'" in text
    rope = gguf_files.rotary(tmp_path, architecture, WIDTH | answered)
    np.testing.assert_array_equal(rope.inv_freq, RotaryEmbedding(64).inv_freq)


SECTIONS = "rope.dimension_sections"
KEY = "attention.key_length"
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
FREE = {"embedding_length": 64}
WINDOW = {"attention.sliding_window": 128}


# Architecture, the values beside the widths, and the last part of the key that is not used.
@pytest.mark.parametrize(
    ("architecture", "values", "key", "value"),
    [
        ("qwen3", YARN, "rope.scaling.yarn_beta_fast", 16.0),
        ("qwen3", YARN, "rope.scaling.yarn_beta_slow", 2.0),
        ("qwen3", YARN, "rope.scaling.yarn_ext_factor", 0.5),
        ("qwen3", YARN, "rope.scaling.yarn_log_multiplier", 0.1),
        ("qwen3", YARN, "rope.scaling.yarn_attn_factor", 1.5),
        ("qwen3", {}, "rope.scaling.yarn_attn_factor", 1.5),
        ("phi3", {}, "rope.freq_base_swa", 1e6),
        ("gemma3", {}, "rope.dimension_count_swa", 32),
        ("qwen3", {}, "rope.scaling.alpha", 1000.0),
        ("gemma3", {}, "attention.key_length_swa", 32),
        ("gemma3", {}, "rope.freq_base_swa", 5e5),  # without a window
        ("qwen3", {}, SECTIONS, [8, 12, 12, 0]),
        # Names of other writers, or of releases to come.
        ("gemma3", {}, "rope.local.freq_base", 10000.0),
        ("llama", {}, "rope.freq_base_per_layer", [1e4, 1e6]),
        ("llama", {}, "rope.partial_rotary_factor", 0.5),
        ("llama", {}, "rope.scaling.low_freq_factor", 1.5),
        ("llama", {}, "attention.compress_rope_freq_base", 160000.0),
        ("llama", {}, "attention.max_alibi_bias", 8.0),
        ("qwen3", {}, "mrope_interleaved", True),
        ("qwen3", {}, "rope.mode", "imrope"),
        ("qwen3", {}, "rope.note", "x" * 5000),
    ],
)
def test_values_that_llama_cpp_does_not_use(architecture, values, key, value, tmp_path):
    text = refusal(tmp_path, architecture, WIDTH | values | {key: value})
    assert f"`{architecture}.{key}` is" in text
    assert "llama.cpp does not use it" in text or key == SECTIONS


@pytest.mark.parametrize(
    "values",
    [
        {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        {"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0},
        {"rope.scaling.yarn_attn_factor": 1.1386294},
        {"rope.scaling.yarn_ext_factor": -1.0, "rope.scaling.yarn_log_multiplier": 0.0},
        {"rope.scaling.finetuned": True, "rope.scale_linear": 8.0, "rope.scaling.alpha": 0.0},
        {"rope.freq_base_swa": 1e4, "rope.dimension_count_swa": 64},
        {"attention.key_length_swa": 64, "attention.key_length_mla": 192},
        {"attention.max_alibi_bias": 0.0, "rope.mrope_interleaved": False, "rope.freq_scale": 1.0},
        {SECTIONS: [32, 0, 0, 0]},
    ],
)
def test_unused_keys_with_the_values_that_llama_cpp_has(values, tmp_path):
    plain = gguf_files.rotary(tmp_path, "qwen3", WIDTH | YARN)
    assert gguf_files.rotary(tmp_path, "qwen3", WIDTH | YARN | values) == plain


@pytest.mark.parametrize(
    ("architecture", "values", "text"),
    [
        ("llama", {KEY: "64"}, "must be an integer"),
        ("llama", {KEY: 2**32 - 1}, "at most 65536"),
        ("llama", {KEY: 0}, "at least 2"),
        ("llama", WIDTH | {"rope.dimension_count": 63}, "must be even"),
        ("llama", WIDTH | {"rope.dimension_count": 66}, "at most head_dim 64"),
        ("llama", {}, "key_length or embedding_length / head_count` is None; it must be an int"),
        ("llama", FREE, "key_length or embedding_length / head_count` is None"),
        (
            "llama",
            {"attention.head_count": 4},
            "/ head_count` is 0; it must be at least 2",
        ),
        ("llama", FREE | {"attention.head_count": [0, 4]}, "at least 1"),
        ("llama", WIDTH | {"rope.freq_base": 0.0}, "above 0"),
        ("llama", WIDTH | {"rope.freq_base": float("nan")}, "finite"),
        ("llama", WIDTH | {"rope.freq_base": [1, 2]}, "must be a number"),
        ("llama", WIDTH | {"rope.scaling.factor": -1.0}, "at least 0"),
        ("llama", WIDTH | {"rope.scaling.factor": "x" * 5000}, "must be a number"),
        ("llama", WIDTH | {"rope.scaling.type": "ntk"}, "must be one of none, li"),
        ("llama", WIDTH | {"rope.scaling.type": 3}, "must be one of"),
        ("qwen3", {KEY: 64} | YARN, "`original_max_position_embeddings` is missing"),
        ("qwen3", WIDTH | YARN | {"rope.freq_base": 1.0}, "must be above 1"),
        ("qwen2vl", WIDTH, "must have the pairs of at most 4 axes"),
        ("qwen3vl", WIDTH | {SECTIONS: [0, 0, 0, 0]}, "at most 3 axes"),
        ("qwen2vl", WIDTH | {SECTIONS: [8, 8, 8, 4, 4]}, "at most 4 entries"),
        ("qwen2vl", WIDTH | {SECTIONS: [8, -8, 8]}, "at least 0"),
        ("qwen3vl", WIDTH | {SECTIONS: [8, 8, 8, 8]}, "at most 3 axes"),
        ("llama", WIDTH | {SECTIONS: [16, 8, 8]}, "at most 1 axes"),
        (
            "gemma2",
            WIDTH | WINDOW | {"rope.freq_base_swa": -1.0},
            "`gemma2.rope.freq_base_swa` is -1",
        ),
        ("gemma4", WIDTH | WINDOW | {"rope.dimension_count_swa": 66}, "at most head_dim 64"),
        ("hunyuan-dense", {KEY: 2, "rope.scaling.alpha": 2.0}, "heads 2 wide"),
    ],
)
def test_values_out_of_range(architecture, values, text, tmp_path):
    assert text in refusal(tmp_path, architecture, values)


ONES = np.ones(32)


@pytest.mark.parametrize(
    ("architecture", "tensors", "text"),
    [
        ("qwen3", {gguf_files.FREQS: ONES}, "is unused for 'qwen3'"),
        ("phi3", {gguf_files.LONG: ONES}, "`short_factor` is missing"),
        (
            "phi3",
            {gguf_files.LONG: ONES[:16], gguf_files.SHORT: ONES},
            "has shape (16,); it must have 32",
        ),
    ],
)
def test_factors(architecture, tensors, text, tmp_path):
    assert text in refusal(tmp_path, architecture, WIDTH, tensors)


@pytest.mark.parametrize("path", [7, None, {"model_type": "llama"}])
def test_the_path_is_a_path(path):
    with pytest.raises(TypeError, match="`path` is a"):
        RotaryEmbedding.from_gguf(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("missing.gguf", "No such file"), ("", "Is a directory"), ("a\0b", "embedded null byte")],
)
def test_missing_files_and_folders(name, text, tmp_path):
    with pytest.raises(ValueError, match=f"^`path` '.*{text}"):
        RotaryEmbedding.from_gguf(f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    "arguments", [{"layer": 0}, {"interleaved": False}, {"angle_dtype": "float32"}]
)
def test_arguments_of_from_config_that_a_file_settles(arguments, tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", "llama", WIDTH)
    with pytest.raises(ValueError, match=next(iter(arguments))):
        RotaryEmbedding.from_config(path, **arguments)
    assert RotaryEmbedding.from_config(path, interleaved=True).interleaved
