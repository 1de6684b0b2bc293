"""Wrong arguments are refused by name, before anything is built, drawn or written.

A row is a call, the class of its error, and words of the text, mostly the argument alone.
"""

import inspect
from dataclasses import fields, replace

import numpy as np
import pytest
from refusals import refusal

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.graph import Graph
from rope_cpu.export.options import AttentionOptions, RopeOptions

HUGE = 10**5000
PLAIN = RotaryEmbedding(32)
AXIAL = RotaryEmbedding.from_inv_freq(np.kron(np.eye(2), [1.0, 0.1]))
WIDE = RotaryEmbedding(128)
DENSE = RotaryEmbedding.from_inv_freq(np.ones((2, 4)))
DENSE32 = RotaryEmbedding.from_spec(replace(DENSE.spec, angle_dtype="float32"))
BLOCKS = RotaryEmbedding.from_inv_freq(np.kron(np.eye(2), np.ones(8)), blocks=2)
BY_HEAD = RotaryEmbedding.from_inv_freq(np.cos(np.arange(64.0)).reshape(2, 4, 8))
LONG = RotaryEmbedding(
    16, scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64
)
MODEL = export.export_rope(PLAIN)
WEIGHTS = {"q": np.ones((128, 8)), "k": np.ones((64, 8)), "v": np.ones((64, 8))}
ONES = np.ones(32)


def rope(rotation=PLAIN, **options):
    return lambda: export.export_rope(rotation, **options)


def attention(rotation=PLAIN, **options):
    options = {"num_heads": 4, "num_kv_heads": 2} | options
    return lambda: export.export_attention(rotation, **options)


def ort(rotation=PLAIN, **options):
    return attention(rotation, **{"target": "ort", "max_positions": 8} | options)


def shared(**options):
    return attention(cache="shared", **options)


def optimum(**options):
    return attention(**{"names": "optimum", "layer": 7} | options)


def weights(**arrays):
    return attention(weights=WEIGHTS | arrays)


