"""Errors for the habits of other libraries: each names the argument, value or call to use here."""

import re

import numpy as np
import pytest

import rope_cpu
from rope_cpu import RotaryEmbedding

ROPE = RotaryEmbedding(128)
X = np.zeros((1, 3, 2, 128), np.float32)
COS, SIN = ROPE.cos_sin(np.arange(3))


class Tensor:
    """An array of another library, which shares its memory through DLPack alone."""

    def __dlpack__(self, **_):
        raise AssertionError("must not be called")


CONVERTED = {
    "x": lambda other: ROPE.rotate(other),
    "q": lambda other: ROPE(other, X),
    "k": lambda other: ROPE(X, other),
    "keys": lambda other: ROPE.shift(other, 1),
    "cos": lambda other: rope_cpu.apply_rotary(X, other, SIN),
    "sin": lambda other: rope_cpu.apply_rotary(X, COS, other),
}
# Calls whose argument has the name of another call.
MORE = [
    ("x", lambda other: ROPE.plan([0]).rotate(other)),
    ("k", lambda other: ROPE.plan([0, 1, 2])(X, other)),
    ("x", lambda other: rope_cpu.apply_rotary(other, COS, SIN)),
]


@pytest.mark.parametrize(("name", "call"), [*CONVERTED.items(), *MORE])
def test_arrays_of_other_libraries_get_their_conversion(name, call):
    for other, conversion in ((Tensor(), "np.from_dlpack"), ([1.0], "np.asarray")):
        with pytest.raises(TypeError) as caught:
            call(other)
        assert f"`{name}` is a {type(other).__name__}" in str(caught.value)
        assert f"{conversion}({name})" in str(caught.value)


class Bfloat16(Tensor):
    """An array of bfloat16, which NumPy does not take through DLPack."""

    def __init__(self, dtype):
        self.dtype = dtype


@pytest.mark.parametrize(
    ("dtype", "conversion"),
    [
        ("torch.bfloat16", "x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)"),
        ("bfloat16", "np.asarray(x)"),
    ],
)
def test_bfloat16_of_other_libraries_gets_its_conversion(dtype, conversion):
    with pytest.raises(TypeError, match=re.escape(f"; pass {conversion}")):
        ROPE.rotate(Bfloat16(dtype))


def test_an_output_of_another_library_gets_its_conversion():
    with pytest.raises(TypeError, match=re.escape("like `q`; pass np.from_dlpack(out[0])")):
        ROPE(X, X, out=(Tensor(), Tensor()))


def test_a_weight_that_is_no_array_gets_its_conversion():
    with pytest.raises(TypeError, match=re.escape("np.from_dlpack(w)")):
        rope_cpu.convert_weight(Tensor(), 2, to="half")


def zeros(*shape):
    return np.zeros((*shape, 128), np.float32)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: ROPE(zeros(1, 1, 32), zeros(1, 513, 8)), "rope.rotate(q, offset=…)"),
        (lambda: ROPE(zeros(1, 1, 8), zeros(1, 513, 8)), "rope.rotate(q, offset=…)"),
        (lambda: ROPE(zeros(1, 2, 8), zeros(1, 0, 8)), "rope.rotate(q, offset=…)"),
        (lambda: ROPE(zeros(2, 32, 7), zeros(2, 8, 7)), "by layout 'bshd'"),
        (lambda: ROPE.rotate(zeros(1, 32, 7), range(7)), "check `layout`"),
        (lambda: ROPE.rotate(zeros(7, 2, 32), range(7)), "check `layout`"),
        (lambda: ROPE.rotate(zeros(1, 5, 32), range(7)), "must have as many on axis 1"),
    ],
)
def test_unequal_numbers_of_tokens_get_the_likely_remedy(call, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)) as caught:
        call()
    assert ("check `layout`" in str(caught.value)) == ("check `layout`" in remedy)


@pytest.mark.parametrize("position", [5, np.int64(-5)])
def test_one_number_for_positions_is_an_offset(position):
    for call in (lambda: ROPE.rotate(X, position), lambda: ROPE(X, X, position)):
        with pytest.raises(ValueError, match=f"`position_ids` is {position}.*`offset={position}`"):
            call()
    with pytest.raises(ValueError, match=re.escape(f"np.arange({position}, {position} + seq)")):
        ROPE.plan(position)


@pytest.mark.parametrize("columns", [65, 96, 128])
def test_tables_of_full_width_get_the_slice(columns):
    table = np.ones((3, columns))
    slices = re.escape(f"pass one: cos[..., :{columns // 2}], or cos[..., ::2] if interleaved")
    with pytest.raises(ValueError, match=f"at most 64 columns, .*{slices}"):
        rope_cpu.apply_rotary(X, table, table)


def test_the_package_for_onnx_is_named(run_program):
    program = """
    import rope_cpu
    for name in ("export", "nonsense"):
        try: getattr(rope_cpu, name)
        except AttributeError as error: print(error)
    """
    of_export, of_nonsense = run_program(program)[0].splitlines()
    assert "from rope_cpu import export" in of_export
    assert "import" not in of_nonsense
    assert "'nonsense'" in of_nonsense


@pytest.mark.parametrize("call", [ROPE, ROPE.plan([0, 1, 2])])
def test_one_array_in_a_call_for_two_gets_the_call_for_one(call):
    with pytest.raises(TypeError, match=re.escape("`rotate(q)` rotates q alone")):
        call(X)


def test_a_short_name_of_a_dtype_gets_the_known_one():
    with pytest.raises(TypeError, match=re.escape("(did you mean 'bfloat16'?)")):
        rope_cpu.KVCache.zeros(1, 16, 4, 64, dtype="bf16")
