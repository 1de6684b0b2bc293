"""Cos and sin in integers, for many large positions; nothing here imports rope_cpu.

An angle p·ω is reduced in integers: its revolutions p·ω/2π, modulo 1, are exact to 2^-128. So any
position up to 2^53 and any frequency up to 2^40 will do, and a value costs microseconds, where
`oracle.cos_sin` needs mpmath.
"""

from __future__ import annotations

import mpmath
import numpy as np
import oracle

_CONTEXT = mpmath.mp.clone()
_CONTEXT.prec = 500
_BITS = 420
_REVOLUTIONS = int(
    _CONTEXT.floor(_CONTEXT.ldexp(1 / (2 * _CONTEXT.pi), _BITS))
)  # 1/2π in units of 2^-420
_UNITS = 128  # revolutions are integers of 2^-128
_QUARTER = 1 << (_UNITS - 2)

# The rounding to float64 here, in units of 2^-53·A·(|x_a| + |x_b|): 1.7 for cos and sin (the angle
# is an eighth of a revolution at most and rounded twice, and the library's half), 1 for each of two
# products, and ½ for their sum.
OWN_ROUNDINGS = 4.0


def _integer(number):
    """Return (m, e) of a float64: m·2^e, m an integer."""
    fraction, exponent = np.frexp(number)
    return int(fraction * 2.0**53), int(exponent) - 53


def cos_sin(positions, inv_freq):
    """Return cos and sin (…, pairs) of Σ position·frequency.

    positions: (…, axes). inv_freq: (axes, pairs).
    """
    positions = np.asarray(positions, np.float64)
    columns = [[_integer(w) for w in row] for row in np.asarray(inv_freq, np.float64)]
    quarters, rests = [], []
    for token in positions.reshape(-1, positions.shape[-1]):
        coordinates = [_integer(p) for p in token]
        for pair in range(len(columns[0])):
            turned = 0
            for (p, p_exponent), column in zip(coordinates, columns, strict=True):
                w, w_exponent = column[pair]
                turned += p * w * _REVOLUTIONS >> (_BITS - _UNITS - p_exponent - w_exponent)
            quarter = (turned + _QUARTER // 2) // _QUARTER
            quarters.append(quarter % 4)
            rests.append(float(turned - quarter * _QUARTER))
    shape = (*positions.shape[:-1], len(columns[0]))
    angle = 2 * np.pi * np.ldexp(np.array(rests).reshape(shape), -_UNITS)
    quarter = np.array(quarters, int).reshape(shape)
    c, s = np.cos(angle), np.sin(angle)
    return np.choose(quarter, [c, -s, -c, s]), np.choose(quarter, [s, c, -s, -c])


def cos_sin_in_float32(positions, inv_freq):
    """Return the same for one axis with float32 positions, frequencies and products.

    Transformers computes angles like this.
    """
    product = np.asarray(positions, np.float64).astype(np.float32) * np.asarray(
        inv_freq, np.float64
    ).astype(np.float32)
    cos, sin = cos_sin(product.reshape(-1, 1), [[1.0]])
    return tuple(
        table.astype(np.float32).astype(np.float64).reshape(product.shape) for table in (cos, sin)
    )


def rotate(x, cos, sin, interleaved, blocks):
    """Rotate x (batch, seq, heads, head_dim), also values whose products overflow, in float64.

    cos, sin: (batch or 1, seq, heads or a divisor, pairs).
    """
    cos, sin = (np.repeat(table, x.shape[2] // table.shape[2], axis=2) for table in (cos, sin))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        rotated = oracle.rotate(x[..., None, :], cos, sin, interleaved, blocks)
    return tuple(y[..., 0, :] for y in rotated)
