"""The error of cached keys after many shifts, by dtype.

A server that drops the oldest tokens of a full context moves the keys of the others, and each move
rounds them once. Here random keys are moved again and again in place, and compared with the keys
rotated once, in float64, by the sum of all moves.

Usage: python examples/context_shift.py [--delta N] [--shifts N …] [--tokens N]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from rope_cpu import KVCache, RotaryEmbedding
from rope_cpu.array_types import Array, Float64

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PAGE_SIZE = 16
KV_HEADS = 8
HEAD_DIM = 128


def make_cache(keys: Array, dtype: type) -> KVCache:
    """Return a paged cache of a dtype that holds keys (tokens, heads, head_dim)."""
    pages = keys.reshape(-1, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    cache = KVCache.zeros(*pages.shape, dtype=dtype)
    cache.key[...] = pages
    return cache


def rotated_in_float64(keys: Array, inv_freq: Float64, position: int) -> Float64:
    """Rotate half-split pairs in float64."""
    first, second = np.split(keys.astype(np.float64), 2, axis=-1)
    cos = np.cos(position * inv_freq)
    sin = np.sin(position * inv_freq)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def errors_after_shifts(
    dtype: type, delta: int, counts: Sequence[int], tokens: int
) -> list[tuple[float, float]]:
    """Return the largest error and its root mean square after each number of shifts.

    delta: positions of one shift. counts: numbers of shifts, ascending.
    """
    rope = RotaryEmbedding(HEAD_DIM, rope_theta=500000.0)
    random = np.random.default_rng(0)
    cache = make_cache(random.standard_normal((tokens, KV_HEADS, HEAD_DIM)), dtype)
    before = cache.key.copy()
    moves = rope.shift_plan(delta, layout="thd")
    slots = np.arange(tokens)
    errors = []
    done = 0
    for count in counts:
        for _ in range(count - done):
            moves.rotate_cached(cache, slots)
        done = count
        exact = rotated_in_float64(before, rope.inv_freq, delta * count)
        error = np.abs(cache.key.astype(np.float64) - exact)
        errors.append((float(error.max()), float(np.sqrt(np.mean(error**2)))))
    return errors


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table with a row for each dtype."""
    parser = argparse.ArgumentParser(description="The error of cached keys after many shifts.")
    parser.add_argument("--delta", type=int, default=-256, help="positions of one shift")
    parser.add_argument("--shifts", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--tokens", type=int, default=1024, help="a multiple of 16")
    options = parser.parse_args(arguments)
    counts = sorted(options.shifts)
    print(f"{options.tokens} keys of {KV_HEADS} heads of {HEAD_DIM}, moved by {options.delta}")
    print("root mean square of the error (largest) after shifts, of elements of variance 1")
    print("dtype     " + "".join(f"{count:>20}" for count in counts))
    for name, dtype in DTYPES.items():
        errors = errors_after_shifts(dtype, options.delta, counts, options.tokens)
        cells = [f"{mean:.1e} ({largest:.1e})" for largest, mean in errors]
        print(f"{name:<10}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
