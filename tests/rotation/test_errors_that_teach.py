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
    with pytest.raises(TypeError, match=re.escape(f"array; pass np.from_dlpack({name})")):
        call(Tensor())
    with pytest.raises(TypeError, match=f"`{name}` is a list; it must be a NumPy array"):
        call([1.0])


def test_an_output_of_another_library_gets_its_conversion():
    with pytest.raises(TypeError, match=re.escape("like `q`; pass np.from_dlpack(out[0])")):
        ROPE(X, X, out=(Tensor(), Tensor()))


def zeros(*shape):
    return np.zeros((*shape, 128), np.float32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ROPE(zeros(1, 1, 32), zeros(1, 513, 8)), "`k` has 513 tokens; .* `q`, 1, by"),
        (lambda: ROPE(zeros(1, 2, 8), zeros(1, 0, 8)), "`k` has 0 tokens; .* `q`, 2, by"),
        (lambda: ROPE(zeros(2, 32, 7), zeros(2, 8, 7)), "by layout 'bshd'"),
        (
            lambda: ROPE.rotate(zeros(1, 32, 7), range(7)),
            "`x` has 32 tokens by layout 'bshd'; .* 7",
        ),
    ],
)
def test_unequal_numbers_of_tokens_name_the_layout(call, words):
    with pytest.raises(ValueError, match=words):
        call()


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
