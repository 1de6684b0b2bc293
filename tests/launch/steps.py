"""Norm, rounding to a cache's dtype and quantisation as steps of plain NumPy.

Nothing here imports rope_cpu. Bits equal those of the library because the order of operations is
that of the docstring of `rope_cpu/kernels/head_vectors.py`.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import oracle

DTYPES = {name: np.dtype(name) for name in ("float32", "float16", "int8")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}
INPUT_DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = ("float32", "float16", "bfloat16", "int8")

UNIT = 2.0**-24  # half of float32's distance from 1 to the next number


class Norm(NamedTuple):
    """The arguments of an RMS norm. weight: (width,), or None."""

    weight: Any
    eps: float = 1e-6
    offset: float = 0.0


def joined(lanes):
    """Return the sum of 2^n lanes, halves joined until one lane is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def added_by_lanes(squares, lanes):
    """Return lane sums of as many squares as there are whole vectors of."""
    total = np.zeros((*squares.shape[:-1], lanes), np.float32)
    for start in range(0, squares.shape[-1] - lanes + 1, lanes):
        total = total + squares[..., start : start + lanes]
    return total


def sum_of_squares(x):
    """Return the sum of squares of rows of float32: by 64 lanes, then by 8, then one by one."""
    squares = x * x
    by_64 = squares.shape[-1] // 64 * 64
    by_8 = squares.shape[-1] // 8 * 8
    few = squares[..., by_64:by_8]
    total = joined(added_by_lanes(squares, 64)) + joined(added_by_lanes(few, 8))
    for i in range(by_8, squares.shape[-1]):
        total = total + squares[..., i]
    return total


def normalised(x, norm):
    """Return rows of float32 after their norm, if there is one."""
    if norm is None:
        return x
    with np.errstate(all="ignore"):
        mean = sum_of_squares(x) / np.float32(x.shape[-1])
        factor = np.float32(1) / np.sqrt(mean + np.float32(norm.eps))
        scaled = x * factor[..., None]
        if norm.weight is None:
            return scaled
        return scaled * (np.asarray(norm.weight).astype(np.float32) + np.float32(norm.offset))


def stored(x, dtype):
    """Return float32 rounded once to a dtype of floats; bfloat16 has no subnormal results."""
    if dtype == DTYPES["bfloat16"]:
        x = np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(dtype)


def quantised(x):
    """Return rows of float32 as int8, and their scales max|x| / 127."""
    largest = np.abs(x).max(axis=-1)
    finite = np.isfinite(largest)
    counted = finite & (largest >= np.float32(2.0**-120))
    with np.errstate(all="ignore"):
        scale = np.where(counted, largest / np.float32(127), np.float32(0))
        steps = np.where(counted, np.float32(127) / largest, np.float32(0))
        values = np.where(counted[..., None], np.rint(x * steps[..., None]), 0)
    return values.astype(np.int8), np.where(finite, scale, np.float32(np.nan))


def exactly_normalised(x, norm):
    """Return rows after their norm in float64, and how many roundings float32 is off at most."""
    x = np.asarray(x).astype(np.float64)
    if norm is None:
        return x, 0.0
    width = x.shape[-1]
    mean = np.square(x).sum(axis=-1, keepdims=True) / width
    y = x / np.sqrt(mean + norm.eps)
    if norm.weight is not None:
        y = y * (np.asarray(norm.weight).astype(np.float32).astype(np.float64) + norm.offset)
    # A square and its sums: in a lane, of 64 or 8 lanes, of both, with up to seven single elements.
    in_sum = 1 + max(width // 64 + 6, 7 + 3) + 1 + 7
    # Then / width and + eps (rounded itself), of which the root halves the error; the root, 1 / ·,
    # x · factor, offset + weight, and the product with it.
    return y, (in_sum + 3) / 2 + 5


def allowed_error(y, reach, roundings, dtype, factor=1.0):
    """Return the allowed error of a stored result whose norm is so many roundings off."""
    return oracle.bound(y, reach, dtype, factor) + 1.01 * roundings * UNIT * factor * reach


def pickled(value):
    """Return a value after pickling."""
    return pickle.loads(pickle.dumps(value))


def assert_same_bits(result, expected, text=""):
    """Raise unless two arrays have the same bits; NaN may have any."""
    assert result.dtype == expected.dtype, text
    assert result.shape == expected.shape, text
    integers = np.dtype(f"u{result.itemsize}")
    same = np.ascontiguousarray(result).view(integers) == np.ascontiguousarray(expected).view(
        integers
    )
    if result.dtype != np.int8:
        same |= np.isnan(result) & np.isnan(expected)
    assert same.all(), f"{text}: {(~same).sum()} of {same.size} elements differ"
