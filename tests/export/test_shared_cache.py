"""Attention over a shared cache: one buffer, rows of different length, nothing copied."""

import re

import numpy as np
import onnxruntime
import pytest
from attention_oracle import attention, cached, rotated
from attention_runs import SEPARATE, WINDOW_ATTRIBUTE, agrees, count_on, draw_tensors
from conftest import DTYPES
from control_characters import MARK, WRITTEN
from onnx import TensorProto, helper
from refusals import read_only, zeros

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.targets.ort import runtime_takes_query_lengths
from rope_cpu.export.validation import session as runtime

ROPE = RotaryEmbedding(32, rope_theta=500.0)
MROPE = RotaryEmbedding.mrope(32, [8, 4, 4], rope_theta=500.0)
SHARED = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 64,
    "layout": "bshd",
    "cache": "shared",
}
TOKENS = 14
CAPACITY = 20
OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.array([-1.0, 0.5, 2.0, 3.0])},
    "all": {"window": 5, "softcap": 3.0, "scale": 0.4, "sinks": np.array([-1.0, 0.5, 2.0, 3.0])},
}
# For each step the number of tokens that each row has, and the number of new tokens.
STEPS = {
    "prefill": [((0, 0, 0), 14)],
    "prefill and single steps": [((0, 0, 0), 12), ((12, 12, 12), 1), ((13, 13, 13), 1)],
    "rows of different length": [((0, 0, 0), 9), *[((8 + i, 3 + i, 5 + i), 1) for i in range(6)]],
}
# Rows of different length in a cache of a window, where no row may come back to an earlier token
# once tokens are evicted.
LATER_STEPS = [((0, 0, 0), 3), *[((3 + i, 1 + i, 2 + i), 1) for i in range(10)]]
CHUNKS = [((0, 0, 0), 6), ((6, 2, 5), 4), ((10, 4, 9), 4)]


def draw(rng, dtype=np.float32, batch=3, width=32):
    """Return q, k, v (batch, TOKENS, heads, width), and two buffers of numbers without meaning."""
    tensors = draw_tensors(rng, dtype, batch, TOKENS, v_width=width)
    buffers = [rng.uniform(-90, 90, (batch, 2, CAPACITY, n)).astype(dtype) for n in (32, width)]
    return tensors, buffers


def bound_steps(model, tensors, buffers, steps, arrays=None):
    """Run steps over two buffers; yield past lengths, count and result of each."""
    session = runtime.open_session(model, 1)
    feeds_of_all = dict(zip(("past_key", "past_value"), buffers, strict=True)) | (arrays or {})
    v = tensors[2]
    for past, count in steps:
        lengths = np.array(past)
        feeds = {name: tokens_at(x, lengths, count) for name, x in zip("qkv", tensors, strict=True)}
        feeds |= feeds_of_all | {"past_lengths": lengths}
        result = np.zeros((len(lengths), count, 4, v.shape[3]), v.dtype)
        export.bind(session, feeds, {"attention": result})()
        yield lengths, count, result


def tokens_at(x, first, count):
    """Return `count` tokens of each row of x (rows, tokens, …), from `first` (rows,) on."""
    return x[np.arange(len(first))[:, None], first[:, None] + np.arange(count)]


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_give_what_one_pass_gives(target, name, rng):
    tensors, _ = draw(rng)
    model = export.export_attention(ROPE, **SHARED, target=target, **OPTIONS[name])
    want = attention(ROPE, *tensors, count_on(3, TOKENS), "float32", **OPTIONS[name])
    for steps in STEPS.values():
        _, buffers = draw(rng)
        for first, count, result in bound_steps(model, tensors, buffers, steps):
            assert agrees(result, [tokens_at(x, first, count) for x in want]), (first, count)


@pytest.mark.parametrize("capacity", [5, 7, CAPACITY])
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_a_cache_of_a_window_gives_what_one_pass_gives(capacity, cache_dtype, rng):
    tensors, _ = draw(rng)
    scales = {f"{name}_scale": np.full((1, 2, 1, 32), 0.02, np.float32) for name in "kv"}
    is_int8 = cache_dtype is not None
    options = SHARED | {"cache": "window", "cache_dtype": cache_dtype}
    model = export.export_attention(ROPE, **options, target="ort", **OPTIONS["all"])
    stored = {"stored": int8_store(scales)} if is_int8 else {}
    want = attention(ROPE, *tensors, count_on(3, TOKENS), "float32", **stored, **OPTIONS["all"])
    dtype = np.int8 if is_int8 else np.float32
    for steps in (STEPS["prefill"], STEPS["prefill and single steps"], LATER_STEPS):
        buffers = [np.full((3, 2, capacity, 32), 99, dtype) for _ in range(2)]
        arrays = scales if is_int8 else {}
        for first, count, result in bound_steps(model, tensors, buffers, steps, arrays):
            assert agrees(result, [tokens_at(x, first, count) for x in want]), (first, count)


