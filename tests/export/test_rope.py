"""export_rope: targets, dtypes, layouts and kinds of positions, against mathematics and NumPy."""

import itertools

import numpy as np
import oracle
import pytest
from attention_runs import SEPARATE, targets_of
from conftest import DTYPES
from fewer_cases import pairwise
from onnx.reference import ReferenceEvaluator

from rope_cpu import RotaryEmbedding, export
from rope_cpu.accuracy import tolerance
from rope_cpu.export.targets import TARGETS
from rope_cpu.export.validation import session as runtime

OMEGA = 500.0 ** (-np.arange(8) / 8)
MROPE = np.repeat(np.arange(3), [4, 2, 2])
INTERLEAVED_MROPE = np.array([0, 1, 2, 0, 1, 2, 0, 0])


def on_axes(owner, axes):
    """Return frequencies of which pair i rotates by axis owner[i] only."""
    return OMEGA[: len(owner)] * (np.asarray(owner) == np.arange(axes)[:, None])


# name → arguments of from_inv_freq
ROTATIONS = {
    "plain": {"inv_freq": OMEGA},
    "partial": {"inv_freq": OMEGA[:4], "head_dim": 16},
    "scaled": {"inv_freq": OMEGA / 3, "attention_factor": 1.37},
    "axial, in blocks": {"inv_freq": on_axes([0] * 4 + [1] * 4, 2), "blocks": 2, "head_dim": 20},
    "axial, over the head": {
        "inv_freq": on_axes([0, 0, 0, 1, 1, 1, 2, 2], 3),
        "attention_factor": 0.7,
    },
    "mrope": {"inv_freq": on_axes(MROPE, 3)},
    "mrope, interleaved axes": {"inv_freq": on_axes(INTERLEAVED_MROPE, 3), "head_dim": 24},
    "mixed": {"inv_freq": np.cos(np.arange(16.0)).reshape(2, 8)},
    "mixed, by head": {
        "inv_freq": np.cos(np.arange(32.0)).reshape(2, 2, 8),
        "attention_factor": 1.1,
    },
}
DENSE = ("mixed", "mixed, by head")
TABLE = 40


