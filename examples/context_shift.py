"""The error of cached keys after many shifts, by dtype.

A server that drops the oldest tokens of a full context moves the keys of the others, and each move
rounds them once. Here random keys are moved again and again in place, and compared with the keys
rotated once, in float64, by the sum of all moves.

    python examples/context_shift.py
    python examples/context_shift.py --delta -1 --shifts 1 10 100
"""

import argparse

import ml_dtypes
import numpy as np

import rope_cpu

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PAGE_SIZE = 16
KV_HEADS = 8
HEAD_DIM = 128


def make_cache(keys, dtype):
    """Return a paged cache that holds keys (tokens, heads, head_dim), rounded to a dtype."""
    pages = keys.reshape(-1, PAGE_SIZE, KV_HEADS, HEAD_DIM).astype(dtype)
    return rope_cpu.KVCache(pages, np.zeros_like(pages))


def moved_in_float64(keys, inv_freq, delta):
    """Rotate half-split pairs by delta positions, in float64."""
    first, second = np.split(keys.astype(np.float64), 2, axis=-1)
    cos = np.cos(delta * inv_freq)
    sin = np.sin(delta * inv_freq)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def errors_after_shifts(dtype, delta, counts, tokens):
    """Return (largest error, its root mean square) after each number of shifts, ascending."""
    rope = rope_cpu.RotaryEmbedding(HEAD_DIM, rope_theta=500000.0)
    random = np.random.default_rng(0)
    cache = make_cache(random.standard_normal((tokens, KV_HEADS, HEAD_DIM)), dtype)
    before = cache.key.copy()
    moves = rope.shift_plan(delta, layout="thd")
    slots = np.arange(tokens)
    found = []
    done = 0
    for count in counts:
        for _ in range(count - done):
            moves.rotate_cached(cache, slots)
        done = count
        exact = moved_in_float64(before, rope.inv_freq, delta * count)
        difference = np.abs(cache.key.astype(np.float64) - exact)
        found.append((difference.max(), np.sqrt(np.mean(difference**2))))
    return found


def main(arguments=None):
    """Print a table: a row for each dtype, the largest and the mean error after each number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delta", type=int, default=-256, help="positions of one shift")
    parser.add_argument("--shifts", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--tokens", type=int, default=1024, help="a multiple of 16")
    options = parser.parse_args(arguments)
    counts = sorted(options.shifts)
    print(f"{options.tokens} keys of {KV_HEADS} heads of {HEAD_DIM}, moved by {options.delta}")
    print("largest error (root mean square) after a number of shifts, elements of variance 1")
    print("dtype     " + "".join(f"{count:>20}" for count in counts))
    for name, dtype in DTYPES.items():
        found = errors_after_shifts(dtype, options.delta, counts, options.tokens)
        cells = [f"{largest:.1e} ({mean:.1e})" for largest, mean in found]
        print(f"{name:<10}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
