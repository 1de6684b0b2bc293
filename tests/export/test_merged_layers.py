"""Layers whose names have prefixes merge into one model; files say what is in them."""

from functools import partial

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


PRODUCT = "one (float[n] x, float[n] a) => (float[n] y) { y = Mul(x, a) }"
PRODUCT_AGAIN = "two (float[n] y, float[n] b) => (float[n] z) { z = Mul(y, b) }"


def test_defaults_of_inputs_are_not_shared():
    """Equal ones stay as they are: each may be fed another value."""
    two = np.array([2], np.float32)
    merged = export.merge([parsed(PRODUCT, a=two), parsed(PRODUCT_AGAIN, b=two)])
    feeds = {"x": two, "b": np.array([10], np.float32)}
    assert runtime.open_session(merged).run(["z"], feeds)[0] == 40


def test_a_link_replaces_the_default_of_an_input():
    first = parsed("one (float[n] x) => (float[n] c) { c = Neg(x) }")
    second = parsed(PRODUCT, a=np.array([2], np.float32))
    merged = export.merge([first, second], links={"a": "c"})
    feeds = {"x": np.array([3], np.float32)}
    assert runtime.open_session(merged).run(["y"], feeds)[0] == -9


def test_initializers_that_are_outputs_keep_their_names():
    two = np.array([2], np.float32)
    first = parsed("one (float[n] x) => (float[n] y, float[1] t) { y = Mul(x, t) }", t=two)
    second = parsed("two (float[n] y) => (float[n] z, float[1] u) { z = Mul(y, u) }", u=two)
    results = runtime.open_session(export.merge([first, second])).run(["z", "t", "u"], {"x": two})
    assert results == [8, 2, 2]


def test_dimensions_of_a_linked_input_are_those_of_the_output():
    """In both models n is another size; onnxruntime reuses memory of values of one size."""
    double = "one (float[n] x) => (float[m] y) <float[n] c> { c = Neg(x) y = Concat<axis=0>(c, c) }"
    further = """two (float[n] y) => (float[n] z) <float[n] d, float[n] e, float[n] f> {
        d = Neg(y) e = Abs(d) f = Neg(e) z = Sub(f, d)
    }"""
    merged = export.merge([parsed(double), parsed(further)])
    sizes = {
        value.name: value.type.tensor_type.shape.dim[0].dim_param
        for value in (*merged.graph.value_info, *merged.graph.output)
    }
    assert sizes == {"c": "n"} | dict.fromkeys("ydefz", "m")
    (z,) = runtime.open_session(merged).run(None, {"x": np.array([1, 2, 3], np.float32)})
    assert z.tolist() == [-2, -4, -6] * 2


def test_an_input_of_several_models_is_one_although_a_link_gives_a_number():
    first = parsed("one (float[n] x, float[n] m) => (float[n] y) { y = Add(x, m) }")
    between = parsed("two (float[2] y) => (float[2] v) { v = Neg(y) }")
    last = parsed("three (float[n] v, float[n] m) => (float[n] z) { z = Mul(v, m) }")
    merged = export.merge([first, between, last])
    assert [value.name for value in merged.graph.input] == ["x", "m"]
    feeds = {"x": np.array([1, 2], np.float32), "m": np.array([3, 4], np.float32)}
    (z,) = runtime.open_session(merged).run(None, feeds)
    assert z.tolist() == [-12, -24]


def test_an_input_that_is_an_output_too_has_the_name_of_its_link():
    first = parsed("one (float[n] x) => (float[n] y) { y = Neg(x) }")
    second = parsed("two (float[n] u) => (float[n] z, float[n] u) { z = Neg(u) }")
    merged = export.merge([first, second], links={"u": "y"})
    onnx.checker.check_model(merged, full_check=True)
    assert [value.name for value in merged.graph.output] == ["y", "z"]


def test_an_initializer_with_the_name_of_an_earlier_link_stays():
    first = parsed("one (float[n] x) => (float[n] y) { y = Neg(x) }")
    second = parsed("two (float[n] u) => (float[n] z) { z = Neg(u) }")
    two = np.array([2], np.float32)
    third = parsed("three (float[n] z) => (float[n] w) { w = Mul(z, u) }", u=two)
    merged = export.merge([first, second, third], links={"u": "y"})
    assert runtime.open_session(merged).run(["w"], {"x": two}) == [4]


def test_value_infos_of_no_value_are_left_out():
    second = parsed("two (float[n] y) => (float[n] z) { z = Neg(y) }")
    second.graph.value_info.append(onnx.helper.make_tensor_value_info("c", 7, [3]))
    merged = export.merge([parsed(FIRST), second])
    onnx.checker.check_model(merged, full_check=True)


