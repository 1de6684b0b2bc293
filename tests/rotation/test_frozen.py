"""Frozen results of transformers' models for a fixed input: tests/peers without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy.tolerance import half_ulp, rotation_bound

FROZEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "rotated_by_transformers.json").read_text(
        encoding="utf-8"
    )
)


@pytest.mark.parametrize("name", FROZEN)
def test_rotated_values(name: str) -> None:
    entry = FROZEN[name]
    ids, expected = np.array(entry["ids"]), np.array(entry["rotated"]).reshape(-1, 64)
    x = ((np.arange(expected.size) * 7 % 33 - 16) / 16).astype(np.float32).reshape(1, 1, -1, 64)
    rope = RotaryEmbedding.from_config(
        entry["config"], layer_type=entry["layer_type"], angle_dtype="float32"
    )
    rope = rope.at_length(entry["length"])
    np.testing.assert_allclose(rope.inv_freq, entry["inv_freq"], rtol=1e-6)
    result = rope.rotate(x, ids, layout="bhsd")[0, 0].astype(np.float64)

    width, order = rope.rotary_dim, np.arange(rope.rotary_dim)
    if entry["halves_out"]:  # DeepSeek's code reads neighbours and writes halves
        expected = expected[:, np.arange(64).reshape(2, -1).T.reshape(-1)]
    partner = order ^ 1 if rope.interleaved else (order + width // 2) % width
    pair = order // 2 if rope.interleaved else order % (width // 2)
    x_a, x_b = x[0, 0][:, :width], x[0, 0][:, partner]
    # The last bits of a frequency may differ, and so may its angle: see test_rotated_values.py in
    # tests/peers.
    apart = np.abs(rope.inv_freq - entry["inv_freq"])
    angle = ids[:, None] * rope.inv_freq
    drift = (ids[:, None] * apart + np.where(apart > 0, 2 * half_ulp(angle, np.float32), 0))[
        :, pair
    ]
    bound = 2 * rotation_bound(expected[:, :width], x_a, x_b, rope.attention_factor, np.float32)
    bound += rope.attention_factor * drift * (np.abs(x_a) + np.abs(x_b))
    assert (np.abs(result[:, :width] - expected[:, :width]) <= bound).all()
    assert np.array_equal(result[:, width:], expected[:, width:])
