"""Absurd metadata are refused by name, before anything is built or drawn."""

import json

import numpy as np
import onnx
import pytest
from refusals import refusal

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments import limits
from rope_cpu.export.metadata import OPTIONS_KEY

ROPE = RotaryEmbedding(8)
MODEL = export.export_rope(ROPE)
ATTENTION = export.export_attention(ROPE, num_heads=2)


def described(model, text):
    """Return a model whose metadata describe its options by this text."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    (entry,) = (entry for entry in copy.metadata_props if entry.key == OPTIONS_KEY)
    entry.value = text
    return copy


def options(model):
    (text,) = (entry.value for entry in model.metadata_props if entry.key == OPTIONS_KEY)
    return json.loads(text)


TEXTS = [
    ("null", "'NoneType' object is not a mapping"),
    ("[]", "'list' object is not a mapping"),
    ("3", "'int' object is not a mapping"),
    ('"rope"', "'str' object is not a mapping"),
    ("", "line 1 column 1"),
    ("{", "line 1 column 2"),
    ("[" * 50_000, "recursion"),
    ("9" * 5000, "4300 digits"),
    ("{}", "`kind` is None"),
    ('{"kind": null}', "`kind` is None"),
    ('{"kind": ["rope"]}', "`kind` is ['rope']"),
    ('{"kind": "rope"}', "missing"),
    ('{"kind": "attention"}', "missing"),
    ('{"kind": "rope", "%s": 1}' % ("k" * 50_000), "unexpected keyword"),
]


@pytest.mark.parametrize(("text", "words"), TEXTS, ids=[text[:20] for text, _ in TEXTS])
def test_metadata_that_describe_no_options_are_refused(text, words):
    message = refusal(lambda: export.validate(described(MODEL, text), ROPE))
    assert message.startswith("`model` has metadata 'rope_cpu.export'")
    assert words in message


WRONG = [[], {}, "x", -1, 1.5, 2**40, float("nan"), [[1]], "x" * 1000]


@pytest.mark.parametrize("model", [MODEL, ATTENTION], ids=["rope", "attention"])
def test_options_of_wrong_values_are_refused(model):
    for key in options(model):
        for value in WRONG:
            text = json.dumps({**options(model), key: value})
            if value == -1 and key in ("scale",):
                assert "`scale` is -1" in refusal(
                    lambda text=text: export.validate(described(model, text), ROPE)
                )
            elif not is_allowed(key, value):
                assert f"`{key}` is" in refusal(
                    lambda text=text: export.validate(described(model, text), ROPE)
                )


def is_allowed(key, value):
    """Return True if an option may have a value of `WRONG`."""
    return (key, value) in [
        ("softcap", 1.5),
        ("scale", 1.5),
        ("softcap", 2**40),
        ("scale", 2**40),
        ("window", 2**40),
    ]


def test_weights_that_metadata_alone_have_are_refused():
    text = json.dumps({**options(ATTENTION), "hidden": 2**20})
    assert "'q_weight'" in refusal(lambda: export.validate(described(ATTENTION, text), ROPE))
    text = json.dumps({**options(ATTENTION), "output": 8})
    assert "'o_weight'" in refusal(lambda: export.validate(described(ATTENTION, text), ROPE))


def test_the_largest_number_of_inputs_and_heads_is_accepted():
    model = export.export_rope(
        ROPE, inputs=[f"x{i}" for i in range(limits.INPUTS)], num_heads=limits.HEADS
    )
    assert len(model.graph.output) == limits.INPUTS
    assert np.prod(model.graph.input[0].type.tensor_type.shape.dim[1].dim_value) == limits.HEADS
