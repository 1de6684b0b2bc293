"""RopeOptions: inexpressible rotations are refused before a graph is built, with a reason."""

import inspect
from dataclasses import fields, replace

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.options import AttentionOptions, RopeOptions

PLAIN = RotaryEmbedding(16)
AXIAL = RotaryEmbedding.from_inv_freq(np.kron(np.eye(2), [1.0, 0.1]))
BY_HEAD = RotaryEmbedding.from_inv_freq(np.cos(np.arange(64.0)).reshape(2, 4, 8))
LONG = RotaryEmbedding(
    16, scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64
)

REFUSED = {
    "unknown target": (
        PLAIN,
        {"target": "tflite"},
        "`target` is 'tflite'; it must be one of primitive, onnx, ort",
    ),
    "float64 by operator": (
        PLAIN,
        {"dtype": np.float64},
        "float64, which ai.onnx RotaryEmbedding has no kernel for; target 'primitive'",
    ),
    "float64 by onnxruntime": (
        PLAIN,
        {"target": "ort", "dtype": np.float64},
        "target 'primitive' can express it",
    ),
    "opset": (PLAIN, {"opset": 22}, "`opset` is 22; target 'onnx' is written in opsets 23 to 24"),
    "heads' own frequencies": (BY_HEAD, {}, "frequencies for 4 heads; target 'primitive' can"),
    "number of those heads": (
        BY_HEAD,
        {"target": "primitive", "num_heads": 6},
        "`num_heads` is 6; .*frequencies of 4 heads",
    ),
    "no number of those heads": (
        BY_HEAD,
        {"target": "primitive"},
        "`num_heads` is None; .*frequencies of 4 heads",
    ),
    "a table of dense axes": (
        RotaryEmbedding.from_inv_freq(np.ones((2, 4))),
        {"max_positions": 8},
        "rotate by several axes.* tables cannot hold",
    ),
    "float32 sums of several axes": (
        RotaryEmbedding.from_spec(
            replace(RotaryEmbedding.from_inv_freq(np.ones((2, 4))).spec, angle_dtype="float32")
        ),
        {"target": "primitive"},
        "`angle_dtype` 'float32' and pairs that rotate by several axes",
    ),
    "a length that is not chosen": (
        LONG,
        {},
        "'dynamic' depends on the sequence length; give `rope.at_length",
    ),
    "a length for each row": (
        LONG.at_length([64, 128]),
        {},
        "for 2 batch rows; a graph is written for one length",
    ),
    "counting on axes": (
        AXIAL,
        {"positions": "none"},
        "`positions` is 'none'; with 2 axes each token needs",
    ),
    "counting packed tokens": (
        PLAIN,
        {"layout": "thd", "positions": "offset"},
        "`positions` is 'offset'.*layout thd.* need 'position_ids'",
    ),
    "packed heads unnumbered": (PLAIN, {"layout": "bsd"}, "`num_heads` is None; layout bsd"),
    "unknown layout": (PLAIN, {"layout": "hbsd"}, "`layout` is 'hbsd'; it must be one of bhsd"),
    "no rows": (PLAIN, {"max_positions": 0}, "`max_positions` is 0; it must be at least 1"),
    "kv heads alone": (PLAIN, {"num_kv_heads": 2}, "`num_kv_heads` is 2, but `num_heads` is None"),
    "names twice": (PLAIN, {"inputs": ("q", "q")}, "different identifiers"),
    "a name of another input": (
        PLAIN,
        {"inputs": ("position_ids",)},
        "`inputs` hold 'position_ids', the name of another value",
    ),
    "a name of a result": (
        PLAIN,
        {"inputs": ("q", "q_rot")},
        "`inputs` hold 'q_rot', the name of another value",
    ),
    "a name of a table": (
        PLAIN,
        {"inputs": ("cos_cache",), "max_positions": 8},
        "`inputs` hold 'cos_cache'",
    ),
    "a name inside": (
        PLAIN,
        {"inputs": ("q", "ids")},
        "`inputs` hold 'ids', the name of another value",
    ),
    "positions": (
        PLAIN,
        {"positions": "ids"},
        "`positions` is 'ids'; it must be one of position_ids, offset, none",
    ),
    "number of kv heads": (
        BY_HEAD,
        {"target": "primitive", "num_heads": 8, "num_kv_heads": 6},
        "`num_kv_heads` is 6; .*frequencies of 4 heads",
    ),
    "kv heads of one input": (
        PLAIN,
        {"inputs": ("q",), "num_heads": 2, "num_kv_heads": 1},
        r"`num_kv_heads` is 1; .*second input, but `inputs` is \('q',\)",
    ),
    "names that the file says of itself": (
        PLAIN,
        {"metadata": {"rope_cpu.export": "{}", "rope_cpu.config": "{}"}},
        "`metadata` holds rope_cpu.export, ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_export_rope_refuses_what_cannot_be_expressed(name):
    rope, options, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        export.export_rope(rope, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": np.int32}, "`dtype` is int32; it must be one of float32"),
        ({"inputs": "qk"}, "`inputs` is 'qk'; it must be a sequence of names"),
        ({"max_positions": 2.5}, "`max_positions` is 2.5; it must be an integer"),
        ({"inverse": 1}, "`inverse` is 1; it must be True or False"),
        ({"dtype": None}, "`dtype` is None; it must be one of float32"),
        ({"dtype": "foo"}, "`dtype` is 'foo'; it must be one of float32"),
        ({"opset": 23.0}, "`opset` is 23.0; it must be an integer"),
        ({"inputs": ("q",), "num_kv_heads": "2"}, "`num_kv_heads` is '2'; it must be an integer"),
        (
            {"metadata": "config"},
            "`metadata` is 'config'; it must be a mapping of strings to strings",
        ),
        (
            {"metadata": {"config": 1}},
            "`metadata` is {'config': 1}; it must be a mapping of strings to strings",
        ),
    ],
)
def test_export_rope_refuses_wrong_types(options, text):
    with pytest.raises(TypeError, match=text):
        export.export_rope(PLAIN, **options)


@pytest.mark.parametrize(
    "call",
    [
        lambda rope: export.export_rope(rope),
        lambda rope: export.export_attention(rope, num_heads=4),
        lambda rope: export.validate(export.export_rope(PLAIN), rope),
    ],
)
def test_exports_refuse_what_is_no_rotary_embedding(call):
    with pytest.raises(TypeError, match="`rope` is a RopeSpec; it must be a RotaryEmbedding"):
        call(PLAIN.spec)


def test_whole_numbers_of_numpy_are_taken():
    assert export.export_rope(PLAIN, opset=np.int64(24)).opset_import[0].version == 24


@pytest.mark.parametrize(
    ("function", "options"),
    [(export.export_rope, RopeOptions), (export.export_attention, AttentionOptions)],
)
def test_every_argument_is_an_option(function, options):
    """Arguments that the dataclass validates; the others are arrays and metadata."""
    arguments = set(inspect.signature(function).parameters) - {"rope", "weights", "metadata"}
    assert arguments <= {field.name for field in fields(options)}


def test_the_first_wrong_option_is_named():
    options = {"target": "ort", "opset": 7, "mask": "bool", "cache": "shared"}
    with pytest.raises(ValueError, match=r"^`opset` is 7; target 'ort' is written in"):
        export.export_attention(PLAIN, num_heads=2, **options)
