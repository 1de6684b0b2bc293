"""Logits against transformers: whole prompts and chunks, float32, bfloat16 and int8 caches."""

from __future__ import annotations

import inspect
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from rope_server.model import forward
from rope_server.weights import load

import rope_cpu

LENGTHS = (1, 2, 15, 16, 17, 63, 65, 150)
PAGE_SIZE = 16
# The name of the cache in arguments, which transformers changed in 5.24.
CACHE = next(
    name
    for name in inspect.signature(transformers.LlamaModel.forward).parameters
    if name in ("cache", "past_key_values")
)


def logits(model, prompts, dtype, chunk):
    """Return the logits of all tokens of prompts, which come side by side in chunks."""
    pages = [-(-len(prompt) // PAGE_SIZE) for prompt in prompts]
    order = np.random.default_rng(0).permutation(sum(pages)).tolist()
    table = [order[sum(pages[:i]) : sum(pages[: i + 1])] for i in range(len(pages))]
    caches = [
        rope_cpu.KVCache.zeros(
            sum(pages), PAGE_SIZE, layer.facts.num_kv_heads, layer.facts.head_dim, dtype=dtype
        )
        for layer in model.weights.layers
    ]
    found = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        parts = [prompt[start : start + chunk] for prompt in prompts]
        batch = rope_cpu.Batch(
            seq_lens=[min(len(prompt), start + chunk) for prompt in prompts],
            query_lens=[*map(len, parts)],
            page_table=table,
            page_size=PAGE_SIZE,
        )
        tokens = [token for part in parts for token in part]
        rows = range(len(tokens))
        lengths = [*map(len, prompts)]
        result = forward(model.weights, caches, tokens, batch, lengths, rows)
        for index, part in enumerate(np.split(result, batch.cu_seqlens[1:-1])):
            found[index].append(part)
    return [np.concatenate(parts) for parts in found]


@pytest.fixture
def prompts(rng):
    return [rng.integers(0, 320, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("chunk", [7, 512])
def test_logits(model, prompts, chunk):
    for prompt, found in zip(prompts, logits(model, prompts, "float32", chunk), strict=True):
        expected = model.logits(prompt)
        assert expected.std() > 0.5  # so that the tolerance means something
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def rounded_bfloat16(x):
    return x.to(torch.bfloat16).float()


def rounded_int8(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


class RoundingCache(transformers.DynamicCache):
    """The peer's cache, which rounds keys and values."""

    def __init__(self, rounded):
        super().__init__()
        self.rounded = rounded

    def update(self, key, value, *args, **kwargs):
        return super().update(self.rounded(key), self.rounded(value), *args, **kwargs)


@pytest.mark.parametrize(
    ("dtype", "rounded"), [(ml_dtypes.bfloat16, rounded_bfloat16), (np.int8, rounded_int8)]
)
def test_cache_dtypes(model, rng, dtype, rounded):
    """The rounding of keys and values is the whole difference.

    Where a value lies between two that can be stored, the last bits of float32 decide, so that the
    two models do not store all the same.
    """
    prompt = rng.integers(0, 320, 150).tolist()
    (found,) = logits(model, [prompt], dtype, 512)
    peer = model.peer(torch.tensor([prompt]), **{CACHE: RoundingCache(rounded)})
    remaining = np.abs(found - peer.logits[0].numpy())
    error = np.abs(found - model.logits(prompt))
    print(f"{model.name}, {np.dtype(dtype)}: {error.max() / model.logits(prompt).std():.2g}")
    assert error.max() > 1e-3
    assert remaining.mean() < 0.1 * error.mean()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not served"),
        ({"hidden_act": "gelu"}, "'gelu' is not served"),
        ({"rms_norm_eps": None}, "no rms_norm_eps"),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "by their position"),
    ],
)
def test_models_that_are_not_served(changes, words, llama, tmp_path):
    shutil.copytree(llama.folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ValueError, match=words):
        load(tmp_path)
