"""`rope-cpu check`: graphs of the forms that other exporters write, before and after --fix."""

import json

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import oracle
import pytest
from onnx import helper, numpy_helper

from rope_cpu import RotaryEmbedding, export
from rope_cpu.cli import main

PAIRS = 8
BASE = 1e4
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2 * PAIRS,
    "num_attention_heads": 1,
    "rope_theta": BASE,
    "max_position_embeddings": 131072,
}
YARN = {
    **CONFIG,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 2 * PAIRS,
    "num_hidden_layers": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
POSITIONS = np.array([[0, 4000, 131000, 1000000]])

# Bodies of graphs from the position ids p (1, seq) and x (1, 1, seq, 16): torch.onnx writes the
# first four, of opset 18 and 23, with and without dynamo; the others are of older models.
ANGLES = """
  column = Unsqueeze(p, last)
  position = Cast<to=1>(column)
  angle = Mul(position, inv_freq)
"""
TWICE = """
  twice = Concat<axis=-1>(angle, angle)
  c = Cos(twice)
  s = Sin(twice)
  cos = Mul(c, factor)
  sin = Mul(s, factor)
"""
ROTATE_HALF = """
  cos_head = Unsqueeze(cos, one)
  sin_head = Unsqueeze(sin, one)
  x_cos = Mul(x, cos_head)
  a, b = Split<axis=-1>(x, halves)
  minus_b = Neg(b)
  half = Concat<axis=-1>(minus_b, a)
  half_sin = Mul(half, sin_head)
  y = Add(x_cos, half_sin)
"""
STRIDED = """
  cos_head = Unsqueeze(cos, one)
  sin_head = Unsqueeze(sin, one)
  a = Slice(x, zero, end, last, two)
  b = Slice(x, one, end, last, two)
  a_cos = Mul(a, cos_head)
  b_sin = Mul(b, sin_head)
  b_cos = Mul(b, cos_head)
  a_sin = Mul(a, sin_head)
  y_a = Sub(a_cos, b_sin)
  y_b = Add(b_cos, a_sin)
  column_a = Unsqueeze(y_a, last)
  column_b = Unsqueeze(y_b, last)
  columns = Concat<axis=-1>(column_a, column_b)
  y = Reshape(columns, joined)
"""
# As GLM-4 repeats each cos of the first half.
REPEATED = """
  cos_first = Slice(cos, zero, pairs, last)
  sin_first = Slice(sin, zero, pairs, last)
  cos_column = Unsqueeze(cos_first, last)
  sin_column = Unsqueeze(sin_first, last)
  cos_twice = Concat<axis=-1>(cos_column, cos_column)
  sin_twice = Concat<axis=-1>(sin_column, sin_column)
  cos_each = Reshape(cos_twice, one_row)
  sin_each = Reshape(sin_twice, one_row)
  a = Slice(x, zero, end, last, two)
  b = Slice(x, one, end, last, two)
  minus_b = Neg(b)
  column_b = Unsqueeze(minus_b, last)
  column_a = Unsqueeze(a, last)
  columns = Concat<axis=-1>(column_b, column_a)
  turned = Reshape(columns, joined)
  x_cos = Mul(x, cos_each)
  turned_sin = Mul(turned, sin_each)
  y = Add(x_cos, turned_sin)
"""
OPERATORS = """
  cos = Cos(angle)
  sin = Sin(angle)
  cos_again = Cos(angle)
  sin_again = Sin(angle)
  z = RotaryEmbedding(x, cos, sin)
  y = Identity(z)
  w = RotaryEmbedding(x, cos_again, sin_again)
"""
PRODUCT = """
  shape = Shape(p)
  batch = Gather(shape, zero)
  sizes = Concat<axis=0>(batch, column_sizes)
  row = Unsqueeze(inv_freq, zero)
  column = Unsqueeze(row, last)
  expanded = Expand(column, sizes)
  p_row = Unsqueeze(p, one)
  position = Cast<to=1>(p_row)
  product = MatMul(expanded, position)
  angle = Transpose<perm=[0, 2, 1]>(product)
"""
FORMS = {
    "dynamo, opset 18": (18, ANGLES + TWICE + ROTATE_HALF, False),
    "dynamo, opset 23": (23, ANGLES + OPERATORS, False),
    "matmul of an expanded constant": (18, PRODUCT + TWICE + ROTATE_HALF, False),
    "repeated": (18, ANGLES + TWICE + REPEATED, True),
    "strided": (18, ANGLES + "cos = Cos(angle)\n sin = Sin(angle)\n" + STRIDED, True),
}
CONSTANTS = {
    "zero": [0],
    "one": [1],
    "two": [2],
    "last": [-1],
    "end": [2 * PAIRS],
    "halves": [PAIRS, PAIRS],
    "column_sizes": [PAIRS, 1],
    "joined": [0, 0, 0, 2 * PAIRS],
    "pairs": [PAIRS],
    "one_row": [1, -1, 2 * PAIRS],
    "no_axes": np.empty(0, np.int64),
}


def float32_frequencies(base=BASE):
    """The frequencies as models compute them."""
    return (1 / np.float32(base) ** (np.arange(0, 2 * PAIRS, 2) / np.float32(2 * PAIRS))).astype(
        np.float32
    )


def graph_of(form, inv_freq, factor=1.0, as_nodes=False):
    """A model of a form with these frequencies; as_nodes: constants are nodes."""
    opset, body, _ = FORMS[form]
    text = f"""
<ir_version: 8, opset_import: ["" : {opset}]>
g (int64[1, seq] p, float[1, 1, seq, 16] x) => (float[1, 1, seq, 16] y) {{ {body} }}
"""
    return with_constants(text, inv_freq, factor, as_nodes)


def with_constants(text, inv_freq, factor=1.0, as_nodes=False):
    """The model of a text, with the constants that it reads."""
    model = onnx.parser.parse_model(text)
    arrays = {name: np.array(values) for name, values in CONSTANTS.items()}
    arrays |= {"inv_freq": inv_freq, "factor": np.float32(factor)}
    read = {name for node in model.graph.node for name in node.input}
    tensors = [numpy_helper.from_array(arrays[name], name) for name in arrays if name in read]
    if as_nodes:
        nodes = [helper.make_node("Constant", [], [x.name], value=x) for x in tensors]
        body = [*nodes, *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(body)
    else:
        model.graph.initializer.extend(tensors)
    onnx.checker.check_model(model, full_check=True)
    return model


def float32_tables(rows, base=BASE, factor=1.0):
    """Tables as builders of models make them, with angles in float32."""
    angles = np.arange(rows, dtype=np.float32)[:, None] * float32_frequencies(base)
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


TABLES = """
<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
g (int64[1, seq] p, float[1, 1, seq, 16] x) => (float[1, 1, seq, 16] y, float[1, 1, seq, 16] z) {
  y = com.microsoft.RotaryEmbedding(x, p, cos, sin)
  z = com.microsoft.RotaryEmbedding(x, p, cos, sin)
}
"""


def graph_of_tables(tables, text=TABLES):
    model = onnx.parser.parse_model(text)
    for name, table in zip(("cos", "sin"), tables, strict=True):
        model.graph.initializer.append(numpy_helper.from_array(table, name))
    return model


@pytest.fixture
def check(tmp_path, capsys):
    """Run the command on a model; return exit code, reports, and the file of --fix.

    config: None for a run without one.
    """

    def check(model, config=CONFIG, *options):
        path = tmp_path / "model.onnx"
        if not isinstance(model, bytes):
            export.save(model, path)
        else:
            path.write_bytes(model)
        words = [str(path)]
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
            words.append(str(tmp_path / "config.json"))
        fixed = tmp_path / "fixed.onnx"
        options = [str(fixed) if option == "OUT" else option for option in options]
        code = main.main(["check", *words, "--json", *options])
        out, err = capsys.readouterr()
        return code, (json.loads(out) if out else err), fixed

    return check


def rotated(path, x, name="y"):
    """The result of a file at POSITIONS."""
    session = onnxruntime.InferenceSession(path)
    return session.run([name], {"p": POSITIONS[:, : x.shape[2]], "x": x})[0]


def error_of(path, rng, interleaved, inv_freq=None, factor=1.0):
    """The largest error of a file at each of POSITIONS, and the largest share of the bound."""
    x = rng.standard_normal((1, 1, 4, 2 * PAIRS)).astype(np.float32)
    inv_freq = oracle.inv_freq(2 * PAIRS, BASE) if inv_freq is None else inv_freq
    cos, sin = (factor * part for part in oracle.cos_sin(POSITIONS[0], inv_freq))
    exact, reach = oracle.rotate(x.swapaxes(1, 2), cos, sin, interleaved)
    error = np.abs(rotated(path, x).swapaxes(1, 2) - exact)
    share = error / oracle.bound(exact, reach, "float32", factor)
    return error.max(axis=(0, 2, 3)), share.max()


@pytest.mark.parametrize("as_nodes", [False, True], ids=["initializers", "constant nodes"])
@pytest.mark.parametrize("form", FORMS)
def test_computed_angles_before_and_after(form, as_nodes, check, rng):
    interleaved = FORMS[form][2]
    config = {**CONFIG, "model_type": "cohere"} if interleaved else CONFIG
    model = graph_of(form, float32_frequencies(), as_nodes=as_nodes)
    code, reports, fixed = check(model, config, "--fix", "-o", "OUT")
    before, after = (report["rotations"] for report in reports)
    assert code == 0
    assert [report["right"] for report in reports] == [False, True]
    (rotation,) = before
    assert rotation["pairs"] == PAIRS
    assert rotation["interleaved"] == interleaved
    assert rotation["base"] == pytest.approx(BASE)
    assert rotation["scaling"] == pytest.approx(1)
    assert rotation["against the config"] is None
    assert rotation["largest error below 131072"] > 1e-3
    assert after[0]["largest error below 131072"] <= 2**-25 + 1e-9
    onnx.checker.check_model(onnx.load(fixed), full_check=True)
    errors, share = error_of(fixed, rng, interleaved)
    assert share <= 1
    wrong, _ = error_of(fixed.with_name("model.onnx"), rng, interleaved)
    assert wrong[3] > 1e-3 > 1e-6 > errors[3]


def test_branches_that_rejoin_are_visited_once(check):
    """40 times halves are taken apart and joined: 2^40 paths from the frequencies to y."""
    halves = """
  first_{next} = Slice(half_{index}, zero, pairs, last)
  second_{next} = Slice(half_{index}, pairs, end, last)
  half_{next} = Concat<axis=-1>(first_{next}, second_{next})
"""
    body = "half_0 = Identity(cos)\n"
    body += "".join(halves.format(index=index, next=index + 1) for index in range(40))
    text = f"""
<ir_version: 8, opset_import: ["" : 18]>
g (int64[1, seq] p, float[1, seq, 16] x) => (float[1, seq, 16] y, float[1, seq, 16] z) {{
  {ANGLES + TWICE + body}
  y = Mul(x, half_40)
  z = Mul(x, sin)
}}
"""
    code, (report,), _ = check(with_constants(text, float32_frequencies()))
    assert code == 1
    assert report["rotations"][0]["against the config"] is None


def test_fix_keeps_the_dtype_of_frequencies_for_other_nodes(check):
    text = f"""
<ir_version: 8, opset_import: ["" : 18]>
g (int64[1, seq] p, float[1, 1, seq, 16] x) => (float[1, 1, seq, 16] y, float z)
<float[8] inv_freq, float[1, seq, 8] angle> {{
  {ANGLES + TWICE + ROTATE_HALF}
  first = Gather(inv_freq, zero)
  z = Reshape(first, no_axes)
}}
"""
    code, _, fixed = check(
        with_constants(text, float32_frequencies()), CONFIG, "--fix", "-o", "OUT"
    )
    assert code == 0
    onnx.checker.check_model(onnx.load(fixed), full_check=True)


HALF = f"""
<ir_version: 8, opset_import: ["" : 18]>
g (int64[1, seq] p, float16[1, seq, 16] x) => (float16[1, seq, 16] y, float16[1, seq, 16] z) {{
  {ANGLES + TWICE}
  cos_half = Cast<to=10>(cos)
  sin_half = Cast<to=10>(sin)
  y = Mul(x, cos_half)
  z = Mul(x, sin_half)
}}
"""


def test_cos_and_sin_in_float16(check):
    code, reports, fixed = check(
        with_constants(HALF, float32_frequencies()), CONFIG, "--fix", "-o", "OUT"
    )
    assert code == 0
    assert reports[0]["rotations"][0]["read from"] == "Cos and Sin, float16"
    assert reports[1]["rotations"][0]["times the tolerance"] <= 1
    ones = np.ones((1, 4, 2 * PAIRS), np.float16)
    results = onnxruntime.InferenceSession(fixed).run(["y", "z"], {"p": POSITIONS, "x": ones})
    exact = oracle.cos_sin(POSITIONS, oracle.inv_freq(2 * PAIRS, BASE))
    for result, values in zip(results, exact, strict=True):
        assert np.abs(result[..., :PAIRS] - values).max() <= 2**-12 + 2**-25 + 1e-9


def test_the_attention_factor_of_a_graph_becomes_that_of_the_config(check, rng):
    rope = RotaryEmbedding.from_config(YARN)
    factor = rope.attention_factor
    frequencies = rope.inv_freq.astype(np.float32)
    model = graph_of("dynamo, opset 18", frequencies, factor)
    code, reports, fixed = check(model, YARN, "--fix", "-o", "OUT")
    before, after = (report["rotations"][0] for report in reports)
    assert code == 0
    assert before["attention factor"] == pytest.approx(factor, rel=1e-5)
    assert before["scaling"] == pytest.approx(32)
    assert after["times the tolerance"] <= 1
    assert error_of(fixed, rng, False, rope.inv_freq, factor)[1] <= 1


def test_two_rotations_that_share_positions_are_matched_with_their_layers(check):
    model = graph_of("dynamo, opset 18", float32_frequencies())
    other = graph_of("dynamo, opset 18", float32_frequencies(1e6))
    other = onnx.compose.add_prefix(other, "other_")
    merged = onnx.compose.merge_models(model, other, io_map=[("y", "other_x")])
    code, reports, _ = check(merged, GEMMA3, "--fix", "-o", "OUT")
    assert code == 0
    for report in reports:
        layers = [rotation["config"] for rotation in report["rotations"]]
        assert sorted(layers) == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 5e5}, "base 10000.0, not 500000.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "scaling 1.0, not 4.0"),
        ({"head_dim": 64}, "pairs 8, not 32"),
        ({"model_type": "cohere"}, "interleaved False, not True"),
        (YARN, "attention factor 1.0, not 1.34657"),
    ],
)
def test_a_rotation_against_the_config_says_where_it_differs(change, words, check):
    code, (report,), _ = check(graph_of_tables(float32_tables(4096)), CONFIG | change)
    assert code == 1
    assert words in report["rotations"][0]["against the config"].split("; ")


