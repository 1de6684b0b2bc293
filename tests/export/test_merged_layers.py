"""Layers whose names have prefixes merge into one model; files say what is in them."""

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from refusals import assert_refused

import rope_cpu
from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation import session as runtime

ROPE = RotaryEmbedding(32)
LINK = {"layers.1.hidden": "layers.0.attention"}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "max_positions": 64}


def layer(rng, rope=ROPE, **options):
    """Return a layer from 48 to 48 hidden sizes, with random weights."""
    sizes = {"q": (128, 48), "k": (64, 48), "v": (64, 48), "o": (48, 128)}
    weights = {name: rng.standard_normal(size) / size[1] ** 0.5 for name, size in sizes.items()}
    return export.export_attention(rope, **(HEADS | options), weights=weights)


@pytest.mark.parametrize("cache", ["growing", "shared"])
def test_layers_merge(target, cache, rng):
    """The merged model gives the results of one layer after the other."""
    layers = [layer(rng, target=target, cache=cache, name_prefix=f"layers.{i}.") for i in range(2)]
    merged = export.merge(layers, links=LINK)
    hidden = rng.standard_normal((2, 5, 48)).astype(np.float32)
    shape = (2, 2, 9 if cache == "shared" else 0, 32)
    feeds = [
        {f"layers.{i}.past_{name}": np.zeros(shape, np.float32) for name in ("key", "value")}
        for i in range(2)
    ]
    if cache == "shared":
        for i in range(2):
            feeds[i][f"layers.{i}.past_lengths"] = np.zeros(2, np.int64)
    first, *caches = runtime.open_session(layers[0]).run(
        None, feeds[0] | {"layers.0.hidden": hidden}
    )
    second, *more_caches = runtime.open_session(layers[1]).run(
        None, feeds[1] | {"layers.1.hidden": first}
    )
    session = runtime.open_session(merged)
    names = [
        "layers.1.attention",
        *(f"layers.{i}.present_{name}" for i in range(2) for name in ("key", "value")),
    ]
    results = session.run(names, feeds[0] | feeds[1] | {"layers.0.hidden": hidden})
    written = np.s_[:, :, :5]  # run() leaves the rows behind them as they are
    np.testing.assert_array_equal(results[0], second)
    assert "layers.0.attention" not in [value.name for value in merged.graph.output]
    for result, known in zip(results[1:], [*caches, *more_caches], strict=True):
        np.testing.assert_array_equal(result[written], known[written])
    with pytest.raises(ValueError, match="validate them before they are merged"):
        export.validate(merged, ROPE)


def test_bind_takes_the_caches_of_merged_layers(rng):
    layers = [
        layer(rng, target="ort", cache="shared", name_prefix=f"layers.{i}.") for i in range(2)
    ]
    merged = export.merge(layers, links=LINK)
    session = runtime.open_session(merged)
    feeds = {"layers.0.hidden": rng.standard_normal((1, 1, 48)).astype(np.float32)}
    for i in range(2):
        for name in ("key", "value"):
            feeds[f"layers.{i}.past_{name}"] = np.zeros((1, 2, 16, 32), np.float32)
        feeds[f"layers.{i}.past_lengths"] = np.zeros(1, np.int64)
    outputs = {"layers.1.attention": np.zeros((1, 1, 48), np.float32)}
    export.bind(session, feeds, outputs)()
    for i in range(2):
        assert (feeds[f"layers.{i}.past_value"][:, :, 0] != 0).all()
        assert (feeds[f"layers.{i}.past_value"][:, :, 1:] == 0).all()
    feeds["layers.1.past_key"] = np.zeros((1, 2, 65, 32), np.float32)
    with pytest.raises(ValueError, match=r"layers\.1\.past_key.* a capacity of 65; .* 64 rows"):
        export.bind(session, feeds, outputs)


