"""Llama and Qwen3 in NumPy, from a Hugging Face folder, with the positions by rope_cpu.

    python examples/numpy_llama.py FOLDER --tokens 1 2 3 --steps 16

FOLDER holds config.json and *.safetensors. Tokens are ids; there is no tokenizer here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from rope_cpu import RotaryEmbedding

MODEL_TYPES = ("llama", "qwen3")
SAFETENSORS_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file as float32.

    The format is the length of the header, a JSON header and the data.
    """
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(raw[:8].view(np.uint64)[0])
    header = json.loads(bytes(raw[8:start]))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype = SAFETENSORS_DTYPES[entry["dtype"]]
        stored = np.frombuffer(raw[start + first : start + last], dtype=dtype)
        tensors[name] = stored.astype(np.float32).reshape(entry["shape"])
    return tensors


def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _frequencies(rope: RotaryEmbedding) -> tuple[bytes, float]:
    """Return the values that two embeddings share if they rotate alike."""
    return rope.inv_freq.tobytes(), rope.attention_factor


@dataclass
class Cache:
    """Rotated keys and values of every layer, (batch, seq, kv_heads, head_dim).

    rope: the embedding that rotated the keys.
    """

    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    rope: RotaryEmbedding | None = None

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self.keys[0].shape[1] if self.keys else 0

    def rerotate(self, rope: RotaryEmbedding) -> None:
        """Rotate the keys by `rope`.

        The frequencies of longrope and dynamic change as a sequence grows.
        """
        old = self.rope
        self.rope = rope
        if old is not None and _frequencies(rope) != _frequencies(old):
            self.keys = [rope.rotate(old.rotate(keys, inverse=True)) for keys in self.keys]

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add keys and values to a layer; return all of its keys and values."""
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = np.concatenate([self.keys[layer], k], axis=1)
            self.values[layer] = np.concatenate([self.values[layer], v], axis=1)
        return self.keys[layer], self.values[layer]


class Transformer:
    """A decoder like Llama."""

    def __init__(self, folder: str | Path) -> None:
        """Read the folder's config and weights."""
        self.config = json.loads((Path(folder) / "config.json").read_text())
        if self.config["model_type"] not in MODEL_TYPES:
            raise ValueError(
                f"model type {self.config['model_type']!r} is not one of {', '.join(MODEL_TYPES)}"
            )
        self.rope = RotaryEmbedding.from_config(folder)
        self.weights: dict[str, np.ndarray] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            self.weights |= read_safetensors(path)

    def __call__(self, tokens: np.ndarray, cache: Cache) -> np.ndarray:
        """Return the logits (batch, seq, vocabulary) of the next tokens (batch, seq)."""
        start = cache.length
        count = tokens.shape[1]
        rope = self.rope.at_length(start + count)
        cache.rerotate(rope)
        plan = rope.plan(np.arange(start, start + count))  # cos and sin once, for every layer
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self._norm(x, f"{name}.input_layernorm")
            x = x + self._attention(normed, f"{name}.self_attn", layer, plan, cache)
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + self._mlp(normed, f"{name}.mlp")
        tied = self.config.get("tie_word_embeddings")
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return self._norm(x, "model.norm") @ self.weights[head].T

    def _attention(self, x: np.ndarray, name: str, layer: int, plan, cache: Cache) -> np.ndarray:
        batch, seq, _ = x.shape
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").reshape(batch, seq, -1, self.rope.head_dim)
            for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self.weights:  # Qwen3
            q = self._norm(q, f"{name}.q_norm")
            k = self._norm(k, f"{name}.k_norm")
        q, k = plan(q, k)
        k, v = cache.append(layer, k, v)
        groups = q.shape[2] // k.shape[2]
        q = q.reshape(batch, seq, k.shape[2], groups, -1)
        scores = np.einsum("bqhgd,bkhd->bhgqk", q, k) / np.sqrt(np.float32(self.rope.head_dim))
        past = k.shape[1] - seq
        scores = np.where(np.arange(k.shape[1]) <= past + np.arange(seq)[:, None], scores, -np.inf)
        mixed = np.einsum("bhgqk,bkhd->bqhgd", softmax(scores), v)
        return self._linear(mixed.reshape(batch, seq, -1), f"{name}.o_proj")

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate = self._linear(x, f"{name}.gate_proj")
        silu = gate / (1 + np.exp(-gate))
        up = self._linear(x, f"{name}.up_proj")
        return self._linear(silu * up, f"{name}.down_proj")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        rms = np.sqrt(mean_square + np.float32(self.config["rms_norm_eps"]))
        return x / rms * self.weights[f"{name}.weight"]


def generate(model: Transformer, tokens: list[int], steps: int) -> list[int]:
    """Return the next tokens by greedy decoding."""
    cache = Cache()
    inputs = np.array([tokens])
    generated = []
    for _ in range(steps):
        token = int(model(inputs, cache)[0, -1].argmax())
        generated.append(token)
        inputs = np.array([[token]])
    return generated


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="folder with config.json and *.safetensors")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="ids of the prompt")
    parser.add_argument("--steps", type=int, default=16, help="number of new tokens (default 16)")
    args = parser.parse_args()
    print(*generate(Transformer(args.folder), args.tokens, args.steps))


if __name__ == "__main__":
    main()