# What the names of sizes stand for.
SIZES = {"n": 2, "m": 3, "k": 5}


def random_model(rng):
    """Return a small model whose names are letters, and the sizes of its inputs."""
    letters = iter(rng.permutation([*"abcdefghijklmnop"]).tolist())
    node_names = iter(rng.permutation([*"abcdefgh", "", "", ""]).tolist())
    all_sizes = [*SIZES, 2, 3]
    sizes = {next(letters): all_sizes[rng.integers(5)] for _ in range(rng.integers(1, 3))}
    inputs = dict(sizes)
    weight = onnx.numpy_helper.from_array(rng.integers(2, size=1).astype("f"), next(letters))
    nodes = []
    for _ in range(rng.integers(1, 4)):
        source = [*sizes][rng.integers(len(sizes))]
        names = ([next(letters)], next(node_names))
        size = sizes[source]
        if rng.integers(2):
            nodes.append(onnx.helper.make_node("Mul", [source, weight.name], *names))
        else:
            nodes.append(onnx.helper.make_node("Concat", [source] * 2, *names, axis=0))
            unused = [name for name in SIZES if name not in sizes.values()]
            size = 2 * size if isinstance(size, int) else next(iter(unused), None)
        sizes[names[0][0]] = size
    infos = {
        name: onnx.helper.make_tensor_value_info(name, 1, [size]) for name, size in sizes.items()
    }
    outputs = [name for name in sizes if name == nodes[-1].output[0] or rng.random() < 0.3]
    graph = onnx.helper.make_graph(
        nodes,
        "random",
        [infos[name] for name in inputs],
        [infos[name] for name in outputs],
        [weight],
        value_info=[infos[name] for name in sizes if name not in (*inputs, *outputs)],
    )
    opset = onnx.helper.make_opsetid(["", "ai.onnx"][rng.integers(2)], 17)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), inputs


def check_valid(model):
    """Check a model whose opset may have the name "ai.onnx", which onnx 1.21 checks as "" only."""
    renamed = onnx.ModelProto()
    renamed.CopyFrom(model)
    for opset in renamed.opset_import:
        opset.domain = "" if opset.domain == "ai.onnx" else opset.domain
    onnx.checker.check_model(renamed, full_check=True)


def test_random_models_are_refused_or_merge_into_their_composition(rng):
    compared = 0
    for _ in range(400):
        (first, first_sizes), (second, second_sizes) = random_model(rng), random_model(rng)
        for model in (first, second):
            check_valid(model)
        output = first.graph.output[0].name
        links = {name: output for name in second_sizes if rng.random() < 0.7}
        try:
            merged = export.merge([first, second], links=links)
        except ValueError:
            continue
        onnx.checker.check_model(merged, full_check=True)
        feeds = {
            name: rng.standard_normal(SIZES.get(size, size)).astype(np.float32)
            for name, size in (second_sizes | first_sizes).items()
        }
        expected = results_of(first, feeds)
        named = {name: links.get(name, name) for name in second_sizes}
        known = feeds | {name: expected[to] for name, to in named.items() if to in expected}
        lengths = {(size, len(known[name])) for name, size in second_sizes.items()}
        if any(size in (2, 3) and size != length for size, length in lengths):
            continue  # a contradiction that shows when the model runs
        if len(dict(lengths)) < len(lengths):
            continue  # one name of two sizes
        expected |= {named.get(name, name): x for name, x in results_of(second, known).items()}
        for name, result in results_of(merged, feeds).items():
            np.testing.assert_array_equal(result, expected[name])
        compared += 1
    assert compared > 30


def results_of(model, feeds):
    """Return the outputs of a model by name."""
    session = runtime.open_session(model)
    names = [value.name for value in session.get_outputs()]
    known = {value.name: feeds[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(names, known), strict=True))


def with_numbers(text, value):
    """Return a model whose initializer t has no bytes, but numbers of its own field."""
    model = parsed(text)
    model.graph.initializer.append(onnx.helper.make_tensor("t", 1, [1], [value]))
    return model


def with_metadata(text):
    model = parsed(FIRST)
    onnx.helper.set_model_props(model, {"author": text})
    return model


def with_opset(text, domain, version):
    model = parsed(text)
    del model.opset_import[:]
    model.opset_import.add(domain=domain, version=version)
    return model


def with_function():
    model = parsed(FIRST)
    model.functions.add(name="f", domain="d")
    return model


def with_sparse_initializer():
    model = parsed(FIRST)
    values = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [1], [7])
    indices = onnx.helper.make_tensor("", onnx.TensorProto.INT64, [1], [0])
    sparse = onnx.helper.make_sparse_tensor(values, indices, [1])
    model.graph.sparse_initializer.append(sparse)
    return model


