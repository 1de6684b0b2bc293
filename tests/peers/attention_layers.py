"""Attention layers of small models of transformers, with random weights, and their results."""

import copy
from importlib import import_module

import numpy as np
import torch
import transformers

HEADS = 6
KV_HEADS = 2
HEAD_DIM = 32
SMALL = {
    "hidden_size": 192,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "vocab_size": 16,
    "attn_implementation": "eager",  # whose softmax is in float32
}
DEFAULT = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_layer(folder, prefix, keys, config_name="Config"):
    """Return the attention layer of a model in float64, and its config."""
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(transformers, prefix + config_name)(**(SMALL | keys))
    torch.manual_seed(5)
    layer = getattr(modeling, f"{prefix}Attention")(config, 0).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            size = 0.08 if parameter.ndim > 1 else 0.5
            parameter.copy_(torch.randn_like(parameter) * size)
    return layer, config


def tables(rope, tokens, halves=True):
    """Return cos and sin as a layer takes them: of the pairs, in most models for both halves.

    They are float64, because tests compare attention, not the rounding of angles in transformers.
    """
    found = rope.cos_sin(np.arange(tokens), np.float64)
    if halves:
        found = [np.concatenate([table, table], axis=-1) for table in found]
    return tuple(torch.from_numpy(table)[None] for table in found)


def expected(layer, cos_sin, hidden, window=None):
    """Return the results of a layer in float64, and the largest error of its own in float32."""
    key = torch.arange(hidden.shape[1])
    query = key[:, None]
    seen = (key <= query) & (key > query - (window or len(key)))
    mask = torch.where(seen, 0.0, -torch.inf).double()[None, None]
    with torch.no_grad():
        want = layer(hidden, position_embeddings=cos_sin, attention_mask=mask)[0]
        in_float32 = copy.deepcopy(layer).float()(
            hidden.float(),
            position_embeddings=tuple(table.float() for table in cos_sin),
            attention_mask=mask.float(),
        )[0]
    return want.numpy(), float((in_float32 - want).abs().max())
