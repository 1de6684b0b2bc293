"""GGUF files, written by the writer of the package gguf, for tests of `from_gguf`."""

from __future__ import annotations

import math

import gguf
import numpy as np

from rope_cpu import RotaryEmbedding

FREQS = "rope_freqs.weight"
SHORT = "rope_factors_short.weight"
LONG = "rope_factors_long.weight"


def write(path, architecture, values, tensors=None, strings=None, general=None):
    """Write a file; values: by key without the architecture. Return the path."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (strings or {}).items():
        writer.add_array(key, value)
    for key, value in (general or {}).items():
        _add(writer, key, value)
    for key, value in values.items():
        _add(writer, f"{architecture}.{key}", value)
    for name, tensor in (tensors or {}).items():
        held = np.asarray(tensor)
        writer.add_tensor(name, held if held.dtype == np.float16 else held.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rotary(folder, architecture, values, tensors=None, **arguments):
    """Return the rotary embedding of a file with these metadata; arguments: of `from_gguf`."""
    path = write(folder / "model.gguf", architecture, values, tensors)
    return RotaryEmbedding.from_gguf(path, **arguments)


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def llama3_factors(theta, width, section):
    """Return the divisors of Llama 3.1's scaling as a converter writes them: `rope_freqs`."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    original = section["original_max_position_embeddings"]
    low = section["low_freq_factor"]
    high = section["high_freq_factor"]
    factor = section["factor"]
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.select(
        [wavelengths < original / high, wavelengths > original / low], [1.0, factor], between
    )


def ggml_frequency(pair, width, base, factor, original, fast, slow, strength):
    """Return the frequency of a pair, from `rope_yarn` and `ggml_rope_yarn_corr_dims`."""

    def dimension(revolutions):
        ratio = original / (revolutions * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(base))

    start = max(0.0, math.floor(dimension(fast)))
    end = min(width - 1.0, math.ceil(dimension(slow)))
    height = (pair - start) / max(0.001, end - start)
    mix = (1 - min(1.0, max(0.0, height))) * strength
    extrapolated = base ** (-2 * pair / width)
    return extrapolated / factor * (1 - mix) + extrapolated * mix


def permuted(rows, heads):
    """Return rows of q or k (heads · head_dim, …) in the order that the converter writes."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