@pytest.mark.parametrize("config", [CONFIG, GEMMA3], ids=["one", "several"])
def test_fix_leaves_another_rotation_than_that_of_the_config_as_it_is(config, check):
    model = graph_of_tables(float32_tables(4096, base=3e5))
    code, (before, after), _ = check(model, config, "--fix", "-o", "OUT")
    assert code == 1
    assert before["rotations"] == after["rotations"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_tables_before_and_after(dtype, check):
    tables = [table.astype(dtype) for table in float32_tables(131072)]
    text = TABLES if dtype == np.float32 else TABLES.replace("float[", "float16[")
    code, reports, fixed = check(graph_of_tables(tables, text), CONFIG, "--fix", "-o", "OUT")
    before, after = (report["rotations"] for report in reports)
    assert code == 0
    assert len(before) == 1  # two nodes share the tables
    assert before[0]["rows"] == 131072
    assert before[0]["largest error below 131072"] > 1e-3
    assert after[0]["times the tolerance"] <= 1
    rows = [0, 4000, 131000]
    exact = oracle.cos_sin(rows, oracle.inv_freq(2 * PAIRS, BASE))
    for tensor, values in zip(onnx.load(fixed).graph.initializer, exact, strict=True):
        table = numpy_helper.to_array(tensor)
        assert table.dtype == dtype
        # One rounding of the exact value, or its neighbour where two are as near.
        assert (
            np.abs(table[rows] - values) <= np.spacing(np.abs(table[rows])) * 0.501 + 1e-12
        ).all()


LONGROPE = {
    **CONFIG,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * PAIRS,
        "long_factor": [1.0 + index for index in range(PAIRS)],
    },
}


