"""export_attention: all targets, step by step, against attention written from its definition."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from attention_oracle import attention, cached, normed, projected, rotated
from attention_runs import (
    SEPARATE,
    WINDOW_ATTRIBUTE,
    agrees,
    count_on,
    draw_tensors,
    run_steps,
    targets_of,
)
from conftest import DTYPES
from fewer_cases import pairwise
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.targets import TARGETS
from rope_cpu.export.validation import session as runtime

ROPE = RotaryEmbedding(32, rope_theta=500.0)
HEADS = {"num_heads": 4, "num_kv_heads": 2}


STEPS = {"one pass": (13,), "prefill and single steps": (9, 1, 1, 1, 1), "single steps": (1,) * 13}
OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.31},
    "everything": {"window": 5, "softcap": 3.0, "scale": 0.4},
}


@pytest.mark.parametrize(
    ("target", "kind", "name"),
    pairwise(TARGETS, DTYPES, OPTIONS, allowed=lambda target, kind, _: target in targets_of(kind)),
)
def test_steps_give_what_one_pass_gives(target, kind, name, rng):
    tensors = draw_tensors(rng, DTYPES[kind])
    want = attention(ROPE, *tensors, count_on(2, 13), kind, **OPTIONS[name])
    keys_wanted = cached(rotated(ROPE, tensors[1], count_on(2, 13), kind), kind)
    options = HEADS | {"target": target, "dtype": DTYPES[kind], "max_positions": 32}
    model = export.export_attention(ROPE, layout="bshd", **options, **OPTIONS[name])
    for steps in STEPS.values():
        result, (keys, values) = run_steps(model, tensors, steps)
        assert result.dtype == DTYPES[kind]
        assert agrees(result, want), steps
        assert agrees(keys.transpose(0, 2, 1, 3), keys_wanted), steps
        np.testing.assert_array_equal(values, tensors[2].transpose(0, 2, 1, 3))


@pytest.mark.parametrize("mask", ["padding", "bool", "float"])
@pytest.mark.parametrize("window", [None, 5])
def test_export_attention_with_masks(target, window, mask, rng):
    """Queries without any key among them: left padding has such."""
    tensors = draw_tensors(rng)
    model = export.export_attention(
        ROPE, **HEADS, target=target, layout="bshd", max_positions=32, mask=mask, window=window
    )
    if mask == "padding":
        masks = np.arange(13) >= np.array([[0], [6]])
        oracle_masks = {"allowed": masks[:, None, None]}
    else:
        masks = rng.random((2, 4, 13, 13)) < 0.6
        masks[0, 1, 7] = False
        oracle_masks = {"allowed": masks}
        if mask == "float":
            masks = np.where(masks, rng.standard_normal(masks.shape), -np.inf).astype(np.float32)
            oracle_masks = {"added": masks}
    want = attention(ROPE, *tensors, count_on(2, 13), "float32", window=window, **oracle_masks)
    for steps in ((13,), (9, 1, 1, 1, 1)):
        result, _ = run_steps(model, tensors, steps, masks)
        assert agrees(result, want)
    assert (want[0] == 0).all(axis=-1).any()


@WINDOW_ATTRIBUTE
@pytest.mark.parametrize("mask", ["none", "bool"])
def test_windows_are_attributes_from_opset_25_on(mask, rng):
    """In onnxruntime and in the reference evaluator."""
    tensors = draw_tensors(rng)
    options = HEADS | {"target": "onnx", "layout": "bshd", "window": 4, "opset": 25}
    model = export.export_attention(ROPE, **options, max_positions=32, mask=mask)
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    assert [a.i for a in node.attribute if a.name == "left_window_size"] == [3]
    masks = rng.random((2, 4, 13, 13)) < 0.6 if mask == "bool" else None
    want = attention(ROPE, *tensors, count_on(2, 13), "float32", window=4, allowed=masks)
    for steps in STEPS.values():
        result, _ = run_steps(model, tensors, steps, masks)
        assert agrees(result, want), steps
    feeds = dict(zip("qkv", tensors, strict=True))
    feeds |= {name: np.zeros((2, 2, 0, 32), np.float32) for name in ("past_key", "past_value")}
    feeds |= {} if masks is None else {"attention_mask": masks}
    assert agrees(ReferenceEvaluator(model).run(["attention"], feeds)[0], want)


@pytest.mark.parametrize("table", [None, 64])
def test_export_attention_with_position_ids(target, table, rng):
    tensors = draw_tensors(rng)
    ids = rng.integers(0, 64, (2, 13))
    model = export.export_attention(
        ROPE, **HEADS, target=target, layout="bshd", positions="position_ids", max_positions=table
    )
    steps = (8, 1, 4) if TARGETS[target].takes_chunks else (11, 1, 1)
    result, (keys, _) = run_steps(model, tensors, steps, ids=ids)
    assert agrees(result, attention(ROPE, *tensors, ids, "float32"))
    assert agrees(keys.transpose(0, 2, 1, 3), rotated(ROPE, tensors[1], ids, "float32"))


ROTATIONS = {
    "interleaved, partial": RotaryEmbedding.from_inv_freq(
        ROPE.inv_freq[:8], head_dim=32, interleaved=True
    ),
    "partial, 24 wide": RotaryEmbedding.from_inv_freq(ROPE.inv_freq[:12], head_dim=32),
    "scaled": RotaryEmbedding.from_inv_freq(ROPE.inv_freq, attention_factor=1.2),
    "axial": RotaryEmbedding.axial(32, span="head"),
    "blocks": RotaryEmbedding.from_inv_freq(np.kron(np.eye(2), ROPE.inv_freq[:8]), blocks=2),
    "mrope": RotaryEmbedding.mrope(32, [8, 4, 4], rope_theta=500.0),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_export_attention_of_other_rotations(target, name, rng):
    rope = ROTATIONS[name]
    tensors = draw_tensors(rng)
    needs_ids = rope.axes > 1 and not rope.spec.shared_id
    options = {"num_heads": 4, "num_kv_heads": 1, "layout": "bshd", "target": target}
    options["max_positions"] = 32
    tensors[1:] = [x[:, :, :1] for x in tensors[1:]]
    if needs_ids:
        ids = rng.integers(0, 32, (2, 13, rope.axes))
        model = export.export_attention(rope, **options, positions="position_ids")
        result, _ = run_steps(model, tensors, (12, 1), ids=ids)
    else:
        ids = count_on(2, 13)
        if rope.axes > 1:
            ids = np.repeat(ids[..., None], rope.axes, axis=-1)
        model = export.export_attention(rope, **options, positions="past")
        result, _ = run_steps(model, tensors, (12, 1))
    assert agrees(result, attention(rope, *tensors, ids, "float32"))


@pytest.mark.parametrize(
    ("rope", "options", "rotates"),
    [
        (ROPE, {}, 1),
        (ROTATIONS["mrope"], {}, 1),
        (ROPE, {"positions": "position_ids"}, 0),
        (ROPE, {"max_positions": None}, 0),
        (RotaryEmbedding(24), {}, 0),
        (ROTATIONS["partial, 24 wide"], {}, 0),
        (RotaryEmbedding.from_inv_freq(ROPE.inv_freq, blocks=2), {}, 0),
    ],
)
def test_group_query_attention_rotates_where_it_can(rope, options, rotates):
    """Elsewhere it attends to vectors that are rotated before it: do_rotary is 0."""
    model = export.export_attention(
        rope, **HEADS, **({"target": "ort", "max_positions": 8} | options)
    )
    (node,) = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    attributes = {one.name: one.i for one in node.attribute}
    assert attributes["do_rotary"] == rotates
    assert ("cos_cache" in node.input) == bool(rotates)
    assert export.validate(model, rope).passed


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "bsd"])
def test_export_attention_in_every_layout(target, layout):
    model = export.export_attention(
        ROPE, **HEADS, target=target, layout=layout, past=False, max_positions=16
    )
    assert [value.name for value in model.graph.output] == ["attention"]
    assert export.validate(model, ROPE).passed


@pytest.mark.parametrize("target", SEPARATE)
def test_not_causal_and_values_of_another_width(target, rng):
    tensors = draw_tensors(rng, v_width=24)
    model = export.export_attention(
        ROPE, **HEADS, target=target, layout="bshd", causal=False, past=False, v_head_dim=24
    )
    result, _ = run_steps(model, tensors, (13,))
    assert result.shape == (2, 13, 4, 24)
    assert agrees(result, attention(ROPE, *tensors, count_on(2, 13), "float32", causal=False))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
def test_export_attention_with_projections_norms_and_biases(target, kind, rng):
    """From hidden states to the output projection, as a layer has it."""
    hidden = 48
    dtype = DTYPES[kind]
    widths = {"q": 4 * 32, "k": 2 * 32, "v": 2 * 32}
    weights = {
        name: (rng.standard_normal((width, hidden)) * hidden**-0.5)
        for name, width in widths.items()
    }
    weights |= {"q_bias": rng.standard_normal(128), "v_bias": rng.standard_normal(64)}
    weights["o"] = rng.standard_normal((40, 128)) * 128**-0.5
    weights = {name: value.astype(dtype).astype(np.float64) for name, value in weights.items()}
    norms = (
        rng.uniform(0.5, 1.5, 32).astype(np.float32),
        rng.uniform(0.5, 1.5, 32).astype(np.float32),
    )
    model = export.export_attention(
        ROPE,
        **HEADS,
        target=target,
        dtype=dtype,
        weights=weights,
        qk_norm=norms,
        norm_epsilon=1e-5,
        past=False,
        max_positions=32,
    )
    x = rng.standard_normal((2, 7, hidden)).astype(dtype)
    (result,) = runtime.run(runtime.open_session(model), {"hidden": x}, [(2, 7, 40)])
    vectors = [projected(x, weights[n], weights.get(f"{n}_bias", 0), kind) for n in "qkv"]
    vectors = [tuple(part.reshape(2, 7, -1, 32) for part in pair) for pair in vectors]
    vectors[:2] = [
        normed(pair, weight, 1e-5, kind) for pair, weight in zip(vectors[:2], norms, strict=True)
    ]
    merged = tuple(
        part.reshape(2, 7, -1) for part in attention(ROPE, *vectors, count_on(2, 7), kind)
    )
    assert agrees(result, projected(merged, weights["o"], 0, kind))
    assert export.validate(model, ROPE).passed


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_validate_allows_for_roundings_of_large_scores(target, kind, rng):
    options = {**HEADS, "target": target, "dtype": DTYPES[kind], "max_positions": 32}
    for sinks in (None, np.ones(4)):  # beside which some weights are below the normal numbers
        model = export.export_attention(ROPE, **options, scale=20.0, sinks=sinks)
        report = export.validate(model, ROPE)
        assert report.passed, str(report)
    weights = {
        name: rng.standard_normal((width, 256))
        for name, width in {"q": 128, "k": 64, "v": 64}.items()
    }
    weights["o"] = rng.standard_normal((256, 128))
    model = export.export_attention(ROPE, **options, weights={n: w / 5 for n, w in weights.items()})
    assert export.validate(model, ROPE).passed


WEIGHTS = {"q": np.ones((128, 8)), "k": np.ones((64, 8)), "v": np.ones((64, 8))}


def test_the_layout_of_hidden_states_may_be_given():
    for layout in ("bhsd", "bsd"):  # the first is the default
        model = export.export_attention(ROPE, **HEADS, weights=WEIGHTS, layout=layout)
        assert model.graph.input[0].name == "hidden"


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_inputs_of_half_precision_are_cast_once(kind):
    model = export.export_attention(ROPE, **HEADS, weights=WEIGHTS, dtype=DTYPES[kind])
    casts = [node.input[0] for node in model.graph.node if node.op_type == "Cast"]
    assert {"hidden", "past_key", "past_value"} < set(casts)
    assert len(casts) == len(set(casts))


NORMS = {"qk_norm": (np.linspace(0.5, 1.5, 32), np.linspace(1.5, 0.5, 32))}
# What graphs have, and what their metadata say.
WRONG = {
    "scale": ({"scale": 0.18}, {"scale": 32**-0.5}),
    "window": ({"window": 4}, {"window": 5}),
    "softcap": ({}, {"softcap": 50.0}),
    "no sinks": ({}, {"sinks": np.array([-1.0, 0.5, 2.0, 3.0])}),
    "no norms": ({}, NORMS),
    "epsilon": ({"norm_epsilon": 1e-5} | NORMS, NORMS),
    "offset": ({"qk_norm": "input"}, {"qk_norm": "input", "norm_offset": 1.0}),
    "theta": ({"rope": RotaryEmbedding(32, rope_theta=501.0)}, {}),
    "pairing": ({"rope": RotaryEmbedding(32, rope_theta=500.0, interleaved=True)}, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_validate_finds_a_wrong_attention(target, name):
    options = HEADS | {"rope": ROPE, "target": target, "max_positions": 32}
    model, right = (export.export_attention(**options | given) for given in WRONG[name])
    assert export.validate(right, ROPE).passed
    del model.metadata_props[:]
    model.metadata_props.extend(right.metadata_props)
    if name in ("no sinks", "no norms"):
        with pytest.raises(ValueError, match="`model` has no initializer"):
            export.validate(model, ROPE)
        return
    report = export.validate(model, ROPE)
    assert not report.outcomes[0].problem
    assert not report.passed


@pytest.mark.parametrize("name", ["scale", "softcap", "theta"])
def test_validate_finds_a_wrong_attention_behind_wide_projections(name, rng):
    """Roundings of their sums have no common direction: a bound for that would hide the faults."""
    shapes = {"q": (128, 512), "k": (64, 512), "v": (64, 512), "o": (512, 128)}
    weights = {key: rng.standard_normal(shape) * shape[1] ** -0.5 for key, shape in shapes.items()}
    options = HEADS | {"rope": ROPE, "weights": weights}
    model, right = (export.export_attention(**options | given) for given in WRONG[name])
    assert export.validate(right, ROPE).passed
    del model.metadata_props[:]
    model.metadata_props.extend(right.metadata_props)
    assert not export.validate(model, ROPE).passed


@pytest.mark.parametrize("cache", ["growing", "shared"])
def test_validate_finds_an_input_that_no_node_reads(cache):
    model = export.export_attention(ROPE, **HEADS, target="ort", cache=cache, max_positions=32)
    model.graph.input.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, [1]))
    assert not export.validate(model, ROPE).passed


@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_validate_finds_inputs_rounded_to_float16(target, name, past):
    model = export.export_attention(ROPE, **HEADS, target=target, past=past, max_positions=32)
    for node in model.graph.node:
        node.input[:] = ["rounded" if value == name else value for value in node.input]
    half = helper.make_node("Cast", [name], ["half"], to=TensorProto.FLOAT16)
    single = helper.make_node("Cast", ["half"], ["rounded"], to=TensorProto.FLOAT)
    body = [half, single, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(body)
    report = export.validate(model, ROPE)
    assert not report.outcomes[0].problem
    assert not report.passed


def with_node_before_output(model, name, op, value):
    """Return the model with `op`(output, `value`) in place of an output."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}_right" if name == used else used for used in names]
    copy.graph.initializer.append(numpy_helper.from_array(np.array(value), "change"))
    copy.graph.node.append(helper.make_node(op, [f"{name}_right", "change"], [name]))
    return copy


