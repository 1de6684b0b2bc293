"""Absurd arguments and metadata are refused by name, before anything is built or drawn."""

import json

import numpy as np
import onnx
import pytest
from refusals import nested, refusal

from rope_cpu import RotaryEmbedding, export
from rope_cpu.arguments import limits
from rope_cpu.export.metadata import OPTIONS_KEY

HUGE = 10**5000
ROPE = RotaryEmbedding(8)
WIDE = RotaryEmbedding(128)
MODEL = export.export_rope(ROPE)
ATTENTION = export.export_attention(ROPE, num_heads=2)


def rope(**options):
    return lambda: export.export_rope(ROPE, **options)


def attention(**options):
    return lambda: export.export_attention(ROPE, **{"num_heads": 2, **options})


REFUSED = [
    (
        lambda: export.export_rope(WIDE, max_positions=2**24),
        "`max_positions` is 16777216: a table of 16777216 x 64 elements",
    ),
    (rope(max_positions=HUGE), "`max_positions` is an integer of"),
    (rope(num_heads=2**40), "`num_heads` is 1099511627776; it must be at most 4096"),
    (rope(inputs=[f"x{i}" for i in range(65)]), "it must have at most 64 entries"),
    (rope(inputs=[["q"]]), "`inputs` is [['q']]"),
    (rope(inputs=["x" * 10**6 + "!"]), "`inputs` is ['xxx"),
    (rope(dtype="x" * 10**6), "`dtype` is 'xxx"),
    (rope(dtype={"a": 1}), "`dtype` is {'a': 1}"),
    (rope(target=nested(10**5)), "`target` is [[[["),
    (rope(opset=HUGE), "`opset` is an integer of"),
    (rope(metadata={"a": nested(10**5)}), "`metadata` is {'a'"),
    (attention(num_heads=2**40), "`num_heads` is 1099511627776"),
    (attention(num_kv_heads=HUGE), "`num_kv_heads` is an integer of"),
    (attention(v_head_dim=2**40), "`v_head_dim` is 1099511627776; it must be at most 65536"),
    (attention(window=2**60), "`window` is 1152921504606846976"),
    (attention(softcap=5e-324), "`softcap` is 5e-324; it must be at least 2^-126"),
    (attention(scale=2.0**62), "`scale` is 4.6"),
    (attention(scale=2.0**61, softcap=2.0**-10), "`scale / softcap` is 2.3"),
    (attention(norm_epsilon=1e308), "`norm_epsilon` is 1e+308"),
    (attention(weights={"x" * 10**6: 1}), "`weights` holds ['xxx"),
    (lambda: export.save(MODEL, "x" * 300), "`path` is 'xxx"),
    (lambda: export.save(MODEL, "x/" * 10**6), "`path` is 'x/x"),
    (lambda: export.save(MODEL, "a\0b"), "`path` is 'a\\x00b'"),
    (lambda: export.save(MODEL, 3), "`path` is 3; it must be a path"),
    (lambda: export.save(MODEL, "a.onnx", external_bytes="1"), "`external_bytes` is '1'"),
    (lambda: export.validate("x" * 10**6, ROPE), "`model` is 'xxx"),
    (lambda: export.validate("a\0b", ROPE), "`model` is 'a\\x00b'"),
    (lambda: export.validate(MODEL, ROPE, seed=HUGE), "`seed` is an integer of"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[row[1] for row in REFUSED])
def test_absurd_arguments_are_refused(call, words):
    assert words in refusal(call)


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
    ("null", "it is not a JSON object"),
    ("[]", "it is not a JSON object"),
    ("3", "it is not a JSON object"),
    ('"rope"', "it is not a JSON object"),
    ("", "it is not JSON"),
    ("{", "it is not JSON"),
    ("[" * 50_000, "it is not JSON"),
    ("9" * 5000, "it is not JSON"),
    ("{" + " " * 2**16 + "}", "it has 65538 characters"),
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
