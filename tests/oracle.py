"""The mathematics, without a line of the library: angles in 200 bits, rotation in float64.

Nothing here imports rope_cpu; `rotate` picks pairs by index arithmetic of its own.
"""

import math
from functools import cache

import mpmath
import numpy as np

CONTEXT = mpmath.mp.clone()
CONTEXT.prec = 200


@cache
def _cos_sin(position, frequency):
    angle = CONTEXT.mpf(position) * CONTEXT.mpf(frequency)
    return float(CONTEXT.cos(angle)), float(CONTEXT.sin(angle))


def cos_sin(positions, inv_freq):
    """cos and sin of position·frequency, float64, positions.shape + (pairs,); one axis."""
    positions = np.asarray(positions)
    rows = [[_cos_sin(float(p), float(w)) for w in inv_freq] for p in positions.flat]
    table = np.array(rows).reshape(*positions.shape, len(inv_freq), 2)
    return table[..., 0], table[..., 1]


def cos_sin_axes(positions, inv_freq):
    """The same for several axes: positions (…, axes), inv_freq (axes, pairs)."""
    positions = np.asarray(positions, dtype=np.float64)
    flat = positions.reshape(-1, positions.shape[-1])
    rows = []
    for p in flat:
        angles = [
            sum(CONTEXT.mpf(a) * CONTEXT.mpf(w) for a, w in zip(p, column, strict=True))
            for column in inv_freq.T
        ]
        rows.append([(float(CONTEXT.cos(a)), float(CONTEXT.sin(a))) for a in angles])
    table = np.array(rows).reshape(*positions.shape[:-1], inv_freq.shape[1], 2)
    return table[..., 0], table[..., 1]


def pair_indices(pairs, interleaved, blocks=None):
    """Indices of the first and the second element of each pair."""
    if interleaved:
        return [2 * i for i in range(pairs)], [2 * i + 1 for i in range(pairs)]
    first, second, start = [], [], 0
    for width in blocks or [2 * pairs]:
        first += [start + i for i in range(width // 2)]
        second += [start + width // 2 + i for i in range(width // 2)]
        start += width
    return first, second


def rotate(x, cos, sin, interleaved=False, blocks=None):
    """Rotate (…, heads, head_dim) in float64; also return |x_a| + |x_b| of each pair.

    cos, sin: (…, pairs).
    """
    x = np.asarray(x).astype(np.float64)
    result, reach = x.copy(), np.zeros_like(x)
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = pair_indices(cos.shape[-1], interleaved, blocks)
    a, b = x[..., first], x[..., second]
    result[..., first] = a * cos - b * sin
    result[..., second] = b * cos + a * sin
    reach[..., first] = reach[..., second] = np.abs(a) + np.abs(b)
    return result, reach


def inv_freq(dim, base=10000.0):
    return base ** (-np.arange(0, dim, 2) / dim)


def bound(exact, reach, dtype, factor=1.0):
    """½ ulp of the dtype + 3·u·A·(|x_a| + |x_b|), from the parameters of the formats.

    Below the smallest normal number of the computation, u is relative to that number.
    """
    bits, least = {
        "float32": (24, -126),
        "float64": (53, -1022),
        "float16": (11, -14),
        "bfloat16": (8, -126),
    }[str(dtype)]
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 1e-300))), least)
    half_ulp = 0.5 * 2.0 ** (exponent - (bits - 1))
    if str(dtype) == "bfloat16":  # results below the smallest normal number are written as zero
        half_ulp = np.where(np.abs(exact) < 2.0**-126, 2.0**-126, half_ulp)
    unit, smallest = (2.0**-53, 2.0**-1022) if str(dtype) == "float64" else (2.0**-24, 2.0**-126)
    return half_ulp + 3 * unit * np.maximum(factor * reach, smallest)


def rounded(values, dtype):
    """Return float64 values, zero or at least 2^-126, rounded once to float16 or bfloat16."""
    if np.dtype(dtype) == np.float16:
        return values.astype(dtype)
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 2.0**8) / 2.0**8, exponent).astype(dtype)


# Where batch, token, head and element stand in each layout.
ORDER = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}


def to_layout(x, layout):
    """(batch, seq, heads, dim) as a contiguous array of the layout; thd takes a batch of one."""
    return x[0].copy() if layout == "thd" else np.ascontiguousarray(x.transpose(ORDER[layout]))


def from_layout(x, layout):
    return x[None] if layout == "thd" else x.transpose(np.argsort(ORDER[layout]))


def draw(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def expected(rope, x, positions, inverse=False):
    """Return the exact rotation by a rotary embedding of one axis, and its allowed error.

    x: (batch, seq, heads, head_dim).
    """
    cos, sin = cos_sin(positions, rope.inv_freq)
    factor = 1 / rope.attention_factor if inverse else rope.attention_factor
    exact, reach = rotate(
        x, factor * cos, (-factor if inverse else factor) * sin, rope.interleaved, rope.blocks
    )
    exact[..., rope.rotary_dim :] = x[..., rope.rotary_dim :].astype(np.float64)
    return exact, bound(exact, reach, x.dtype, factor)


def assert_rotated(result, rope, x, positions, inverse=False):
    exact, allowed = expected(rope, x, positions, inverse)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    assert (np.abs(result.astype(np.float64) - exact) <= allowed).all()
    tail = slice(rope.rotary_dim, None)
    assert result[..., tail].tobytes() == np.ascontiguousarray(x[..., tail]).tobytes()


def expm(matrix):
    """Return the exponential of a matrix, in long doubles.

    It squares Taylor's series of a small part. For antisymmetric matrices of a few radians,
    scipy's result errs by some hundred roundings.
    """
    squarings = max(0, math.ceil(math.log2(max(np.abs(matrix).sum(axis=1).max(), 1e-300))) + 1)
    part = np.asarray(matrix, np.longdouble) / 2**squarings  # of norm 1/2 at most
    one = np.eye(len(part), dtype=np.longdouble)
    result = one
    for term in range(24, 0, -1):  # (1/2)^25 / 25! is far below a rounding
        result = one + part @ result / term
    for _ in range(squarings):
        result = result @ result
    return result.astype(np.float64)