# As Microsoft's mobius writes rotations: rows of the tables at positions, in float16 after the
# lookup, of three axes, and of a long rotation behind a short one.
GATHERED = """
<ir_version: 10, opset_import: ["" : 23]>
g (int64[1, seq] p, float[1, 1, seq, 16] x) => (float[1, 1, seq, 16] y) {
  c = Gather(cos, p)
  s = Gather(sin, p)
  y = RotaryEmbedding(x, c, s)
}
"""
GATHERED_HALF = """
<ir_version: 10, opset_import: ["" : 23]>
g (int64[1, seq] p, float16[1, 1, seq, 16] x) => (float16[1, 1, seq, 16] y) {
  c_row = Gather(cos, p)
  s_row = Gather(sin, p)
  c = Cast<to=10>(c_row)
  s = Cast<to=10>(s_row)
  y = RotaryEmbedding(x, c, s)
}
"""
GATHERED_AXES = """
<ir_version: 10, opset_import: ["" : 23]>
g (int64[2, 1, seq] p, bool[8] mask, float[1, 1, seq, 16] x) => (float[1, 1, seq, 16] y) {
  first = Constant<value = int64 {0}>()
  second = Constant<value = int64 {1}>()
  row = Gather(p, first)
  column = Gather(p, second)
  c_row = Gather(cos, row)
  s_row = Gather(sin, row)
  c_column = Gather(cos, column)
  s_column = Gather(sin, column)
  c = Where(mask, c_row, c_column)
  s = Where(mask, s_row, s_column)
  y = RotaryEmbedding(x, c, s)
}
"""
GATHERED_OFFSET = GATHERED.replace("Gather(cos, p)", "Gather(cos, q)").replace(
    "c =", "last = ReduceMax<keepdims=0>(p)\n  q = Add(p, last)\n  c ="
)


