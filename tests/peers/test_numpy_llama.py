"""The NumPy example against transformers: logits of the prefill and of 64 decode steps."""

from __future__ import annotations

import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.peers

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from numpy_llama import Cache, Transformer  # noqa: E402
from peers.attention_layers import LLAMA3  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "attn_implementation": "eager",
    "initializer_range": 0.08,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 32.0,
    "short_factor": [1 + i / 20 for i in range(16)],
    "long_factor": [1 + i for i in range(16)],
}
CASES = {
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "longrope, short": (
        "LlamaConfig",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 2048}},
    ),
    "longrope, long": (
        "LlamaConfig",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16}},
    ),
}
PREFILL, STEPS = 40, 64

# The name of the cache in arguments and outputs, which transformers changed in 5.24.
CACHE = next(
    name
    for name in inspect.signature(transformers.LlamaModel.forward).parameters
    if name in ("cache", "past_key_values")
)


def saved(name: str, folder: Path) -> Any:
    """Make a small random model, save it, and return it."""
    kind, keys = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SMALL, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_of_prefill_and_decode(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    theirs, ours = saved(name, tmp_path), Transformer(tmp_path)
    tokens = rng.integers(0, 199, (2, PREFILL + STEPS))
    cache, past, step = Cache(), None, tokens[:, :PREFILL]
    for end in range(PREFILL, PREFILL + STEPS + 1):
        with torch.no_grad():
            out = theirs(torch.from_numpy(step), **{CACHE: past}, use_cache=True)
        past = out[CACHE]
        expected, logits = out.logits.numpy(), ours(step, cache)
        assert np.abs(expected).max() > 0.5, (
            "logits must be large enough for the bound to mean something"
        )
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        step = tokens[:, end : end + 1]
        if step.shape[1] == 0:
            break


def test_growing_into_the_long_factors_equals_starting_there(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    saved("longrope, long", tmp_path)
    model = Transformer(tmp_path)
    model.config["num_hidden_layers"] = (
        1  # keys of the first layer depend on tokens alone, not on earlier attention
    )
    tokens = rng.integers(0, 199, (1, 30))
    whole, grown = Cache(), Cache()
    expected = model(tokens, whole)[:, -1]
    model(tokens[:, :10], grown)
    assert grown.rope != whole.rope
    result = model(tokens[:, 10:], grown)[:, -1]
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(grown.keys[0], whole.keys[0], rtol=0, atol=1e-5)


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = saved("llama3", tmp_path)
    expected = theirs.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    program = str(EXAMPLES / "numpy_llama.py")
    monkeypatch.setattr(
        sys, "argv", [program, str(tmp_path), "--tokens", "5", "6", "7", "--steps", "8"]
    )
    capsys.readouterr()
    runpy.run_path(program, run_name="__main__")
    assert [int(word) for word in capsys.readouterr().out.split()] == expected[0, 3:].tolist()
