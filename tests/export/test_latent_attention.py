"""Latent attention (DeepSeek-V2 and V3) by export_attention: expanded, and absorbed."""

import numpy as np
import oracle
import pytest
from attention_oracle import attention, half_ulp
from attention_runs import SEPARATE

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation import session as runtime

BATCH, TOKENS = 2, 11
HEADS, NOPE, ROTATED, VALUE, RANK = 4, 32, 16, 16, 48
SCALE = 1.3 * (NOPE + ROTATED) ** -0.5  # times the square of YaRN's mscale
OPTIONS = {"num_heads": HEADS, "layout": "bshd", "scale": SCALE, "max_positions": 32}
FREQUENCIES = RotaryEmbedding(ROTATED, rope_theta=500.0, interleaved=True)


@pytest.fixture
def parts(rng):
    """Return the parts of queries and keys, and the weights from latent vectors to keys, values."""
    sizes = {
        "q_nope": (BATCH, TOKENS, HEADS, NOPE),
        "q_rotated": (BATCH, TOKENS, HEADS, ROTATED),
        "k_rotated": (BATCH, TOKENS, 1, ROTATED),
        "latent": (BATCH, TOKENS, RANK),
        "to_keys": (HEADS, NOPE, RANK),
        "to_values": (HEADS, VALUE, RANK),
    }
    return {
        name: rng.standard_normal(size).astype(np.float32).astype(np.float64)
        / (RANK**0.5 if name.startswith("to_") else 1)
        for name, size in sizes.items()
    }


def from_definition(parts):
    """Return latent attention (batch, tokens, heads, width), in float64."""
    ids = np.broadcast_to(np.arange(TOKENS), (BATCH, TOKENS))
    cos, sin = oracle.cos_sin_axes(ids[..., None], FREQUENCIES.inv_freq[None])
    q, k = (
        oracle.rotate(parts[name], cos, sin, True, [ROTATED])[0]
        for name in ("q_rotated", "k_rotated")
    )
    keys = np.einsum("hnr,btr->bthn", parts["to_keys"], parts["latent"])
    values = np.einsum("hvr,btr->bthv", parts["to_values"], parts["latent"])
    scores = np.einsum("bshn,bthn->bhst", parts["q_nope"], keys)
    scores += np.einsum("bshr,btkr->bhst", q, k)
    scores = np.where(np.tri(TOKENS, dtype=bool), SCALE * scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhst,bthv->bshv", weights, values)


def rotary(width):
    """Return the rotation of the first elements of a head vector."""
    return RotaryEmbedding.from_inv_freq(FREQUENCIES.inv_freq, head_dim=width, interleaved=True)


def run(rope, tensors, target, **options):
    """Run a prefill and single steps over a shared cache."""
    model = export.export_attention(rope, **(OPTIONS | options), target=target, cache="shared")
    session = runtime.open_session(model, 1)
    singles = [x.astype(np.float32) for x in tensors]
    q, k, v = singles
    cache = {
        "past_key": np.zeros((BATCH, k.shape[2], TOKENS, k.shape[3]), np.float32),
        "past_value": np.zeros((BATCH, v.shape[2], TOKENS, v.shape[3]), np.float32),
    }
    results = []
    done = 0
    for count in (7, 1, 1, 1, 1):
        span = np.s_[:, done : done + count]
        feeds = {
            name: np.ascontiguousarray(x[span]) for name, x in zip("qkv", singles, strict=True)
        }
        feeds |= cache | {"past_lengths": np.full(BATCH, done)}
        result = np.zeros((BATCH, count, q.shape[2], v.shape[3]), np.float32)
        export.bind(session, feeds, {"attention": result})()
        results.append(result)
        done += count
    return np.concatenate(results, axis=1)


def rounded(x):
    """Return an array and the error of its rounding to float32."""
    return x, half_ulp(x, "float32")


def known(rope, tensors):
    """Return the attention of tensors that are rounded to float32, with a bound on its error."""
    ids = np.broadcast_to(np.arange(TOKENS), (BATCH, TOKENS))
    return attention(rope, *(rounded(x) for x in tensors), ids, "float32", scale=SCALE)


@pytest.mark.parametrize("target", SEPARATE)
def test_expanded(parts, target):
    """Keys and values of every head, as the weights give them."""
    keys = np.einsum("hnr,btr->bthn", parts["to_keys"], parts["latent"])
    values = np.einsum("hvr,btr->bthv", parts["to_values"], parts["latent"])
    k_rotated = np.broadcast_to(parts["k_rotated"], (BATCH, TOKENS, HEADS, ROTATED))
    q = np.concatenate([parts["q_rotated"], parts["q_nope"]], axis=-1)
    k = np.concatenate([k_rotated, keys], axis=-1)
    rope = rotary(ROTATED + NOPE)
    result = run(rope, (q, k, values), target, v_head_dim=VALUE)
    exact = from_definition(parts)
    again, bound = known(rope, (q, k, values))
    np.testing.assert_allclose(again, exact, atol=1e-13)
    difference = np.abs(result - exact)
    print(f"{target}, expanded: {difference.max():.1e}")
    assert (difference <= bound + half_ulp(exact, "float32")).all()


def test_absorbed(parts, target):
    """One key head, the latent vector: its projections move to the queries and to the result."""
    absorbed = np.einsum("bshn,hnr->bshr", parts["q_nope"], parts["to_keys"])
    latent = parts["latent"][:, :, None]
    q = np.concatenate([parts["q_rotated"], absorbed], axis=-1)
    k = np.concatenate([parts["k_rotated"], latent], axis=-1)
    rope = rotary(ROTATED + RANK)
    v = latent
    if target == "ort":  # its values are as wide as its keys
        v = np.concatenate([latent, np.zeros_like(parts["k_rotated"])], axis=-1)
    result = run(rope, (q, k, v), target, num_kv_heads=1, v_head_dim=v.shape[-1])[..., :RANK]
    exact = from_definition(parts)
    y, bound = known(rope, (q, k, latent))
    difference = np.abs(np.einsum("hvr,bshr->bshv", parts["to_values"], result) - exact)
    print(f"{target}, absorbed: {difference.max():.1e}")
    bound = np.einsum("hvr,bshr->bshv", np.abs(parts["to_values"]), bound + half_ulp(y, "float32"))
    assert (difference <= bound).all()