@pytest.mark.parametrize("as_nodes", [False, True], ids=["initializers", "constant nodes"])
@pytest.mark.parametrize("text", [GATHERED, GATHERED_HALF, GATHERED_AXES])
def test_rows_of_tables_before_and_after(text, as_nodes, check):
    model = graph_of_tables(float32_tables(131072), text)
    if as_nodes:
        tensors = [*model.graph.initializer]
        for tensor in tensors:
            node = helper.make_node("Constant", [], [tensor.name], value=tensor)
            model.graph.node.insert(0, node)
        del model.graph.initializer[:]
    code, reports, fixed = check(model, CONFIG, "--fix", "-o", "OUT")
    ((before,), (after,)) = (report["rotations"] for report in reports)
    assert code == 0
    assert before["names"] == "cos, sin"
    assert before["read from"] == "RotaryEmbedding, float32"
    assert before["rows"] == 131072
    assert before["largest error below 131072"] > 1e-3
    assert after["times the tolerance"] <= 1
    onnx.checker.check_model(onnx.load(fixed), full_check=True)


@pytest.mark.parametrize("rows", [5, 100, 4096])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("config", [{**CONFIG, "rope_theta": 1e7}, LONGROPE], ids=["base", "two"])
def test_rounded_tables_are_right(config, dtype, rows, check):
    """Values fix low frequencies badly, above all at 16 bits; they are right all the same."""
    rope = RotaryEmbedding.from_config(config)
    if config is LONGROPE:
        rope = rope.at_length(5000)
    exact = (rope.attention_factor * x for x in oracle.cos_sin(np.arange(rows), rope.inv_freq))
    model = graph_of_tables([x.astype(dtype) for x in exact])
    for given in (config, None):
        code, reports, _ = check(model, given)
        assert code == 0, reports