def test_equal_initializers_become_one(target, rng):
    """Layers share tables of one rotation; weights and tables of another one stay their own."""
    ropes = [ROPE, ROPE, RotaryEmbedding(32, rope_theta=1e6)]
    layers = [
        layer(rng, rope=rope, target=target, name_prefix=f"layers.{index}.")
        for index, rope in enumerate(ropes)
    ]
    links = LINK | {"layers.2.hidden": "layers.1.attention"}
    tensors = export.merge(layers, links=links).graph.initializer
    contents = [(tuple(tensor.dims), tensor.raw_data) for tensor in tensors]
    assert len(set(contents)) == len(contents)
    all_contents = {
        (tuple(tensor.dims), tensor.raw_data)
        for model in layers
        for tensor in model.graph.initializer
    }
    assert set(contents) == all_contents
    tables = [
        tensor.name for tensor in tensors if tensor.dims[:1] == [64] and 48 not in tensor.dims
    ]
    assert {name.split(".")[1] for name in tables} == {"0", "2"}


def test_merge_leaves_its_models_as_they_are(rng):
    layers = [layer(rng, name_prefix=f"layers.{index}.") for index in range(2)]
    before = [model.SerializeToString() for model in layers]
    merged = export.merge(layers, links=LINK)
    assert [model.SerializeToString() for model in layers] == before
    keys = {entry.key for entry in merged.metadata_props}
    assert keys == {entry.key for model in layers for entry in model.metadata_props}
    onnx.checker.check_model(merged, full_check=True)


def parsed(text, opset=17, ir=8, **tensors):
    """Return a model of a graph in text, with initializers."""
    model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> {text}')
    for name, array in tensors.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return model


FIRST = "one (float[n] x, int64 m) => (float[n] y) { c = Cast<to=1>(m) y = Add(x, c) }"
SECOND = "two (float[n] y, int64 m) => (float[n] z) { d = Cast<to=1>(m) z = Mul(y, d) }"


def test_values_of_one_name_are_one_value():
    merged = export.merge(model for model in (parsed(FIRST), parsed(SECOND)))
    assert [value.name for value in merged.graph.input] == ["x", "m"]
    assert [value.name for value in merged.graph.output] == ["z"]
    feeds = {"x": np.array([1, 2], np.float32), "m": np.array(3)}
    (z,) = runtime.open_session(merged).run(None, feeds)
    assert z.tolist() == [12, 15]


def test_subgraphs_read_the_shared_initializer_and_the_linked_output():
    branches = """two (float[n] u, bool b) => (float[n] z) {
        z = If(b) <then_branch = then () => (float[n] t) { t = Add(u, w) },
                   else_branch = other () => (float[n] f) { f = Mul(u, w) }>
    }"""
    weight = np.array([5], np.float32)
    first = parsed("one (float[n] x) => (float[n] y) { y = Add(x, v) }", v=weight)
    merged = export.merge([first, parsed(branches, w=weight)], links={"u": "y"})
    assert [tensor.name for tensor in merged.graph.initializer] == ["v"]
    session = runtime.open_session(merged)
    x = np.array([1], np.float32)
    results = [session.run(None, {"x": x, "b": np.array(b)})[0].item() for b in (True, False)]
    assert results == [11, 30]


def test_the_newest_ir_version_is_kept():
    for versions in ([8, 10], [10, 8]):
        first, second = versions
        merged = export.merge([parsed(FIRST, ir=first), parsed(SECOND, ir=second)])
        assert merged.ir_version == 10


def test_initializers_of_other_dtypes_or_shapes_stay():
    bits = np.array([1, 2], np.float32)
    first = parsed(FIRST, t1=bits, t2=bits.view(np.int32))
    merged = export.merge([first, parsed(SECOND, t3=bits[None], t4=bits)])
    assert [tensor.name for tensor in merged.graph.initializer] == ["t1", "t2", "t3"]


def with_metadata(text):
    model = parsed(FIRST)
    onnx.helper.set_model_props(model, {"author": text})
    return model


def with_function():
    model = parsed(FIRST)
    model.functions.add(name="f", domain="d")
    return model