ROPE = [
    (rope(target="tflite"), ValueError, "`target` is 'tflite'; it must be one of primitive, onnx"),
    (rope(dtype=np.float64), ValueError, "`dtype` is 'float64'; it must be one of"),
    (rope(target="ort", dtype=np.float64), ValueError, "target 'primitive' can express it"),
    (rope(dtype=np.int32), TypeError, "`dtype` is int32; it must be one of float32"),
    (rope(dtype=None), TypeError, "`dtype` is None"),
    (rope(dtype={"a": 1}), TypeError, "`dtype` is {'a': 1}"),
    (
        rope(opset=22),
        ValueError,
        "`opset` is 22; it must be at least 23; targets 'primitive' and 'ort' can",
    ),
    (rope(opset=23.0), TypeError, "`opset` is 23.0; it must be an integer"),
    (rope(BY_HEAD), ValueError, "`rope` has frequencies for 4 heads"),
    (rope(BY_HEAD, target="primitive"), ValueError, "`num_heads` is None"),
    (rope(BY_HEAD, target="primitive", num_heads=6), ValueError, "`num_heads` is 6"),
    (
        rope(BY_HEAD, target="primitive", num_heads=8, num_kv_heads=6),
        ValueError,
        "`num_kv_heads` is 6; it must be a multiple of 4",
    ),
    (rope(DENSE, max_positions=8), ValueError, "tables cannot hold such a rotation"),
    (rope(DENSE32, target="primitive"), ValueError, "`angle_dtype` 'float32' and pairs that rot"),
    (rope(LONG), ValueError, "'dynamic', which depends on the sequence length (up"),
    (
        rope(LONG.at_length([64, 128])),
        ValueError,
        "for 2 batch rows; it must be for one length; give",
    ),
    (rope(AXIAL, positions="none"), ValueError, "`positions` is 'none'; it must be 'pos"),
    (rope(layout="thd", positions="offset"), ValueError, "`positions` is 'offset'"),
    (rope(layout="bsd"), ValueError, "`num_heads` is None; it must be given with layout bsd"),
    (rope(layout="hbsd"), ValueError, "`layout` is 'hbsd'; it must be one of bhsd"),
    (rope(max_positions=0), ValueError, "`max_positions` is 0"),
    (rope(WIDE, max_positions=2**24), ValueError, "`max_positions` is 16777216: a table of"),
    (rope(num_heads=2**40), ValueError, "`num_heads` is 1099511627776; it must be at most 4096"),
    (rope(num_kv_heads=2), ValueError, "`num_kv_heads` is 2; it must be left out, as `num_h"),
    (rope(inputs=("q",), num_heads=2, num_kv_heads=1), ValueError, "`inputs` is ('q',)"),
    (rope(inputs="qk"), TypeError, "`inputs` is 'qk'; it must be a sequence of names"),
    (rope(inputs=("q", "q")), ValueError, "different identifiers"),
    (rope(inputs=[["q"]]), ValueError, "`inputs` is [['q']]"),
    (rope(inputs=["x" * 10**6 + "!"]), ValueError, "`inputs` is ['xxx"),
    (rope(inputs=[f"x{i}" for i in range(65)]), ValueError, "it must have at most 64 entries"),
    (rope(inputs=("position_ids",)), ValueError, "`inputs` holds 'position_ids', the name of an"),
    (rope(inputs=("q", "q_rot")), ValueError, "`inputs` holds 'q_rot'"),
    (rope(inputs=("cos_cache",), max_positions=8), ValueError, "`inputs` holds 'cos_cache'"),
    (rope(inverse=1), TypeError, "`inverse` is 1; it must be True or False"),
    (rope(metadata="config"), TypeError, "`metadata` is 'config'; it must be a mapping of string"),
    (rope(metadata={"config": 1}), TypeError, "`metadata` is {'config': 1}"),
    (rope(metadata={"rope_cpu.export": "{}"}), ValueError, "`metadata` holds rope_cpu.export, "),
    (rope(metadata={"x.rope_cpu.export": "{}"}), ValueError, "`metadata` holds x.rope_cpu.export"),
    (rope(PLAIN.spec), TypeError, "`rope` is a RopeSpec; it must be a RotaryEmbedding"),
    (attention(PLAIN.spec), TypeError, "`rope` is a RopeSpec"),
    (lambda: export.validate(MODEL, PLAIN.spec), TypeError, "`rope` is a RopeSpec"),
]
ATTENTION = [
    (attention(num_kv_heads=3), ValueError, "`num_heads` is 4; it must be a multiple of `num_kv"),
    (attention(v_head_dim=2**40), ValueError, "`v_head_dim` is 1099511627776"),
    (attention(window=2**60), ValueError, "`window` is 1152921504606846976"),
    (attention(causal=False, window=3), ValueError, "`window` is 3"),
    (attention(softcap=0.0), ValueError, "`softcap` is 0.0; it must be finite and above 0"),
    (attention(softcap=5e-324), ValueError, "`softcap` is 5e-324; it must be at least 2^-126"),
    (attention(scale=10**400), ValueError, "`scale` is an integer of 1329 bits"),
    (attention(scale=2.0**62), ValueError, "`scale` is 4.6"),
    (attention(scale=2.0**61, softcap=2.0**-10), ValueError, "`scale / softcap` is 2.3"),
    (attention(norm_epsilon=0.5), ValueError, "`norm_epsilon` is 0.5; it must be left out"),
    (attention(norm_epsilon=1e308), ValueError, "`norm_epsilon` is 1e+308"),
    (attention(norm_offset=1.0), ValueError, "`norm_offset` is 1.0; it must be left out"),
    (attention(qk_norm="input", norm_offset=-1.0), ValueError, "`norm_offset` is -1.0"),
    (attention(layout="thd"), ValueError, "`layout` is 'thd'; it must be one of bhsd, bshd, bsd"),
    (attention(weights=WEIGHTS, layout="bshd"), ValueError, "`layout` is 'bshd'; it must be left "),
    (attention(weights={"q": np.ones((128, 8))}), ValueError, "it must hold q, k and v"),
    (attention(weights=5), TypeError, "`weights` is a int; it must be a mapping"),
    (weights(k=1.0), ValueError, "`weights['k']` has shape (); it must be (64, 8)"),
    (weights(k="1"), TypeError, "`weights['k']` has dtype <U1"),
    (weights(k=np.ones((64, 9))), ValueError, "`weights['k']` has shape (64, 9); it must be (64,"),
    (weights(q_bias=np.ones(8)), ValueError, "`weights['q_bias']` has shape (8,); it must be (128"),
    (weights(o_bias=np.ones(8)), ValueError, "together with o, o_bias"),
    (attention(qk_norm=(ONES,) * 3), ValueError, "`qk_norm` holds 3 arrays"),
    (attention(qk_norm=(ONES, np.ones(31))), ValueError, "`qk_norm[1]` has shape (31,); it must b"),
    (attention(qk_norm=5), TypeError, "`qk_norm` is a int; it must be a pair of arrays"),
    (attention(qk_norm="inputs"), TypeError, "a pair of arrays, q and k, or 'input'"),
    (attention(sinks=np.ones(3)), ValueError, "`sinks` has shape (3,); it must be (4,)"),
    (attention(sinks=[1, 2, 3, np.nan]), ValueError, "`sinks` holds nan; it must be finite"),
    (attention(sinks="inputs"), TypeError, "`sinks` has dtype <U6"),
    (attention(sinks=True), TypeError, "`sinks` has dtype bool"),
    (attention(name_prefix="a b"), ValueError, "`name_prefix` is "),
    (attention(name_prefix="x" * 65), ValueError, "`name_prefix` is "),
    (attention(name_prefix=3), TypeError, "`name_prefix` is "),
    (attention(dtype=np.float64), ValueError, "target 'primitive' can express it"),
    (ort(causal=False), ValueError, "`causal` is False; it must be True for com.microsoft Gro"),
    (
        ort(v_head_dim=16),
        ValueError,
        "it must be `head_dim`, 32, for com.microsoft GroupQueryAttent",
    ),
    (ort(RotaryEmbedding(20)), ValueError, "`head_dim` is 20; it must be a multiple of 8"),
    (ort(BLOCKS), ValueError, "each token needs its coordinates"),
    (shared(past=False), ValueError, "`past` is False; it must be left out"),
    (shared(causal=False), ValueError, "`causal` is False; it must be True for attention"),
    (shared(mask="padding"), ValueError, "`mask` is 'padding'; it must be left out"),
    (ort(cache="window"), ValueError, "`window` is None; it must be given, as `cache` is 'window'"),
    (
        attention(cache="window", window=3),
        ValueError,
        "`cache` is 'window'; it must be 'growing' or 'shared' with target 'onnx'; target 'ort' ca",
    ),
    (shared(cache_dtype="int8"), ValueError, "`cache_dtype` is 'int8'; it must be left out with"),
    (ort(cache_dtype="int8"), ValueError, "`cache_dtype` is 'int8'; it must be left out, as"),
    (shared(target="ort", cache_dtype="uint8"), TypeError, "`cache_dtype` is uint8"),
    (ort(batch_chunks=True), ValueError, "`batch_chunks` is True; it must be left out with"),
    (shared(batch_chunks=None), TypeError, "`batch_chunks` is None"),
    (shared(opset=23), ValueError, "`opset` is 23; it must be at least 24"),
    (ort(cache="shared", dtype=np.float16), ValueError, "`dtype` is 'float16'; it"),
    (ort(opset=7, mask="bool", cache="shared"), ValueError, "`opset` is 7; it must be at least 14"),
    (optimum(layer=None), ValueError, "`layer` is None; it must be the index in the names"),
    (optimum(layer=-1), ValueError, "`layer` is -1"),
    (optimum(names="rope_cpu"), ValueError, "`layer` is 7; it must be left out"),
    (optimum(past=False), ValueError, "`past` is False; it must be left out, as `names`"),
    (optimum(mask="padding"), ValueError, "`mask` is 'padding'; it must be left out, as `names"),
]
FILES = [
    (lambda: export.save(MODEL, "x/" * 10**6), ValueError, "`path` is 'x/x"),
    (lambda: export.save(MODEL, "a\0b"), ValueError, "`path` is 'a\\x00b'"),
    (lambda: export.save(MODEL, 3), TypeError, "`path` is 3; it must be a path"),
    (lambda: export.save("model", "a.onnx"), TypeError, "`model` is a str; it must be an onnx.Mo"),
    (
        lambda: export.save(MODEL, "a.onnx", external_bytes="1"),
        TypeError,
        "`external_bytes` is '1'",
    ),
    (lambda: export.validate("x" * 10**6, PLAIN), ValueError, "`model` is 'xxx"),
    (lambda: export.validate("a\0b", PLAIN), ValueError, "`model` is 'a\\x00b'"),
    (lambda: export.validate(MODEL, PLAIN, seed=HUGE), ValueError, "`seed` is an integer of"),
    (lambda: export.check(3, PLAIN), TypeError, "`model` is a int; it must be an onnx.ModelProto"),
    (lambda: export.check(MODEL, [PLAIN]), TypeError, "`rope` is a list"),
    (lambda: export.check(MODEL, {"all": LONG}), ValueError, "`rope` has rope type 'dynamic'"),
    (lambda: export.check(MODEL, positions=2**25), ValueError, "`positions` is 33554432"),
    (lambda: export.check(__file__), ValueError, "`model` cannot be read: "),
]
ROWS = [*ROPE, *ATTENTION, *FILES]