@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "own frequencies"])
@pytest.mark.parametrize(
    ("target", "rows", "source"),
    [
        ("onnx", None, "Cos and Sin"),
        ("primitive", None, "Cos and Sin"),
        ("ort", None, "Cos and Sin"),
        ("onnx", 4096, "RotaryEmbedding"),
        ("ort", 4096, "RotaryEmbedding"),
    ],
)
def test_files_of_the_export_are_right(target, rows, source, config, check):
    rope = RotaryEmbedding.from_config(CONFIG)
    model = export.export_rope(rope, target=target, max_positions=rows, num_heads=1)
    code, (report,), _ = check(model, config)
    assert code == 0
    (rotation,) = report["rotations"]
    assert rotation["read from"] == f"{source}, float32"
    assert rotation["rows"] == (rows or "none: computed")


def test_attention_of_the_export_is_right(check):
    rope = RotaryEmbedding.from_config(CONFIG)
    model = export.export_attention(
        rope, num_heads=2, num_kv_heads=1, target="ort", max_positions=512
    )
    code, (report,), _ = check(model)
    assert code == 0
    assert report["rotations"][0]["read from"] == "GroupQueryAttention, float32"


def test_attention_without_rotation_has_none(check):
    rope = RotaryEmbedding.from_config(CONFIG)
    options = {"num_heads": 2, "num_kv_heads": 1, "target": "ort", "max_positions": 64}
    model = export.export_attention(rope, **options)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "do_rotary":
                attribute.i = 0
    code, text, _ = check(model)
    assert code == 2
    assert "no rotation is found" in text


