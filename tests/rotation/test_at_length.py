"""RotaryEmbedding.at_length; what lengths do to frequencies is tested by rope type."""

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding


def test_a_length_plays_no_part_where_frequencies_are_fixed():
    rope = RotaryEmbedding.from_inv_freq([1.0, 0.1])
    assert rope.at_length(5) is rope
    assert rope.at_length([5, 6]) is rope


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)
X = np.zeros((2, 3, 4, 6), np.float32)
LENGTHS = RotaryEmbedding(
    6, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}
)
LENGTHS = LENGTHS.at_length([3, 9, 12])

REFUSED = [
    (lambda: ROPE.at_length("12"), TypeError, "`seq_len` is '12'"),
    (lambda: ROPE.at_length(0), ValueError, "`seq_len` is 0; it must be at least 1"),
    (lambda: ROPE.at_length(1.5), TypeError, "`seq_len` is 1.5; it must be an integer"),
    (lambda: ROPE.at_length([]), ValueError, "`seq_len` is empty"),
    (lambda: LENGTHS.rotate(X), ValueError, "`x` has batch 2 .*lengths are given for 3"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
