"""A sequence that grows past the original length of longrope: its cached keys are rotated on."""

import numpy as np
import pytest
from attention_oracle import attention, half_ulp

import rope_cpu
from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation import session as runtime

ORIGINAL, TOKENS, CAPACITY = 12, 16, 24
ROPE = RotaryEmbedding(
    32,
    scaling={
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + 0.5 * i for i in range(16)],
        "original_max_position_embeddings": ORIGINAL,
    },
    max_position_embeddings=64,
)
SHORT, LONG = ROPE.at_length(ORIGINAL), ROPE.at_length(ORIGINAL + 1)


@pytest.mark.parametrize("rerotated", [True, False])
def test_keys_in_a_shared_cache_are_rotated_on(target, rerotated, rng):
    tensors = [rng.standard_normal((1, TOKENS, h, 32)).astype(np.float32) for h in (4, 2, 2)]
    buffers = {
        name: np.zeros((1, 2, CAPACITY, 32), np.float32) for name in ("past_key", "past_value")
    }
    sessions = [
        runtime.open_session(
            export.export_attention(
                rope,
                num_heads=4,
                num_kv_heads=2,
                target=target,
                cache="shared",
                layout="bshd",
                max_positions=CAPACITY,
            ),
            1,
        )
        for rope in (SHORT, LONG)
    ]

    def step(session, start, stop):
        feeds = {name: x[:, start:stop].copy() for name, x in zip("qkv", tensors, strict=True)}
        feeds |= buffers | {"past_lengths": np.array([start])}
        result = np.empty((1, stop - start, 4, 32), np.float32)
        export.bind(session, feeds, {"attention": result})()
        return result

    step(sessions[0], 0, ORIGINAL)
    if rerotated:
        cached = np.arange(ORIGINAL)
        cache = rope_cpu.KVCache(
            *(buffers[name].transpose(0, 2, 1, 3) for name in ("past_key", "past_value"))
        )
        LONG.rerotate_plan(SHORT, cached, layout="thd").rotate_cached(cache, cached)
    results = [step(sessions[1], place, place + 1) for place in range(ORIGINAL, TOKENS)]

    def rotated_twice(pair, name):
        """The second rotation mixes the errors of the two elements of a pair, and adds its own."""
        exact, error = pair
        return exact, 4 * error if name == "k" else error

    ids = np.arange(TOKENS)[None]
    exact, bound = attention(LONG, *tensors, ids, "float32", stored=rotated_twice)
    exact, bound = exact[:, ORIGINAL:], bound[:, ORIGINAL:]
    difference = np.abs(np.concatenate(results, axis=1) - exact)
    assert (difference <= bound + half_ulp(exact, "float32")).all() == rerotated
