"""Two layers of attention from a checkpoint, merged into one ONNX model with shared caches.

A random checkpoint in the form of Qwen 3 stands for a real one. Each layer is exported with its
own weights and a name prefix, the layers are merged with onnx.compose, and 64 tokens are decoded
through IO binding: onnxruntime writes new keys and values into buffers that nothing copies.

A whole decoder also has residual connections, other norms and feed-forward parts; here a layer's
output is the next one's input.

Usage: python examples/onnx_decode.py [--tokens N] [--capacity N] [--target ort]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnxruntime

from rope_cpu import RotaryEmbedding, export
from rope_cpu.array_types import Array

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
LAYERS = range(CONFIG["num_hidden_layers"])
PROMPT = 16


def random_checkpoint(random: np.random.Generator) -> dict[str, Array]:
    """Return the attention tensors of a state dict, in float32."""
    hidden = CONFIG["hidden_size"]
    width = CONFIG["head_dim"]
    query_rows = CONFIG["num_attention_heads"] * width
    key_rows = CONFIG["num_key_value_heads"] * width
    shapes = {
        "q_proj": (query_rows, hidden),
        "k_proj": (key_rows, hidden),
        "v_proj": (key_rows, hidden),
        "o_proj": (hidden, query_rows),
        "q_norm": (width,),
        "k_norm": (width,),
    }
    tensors = {}
    for layer in LAYERS:
        for name, shape in shapes.items():
            is_norm = len(shape) == 1
            spread = 0.1 if is_norm else shape[-1] ** -0.5
            tensor = random.standard_normal(shape) * spread + is_norm
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = tensor.astype(np.float32)
    return tensors


def merged_layers(tensors: Mapping[str, Array], capacity: int, target: str) -> onnx.ModelProto:
    """Return one model of all layers; a layer's output is the next one's input."""
    merged = None
    for layer in LAYERS:
        rope = RotaryEmbedding.from_config(CONFIG, layer=layer)
        arguments = export.attention_options(CONFIG, layer=layer)
        arguments |= export.attention_weights(tensors, CONFIG, layer)
        model = export.export_attention(
            rope,
            target=target,
            cache="shared",
            max_positions=capacity,
            name_prefix=f"layer{layer}_",
            **arguments,
        )
        if merged is None:
            merged = model
            continue
        links = [(f"layer{layer - 1}_attention", f"layer{layer}_hidden")]
        merged = onnx.compose.merge_models(merged, model, io_map=links)
    return merged


class Decoder:
    """Runs the merged layers over shared caches, for one sequence.

    caches: (1, kv_heads, capacity, head_dim) by input name, written in place.
    """

    def __init__(self, model: onnx.ModelProto, capacity: int) -> None:
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        shape = (1, CONFIG["num_key_value_heads"], capacity, CONFIG["head_dim"])
        self.caches = {
            f"layer{layer}_past_{part}": np.zeros(shape, np.float32)
            for layer in LAYERS
            for part in ("key", "value")
        }

    def bound(self, tokens: int) -> tuple[Callable[[], None], Array, Array, Array]:
        """Return a step of so many tokens, and its arrays: hidden, past length, result."""
        hidden = np.zeros((1, tokens, CONFIG["hidden_size"]), np.float32)
        result = np.empty_like(hidden)
        past_lengths = np.zeros(1, np.int64)
        feeds = {"layer0_hidden": hidden, **self.caches}
        feeds |= {f"layer{layer}_past_lengths": past_lengths for layer in LAYERS}
        step = export.bind(self.session, feeds, {f"layer{LAYERS[-1]}_attention": result})
        return step, hidden, past_lengths, result


def decode(decoder: Decoder, hidden: Array) -> tuple[Array, float]:
    """Run a prompt, then single tokens; return all results and the seconds of a decode step.

    hidden: (1, tokens, hidden_size) of prompt and new tokens.
    """
    prefill, prompt, _, result = decoder.bound(PROMPT)
    prompt[:] = hidden[:, :PROMPT]
    prefill()
    results = [result]
    step, token, past_lengths, result = decoder.bound(1)
    start = time.perf_counter()
    for position in range(PROMPT, hidden.shape[1]):
        token[:] = hidden[:, position : position + 1]
        past_lengths[:] = position
        step()
        results.append(result.copy())
    seconds = (time.perf_counter() - start) / max(len(results) - 1, 1)
    return np.concatenate(results, axis=1), seconds


def in_one_pass(model: onnx.ModelProto, hidden: Array) -> Array:
    """Return the results of all tokens from one run, over empty caches."""
    capacity = hidden.shape[1]
    step, inputs, _, result = Decoder(model, capacity).bound(capacity)
    inputs[:] = hidden
    step()
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Decode, and compare with one pass over all tokens."""
    parser = argparse.ArgumentParser(description="Decode over two merged layers of attention.")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode after the prompt")
    parser.add_argument("--capacity", type=int, default=256, help="rows of the caches")
    parser.add_argument("--target", default="ort", help="target of the export")
    options = parser.parse_args(arguments)
    if PROMPT + options.tokens > options.capacity:
        parser.error(f"--capacity must hold the prompt of {PROMPT} tokens and --tokens")
    random = np.random.default_rng(0)
    model = merged_layers(random_checkpoint(random), options.capacity, options.target)
    shape = (1, PROMPT + options.tokens, CONFIG["hidden_size"])
    hidden = random.standard_normal(shape).astype(np.float32)
    result, seconds = decode(Decoder(model, options.capacity), hidden)
    difference = np.abs(result - in_one_pass(model, hidden)).max()
    names = [value.name for value in model.graph.input]
    print(f"{len(LAYERS)} layers, inputs {', '.join(names)}")
    print(f"{options.tokens} tokens after {PROMPT}: {seconds * 1e6:.0f} µs a step")
    print(f"largest difference from one pass over all tokens: {difference:.1e}")


if __name__ == "__main__":
    main()
