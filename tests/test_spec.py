import oracle
import pytest

from rope_cpu import RotaryEmbedding


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"interleaved": True},
        {"head_dim": 40},
        {"head_dim": 40, "interleaved": True},
        {"blocks": 3},
        {"blocks": (2, 12, 4, 6), "head_dim": 27},
    ],
)
def test_the_elements_of_pairs(kind):
    spec = RotaryEmbedding.from_inv_freq([1.0] * 12, **kind).spec
    found = tuple(elements.tolist() for elements in spec.pair_elements())
    assert found == oracle.pair_indices(12, spec.interleaved, spec.blocks)
