from dataclasses import replace

import numpy as np
import oracle
import pytest
from refusals import assert_refused

from rope_cpu import RotaryEmbedding as R
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
    spec = R.from_inv_freq([1.0] * 12, **kind).spec
    found = tuple(elements.tolist() for elements in spec.pair_elements())
    assert found == oracle.pair_indices(12, spec.interleaved, spec.blocks)


WRONG_FIELDS = [
    ("head_dim", {"head_dim": 16}),
    ("head_dim", {"head_dim": 24.0}),
    ("blocks", {"blocks": (4,)}),
    ("blocks", {"blocks": (12, 12, 0)}),
    ("blocks", {"blocks": (9, 15)}),
    ("inv_freq", {"inv_freq": np.ones((1, 12))}),
    ("inv_freq", {"inv_freq": np.ones((0, 1, 1, 12))}),
    ("inv_freq", {"inv_freq": np.full((1, 1, 1, 12), np.nan)}),
    ("inv_freq", {"inv_freq": np.full((1, 1, 1, 12), 2.0**41)}),
    ("attention_factor", {"inv_freq": np.ones((2, 1, 1, 12))}),
    ("attention_factor", {"attention_factor": np.array(1.0)}),
    ("attention_factor", {"attention_factor": np.array([0.0])}),
    ("attention_factor", {"attention_factor": np.array([2.0**127])}),
    ("attention_factor", {"attention_factor": np.array([np.nan])}),
    ("interleaved", {"interleaved": 1}),
    ("angle_dtype", {"angle_dtype": "float16"}),
    ("shared_id", {"shared_id": "no"}),
    ("lengths", {"lengths": (1, 2, 3)}),
]


@pytest.mark.parametrize(("argument", "fields"), WRONG_FIELDS)
def test_a_spec_fits_itself_after_replace(argument, fields):
    """Kernels go by it, and would write beyond the arrays that do not fit."""
    spec = R.from_inv_freq([1.0] * 12).spec
    assert_refused(lambda: replace(spec, **fields), (TypeError, ValueError), argument)


def test_a_spec_that_does_not_check_itself_is_refused():
    class Unchecked(RopeSpec):
        def __post_init__(self):
            pass

    spec = R.from_inv_freq([1.0] * 12).spec
    fields = {name: getattr(spec, name) for name in RopeSpec.__dataclass_fields__}
    with pytest.raises(TypeError, match=r"`spec` is .*; it must be a RopeSpec"):
        R.from_spec(Unchecked(**{**fields, "head_dim": 2}))


def test_a_replaced_spec_stands_for_what_its_fields_say():
    spec = R.from_inv_freq([1.0] * 12).spec
    assert replace(spec, blocks=[8, 16], interleaved=np.True_) == replace(
        spec, blocks=(8, 16), interleaved=True
    )
    assert hash(replace(spec, blocks=np.array([8, 16]))) == hash(replace(spec, blocks=(8, 16)))


SPEC = R.from_inv_freq([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).spec
DYNAMIC = R(6, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4})
CHANGES = {
    "inv_freq": 2 * SPEC.inv_freq,
    "attention_factor": [2.0],
    "head_dim": 7,
    "blocks": (2, 4),
    "interleaved": True,
    "rope_type": "linear",
    "angle_dtype": "float32",
    "pair_axis": (0, 1, 1),
    "shared_id": True,
    "length_rule": DYNAMIC.spec.length_rule,
    "lengths": (5,),
}


@pytest.mark.parametrize("field", CHANGES)
def test_equal_specs_agree_in_every_field(field):
    """The direction is in the frequencies."""
    assert replace(SPEC) == SPEC
    assert replace(SPEC, **{field: CHANGES[field]}) != SPEC


def test_the_fastest_frequency_is_accepted():
    assert R.from_inv_freq([2.0**40, -(2.0**40)]).inv_freq.tolist() == [2.0**40, -(2.0**40)]


REFUSED = [
    (lambda: R.from_inv_freq(np.zeros((1, 1, 1, 1))), ValueError, "inv_freq"),
    (lambda: R.from_inv_freq([]), ValueError, "inv_freq"),
    (lambda: R.from_inv_freq([1, np.nan]), ValueError, "inv_freq"),
    (lambda: R.from_inv_freq([1j]), TypeError, "inv_freq"),
    (lambda: R.from_inv_freq([1, 2], head_dim=3), ValueError, "head_dim"),
    (lambda: R.from_inv_freq([1], head_dim=2.0), TypeError, "head_dim"),
    (lambda: R.from_inv_freq([1], attention_factor=0), ValueError, "attention_factor"),
    (lambda: R.from_inv_freq([1, 2, 3], blocks=2), ValueError, "blocks"),
    (lambda: R.from_inv_freq([1, 2, 3], blocks=(3, 3)), ValueError, "blocks"),
    (lambda: R.from_inv_freq([1, 2, 3], blocks=(2, 2)), ValueError, "blocks"),
    (lambda: R.from_inv_freq([1], interleaved="no"), TypeError, "interleaved"),
    (lambda: R.from_inv_freq([1.0, -(2.0**41)]), ValueError, "inv_freq"),
    (lambda: R.from_inv_freq([1], attention_factor="2"), TypeError, "attention_factor"),
    (lambda: R.from_inv_freq([1], attention_factor="abc"), TypeError, "attention_factor"),
    (lambda: R.from_inv_freq([1], attention_factor=True), TypeError, "attention_factor"),
    (lambda: R.from_inv_freq([1], attention_factor=None), TypeError, "attention_factor"),
    (lambda: R.from_inv_freq([1], attention_factor=np.ones(2)), TypeError, "attention_factor"),
    (lambda: R.from_inv_freq(np.ma.array([1.0])), TypeError, "inv_freq"),
    (lambda: R.from_inv_freq([1], attention_factor=1e39), ValueError, "attention_factor"),
    (lambda: R.from_inv_freq([1], attention_factor=1e-39), ValueError, "attention_factor"),
    (lambda: R.from_inv_freq([1], attention_factor=np.inf), ValueError, "attention_factor"),
    (lambda: R.from_inv_freq([[1.0], [1.0, 2.0]]), ValueError, "inv_freq"),
    (lambda: R.from_inv_freq([1, 2], blocks=np.array(2)), TypeError, "blocks"),
    (lambda: R.from_inv_freq([1, 2], blocks=np.ones((1, 2), int)), TypeError, "blocks"),
    (lambda: R.from_inv_freq([1, 2], blocks=[[2], [1, 1]]), TypeError, "blocks"),
    (lambda: R.from_inv_freq([1], interleaved=np.array([1, 2])), TypeError, "interleaved"),
    (lambda: R.from_spec("x"), TypeError, "spec"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals_of_frequency_matrices(call, error, argument):
    assert_refused(call, error, argument)
