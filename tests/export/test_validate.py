"""validate: finds errors of a model, and names the worst case."""

import json

import numpy as np
import onnx
import oracle
import pytest
from conftest import DTYPES
from control_characters import MARK, WRITTEN, check_printed
from google.protobuf.message import Message
from onnx import numpy_helper

from rope_cpu import RotaryEmbedding, export
from rope_cpu.accuracy import reference
from rope_cpu.export.metadata import OPTIONS_KEY

ROPE = RotaryEmbedding(16, rope_theta=1000.0)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def check_passes(model, rope=ROPE, seeds=1):
    """Validate a model with several seeds; return the last report."""
    for seed in range(seeds):
        report = export.validate(model, rope, seed=seed)
        assert report.passed, str(report)
    return report


def with_initializer_changed(model, name, change):
    """Return the model with one initializer changed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), name))
            return copy
    raise LookupError(name)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_right_model_passes(target, kind):
    report = check_passes(export.export_rope(ROPE, target=target, dtype=kind, max_positions=64))
    assert 0 < report.max_abs_error < 40
    names = {outcome.case for outcome in report.outcomes}
    assert {"one token", "no tokens", "left-padded ids", "last ids", "id past the table"} <= names
    assert "passed" in str(report)
    assert report.worst.case in str(report)


def test_a_table_of_one_row_passes(target):
    check_passes(export.export_rope(ROPE, target=target, max_positions=1))


def test_a_long_table_in_float64_passes():
    options = {"target": "primitive", "dtype": "float64", "max_positions": 50_000}
    check_passes(export.export_rope(ROPE, **options))


@pytest.mark.parametrize("rope", [ROPE, RotaryEmbedding.axial(16, 2)], ids=["one axis", "two axes"])
def test_the_reference_rounds_cos_and_sin_once(rope):
    ids = np.array([[0, 1, 4095, 131_071, 999_999, 2**31 - 1, 2**35 - 1]])
    ids = np.stack([ids, ids[:, ::-1]], axis=-1) if rope.axes > 1 else ids
    expected = oracle.cos_sin_axes(
        ids if rope.axes > 1 else ids[..., None], np.atleast_2d(rope.inv_freq)
    )
    for ours, exact in zip(reference.cos_sin(rope.spec, ids), expected, strict=True):
        np.testing.assert_array_equal(ours.high[:, :, 0], exact)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("max_positions", [None, 64])
def test_float64_with_an_attention_factor_passes(inverse, max_positions):
    rope = RotaryEmbedding(32, scaling=YARN)
    options = {"target": "primitive", "dtype": "float64", "max_positions": max_positions}
    check_passes(export.export_rope(rope, inverse=inverse, **options), rope, seeds=2)


@pytest.mark.parametrize("max_positions", [None, 64])
def test_products_below_the_smallest_normal_number_pass(max_positions):
    """Their roundings are no longer relative to the values."""
    rope = RotaryEmbedding.from_inv_freq([0.3], attention_factor=2.0**-126)
    check_passes(export.export_rope(rope, max_positions=max_positions), rope)


@pytest.mark.parametrize("inverse", [False, True])
def test_inputs_stay_so_small_that_no_result_is_infinite(inverse):
    rope = RotaryEmbedding.from_inv_freq([0.3], attention_factor=2.0 ** (-126 if inverse else 126))
    report = check_passes(export.export_rope(rope, inverse=inverse), rope)
    assert 0 < max(outcome.largest_input for outcome in report.outcomes) < 2


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("max_positions", [None, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_float32_angles_are_expected_where_the_rope_has_them(dtype, max_positions, inverse):
    """Float64 arithmetic on them; a model with exact ones is another one."""
    rounded, exact = (
        RotaryEmbedding(16, scaling=YARN, angle_dtype=kind) for kind in ("float32", "float64")
    )
    model = export.export_rope(
        rounded, target="primitive", dtype=dtype, max_positions=max_positions, inverse=inverse
    )
    check_passes(model, rounded)
    assert dtype == "float32" or not export.validate(model, exact).passed


@pytest.mark.parametrize("positions", ["past", "position_ids"])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_attention_in_float64_passes(positions, scaling):
    rope = RotaryEmbedding(32, scaling=scaling)
    options = {"target": "primitive", "dtype": "float64", "positions": positions}
    check_passes(export.export_attention(rope, num_heads=4, **options), rope, seeds=2)


def test_one_wrong_entry_of_a_table_is_found(target):
    def change(table):
        table = table.copy()
        table[-1, 3] += 1e-5
        return table

    model = export.export_rope(ROPE, target=target, max_positions=64)
    report = export.validate(with_initializer_changed(model, "cos_cache", change), ROPE)
    assert not report.passed
    assert not {outcome.case: outcome for outcome in report.outcomes}["last ids"].passed
    assert "FAILED" in str(report)
    assert "OUT OF TOLERANCE" in str(report)


OTHER_ROPES = ({"rope_theta": 1001.0}, {"rope_theta": 1000.0, "interleaved": True})


@pytest.mark.parametrize("changed", OTHER_ROPES)
def test_another_rope_is_found(changed):
    assert not export.validate(export.export_rope(ROPE), RotaryEmbedding(16, **changed)).passed


def test_frequencies_rounded_to_float32_are_found():
    """The usual fault of exporters: right near zero, wrong at a million."""

    def change(inv_freq):
        return inv_freq.astype(np.float32).astype(np.float64)

    model = with_initializer_changed(export.export_rope(ROPE), "inv_freq", change)
    assert not export.validate(model, ROPE).passed


def test_a_model_that_takes_ids_past_its_table_is_found():
    """A table that is longer than its metadata says: ids past the end run instead of failing."""
    model = export.export_rope(ROPE, target="onnx", max_positions=64)
    for name in ("cos_cache", "sin_cache"):
        model = with_initializer_changed(model, name, lambda table: np.concatenate([table, table]))
    problems = {outcome.case: outcome.problem for outcome in export.validate(model, ROPE).outcomes}
    assert "must be refused" in problems["id past the table"]


def test_a_model_without_metadata_is_refused():
    model = export.export_rope(ROPE)
    del model.metadata_props[:]
    with pytest.raises(ValueError, match=r"`model` has no metadata 'rope_cpu.export'"):
        export.validate(model, ROPE)


@pytest.mark.parametrize("field", ["key", "value"])
def test_metadata_that_are_not_utf8_are_refused(field, tmp_path):
    """Protobuf then gives bytes for a string."""
    model = export.export_rope(RotaryEmbedding(8), max_positions=4)
    (entry,) = [entry for entry in model.metadata_props if entry.key == OPTIONS_KEY]
    setattr(entry, field, "?" * 9)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString().replace(b"?" * 9, b"\xff" * 9))
    with pytest.raises(ValueError, match=r"`model` has (no )?metadata 'rope_cpu.export'"):
        export.validate(path, RotaryEmbedding(8))


def test_a_rope_without_one_length_is_refused():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    rope = RotaryEmbedding(16, rope_theta=1000.0, scaling=scaling, max_position_embeddings=64)
    model = export.export_rope(rope.at_length(128))
    assert export.validate(model, rope.at_length(128)).passed
    for wrong, text in (
        (rope, "give `rope.at_length"),
        (rope.at_length([128, 130]), "2 batch rows"),
    ):
        with pytest.raises(ValueError, match=text):
            export.validate(model, wrong)


def test_an_output_without_a_shape_is_found():
    model = export.export_rope(ROPE, target="ort", layout="bshd")
    del model.graph.value_info[:]
    report = export.validate(model, ROPE)
    assert report.outcomes[0].problem.startswith("nothing is known about the shape of q/rotate")


TABLES = {"computed": {}, "initializers": {"max_positions": 50}}


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "thd", "bsd"])
@pytest.mark.parametrize("positions", ["position_ids", "offset", "none"])
@pytest.mark.parametrize("tables", TABLES)
def test_every_layout_and_kind_of_positions_passes(layout, positions, tables):
    if layout == "thd" and positions != "position_ids":
        pytest.skip("refused: packed tokens have no common order")
    options = {"layout": layout, "positions": positions, "num_heads": 4, "num_kv_heads": 2}
    check_passes(export.export_rope(ROPE, **options, **TABLES[tables]))


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("width", [18, 31])
def test_odd_head_sizes_pass(target, heads, width, interleaved):
    """Head sizes of which some elements are rotated.

    For these, onnxruntime's operator needs num_heads; without it, the head is split.
    """
    rope = RotaryEmbedding.from_inv_freq(ROPE.inv_freq, head_dim=width, interleaved=interleaved)
    options = {"target": target, "num_heads": heads, "max_positions": 64}
    check_passes(export.export_rope(rope, **options), rope)


def test_a_model_that_does_not_load_is_a_failure():
    model = export.export_rope(ROPE)
    model.opset_import[0].version = 99
    report = export.validate(model, ROPE)
    assert not report.passed
    assert "cannot load it" in str(report)


def test_an_error_of_onnx_without_a_text_is_reported(monkeypatch):
    """With Python 3.11.2, onnx loses the text of an error about a name that is no UTF-8."""

    def refuse(*_, **__):
        raise onnx.checker.ValidationError

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    report = export.validate(export.export_rope(ROPE, max_positions=8), ROPE)
    assert not report.passed
    assert "ValidationError" in str(report)


def strings_in(message):
    """Yield (message, field, index) of every string in a protobuf message."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            count = 1 if isinstance(value, str) else len(value)
            yield from ((message, field.name, index) for index in range(count))
        elif field.type == field.TYPE_MESSAGE:
            for entry in [value] if isinstance(value, Message) else value:
                yield from strings_in(entry)