@pytest.mark.parametrize(
    ("capacity", "past", "words"),
    [(5, 64, "at_most_the_positions"), (5, -1, "0_or_more"), (4, 0, "at least local_window_size")],
)
def test_a_cache_of_a_window_has_limits(capacity, past, words, rng):
    """Those of the tables, and the window; 64 is the number of positions."""
    tensors, _ = draw(rng, batch=1)
    model = export.export_attention(ROPE, **SHARED | {"cache": "window"}, target="ort", window=5)
    feeds = {name: x[:, :1].copy() for name, x in zip("qkv", tensors, strict=True)}
    feeds |= {
        name: np.zeros((1, 2, capacity, 32), np.float32) for name in ("past_key", "past_value")
    }
    feeds["past_lengths"] = np.array([past])
    with pytest.raises(Exception, match=words):
        runtime.open_session(model, 1).run(None, feeds)


def test_chunks_of_rows_of_different_length(target, rng):
    if target == "ort" and not runtime_takes_query_lengths():
        pytest.skip("this onnxruntime takes a batch of 1 only")
    tensors, buffers = draw(rng)
    model = export.export_attention(ROPE, **SHARED, target=target, window=5, batch_chunks=True)
    want = attention(ROPE, *tensors, count_on(3, TOKENS), "float32", window=5)
    for first, count, result in bound_steps(model, tensors, buffers, CHUNKS):
        assert agrees(result, [tokens_at(x, first, count) for x in want])


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("target", SEPARATE)
def test_every_dtype(target, kind, rng):
    dtype = DTYPES[kind]
    tensors, buffers = draw(rng, dtype, width=24)
    model = export.export_attention(ROPE, **SHARED, target=target, dtype=dtype, v_head_dim=24)
    want = attention(ROPE, *tensors, count_on(3, TOKENS), kind)
    for first, count, result in bound_steps(model, tensors, buffers, CHUNKS):
        assert result.dtype == dtype
        assert agrees(result, [tokens_at(x, first, count) for x in want])
    keys_wanted = cached(rotated(ROPE, tensors[1], count_on(3, TOKENS), kind), kind)
    keys, values = (x.transpose(0, 2, 1, 3) for x in buffers)
    assert agrees(keys[0, :TOKENS], [x[0] for x in keys_wanted])
    np.testing.assert_array_equal(values[0, :TOKENS], tensors[2][0])


def int8_store(scales):
    """Return the function that rounds keys or values to whole multiples of their scales."""

    def store(pair, name):
        exact, error = pair
        scale = scales[f"{name}_scale"][0, :, 0].astype(np.float64)
        levels = np.clip(exact / scale, -128, 127)
        nearest = np.rint(levels)
        # Halfway between two levels, up to the error of the arithmetic, both are right.
        margin = error / scale + 2.0**-22 * np.abs(levels)
        is_halfway = np.abs(levels - nearest) >= 0.5 - margin
        return nearest * scale, np.where(is_halfway, scale, 2.0**-24 * np.abs(nearest * scale))

    return store


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_int8_caches(name, kind, rng):
    dtype = DTYPES[kind]
    tensors, _ = draw(rng, dtype)
    scales = {
        f"{name}_scale": rng.uniform(0.01, 0.03, (1, 2, 1, 32)).astype(np.float32) for name in "kv"
    }
    options = SHARED | OPTIONS[name] | {"batch_chunks": runtime_takes_query_lengths()}
    model = export.export_attention(ROPE, **options, target="ort", dtype=dtype, cache_dtype="int8")
    want = attention(
        ROPE, *tensors, count_on(3, TOKENS), kind, stored=int8_store(scales), **OPTIONS[name]
    )
    steps = [*STEPS.values()]
    if runtime_takes_query_lengths():
        steps.append(CHUNKS)
    for some_steps in steps:
        buffers = [rng.integers(-128, 128, (3, 2, CAPACITY, 32), np.int8) for _ in range(2)]
        for first, count, result in bound_steps(model, tensors, buffers, some_steps, scales):
            assert agrees(result, [tokens_at(x, first, count) for x in want]), (first, count)
    values = tensors[2][0].astype(np.float64).transpose(1, 0, 2) / scales["v_scale"][0]
    np.testing.assert_array_equal(buffers[1][0, :, :TOKENS], np.rint(np.clip(values, -128, 127)))