def test_strided_elements_outside_of_the_rotation_are_no_pairing(check):
    """As the experts of gpt-oss take them."""
    text = f"""
<ir_version: 8, opset_import: ["" : 18]>
g (int64[1, seq] p, float[1, 1, seq, 16] x) => (float[1, 1, seq, 16] y, float[1, 1, seq, 8] z) {{
  {ANGLES + TWICE + ROTATE_HALF}
  gate = Slice(y, zero, end, last, two)
  up = Slice(y, one, end, last, two)
  z = Mul(gate, up)
}}
"""
    _, (report,), _ = check(with_constants(text, float32_frequencies()))
    assert not report["rotations"][0]["interleaved"]


# Without a config the frequencies are fitted, to the rounding of the table.
@pytest.mark.parametrize(("config", "error"), [(CONFIG, 2e-7), (CONFIG, 1e-5), (None, 1e-5)])
def test_a_table_with_one_wrong_row_is_out_of_tolerance(config, error, check):
    model = export.export_rope(RotaryEmbedding.from_config(CONFIG), max_positions=4096)
    (tensor,) = (x for x in model.graph.initializer if x.name == "sin_cache")
    table = numpy_helper.to_array(tensor).copy()
    table[1234, 3] += error
    tensor.CopyFrom(numpy_helper.from_array(table, tensor.name))
    code, (report,), _ = check(model, config)
    assert code == 1
    largest = report["rotations"][0]["largest error below 4096"]
    assert largest == pytest.approx(error, rel=0.01, abs=2.0**-23)  # the table is float32


@pytest.mark.parametrize("form", ["dynamo, opset 18", "tables"])
def test_without_a_config_the_frequencies_of_the_file_are_exact(form, check):
    inv_freq = float32_frequencies()
    is_table = form == "tables"
    model = graph_of_tables(float32_tables(131072)) if is_table else graph_of(form, inv_freq)
    code, (before, after), fixed = check(model, None, "--fix", "-o", "OUT")
    assert code == 0
    assert not before["right"]
    assert after["rotations"][0]["config"] is None
    # Frequencies that were rounded to float32 stay as they are, and a config shows that.
    code, (report,), _ = check(onnx.load(fixed), CONFIG)
    assert code == 1
    assert 1e-4 < report["rotations"][0]["largest error below 131072"] < 8e-3


def test_the_model_itself_is_replaced_where_output_names_it(check, tmp_path):
    model = graph_of_tables(float32_tables(4096))
    path = str(tmp_path / "model.onnx")
    assert check(model, CONFIG, "--fix", "-o", path)[0] == 0
    assert check(onnx.load(path), CONFIG)[0] == 0


