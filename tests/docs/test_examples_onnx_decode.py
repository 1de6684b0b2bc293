"""The example of two merged layers that decode over shared caches, against the definition."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from rope_cpu.export.targets import TARGETS

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "onnx_decode.py"))
CONFIG = EXAMPLE["CONFIG"]
TOKENS = EXAMPLE["PROMPT"] + 64


def rotated(x):
    """Rotate half-split pairs of (tokens, heads, head_dim) at positions 0, 1, …."""
    pairs = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), CONFIG["rope_theta"] ** (-np.arange(pairs) / pairs))
    cos = np.cos(angles)[:, None].astype(x.dtype)
    sin = np.sin(angles)[:, None].astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def normed(x, weight):
    mean = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(mean + x.dtype.type(CONFIG["rms_norm_eps"])) * weight


def attention_of_layer(tensors, layer, hidden):
    """The attention of a layer, (tokens, hidden), in the dtype of `hidden`."""
    dtype = hidden.dtype
    module = f"model.layers.{layer}.self_attn"
    weights = {name: tensors[f"{module}.{name}_proj.weight"].astype(dtype) for name in "qkvo"}
    vectors = {}
    for name in "qkv":
        vectors[name] = (hidden @ weights[name].T).reshape(TOKENS, -1, CONFIG["head_dim"])
    for name in "qk":
        norm = tensors[f"{module}.{name}_norm.weight"].astype(dtype)
        vectors[name] = rotated(normed(vectors[name], norm))
    group = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    keys = np.repeat(vectors["k"], group, axis=1)
    values = np.repeat(vectors["v"], group, axis=1)
    scores = np.einsum("qhd,khd->hqk", vectors["q"], keys) / dtype.type(CONFIG["head_dim"] ** 0.5)
    scores += np.where(np.tri(TOKENS, dtype=bool), 0, -np.inf).astype(dtype)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    result = np.einsum("hqk,khd->qhd", weight, values)
    return result.reshape(TOKENS, -1) @ weights["o"].T


def attention_of_layers(tensors, hidden):
    for layer in EXAMPLE["LAYERS"]:
        hidden = attention_of_layer(tensors, layer, hidden)
    return hidden


@pytest.mark.parametrize("target", TARGETS)
def test_64_tokens_are_decoded_as_the_definition_says(rng, target):
    tensors = EXAMPLE["random_checkpoint"](rng)
    model = EXAMPLE["merged_layers"](tensors, TOKENS, target)
    hidden = rng.standard_normal((1, TOKENS, CONFIG["hidden_size"])).astype(np.float32)
    decoder = EXAMPLE["Decoder"](model, TOKENS)
    result, seconds = EXAMPLE["decode"](decoder, hidden)
    exact = attention_of_layers(tensors, hidden[0].astype(np.float64))
    # Another order of sums may be a few times as far off as NumPy in float32.
    own_error = np.abs(attention_of_layers(tensors, hidden[0]) - exact).max()
    assert result.shape == hidden.shape
    assert np.abs(result[0] - exact).max() <= 4 * own_error
    assert own_error <= 1e-5 * np.abs(exact).max()
    assert seconds > 0
    for cache in decoder.caches.values():
        assert cache.any(axis=(0, 1, 3)).all()


def test_the_program_prints_what_it_does(capsys):
    EXAMPLE["main"](["--tokens", "2", "--capacity", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 layers, inputs layer0_hidden, layer0_past_key")
    assert lines[1].startswith("2 tokens after 16: ")
    assert lines[2].startswith("largest difference from one pass over all tokens: ")
