"""Rotated attention from its definition, one query at a time, with a bound on its rounding errors.

Nothing here imports rope_cpu. Rotary embeddings are passed in, and only their attributes are read.

With u the unit roundoff of the arithmetic, a sum of n products is off by at most n·u·Σ|a·b|.
A score that is off by δ changes each weight of a softmax by at most a factor of e^2δ.
"""

import itertools

import numpy as np
import oracle

# Twice 2^-53 for float64, because the results compared with it are float64 too.
UNITS = {"float32": 2.0**-24, "float64": 2.0**-52, "float16": 2.0**-24, "bfloat16": 2.0**-24}
# Roundings, in u. SCALE: the scaling of queries and keys. SOFTCAP: its quotient, product and tanh,
# which errs by 5.4 in onnxruntime. SOFTMAX: exp above and below the line, 1.7 each, and the
# quotient. NORM: mean, epsilon, root, quotient and weight.
SCALE, SOFTCAP, SOFTMAX, NORM = 4, 12, 8, 6


def half_ulp(x, dtype):
    return oracle.bound(x, 0, dtype)


def exactly(x):
    return x.astype(np.float64), np.zeros(x.shape)


def projected(x, weight, bias, dtype):
    """Return x · Wᵀ + b with an error bound, of an exact x or of a pair (x, its error bound)."""
    (x, off), u = x if isinstance(x, tuple) else exactly(x), UNITS[str(dtype)]
    y, reach = x @ weight.T + bias, np.abs(x) @ np.abs(weight).T
    return y, off @ np.abs(weight).T + u * (x.shape[-1] * reach + np.abs(y) + np.abs(bias))


def normed(x, weight, epsilon, dtype):
    """x / √(mean of x² + ε) · w of a pair."""
    (x, off), u = x, UNITS[str(dtype)]
    root = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    y = x / root * weight
    grown = (
        np.abs(weight)
        / root
        * (off + np.abs(x) * (np.abs(x) * off).mean(-1, keepdims=True) / root**2)
    )
    return y, grown + (x.shape[-1] / 2 + NORM) * u * np.abs(y)


def rotated(rope, x, ids, dtype):
    """Rotate (batch, seq, heads, head_dim), a pair; angles may be products in float64."""
    x, off = x if isinstance(x, tuple) else exactly(x)
    core, factor = "float64" if str(dtype) == "float64" else "float32", rope.attention_factor
    omega, ids = rope.spec.inv_freq[0, :, 0], ids[..., None] if rope.axes == 1 else ids
    cos, sin = oracle.cos_sin_axes(ids, omega)
    y, reach = oracle.rotate(x, factor * cos, factor * sin, rope.interleaved, rope.blocks)
    _, grown = oracle.rotate(off, cos, sin, rope.interleaved, rope.blocks)
    grown[..., rope.rotary_dim :] = off[..., rope.rotary_dim :]
    angle = np.abs(ids).max(initial=0) * np.abs(omega).sum(axis=0).max() * 2.0**-53 * rope.axes
    return y, oracle.bound(y, reach, core, factor) + factor * (grown + angle * reach)


def cached(x, dtype):
    """A pair rounded once more, to a dtype of half the size."""
    return x[0], x[1] + (half_ulp(x[0], dtype) if np.dtype(dtype).itemsize == 2 else 0)


def scored(q, keys, scale, softcap=None):
    """Return the scores of one query, (heads, keys), of (heads, width) and (keys, heads, width)."""
    scores = scale * np.einsum("hd,khd->hk", q, keys)
    return softcap * np.tanh(scores / softcap) if softcap else scores


def weighed(scores, sinks=None):
    """Return the softmax of scores (heads, keys), and the exponent of e of each weight.

    The weight of a score of -inf is 0, also where a head has no other. sinks: (heads,), each a
    score of every query of its head, without a value.
    """
    sinks = np.full((len(scores), 1), -np.inf) if sinks is None else np.asarray(sinks)[:, None]
    largest = np.maximum(scores.max(axis=1, keepdims=True), sinks)
    largest = np.where(largest > -np.inf, largest, 0)
    exponents = scores - largest
    weights = np.exp(exponents)
    total = weights.sum(axis=1, keepdims=True) + np.exp(sinks - largest)
    return weights / np.where(total > 0, total, 1), exponents


def summed(weights, values):
    """Return the sums of values (keys, heads, width) by weights (heads, keys): (heads, width)."""
    return np.einsum("hk,khd->hd", weights, values)


def attention(
    rope,
    q,
    k,
    v,
    ids,
    dtype,
    *,
    causal=True,
    window=None,
    softcap=None,
    scale=None,
    allowed=None,
    added=0.0,
    sinks=None,
    stored=None,
):
    """Return the attention of q, k and v, and its error before it is rounded.

    sinks: as in `weighed`. stored: function of a pair (batch, seq, heads, width) and of its name, k
    or v, that returns it as a cache holds it.

    q, k, v: arrays (batch, seq, heads, width), or pairs of an array and its error.
    """
    q = rotated(rope, q, ids, dtype)
    k = cached(rotated(rope, k, ids, dtype), dtype)
    v = cached(v, dtype) if isinstance(v, tuple) else exactly(v)
    if stored is not None:
        k = stored(k, "k")
        v = stored(v, "v")
    batch, seq, heads, width = q[0].shape
    k, v = ([np.repeat(x, heads // x.shape[2], axis=2) for x in pair] for pair in (k, v))
    scale = scale or width**-0.5
    result, bound = np.zeros((2, batch, seq, heads, v[0].shape[-1]))
    added = np.broadcast_to(added, (batch, heads, seq, seq)).astype(np.float64)
    allowed = np.broadcast_to(True if allowed is None else allowed, (batch, heads, seq, seq))
    for row, i in itertools.product(range(batch), range(seq)):
        near = [(j <= i or not causal) and (window is None or j > i - window) for j in range(seq)]
        seen = np.array(near) & allowed[row, :, i] & (added[row, :, i] > -np.inf)
        query, keys = [x[row, i] for x in q], [x[row] for x in k]
        capped = scored(query[0], keys[0], scale, softcap)
        scores = np.where(seen, capped + added[row, :, i], -np.inf)
        weights, exponents = weighed(scores, sinks)
        u = UNITS[str(dtype)]
        off = score_error(query, keys, scale, u)
        if softcap:
            off += SOFTCAP * u * np.abs(capped)
        off = np.where(seen, off + u * (np.abs(scores) + np.abs(exponents)), 0)
        count = seen.sum(axis=1, keepdims=True)
        change = np.expm1(2 * off.max(axis=1, keepdims=True)) + (2 * count + SOFTMAX) * u
        result[row, i] = summed(weights, v[0][row])
        bound[row, i] = change * summed(weights, np.abs(v[0][row]))
        bound[row, i] += (1 + change) * summed(weights, v[1][row])
    return result, bound


def score_error(q, keys, scale, u):
    """Return a bound on the errors of the products of one query, of pairs as for `scored`."""
    (q, q_off), (keys, keys_off) = (map(np.abs, pair) for pair in (q, keys))
    sums = scored(q, keys, (q.shape[1] + SCALE) * u) + scored(q + q_off, keys_off, 1)
    return scale * (sums + scored(q_off, keys, 1))