def marked_models(model):
    """Yield copies of a model with the mark in a string of each kind, and in its options."""
    content = model.SerializeToString()
    kinds = {
        (message.DESCRIPTOR.name, getattr(message, "op_type", ""), field): number
        for number, (message, field, _) in enumerate(strings_in(model))
    }
    for number in kinds.values():
        changed = onnx.ModelProto.FromString(content)
        message, name, index = list(strings_in(changed))[number]
        if isinstance(getattr(message, name), str):
            setattr(message, name, getattr(message, name) + MARK)
        else:
            getattr(message, name)[index] += MARK
        yield changed
    for new in ({MARK: 1}, {"target": MARK}, {"dtype": MARK}, {"opset": MARK}, {"inputs": [MARK]}):
        changed = onnx.ModelProto.FromString(content)
        (entry,) = [entry for entry in changed.metadata_props if entry.key == OPTIONS_KEY]
        entry.value = json.dumps(json.loads(entry.value) | new)
        yield changed


def test_names_in_a_model_are_shown_with_escapes(target, capfd, tmp_path):
    """In the report, in the lines of its outcomes, and in errors about the options."""
    file = tmp_path / "model.onnx"
    text = ""
    right = export.export_rope(ROPE, target=target, inputs=["x"], max_positions=1)
    for number, model in enumerate(marked_models(right)):
        file.write_bytes(model.SerializeToString())
        try:
            report = export.validate(file if number % 2 else model, ROPE)
        except ValueError as error:
            text += f"{error}\n"
        else:
            text += "\n".join(map(str, [report, *report.outcomes])) + "\n"
    text += "".join(capfd.readouterr())  # onnxruntime's log
    check_printed(text)
    assert WRITTEN in text
