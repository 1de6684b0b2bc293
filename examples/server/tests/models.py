"""Small random models, saved as their makers save them, and requests to engines of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from rope_server.engine import Engine, Event, Request
from rope_server.weights import Weights, load
from tokenizers import Tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "short_factor": [1 + i / 20 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
}
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "rope_parameters": GEMMA3,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 30.0,
        },
    ),
    "phi3": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
}
BORDER = 64  # of the longrope model
TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message.role not in ("system", "user", "assistant") %}
        {{ raise_exception("no role " + message.role) }}
    {% endif %}
    {{ "[" + message.role + "] " + message.content | trim + "\n" }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]{% endif %}"""


class Model:
    """A model of transformers, and the same as this server loads it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        kind, keys = MODELS[name]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**SMALL | keys)
        self.folder = folder
        self.peer = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.peer.requires_grad_(False)
        _spread_norms(self.peer)
        self.peer.save_pretrained(folder)
        save_tokenizer(folder)
        self.weights: Weights = load(folder)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the peer's logits after each token, from one pass without a cache."""
        return self.peer(torch.tensor([tokens]), use_cache=False).logits[0].numpy()

    def logits_of_growth(self, tokens: list[int]) -> np.ndarray:
        """Return the peer's logits after each token, when it was the last."""
        logits = self.logits(tokens)
        if self.name == "phi3":  # shorter sequences have other frequencies
            logits[:BORDER] = self.logits(tokens[:BORDER])
        return logits


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes and some pairs of them, and a chat template."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=SMALL["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def complete(engine: Engine, requests: Iterable[dict[str, Any]]) -> list[list[Event]]:
    """Compute requests, given as the arguments of `Request`, together in this thread."""
    answers: list[list[Event]] = []
    for request in requests:
        answers.append([])
        engine.submit(Request(**request, deliver=answers[-1].append))
    while engine.running or engine.waiting:
        engine.step()
    return answers


def tokens_of(events: list[Event]) -> list[int]:
    """Return the tokens of a sequence."""
    return [event.drawn.token for event in events if event.drawn is not None]


def _spread_norms(peer: Any) -> None:
    """Give norms weights that are not all the same, as they are in a new model."""
    for name, parameter in peer.named_parameters():
        if "norm" in name:
            parameter += 0.1 * torch.randn_like(parameter)