@pytest.mark.parametrize("name", ["present_key", "present_value"])
@pytest.mark.parametrize(
    ("op", "value"),
    [("Mul", np.float32(factor)) for factor in ("nan", "inf", 1.001)] + [("Gather", [0, 0])],
)
def test_validate_finds_wrong_keys_and_values(name, op, value):
    """Single tokens show them in no result: the cache is not read again."""
    model = export.export_attention(ROPE, num_heads=4, target="primitive", max_positions=2)
    assert export.validate(model, ROPE).passed
    assert not export.validate(with_node_before_output(model, name, op, value), ROPE).passed


def test_a_table_that_ends_fails_instead_of_guessing(target, rng):
    tensors = draw_tensors(rng)
    model = export.export_attention(ROPE, **HEADS, target=target, layout="bshd", max_positions=12)
    with pytest.raises(Exception, match=r"out of|bounds|cos_cache dimension 0"):
        run_steps(model, tensors, (12, 1))


class Foreign:
    """An array of another library, whose NumPy form is bfloat16."""

    def __init__(self, array):
        self.array = array.astype(ml_dtypes.bfloat16)

    def __array__(self, dtype=None, copy=None):
        return self.array if dtype is None else self.array.astype(dtype)


def test_weights_of_another_library_in_bfloat16(rng):
    arrays = {
        name: rng.standard_normal((width, 24)) for name, width in (("q", 64), ("k", 32), ("v", 32))
    }
    rope = RotaryEmbedding(16)
    models = [
        export.export_attention(
            rope, **HEADS, weights={name: convert(x) for name, x in arrays.items()}
        )
        for convert in (Foreign, lambda x: x.astype(ml_dtypes.bfloat16))
    ]
    assert models[0] == models[1]
