from dataclasses import replace

import numpy as np
import oracle
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.frequencies.spec import RopeSpec


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


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"head_dim": 16}, "`head_dim` is 16, but `inv_freq` rotates 24"),
        ({"head_dim": 24.0}, "`head_dim` is 24.0"),
        ({"blocks": (4,)}, "`blocks` is \\(4,\\)"),
        ({"blocks": (12, 12, 0)}, "`blocks` is 0"),
        ({"blocks": (9, 15)}, "`blocks` is \\(9, 15\\)"),
        ({"inv_freq": np.ones((1, 12))}, "`inv_freq` has shape \\(1, 12\\)"),
        ({"inv_freq": np.ones((0, 1, 1, 12))}, "`inv_freq` has shape \\(0, 1, 1, 12\\)"),
        ({"inv_freq": np.full((1, 1, 1, 12), np.nan)}, "`inv_freq` holds nan"),
        ({"inv_freq": np.full((1, 1, 1, 12), 2.0**41)}, "`inv_freq` holds 2199023255552.0"),
        ({"inv_freq": np.ones((2, 1, 1, 12))}, "`attention_factor` has shape \\(1,\\)"),
        ({"attention_factor": np.array(1.0)}, "`attention_factor` has shape \\(\\)"),
        ({"attention_factor": np.array([0.0])}, "`attention_factor` is 0.0; it must be finite and above 0"),
        ({"attention_factor": np.array([2.0**127])}, "`attention_factor` is .*; it must be from 2"),
        ({"attention_factor": np.array([np.nan])}, "`attention_factor` is nan; it must be finite"),
        ({"interleaved": 1}, "`interleaved` is 1"),
        ({"angle_dtype": "float16"}, "`angle_dtype` is 'float16'"),
        ({"shared_id": "no"}, "`shared_id` is 'no'"),
        ({"lengths": (1, 2, 3)}, "`lengths` is \\(1, 2, 3\\)"),
    ],
)
def test_a_spec_fits_itself_after_replace(fields, named):
    """Kernels go by it, and would write beyond the arrays that do not fit."""
    spec = RotaryEmbedding.from_inv_freq([1.0] * 12).spec
    with pytest.raises((TypeError, ValueError), match=f"^{named}"):
        replace(spec, **fields)


def test_a_spec_that_does_not_check_itself_is_refused():
    class Unchecked(RopeSpec):
        def __post_init__(self):
            pass

    spec = RotaryEmbedding.from_inv_freq([1.0] * 12).spec
    fields = {name: getattr(spec, name) for name in RopeSpec.__dataclass_fields__}
    with pytest.raises(TypeError, match=r"`spec` is .*; it must be a RopeSpec"):
        RotaryEmbedding.from_spec(Unchecked(**{**fields, "head_dim": 2}))


def test_a_replaced_spec_stands_for_what_its_fields_say():
    spec = RotaryEmbedding.from_inv_freq([1.0] * 12).spec
    assert replace(spec, blocks=[8, 16], interleaved=np.True_) == replace(spec, blocks=(8, 16), interleaved=True)
    assert hash(replace(spec, blocks=np.array([8, 16]))) == hash(replace(spec, blocks=(8, 16)))
