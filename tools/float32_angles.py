"""Print the table of docs/differences.md: how exact cos(position · inv_freq) is in each library.

Each library computes inv_freq and the angles as its users write them. Libraries that are not
installed are left out. From the repository's root, in an environment with the extra `runtimes` and
torch, jax, mlx[cpu], numexpr and tensorflow: python tools/float32_angles.py

tinygrad needs clang, or DEV=PYTHON in the environment.
"""

from importlib import import_module, metadata

import numpy as np

import rope_cpu

WIDTH, BASE = 128, 500000.0
ENDS = (4096, 131072, 1048576)
MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[tokens, 1] positions, float base, float[64] exponents) => (float[tokens, 64] cos)
{
  powers = Pow(base, exponents)
  inv_freq = Reciprocal(powers)
  angles = Mul(positions, inv_freq)
  cos = Cos(angles)
}"""
EXPONENTS = np.arange(0, WIDTH, 2, dtype=np.float32) / np.float32(WIDTH)


def feeds(positions):
    """Return the inputs of `MODEL`."""
    column = positions[:, None].astype(np.float32)
    return {"positions": column, "base": np.array(BASE, np.float32), "exponents": EXPONENTS}


def of_numpy_like(numpy_like, positions, float32):
    """Return cos by a library with the functions and operators of NumPy."""
    exponents = numpy_like.arange(0, WIDTH, 2, dtype=float32) / WIDTH
    angles = positions[:, None] * (1.0 / (BASE**exponents))
    return np.asarray(numpy_like.cos(angles))


def _pytorch(positions):
    import torch

    return of_numpy_like(torch, torch.tensor(positions).float(), torch.float32)


def _jax_eager(positions):
    import jax.numpy as jnp

    return of_numpy_like(jnp, jnp.asarray(positions, jnp.float32), jnp.float32)


def _jax_jit(positions):
    import jax
    import jax.numpy as jnp

    compiled = jax.jit(
        lambda x: jnp.cos(x[:, None] * (1.0 / BASE ** (jnp.arange(0, 128, 2) / 128)))
    )
    return np.asarray(compiled(jnp.asarray(positions, jnp.float32)))


def _mlx(positions):
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    return of_numpy_like(mx, mx.array(positions.astype(np.float32)), mx.float32)


def _numpy_float32(positions):
    return np.cos(positions.astype(np.float32)[:, None] * (1 / np.float32(BASE) ** EXPONENTS))


def _numpy_int64(positions):
    return np.cos(positions[:, None] * (1 / np.float32(BASE) ** EXPONENTS))


def _numexpr(positions):
    import numexpr

    return numexpr.evaluate("cos(positions * (1 / base ** exponents))", feeds(positions))


def _numba(positions):
    import numba

    @numba.njit
    def cos(positions, base, exponents):
        return np.cos(positions * (np.float32(1) / base**exponents))

    return cos(feeds(positions)["positions"], np.float32(BASE), EXPONENTS)


def _onnxruntime(positions):
    import onnx.parser
    import onnxruntime as runtime

    model = onnx.parser.parse_model(MODEL).SerializeToString()
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, feeds(positions))[0]


def _openvino(positions):
    import onnx.parser
    import openvino

    model = openvino.Core().read_model(onnx.parser.parse_model(MODEL).SerializeToString())
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", hint)
    return compiled(feeds(positions))[0]


def _tensorflow(positions):
    import tensorflow as tf

    inv_freq = 1.0 / BASE ** (tf.range(0, WIDTH, 2, dtype=tf.float32) / WIDTH)
    return tf.cos(positions.astype(np.float32)[:, None] * inv_freq).numpy()


def _tinygrad(positions):
    from tinygrad import Tensor

    inv_freq = 1.0 / (BASE ** (Tensor.arange(0, WIDTH, 2).float() / WIDTH))
    return (Tensor(positions.astype(np.float32))[:, None] * inv_freq).cos().numpy()


def _ours_float32(positions):
    rope = rope_cpu.RotaryEmbedding(WIDTH, rope_theta=BASE, angle_dtype="float32")
    return rope.cos_sin(positions)[0]


def _ours(positions):
    return rope_cpu.RotaryEmbedding(WIDTH, rope_theta=BASE).cos_sin(positions)[0]


# The package of each row, and its function.
ROWS = {
    "PyTorch": ("torch", _pytorch),
    "JAX": ("jax", _jax_eager),
    "JAX under jit": ("jax", _jax_jit),
    "MLX on the CPU": ("mlx", _mlx),
    "onnxruntime": ("onnxruntime", _onnxruntime),
    "OpenVINO, hint f32": ("openvino", _openvino),
    "numexpr": ("numexpr", _numexpr),
    "TensorFlow": ("tensorflow", _tensorflow),
    "tinygrad": ("tinygrad", _tinygrad),
    "NumPy, float32 positions": ("numpy", _numpy_float32),
    "NumPy, int64 positions": ("numpy", _numpy_int64),
    "Numba": ("numba", _numba),
    'rope_cpu, angle_dtype="float32"': ("numpy", _ours_float32),
    "rope_cpu": ("numpy", _ours),
}


def errors(function):
    """Return the largest error of cos at the last 256 positions before each end."""
    for end in ENDS:
        positions = np.arange(end - 256, end)
        inv_freq = np.longdouble(BASE) ** -(np.arange(0, WIDTH, 2, dtype=np.longdouble) / WIDTH)
        exact = np.cos(positions[:, None] * inv_freq)
        yield float(abs(function(positions) - exact).max())


def main():
    """Print the table."""
    print("| cos computed by |", " | ".join(f"below {end:,}" for end in ENDS), "|")
    print("|---" * (1 + len(ENDS)) + "|")
    for name, (package, function) in ROWS.items():
        try:
            import_module(package)
        except ImportError:
            continue
        version = "" if name.startswith("rope_cpu") else f" {metadata.version(package)}"
        cells = (f"{error:.1e}".replace("e-0", "e-") for error in errors(function))
        print(f"| {name}{version} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