def exact(rope, x, ids, inverse=False):
    """Return the rotation of (batch, seq, heads, head_dim) in float64, and its tolerance."""
    omega = rope.spec.inv_freq[0]
    heads = x.shape[2]
    ids = ids[..., None] if rope.axes == 1 else ids
    factor = 1 / rope.attention_factor if inverse else rope.attention_factor
    result = np.empty(x.shape)
    bound = np.empty(x.shape)
    for head in range(heads):
        cos, sin = oracle.cos_sin_axes(ids, omega[:, head // (heads // omega.shape[1])])
        sin = -sin if inverse else sin
        one = x[:, :, head : head + 1]
        y, reach = oracle.rotate(one, factor * cos, factor * sin, rope.interleaved, rope.blocks)
        result[:, :, head : head + 1] = y
        bound[:, :, head : head + 1] = tolerance.rotation_bound(y, reach, 0, factor, x.dtype)
    # Copied elements have no error at all; angles computed in float64 are off by their rounding.
    bound[..., rope.rotary_dim :] = 0
    if x.dtype == np.float64:
        bound[..., : rope.rotary_dim] += (
            4 * np.abs(ids).max(initial=0) * np.abs(omega).max() * 2.0**-53 * np.abs(x).max()
        )
    return result, bound


LAYOUTS = {
    "bhsd": lambda x: x.transpose(0, 2, 1, 3),
    "bshd": lambda x: x,
    "sbhd": lambda x: x.transpose(1, 0, 2, 3),
    "thd": lambda x: x.reshape(-1, *x.shape[2:]),
    "bsd": lambda x: x.reshape(*x.shape[:2], -1),
}


def rotate_by(model, layout, feeds, q, k):
    tensors = [np.ascontiguousarray(LAYOUTS[layout](x)) for x in (q, k)]
    feeds = dict(zip("qk", tensors, strict=True)) | feeds
    return runtime.run(runtime.open_session(model, 1), feeds, [x.shape for x in tensors])


def position_feed(positions, layout, ids):
    if positions == "position_ids":
        return {"position_ids": ids.reshape(-1, *ids.shape[2:]) if layout == "thd" else ids}
    return {"offset": ids[:, 0].copy()} if positions == "offset" else {}


def head_counts(rope, layout):
    if layout == "bsd" or rope.spec.inv_freq.shape[2] > 1:
        return {"num_heads": 4, "num_kv_heads": 2}
    return {}


def is_written(name, kind, interleaved, target):
    """Return whether there is such a rotation, and the target can express it.

    Interleaved pairs do not cross blocks: they are the same rotation without blocks.
    """
    rotation = ROTATIONS[name]
    can_express = target in targets_of(kind)
    can_express &= name != "mixed, by head" or TARGETS[target].per_head
    return can_express and not (interleaved and "blocks" in rotation)


def combinations(rope, name, kind):
    """Yield layout, kind of positions and number of table rows of the models to test.

    Layouts other than bshd are tested in float32 and bfloat16: float16 and float64 are cast and
    computed like these.
    """
    layouts = LAYOUTS if kind in ("float32", "bfloat16") else ("bshd",)
    positions = ("position_ids", "offset") if rope.axes == 1 else ("position_ids",)
    tables = (None,) if name in DENSE else (None, TABLE)
    for combination in itertools.product(layouts, positions, tables):
        if combination[:2] != ("thd", "offset"):  # refused, as test_options shows
            yield combination


@pytest.mark.parametrize(
    ("name", "kind", "interleaved", "target"),
    pairwise(ROTATIONS, DTYPES, (False, True), TARGETS, allowed=is_written),
)
def test_export_rope_agrees_with_the_mathematics_and_numpy(name, kind, interleaved, target, rng):
    rope = RotaryEmbedding.from_inv_freq(**ROTATIONS[name], interleaved=interleaved)
    dtype = DTYPES[kind]
    q, k = (rng.standard_normal((2, 5, heads, rope.head_dim)).astype(dtype) for heads in (4, 2))
    ids = {"position_ids": rng.integers(0, TABLE, (2, 5, rope.axes)[: 3 if rope.axes > 1 else 2])}
    if rope.axes == 1:
        ids["offset"] = np.arange(5) + np.array([[3], [11]])
    want = {
        positions: [exact(rope, x, position_ids) for x in (q, k)]
        for positions, position_ids in ids.items()
    }
    kernels = {positions: rope(q, k, position_ids) for positions, position_ids in ids.items()}
    for case in combinations(rope, name, kind):
        layout, positions, table = case
        model = export.export_rope(
            rope,
            target=target,
            dtype=dtype,
            layout=layout,
            positions=positions,
            max_positions=table,
            **head_counts(rope, layout),
        )
        results = rotate_by(model, layout, position_feed(positions, layout, ids[positions]), q, k)
        bring = LAYOUTS[layout]
        for index, result in enumerate(results):
            y, bound = want[positions][index]
            by_numpy = kernels[positions][index].astype(np.float64)
            wide = result.astype(np.float64)
            assert result.dtype == dtype, case
            assert (np.abs(wide - bring(y)) <= bring(bound)).all(), case
            assert (np.abs(wide - bring(by_numpy)) <= 2 * bring(bound)).all(), case


@pytest.mark.parametrize("table", [None, TABLE])
@pytest.mark.parametrize("name", ["partial", "scaled", "axial, in blocks"])
def test_the_inverse_of_three_inputs(target, table, name, rng):
    """RoFormer rotates v as well."""
    rope = RotaryEmbedding.from_inv_freq(**ROTATIONS[name])
    x = rng.standard_normal((2, 5, 2, rope.head_dim)).astype(np.float32)
    ids = rng.integers(0, TABLE, (2, 5, rope.axes)[: 3 if rope.axes > 1 else 2])
    options = {"target": target, "layout": "bshd", "max_positions": table, "inputs": tuple("qkv")}
    model = export.export_rope(rope, **options, inverse=True)
    feeds = {"q": x, "k": 2 * x, "v": -x, "position_ids": ids}
    results = runtime.open_session(model).run(["q_rot", "k_rot", "v_rot"], feeds)
    for result, given in zip(results, (x, 2 * x, -x), strict=True):
        y, bound = exact(rope, given, ids, inverse=True)
        assert (np.abs(result - y) <= bound).all()


def test_computed_angles_have_no_limit(target, rng):
    rope = RotaryEmbedding(32, rope_theta=1e6)
    x = rng.standard_normal((1, 6, 1, 32)).astype(np.float32)
    ids = np.array([[0, 1_000_000, 999_999, 2**27 + 1, -1, -123_456]])
    result, _ = rotate_by(
        export.export_rope(rope, target=target, layout="bshd"), "bshd", {"position_ids": ids}, x, x
    )
    y, bound = exact(rope, x, ids)
    slack = np.abs(ids)[..., None, None] * 2.0**-53 * 2 * np.abs(x).max()
    assert (np.abs(result - y) <= bound + slack).all()


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_runtimes_without_a_cosine_in_float64_load_the_file(target, kind):
    """onnxruntime up to 1.28."""
    model = export.export_rope(RotaryEmbedding(16), target=target, dtype=DTYPES[kind])
    ops = {node.op_type for node in model.graph.node}
    assert "Sin" in ops
    assert "Cos" not in ops


@pytest.mark.parametrize("table", [None, 20])
def test_float32_angles_are_those_of_numpy(target, table, rng):
    """As in transformers, the product and each result are rounded to float32."""
    rope = RotaryEmbedding(
        32,
        angle_dtype="float32",
        scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
    )
    x = rng.standard_normal((1, 5, 2, 32)).astype(np.float32)
    scale = 1 if table else 100_000
    ids = np.array([[0, 1, 7, 15, 19]]) * scale
    model = export.export_rope(rope, target=target, layout="bshd", max_positions=table)
    result, _ = rotate_by(model, "bshd", {"position_ids": ids}, x, x)
    reach = 2 * np.abs(x).max() * rope.attention_factor
    assert np.abs(result - rope.rotate(x, ids)).max() <= 4 * 2.0**-24 * reach


@pytest.mark.parametrize("opset", [13, 14, 15, 18, 21, 23, 24])
def test_every_opset_of_a_target_passes(target, opset, rng):
    rope = RotaryEmbedding(16, interleaved=True)
    options = {"target": target, "layout": "bshd", "opset": opset, "max_positions": 8}
    first, last = TARGETS[target].opsets
    if not first <= opset <= last:
        with pytest.raises(ValueError, match=f"at least {first}|at most {last}"):
            export.export_rope(rope, **options)
        return
    model = export.export_rope(rope, **options)
    assert model.opset_import[0].version == opset
    assert export.validate(model, rope).passed


def test_primitive_has_elementary_operators_alone():
    model = export.export_rope(RotaryEmbedding(16), target="primitive", max_positions=8)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}
    assert "RotaryEmbedding" not in {node.op_type for node in model.graph.node}
    assert model.opset_import[0].version == 14


@pytest.mark.parametrize(("target", "domain"), [("onnx", ""), ("ort", "com.microsoft")])
def test_fused_operators_are_used(target, domain):
    model = export.export_rope(RotaryEmbedding(16), target=target, max_positions=8)
    nodes = [node for node in model.graph.node if node.op_type == "RotaryEmbedding"]
    assert [(node.domain, len(node.input)) for node in nodes] == [(domain, 4)] * 2
    mrope = RotaryEmbedding.from_inv_freq(**ROTATIONS["mrope, interleaved axes"])
    model = export.export_rope(mrope, target="ort", max_positions=8, num_heads=4)
    (node, _) = (node for node in model.graph.node if node.op_type == "MRotaryEmbedding")
    attributes = {
        attribute.name: list(attribute.ints) or attribute.i for attribute in node.attribute
    }
    assert attributes["mrope_section"] == [4, 2, 2]
    assert attributes["mrope_layout"] == 1


def test_shapes_are_dynamic_and_names_readable():
    model = export.export_rope(RotaryEmbedding(16), num_heads=4, num_kv_heads=2, layout="bshd")

    def shape(value):
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert {v.name: shape(v) for v in (*model.graph.input, *model.graph.output)} == {
        "q": ["batch_size", "sequence_length", 4, 16],
        "k": ["batch_size", "sequence_length", 2, 16],
        "position_ids": ["batch_size", "sequence_length"],
        "q_rot": ["batch_size", "sequence_length", 4, 16],
        "k_rot": ["batch_size", "sequence_length", 2, 16],
    }
    assert all(node.name for node in model.graph.node)


def test_another_number_of_heads_is_refused_when_it_runs(target):
    """RotaryEmbedding itself would take any `num_heads` with four axes."""
    model = export.export_rope(RotaryEmbedding(16), target=target, num_heads=4)
    q, k = (np.zeros((1, heads, 2, 16), np.float32) for heads in (3, 4))
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        runtime.open_session(model).run(
            None, {"q": q, "k": k, "position_ids": np.zeros((1, 2), np.int64)}
        )


@pytest.mark.parametrize("target", SEPARATE)
@pytest.mark.parametrize("table", [None, 16])
def test_the_reference_evaluator_agrees(target, table, rng):
    """A second runtime, ONNX's own in NumPy."""
    rope = RotaryEmbedding(16, interleaved=True)
    x = rng.standard_normal((2, 5, 3, 16)).astype(np.float32)
    ids = rng.integers(0, 16, (2, 5))
    model = export.export_rope(rope, target=target, max_positions=table)
    transposed = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    result, _ = ReferenceEvaluator(model).run(
        None, {"q": transposed, "k": transposed, "position_ids": ids}
    )
    y, bound = exact(rope, x, ids)
    assert (np.abs(result.transpose(0, 2, 1, 3) - y) <= bound).all()
