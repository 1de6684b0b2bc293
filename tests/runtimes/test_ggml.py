"""Rotations of ggml itself, which llama.cpp runs, in the build that an npm package brings."""

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest

import rope_cpu

LIBRARIES = Path(__file__).parent / "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
FLOAT32, INT32 = 0, 26  # of ggml_type
NORMAL, NEOX, MROPE, IMROPE = 0, 2, 8, 40  # of GGML_ROPE_TYPE
WIDTH, TOKENS, BASE = 128, 64, 10000.0

pytestmark = [
    pytest.mark.runtimes,
    pytest.mark.skipif(
        not LIBRARIES.is_dir() or platform.machine() != "x86_64",
        reason="needs the packages of tests/runtimes/package.json, on Linux on x86-64",
    ),
]


class InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


POINTER, INT, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
FUNCTIONS = {
    "ggml_init": (POINTER, InitParams),
    "ggml_free": (None, POINTER),
    "ggml_new_tensor_3d": (POINTER, POINTER, INT, INT64, INT64, INT64),
    "ggml_get_data": (POINTER, POINTER),
    "ggml_rope_ext": (POINTER, *[POINTER] * 4, *[INT] * 3, *[FLOAT] * 6),
    "ggml_rope_multi": (POINTER, *[POINTER] * 4, INT, POINTER, *[INT] * 2, *[FLOAT] * 6),
    "ggml_new_graph": (POINTER, POINTER),
    "ggml_build_forward_expand": (None, POINTER, POINTER),
    "ggml_graph_compute_with_ctx": (INT, POINTER, POINTER, INT),
}


@pytest.fixture(scope="module")
def ggml():
    """The functions of ggml by name."""
    base = ctypes.CDLL(str(LIBRARIES / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(LIBRARIES / "libggml-cpu-x64.so"))
    cpu.ggml_cpu_init()
    found = {}
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(cpu if "compute" in name else base, name)
        function.restype = result
        function.argtypes = arguments
        found[name] = function
    return found


def rotated(
    ggml, x, positions, mode, n_dims=WIDTH, factor=1.0, context=0, factors=None, sections=None
):
    """Return x (tokens, heads, width) as ggml rotates it; context: YaRN's original length."""
    memory = ggml["ggml_init"](InitParams(2**24, None, False))

    def tensor(array, kind):
        sizes = [*array.shape[::-1], 1, 1][:3]
        new = ggml["ggml_new_tensor_3d"](memory, kind, *sizes)
        ctypes.memmove(ggml["ggml_get_data"](new), array.ctypes.data, array.nbytes)
        return new

    tensors = [tensor(x, FLOAT32), tensor(np.ascontiguousarray(positions, np.int32), INT32)]
    tensors.append(None if factors is None else tensor(factors.astype(np.float32), FLOAT32))
    extrapolation = 1.0 if context else 0.0
    numbers = (BASE, 1 / factor, extrapolation, 1.0, 32.0, 1.0)
    if sections is None:
        y = ggml["ggml_rope_ext"](memory, *tensors, n_dims, mode, context, *numbers)
    else:
        y = ggml["ggml_rope_multi"](
            memory, *tensors, n_dims, (INT * 4)(*sections), mode, context, *numbers
        )
    graph = ggml["ggml_new_graph"](memory)
    ggml["ggml_build_forward_expand"](graph, y)
    assert ggml["ggml_graph_compute_with_ctx"](memory, graph, 1) == 0
    out = np.empty_like(x)
    ctypes.memmove(out.ctypes.data, ggml["ggml_get_data"](y), out.nbytes)
    ggml["ggml_free"](memory)
    return out


def bound(x):
    """Return the largest difference that float32 angles below 1,000 may make, for each element.

    ggml multiplies the angle by a rounded factor from pair to pair: 2 roundings a pair.
    """
    pairs = np.arange(WIDTH // 2)
    angles = 1000 * BASE ** (-2 * pairs / WIDTH)
    return 2 * abs(x).max() * (((2 * pairs + 2) * angles).max() + 8) * 2.0**-24


FACTORS = np.linspace(1, 8, WIDTH // 2)
PLAIN = BASE ** -(np.arange(0, WIDTH, 2) / WIDTH)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
ONE_AXIS = {
    "normal": ({"mode": NORMAL}, rope_cpu.RotaryEmbedding(WIDTH, interleaved=True)),
    "neox": ({"mode": NEOX}, rope_cpu.RotaryEmbedding(WIDTH)),
    "partial": ({"mode": NEOX, "n_dims": 64}, rope_cpu.RotaryEmbedding(WIDTH, rotary_dim=64)),
    "linear": (
        {"mode": NEOX, "factor": 4.0},
        rope_cpu.RotaryEmbedding(WIDTH, scaling={"rope_type": "linear", "factor": 4.0}),
    ),
    "yarn": (
        {"mode": NEOX, "factor": 4.0, "context": 4096},
        rope_cpu.RotaryEmbedding(WIDTH, scaling=YARN),
    ),
    "frequency factors": (
        {"mode": NEOX, "factors": FACTORS},
        rope_cpu.RotaryEmbedding.from_inv_freq(PLAIN / FACTORS, head_dim=WIDTH),
    ),
}


@pytest.mark.parametrize("name", ONE_AXIS)
def test_ggml_rotates_as_we_do(ggml, name, rng):
    options, rope = ONE_AXIS[name]
    x = rng.standard_normal((TOKENS, 3, WIDTH)).astype(np.float32)
    positions = rng.integers(0, 1000, TOKENS)
    result = rotated(ggml, x, positions, **options)
    expected = rope.rotate(x[None].astype(np.float64), positions)[0]
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound(x))


@pytest.mark.parametrize(
    ("mode", "sections", "left_over"),
    [(MROPE, (16, 24, 24), []), (IMROPE, (22, 21, 21), []), (IMROPE, (24, 20, 20), [61, 62])],
)
def test_ggml_rotates_three_axes_as_we_do(ggml, mode, sections, left_over, rng):
    """Pairs that are left over, where three axes take them in turn, have a fourth position."""
    rope = rope_cpu.RotaryEmbedding.mrope(
        WIDTH, sections, rope_theta=BASE, mrope_interleaved=mode == IMROPE
    )
    x = rng.standard_normal((TOKENS, 3, WIDTH)).astype(np.float32)
    positions = rng.integers(500, 1000, (TOKENS, 3))
    with_fourth = np.vstack([positions.T, np.zeros((1, TOKENS), int)])
    result = rotated(ggml, x, with_fourth.ravel(), mode, sections=(*sections, 0))
    expected = rope.rotate(x[None].astype(np.float64), positions)[0]
    elements = [*left_over, *(pair + WIDTH // 2 for pair in left_over)]
    assert (abs(expected - x)[..., elements].max(0) > bound(x)).all()
    expected[..., elements] = x[..., elements]
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound(x))