@pytest.mark.parametrize("batch_chunks", [True, False])
@pytest.mark.parametrize(
    ("lengths", "count"),
    [((17, 0), 4), ((0, 20), 1), ((21, 0), 1), ((-1, 3), 1), ((2**62, 0), 1), ((0, 0), 21)],
)
def test_tokens_beyond_the_capacity_are_refused(target, lengths, count, batch_chunks, rng):
    """The error has words, and no byte is written: neither to the buffer nor to the result."""
    if target == "ort" and batch_chunks and not runtime_takes_query_lengths():
        pytest.skip("refused")
    options = SHARED | {"target": target, "batch_chunks": batch_chunks}
    session = runtime.open_session(export.export_attention(ROPE, **options), 1)
    feeds = {
        name: rng.standard_normal((2, count, heads, 32)).astype(np.float32)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    # The buffers lie inside larger arrays, so that a write beside them shows.
    around = [np.full((4, 2, CAPACITY, 32), 7.0, np.float32) for _ in range(2)]
    feeds |= {"past_key": around[0][1:3], "past_value": around[1][1:3]}
    feeds["past_lengths"] = np.array(lengths)
    result = np.full((2, count, 4, 32), 7.0, np.float32)
    words = "past_lengths_must_be_0_or_more_and_with_the_new_tokens_at_most_the_capacity"
    with pytest.raises(Exception, match=words):
        export.bind(session, feeds, {"attention": result})()
    for x in (*around, result):
        assert (x == 7.0).all()
    with pytest.raises(Exception, match=words):
        session.run(None, feeds)


@pytest.mark.parametrize("count", [1, 4])
def test_lengths_of_another_batch_are_refused(target, count, rng):
    tensors, buffers = draw(rng)
    model = export.export_attention(ROPE, **SHARED, target=target)
    session = runtime.open_session(model, 1)
    feeds = {name: x[:, :1].copy() for name, x in zip("qkv", tensors, strict=True)}
    feeds |= {"past_key": buffers[0], "past_value": buffers[1]}
    feeds["past_lengths"] = np.zeros(count, np.int64)
    with pytest.raises(Exception, match="past_lengths_are_one_for_each_row"):
        session.run(None, feeds)


def test_buffers_of_different_capacity_are_refused(target, rng):
    tensors, buffers = draw(rng)
    session = runtime.open_session(export.export_attention(ROPE, **SHARED, target=target), 1)
    feeds = {name: x[:, :1].copy() for name, x in zip("qkv", tensors, strict=True)}
    feeds |= {"past_key": buffers[0], "past_value": buffers[1][:, :, :15].copy()}
    feeds["past_lengths"] = np.array([16, 0, 0])
    with pytest.raises(Exception, match=r"INVALID|Status"):
        session.run(None, feeds)


@pytest.mark.parametrize("rope", [ROPE, MROPE, RotaryEmbedding.axial(32)], ids=str)
@pytest.mark.parametrize("table", [None, 64])
def test_positions_that_are_inputs(target, table, rope, rng):
    tensors, buffers = draw(rng)
    coordinates = (rope.axes,) if rope.axes > 1 else ()
    positions = rng.integers(0, 64, (3, TOKENS, *coordinates))
    takes_chunks = target != "ort" or runtime_takes_query_lengths()
    options = SHARED | {"max_positions": table, "batch_chunks": takes_chunks}
    model = export.export_attention(rope, **options, target=target, positions="position_ids")
    want = attention(rope, *tensors, positions, "float32")
    for past, count in CHUNKS if takes_chunks else STEPS["rows of different length"]:
        first = np.array(past)
        arrays = {"position_ids": tokens_at(positions, first, count)}
        ((_, _, result),) = bound_steps(model, tensors, buffers, [(past, count)], arrays)
        assert agrees(result, [tokens_at(x, first, count) for x in want])


@pytest.mark.parametrize(
    "options",
    [
        {"target": "primitive", "dtype": np.float64, "sinks": "input", "window": 3},
        {"target": "primitive", "dtype": np.float16, "qk_norm": "input", "norm_offset": 1.0},
        {"target": "onnx", "dtype": DTYPES["bfloat16"], "softcap": 2.0},
        {"target": "onnx", "positions": "position_ids", "max_positions": None},
        {"target": "ort", "cache_dtype": "int8", "sinks": "input", "window": 3},
        {"target": "ort", "cache_dtype": "int8", "dtype": DTYPES["bfloat16"]},
        {"target": "ort", "batch_chunks": False, "softcap": 2.0},
        {"target": "ort", "cache": "window", "window": 3},
        pytest.param({"target": "onnx", "opset": 25, "window": 3}, marks=WINDOW_ATTRIBUTE),
        {"target": "ort", "positions": "position_ids", "cache_dtype": "int8", "window": 3},
    ],
    ids=str,
)
def test_validate_covers_shared_caches(options):
    model = export.export_attention(ROPE, **(SHARED | options))
    report = export.validate(model, ROPE)
    assert report.passed, str(report)
    assert "rows of different length" in str(report)
    assert not export.validate(model, RotaryEmbedding(32, rope_theta=501.0)).passed


def test_validate_finds_writes_to_other_rows(target):
    """A graph that writes the last row of the buffer too."""
    model = export.export_attention(ROPE, **SHARED, target=target)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["right" if name == "present_key" else name for name in names]
    inputs = ["right", "last_row", "zeros"]
    model.graph.initializer.append(helper.make_tensor("last_row", 7, [1, 3], [0, 0, -1]))
    model.graph.initializer.append(helper.make_tensor("zeros", 1, [1, 32], [0.0] * 32))
    model.graph.node.append(helper.make_node("ScatterND", inputs, ["present_key"]))
    del model.graph.value_info[:]
    report = export.validate(model, ROPE)
    assert "key changed outside the rows of the new tokens" in str(report)


@pytest.mark.parametrize("takes_chunks", [True, False])
def test_a_file_for_chunks_of_a_batch_is_written_on_request(monkeypatch, takes_chunks):
    """The default runs on older releases than the one that writes it."""
    name = "rope_cpu.export.targets.ort.runtime_takes_query_lengths"
    monkeypatch.setattr(name, lambda: takes_chunks)
    options = SHARED | {"target": "ort"}
    assert attention_inputs(export.export_attention(ROPE, **options)) == 9
    options["batch_chunks"] = True
    if takes_chunks:
        assert attention_inputs(export.export_attention(ROPE, **options)) == 17
        return
    with pytest.raises(ValueError, match=r"install onnxruntime 1\.32"):
        export.export_attention(ROPE, **options)


def attention_inputs(model):
    """Return the number of inputs of GroupQueryAttention; the last of 17 is query_seqlens."""
    (node,) = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    return len(node.input)


@pytest.mark.parametrize("cache", ["growing", "shared"])
@pytest.mark.parametrize("batch_chunks", [True, False])
def test_validate_runs_chunks_of_a_batch_where_they_work(target, cache, batch_chunks):
    options = SHARED | {"target": target, "cache": cache, "batch_chunks": batch_chunks}
    is_refused = cache == "growing" or not runtime_takes_query_lengths()
    if target == "ort" and batch_chunks and is_refused:
        pytest.skip("refused")
    report = export.validate(export.export_attention(ROPE, **options), ROPE)
    assert report.passed, str(report)
    assert ("chunks of a batch" in str(report)) == (batch_chunks or target != "ort")


def bound_model(**options):
    """Return a session, and arrays for its inputs and outputs."""
    session = runtime.open_session(export.export_attention(ROPE, **(SHARED | options)), 1)
    feeds = {
        name: np.zeros((1, 1, h, 32), np.float32) for name, h in (("q", 4), ("k", 2), ("v", 2))
    }
    feeds |= {name: np.zeros((1, 2, 64, 32), np.float32) for name in ("past_key", "past_value")}
    feeds["past_lengths"] = np.zeros(1, np.int64)
    return session, feeds, {"attention": np.zeros((1, 1, 4, 32), np.float32)}


CACHE = np.zeros((1, 2, 64, 32), np.float32)
RESULT = np.zeros((1, 1, 4, 32), np.float32)
READ_ONLY = read_only(CACHE)
TRANSPOSED = np.zeros((1, 64, 2, 32), np.float32).transpose(0, 2, 1, 3)
# Changed arrays, the class of the error, and words of its text.
BIND_REFUSED = [
    ({"past_key": np.zeros((1, 2, 65, 32), np.float32)}, ValueError, "a capacity of 65; it must"),
    ({"q": np.zeros((1, 1, 4, 32))}, TypeError, "`feeds['q']` has dtype float64"),
    ({"past_lengths": [0]}, TypeError, "`feeds['past_lengths']` is a list"),
    ({"past_key": np.ma.array(CACHE)}, TypeError, "`feeds['past_key']` is a masked array"),
    ({"attention": np.ma.array(RESULT)}, TypeError, "`outputs['attention']` is a masked array"),
    ({"k": np.zeros((1, 1, 3, 32), np.float32)}, ValueError, "`feeds['k']` has shape (1, 1, 3"),
    ({"past_key": TRANSPOSED}, ValueError, "`feeds['past_key']` has strides"),
    ({"mask": np.zeros(1)}, ValueError, "it must hold q"),
    ({"present_key": CACHE}, ValueError, "`outputs` holds "),
    ({"past_value": READ_ONLY}, ValueError, "`feeds['past_value']` is read-only"),
    ({"attention": read_only(RESULT)}, ValueError, "`outputs['attention']` is read-only"),
]


def test_names_of_a_model_are_escaped_in_errors():
    value = helper.make_tensor_value_info(MARK, TensorProto.FLOAT, [1])
    other = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("Identity", [MARK], ["y"])
    graph = helper.make_graph([node], "graph", [value], [other])
    opset = helper.make_opsetid("", 13)
    session = runtime.open_session(helper.make_model(graph, opset_imports=[opset], ir_version=8))
    with pytest.raises(ValueError, match="`feeds` holds") as error:
        export.bind(session, {}, {"y": np.zeros(1, np.float32)})
    assert str(error.value).isprintable()
    assert WRITTEN in str(error.value)


@pytest.mark.parametrize(("changed", "error", "words"), BIND_REFUSED)
def test_bind_refuses(changed, error, words):
    session, feeds, outputs = bound_model(target="primitive")
    is_output = changed.keys() <= {"attention", "present_key"}
    arrays = (feeds, outputs | changed) if is_output else (feeds | changed, outputs)
    with pytest.raises(error, match=re.escape(words)):
        export.bind(session, *arrays)


def test_bind_refuses_arrays_that_share_memory():
    session, feeds, outputs = bound_model()
    text = r"`feeds\['past_key'\]` shares memory with `feeds\['past_value'\]`"
    with pytest.raises(ValueError, match=text):
        export.bind(session, feeds | {"past_value": feeds["past_key"]}, outputs)
    with pytest.raises(ValueError, match=r"`outputs\['attention'\]` shares memory with"):
        export.bind(session, feeds, {"attention": feeds["q"]})


def test_bind_takes_inputs_that_are_read_only_or_share_memory():
    session, feeds, outputs = bound_model()
    both = read_only(zeros(1, 1, 2, 32))
    export.bind(session, feeds | {"k": both, "v": both}, outputs)()


def test_bind_refuses_other_types():
    session, feeds, outputs = bound_model()
    with pytest.raises(TypeError, match="`session` is a str; it must be an onnxruntime"):
        export.bind("model.onnx", feeds, outputs)
    with pytest.raises(TypeError, match="`feeds` is a list; it must be a mapping"):
        export.bind(session, list(feeds), outputs)
    del feeds["q"]
    with pytest.raises(ValueError, match=r"`feeds` holds .*; it must hold q, k, v"):
        export.bind(session, feeds, outputs)


def test_bind_takes_other_models():
    """Those of a growing cache have a present of their own."""
    model = export.export_attention(
        ROPE, num_heads=4, num_kv_heads=2, layout="bshd", max_positions=64
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    _, feeds, outputs = bound_model()
    del feeds["past_lengths"]
    feeds |= {name: np.ones((1, 2, 5, 32), np.float32) for name in ("past_key", "past_value")}
    outputs |= {
        name: np.zeros((1, 2, 6, 32), np.float32) for name in ("present_key", "present_value")
    }
    export.bind(session, feeds, outputs)()
    assert (outputs["present_value"][:, :, :5] == 1).all()
    assert (outputs["attention"] > 0).all()