@pytest.mark.parametrize(("call", "error", "words"), ROWS, ids=[row[2] for row in ROWS])
def test_wrong_arguments_are_refused(call, error, words):
    assert words in refusal(call)
    with pytest.raises(error) as caught:
        call()
    assert f"`{caught.value.argument}`" in str(caught.value)


def test_a_refusal_names_no_target_that_refuses_another_option():
    """Target "primitive" takes float64, and "ort" the cache of a window: none takes both."""
    call = attention(dtype=np.float64, cache="window", window=3)
    assert "can express" not in refusal(call)


TAKEN = [
    lambda graph: graph.node("Abs", ["x"], "n"),
    lambda graph: graph.node("Abs", ["x"], "w"),
    lambda graph: graph.node("Abs", ["x"], "m/a"),
    lambda graph: graph.multi_output_node("Split", ["x"], "m", ["c", "d"]),
    lambda graph: graph.initializer("n", np.ones(2)),
    lambda graph: graph.initializer("w", np.zeros(2)),
    lambda graph: graph.initializer("w", np.ones(2, np.float32)),
    lambda graph: graph.output("n", "w", np.float32, [2]),
]


@pytest.mark.parametrize("call", TAKEN)
def test_a_graph_refuses_two_nodes_or_values_of_one_name(call):
    graph = Graph()
    graph.input("x", np.float64, [2])
    graph.node("Neg", ["x"], "n")
    graph.multi_output_node("Split", ["x"], "m", ["a", "b"])
    graph.initializer("w", np.ones(2))
    assert graph.initializer("w", np.ones(2)) == "w"
    assert "it must be no name of another node or value" in refusal(lambda: call(graph))


def test_whole_numbers_of_numpy_are_taken():
    assert export.export_rope(PLAIN, opset=np.int64(24)).opset_import[0].version == 24


@pytest.mark.parametrize(
    ("function", "options"),
    [(export.export_rope, RopeOptions), (export.export_attention, AttentionOptions)],
)
def test_every_argument_is_an_option(function, options):
    """Arguments with a rule in `checks`; the others are arrays and metadata."""
    arguments = set(inspect.signature(function).parameters) - {"rope", "weights", "metadata"}
    assert arguments <= {field.name for field in fields(options)}