OF_INTEGERS = "two (int64[n] u) => (int64[n] v) { v = Neg(u) }"
OTHER_NAMES = FIRST.replace("x", "x2").replace("c ", "c2 ").replace(", c)", ", c2)")
MERGE_REFUSALS = {
    "no model": (lambda: export.merge(["model"]), TypeError, "models[0]"),
    "nothing": (lambda: export.merge([]), ValueError, "models"),
    "no mapping": (lambda: export.merge([], links=[("a", "b")]), TypeError, "links"),
    "function": (lambda: export.merge([with_function()]), ValueError, "models[0]"),
    "opset": (lambda: export.merge([parsed(FIRST), parsed(SECOND, 18)]), ValueError, "models[1]"),
    "metadata": (
        lambda: export.merge([with_metadata("a"), with_metadata("b")]),
        ValueError,
        "models[1]",
    ),
    "value": (lambda: export.merge([parsed(FIRST), parsed(OTHER_NAMES)]), ValueError, "models[1]"),
    "input": (
        lambda: export.merge([parsed(FIRST), parsed(SECOND.replace("int64 m", "int64[2] m"))]),
        ValueError,
        "models[1]",
    ),
    "initializer": (
        lambda: export.merge([parsed(FIRST, w=[1.0]), parsed(SECOND, w=[2.0])]),
        ValueError,
        "models[1]",
    ),
    "no input": (
        lambda: export.merge([parsed(FIRST), parsed(SECOND)], links={"u": "y"}),
        ValueError,
        "links",
    ),
    "dtype": (
        lambda: export.merge(
            [parsed(FIRST), parsed("two (int64[n] u) => (int64[n] v) {v = Neg(u)}")],
            links={"u": "y"},
        ),
        ValueError,
        "models[1]",
    ),
    "no output": (
        lambda: export.merge([parsed(FIRST), parsed(SECOND)], links={"m": "z"}),
        ValueError,
        "links",
    ),
}


@pytest.mark.parametrize("name", MERGE_REFUSALS)
def test_merge_refuses(name):
    assert_refused(*MERGE_REFUSALS[name])


def test_layers_without_prefixes_are_told_of_them(rng):
    with pytest.raises(
        ValueError, match=r"`models\[1\]` has the .*; give the layers different name_"
    ):
        export.merge([layer(rng), layer(rng)])


@pytest.mark.parametrize("cache", ["growing", "shared"])
def test_validate_takes_a_model_with_prefixes(target, cache, rng, tmp_path):
    options = {"target": target, "cache": cache, "qk_norm": "input", "sinks": "input"}
    model = layer(rng, **options, name_prefix="model/layers/7/")
    report = export.validate(model, ROPE)
    assert report.passed, str(report)
    assert not export.validate(model, RotaryEmbedding(32, rope_theta=1e6)).passed
    export.save(model, tmp_path / "layer.onnx", external_bytes=1024)
    assert export.validate(tmp_path / "layer.onnx", ROPE).passed


MODELS = {
    "rope": lambda: export.export_rope(ROPE),
    "rope, offset": lambda: export.export_rope(ROPE, positions="offset", inputs=["x"]),
    "growing": lambda: export.export_attention(ROPE, **HEADS, mask="float"),
    "ids": lambda: export.export_attention(ROPE, **HEADS, positions="position_ids"),
    "shared": lambda: export.export_attention(
        ROPE, **HEADS, cache="shared", sinks="input", qk_norm="input"
    ),
    "half": lambda: export.export_attention(ROPE, **HEADS, dtype=ml_dtypes.bfloat16),
    "int8": lambda: export.export_attention(
        ROPE, **HEADS, target="ort", cache="shared", cache_dtype="int8", name_prefix="x."
    ),
    "hidden": lambda: layer(np.random.default_rng(0), target="primitive"),
}


@pytest.mark.parametrize("name", MODELS)
def test_files_describe_themselves(name):
    model = MODELS[name]()
    assert model.producer_name == "rope_cpu"
    assert model.producer_version == rope_cpu.__version__
    assert "otary position embedding" in model.doc_string
    for value in (*model.graph.input, *model.graph.output):
        assert value.doc_string.endswith("."), value.name
    known = {value.name for value in (*model.graph.value_info, *model.graph.output)}
    values = {name for node in model.graph.node for name in node.output if name}
    assert values <= known
    for value in model.graph.value_info:
        assert value.type.tensor_type.HasField("shape"), value.name


def test_the_report_says_how_large_the_inputs_are():
    report = export.validate(export.export_rope(ROPE), ROPE)
    largest = max(outcome.largest_input for outcome in report.outcomes)
    assert largest > 1000
    assert f"inputs reach ±{largest:.4g}" in str(report)
