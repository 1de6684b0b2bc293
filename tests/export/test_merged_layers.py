"""Layers whose names have prefixes merge into one model; files say what is in them."""

import ml_dtypes
import numpy as np
import onnx
import onnx.compose
import pytest

import rope_cpu
from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation import session as runtime

ROPE = RotaryEmbedding(32)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "max_positions": 64}


def layer(rng, **options):
    """Return a layer from 48 to 48 hidden sizes, with random weights."""
    sizes = {"q": (128, 48), "k": (64, 48), "v": (64, 48), "o": (48, 128)}
    weights = {name: rng.standard_normal(size) / size[1] ** 0.5 for name, size in sizes.items()}
    return export.export_attention(ROPE, **(HEADS | options), weights=weights)


@pytest.mark.parametrize("cache", ["growing", "shared"])
def test_layers_merge(target, cache, rng):
    """The merged model gives the results of one layer after the other."""
    layers = [layer(rng, target=target, cache=cache, name_prefix=f"layers.{i}.") for i in range(2)]
    io_map = [("layers.0.attention", "layers.1.hidden")]
    merged = onnx.compose.merge_models(*layers, io_map=io_map)
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
    for result, known in zip(results[1:], [*caches, *more_caches], strict=True):
        np.testing.assert_array_equal(result[written], known[written])
    with pytest.raises(ValueError, match="validate them before they are merged"):
        export.validate(merged, ROPE)


def test_bind_takes_the_caches_of_merged_layers(rng):
    layers = [
        layer(rng, target="ort", cache="shared", name_prefix=f"layers.{i}.") for i in range(2)
    ]
    merged = onnx.compose.merge_models(*layers, io_map=[("layers.0.attention", "layers.1.hidden")])
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