def test_each_fact_is_a_line(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    export.save(graph_of_tables(float32_tables(4096)), path)
    assert main.main(["check", str(path)]) == 1
    lines = capsys.readouterr().out.split("\n")
    assert "    pairs                       8" in lines
    assert any(line.startswith("    largest error below 4096    ") for line in lines)


def test_python_gets_what_the_command_prints(check, tmp_path):
    """Of a file, and of the model in memory, which stays as it is."""
    model = graph_of("dynamo, opset 18", float32_frequencies())
    before = model.SerializeToString()
    _, (printed,), _ = check(model)
    rope = RotaryEmbedding.from_config(CONFIG)
    for source in (model, tmp_path / "model.onnx"):
        report = export.check(source, rope)
        (outcome,) = report.outcomes
        assert not report.passed
        assert report.max_abs_error == outcome.error > 1e-3
        assert outcome.facts | {"config": "all layers"} == {
            name: printed["rotations"][0][name] for name in outcome.facts
        }
    assert model.SerializeToString() == before
    assert export.check(model, {"other": RotaryEmbedding(32), "own": rope}).worst.problem == ""


def test_a_config_of_more_positions_than_are_compared(check, monkeypatch):
    """Errors of 10^15 positions would take years, and more memory than there is."""
    monkeypatch.setattr("rope_cpu.cli.check.FARTHEST", 8192)
    model = graph_of("dynamo, opset 18", float32_frequencies())
    _, (report,), _ = check(model, CONFIG | {"max_position_embeddings": 10**15})
    assert "largest error below 8192" in report["rotations"][0]


def with_cos_from_outside():
    """A rotation by tables that are inputs, beside one that can be read."""
    model = graph_of_tables(float32_tables(64))
    text = TABLES.replace("x) =>", "x, float[64, 8] cos, float[64, 8] sin) =>")
    other = onnx.compose.add_prefix(onnx.parser.parse_model(text), "other_")
    return onnx.compose.merge_models(model, other, io_map=[("y", "other_x")])


WITHOUT = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Sin(x) }'
)


def with_nested_functions(levels):
    """A model whose functions call the next one twice, the last one Identity."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    model = helper.make_model(WITHOUT.graph, opset_imports=opsets)
    for level in range(levels):
        name, domain = (f"f{level + 1}", "own") if level + 1 < levels else ("Identity", "")
        first = helper.make_node(name, ["x"], ["t"], domain=domain)
        second = helper.make_node(name, ["t"], ["y"], domain=domain)
        body = helper.make_function("own", f"f{level}", ["x"], ["y"], [first, second], opsets)
        model.functions.append(body)
    model.graph.node[0].CopyFrom(helper.make_node("f0", ["x"], ["y"], domain="own"))
    return model.SerializeToString()


EXTERNAL = graph_of_tables(float32_tables(4))
onnx.external_data_helper.set_external_data(EXTERNAL.graph.initializer[0], "gone.data")


OF_ONE_ROW = graph_of_tables(float32_tables(1))
OF_NAN = graph_of_tables(float32_tables(9, factor=np.nan))
OF_OFFSETS = graph_of_tables(float32_tables(64), GATHERED_OFFSET)
UNREADABLE = [
    (WITHOUT, "no rotation is found, by tables"),
    (with_cos_from_outside(), "no rotation is found in the operator of other_y"),
    (OF_OFFSETS, "no rotation is found in the operator of y"),
    (with_nested_functions(20), "its functions make 1048576 nodes"),
    (OF_ONE_ROW, "two positions or more"),
    (OF_NAN, "cos, sin must be finite"),
    (b"\0damaged", "model.onnx cannot be read"),
    (EXTERNAL, "gone.data"),
]
WRONG_OPTIONS = [
    ("--fix", "`--fix` and `-o` need each other"),
    ("-o OUT", "`--fix` and `-o` need each other"),
    ("--fix -o out.txt", "with the suffix .onnx"),
    ("--fix -o none/out.onnx", "cannot write none/out.onnx: it must be a file in a folder"),
]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        *((model, "", words) for model, words in UNREADABLE),
        *((WITHOUT, options, words) for options, words in WRONG_OPTIONS),
    ],
)
def test_files_that_cannot_be_read(model, options, words, check):
    content = model if isinstance(model, bytes) else model.SerializeToString()
    code, text, fixed = check(content, CONFIG, *options.split())
    assert code == 2
    assert words in text
    assert not fixed.exists()


def test_damaged_files_end_with_an_exit_code(check, rng):
    model = graph_of("dynamo, opset 18", float32_frequencies()).SerializeToString()
    for _ in range(20):
        damaged = bytearray(model[: rng.integers(len(model) // 2, len(model) + 1)])
        for index in rng.integers(0, len(damaged), 3):
            damaged[index] = rng.integers(256)
        assert check(bytes(damaged), None, "--fix", "-o", "OUT")[0] in (0, 1, 2)