BRANCHES = """two (float[n] u, bool b) => (float[n] z) {
    z = If(b) <then_branch = then () => (float[n] t) { t = Neg(u) },
               else_branch = other () => (float[n] f) { f = Abs(u) }>
}"""
OF_INTEGERS = "two (int64[n] u) => (int64[n] v) { v = Neg(u) }"
OTHER_NAMES = FIRST.replace("x", "x2").replace("c ", "c2 ").replace(", c)", ", c2)")
SIZED_INPUT = SECOND.replace("int64 m", "int64[2] m")
NEG = "one (float[n] x) => (float[n] y) { y = Neg(x) }"
UNKNOWN = NEG.replace("(float[n] y)", "(float[?] y)")
OF_TWO = NEG.replace("n]", "2]")
OF_THREE = "two (float[3] y) => (float[3] z) { z = Neg(y) }"
OF_BOTH = "one (float[2] x, float[3] v) => (float[2] y, float[3] w) { y = Neg(x) w = Neg(v) }"
OF_ONE_SIZE = "two (float[n] y, float[n] w) => (float[n] z) { z = Add(y, w) }"
TWO_AND_THREE = "two (float[2] u, float[3] y) => (float[2] z, float[3] w) { z = Neg(u) w = Neg(y) }"
TWO_OUTPUTS = "one (float[n] x) => (float[n] y, float[n] w) { y = Neg(x) w = Abs(x) }"
OF_OUTPUTS = "two (float[2] y, float[3] w) => (float[2] z) { z = Neg(y) v = Abs(w) }"
SQUARE = NEG.replace("n]", "n, n]")
OBLONG = OF_THREE.replace("3]", "2, 3]")
SEQUENCE = "two (seq(float[n]) y) => (int64 z) { z = SequenceLength(y) }"
# Models that contradict each other, and the output that an input u is linked to.
CONTRADICTIONS = {
    "opset": (parsed(FIRST), parsed(SECOND, 18)),
    "opset under another name": (parsed(FIRST), with_opset(SECOND, "ai.onnx", 18)),
    "metadata": (with_metadata("a"), with_metadata("b")),
    "value": (parsed(FIRST), parsed(OTHER_NAMES)),
    "input": (parsed(FIRST), parsed(SIZED_INPUT)),
    "initializer": (parsed(FIRST, w=[1.0]), parsed(SECOND, w=[2.0])),
    "initializer in numbers": (with_numbers(FIRST, 1.0), with_numbers(SECOND, 2.0)),
    "dtype": (parsed(FIRST), parsed(OF_INTEGERS)),
    "size": (parsed(OF_TWO), parsed(OF_THREE)),
    "rank": (parsed(OF_TWO), parsed(OF_THREE.replace("3", "n, m"))),
    "one name for two sizes": (parsed(OF_BOTH), parsed(OF_ONE_SIZE)),
    "one output for two sizes": (parsed(NEG), parsed(TWO_AND_THREE)),
    "one output of an unknown size for two": (parsed(UNKNOWN), parsed(TWO_AND_THREE)),
    "outputs of one size for two": (parsed(TWO_OUTPUTS), parsed(OF_OUTPUTS)),
    "two sizes of one output": (parsed(SQUARE), parsed(OBLONG)),
    "type": (parsed(FIRST), parsed(SEQUENCE)),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_merge_refuses_models_that_contradict_each_other(name):
    for model in CONTRADICTIONS[name]:
        check_valid(model)
    names = [value.name for value in CONTRADICTIONS[name][1].graph.input]
    links = {"u": "y"} if "u" in names else {}
    call = partial(export.merge, CONTRADICTIONS[name], links=links)
    assert_refused(call, ValueError, "models[1]")


MERGE_REFUSALS = [
    (["model"], None, TypeError, "models[0]"),
    ([], None, ValueError, "models"),
    ([], [("a", "b")], TypeError, "links"),
    ([with_function()], None, ValueError, "models[0]"),
    ([parsed(FIRST), parsed(BRANCHES)], None, ValueError, "models[1]"),
    ([with_sparse_initializer()], None, ValueError, "models[0]"),
    ([parsed(FIRST), parsed(SECOND)], {"u": "y"}, ValueError, "links"),
    ([parsed(FIRST), parsed(SECOND)], {"m": "z"}, ValueError, "links"),
]


@pytest.mark.parametrize(("models", "links", "error", "argument"), MERGE_REFUSALS)
def test_merge_refuses(models, links, error, argument):
    assert_refused(lambda: export.merge(models, links=links), error, argument)


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
