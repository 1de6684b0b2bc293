#!/usr/bin/env bash
# Expected: a NaN or an infinity among keys shows after quantisation: the group, or at least that element, is NaN.
# Really: it becomes an ordinary number, or makes ordinary numbers of its neighbours.
#   ggml q8_0 (AVX2) and q4_0: a NaN is read back as the most negative or the largest level of its group, the others are right.
#   MLX affine, 4 and 8 bits: a NaN among values of 3.3 is read back as 3.3.
#   MLX mxfp8 and mxfp4: one NaN or infinity turns its whole group of 3.3 into 896 and into 0.
#   gguf-py keeps it visible (all of the group is NaN), and so does ggml's portable q8_0 unless the NaN comes first in its group: then it is 0.
# Who meets it: a server with a quantised cache: an overflow in one layer, which a float cache shows at once, becomes a wrong token.
# Versions: node-llama-cpp 3.22.1 (its build of ggml for Linux on x86-64), mlx 0.32.4 on the CPU, gguf 0.19.0, NumPy 2.4.6. Needs npm and AVX2.
set -euo pipefail
grep -q -w avx2 /proc/cpuinfo || { echo "needs a CPU with AVX2"; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check "mlx[cpu]==0.32.4" gguf==0.19.0 numpy==2.4.6
npm pack --silent @node-llama-cpp/linux-x64@3.22.1 > /dev/null
tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
venv/bin/python -W ignore - <<'PY'
import ctypes

import gguf
import mlx.core as mx
import numpy as np

np.seterr(all="ignore")
folder = "package/bins/linux-x64/"
ctypes.CDLL(folder + "libggml-base.so", mode=ctypes.RTLD_GLOBAL)
TYPES = {"q8_0": (gguf.GGMLQuantizationType.Q8_0, 34), "q4_0": (gguf.GGMLQuantizationType.Q4_0, 18)}


def ggml(processor, name, x):
    """Return 32 numbers as they come back from a group of ggml."""
    kind, size = TYPES[name]
    group = np.zeros(size, np.uint8)
    quantize = getattr(ctypes.CDLL(f"{folder}libggml-cpu-{processor}.so"), f"quantize_row_{name}")
    quantize(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(group.ctypes.data), ctypes.c_int64(32))
    return gguf.quants.dequantize(group[None], kind)[0]


def gguf_py(name, x):
    kind, _ = TYPES[name]
    return gguf.quants.dequantize(gguf.quants.quantize(x[None], kind), kind)[0]


def mlx(mode, bits, group_size, x):
    options = {"mode": mode, "bits": bits, "group_size": group_size}
    x = mx.array(np.tile(x, 2)[None])
    return np.array(mx.dequantize(*mx.quantize(x, **options), **options).astype(mx.float32))[0, :32]


mx.set_default_device(mx.cpu)
same = np.full(32, 3.3, np.float32)
ramp = np.linspace(-2, 2, 32).astype(np.float32)
bad = {"NaN": np.float32(np.nan), "infinity": np.float32(np.inf)}


def with_bad(x, name, place):
    x = x.copy()
    x[place] = bad[name]
    return x


print("the group with NaN in the last place, first and last two elements")
results = {}
for name in TYPES:
    results[f"ggml {name}, AVX2"] = ggml("haswell", name, with_bad(ramp, "NaN", 31))
    results[f"ggml {name}, portable"] = ggml("x64", name, with_bad(ramp, "NaN", 31))
    results[f"gguf-py {name}"] = gguf_py(name, with_bad(ramp, "NaN", 31))
results["ggml q8_0, portable, NaN first"] = ggml("x64", "q8_0", with_bad(ramp, "NaN", 0))
for mode, bits, size in (("affine", 4, 64), ("affine", 8, 64), ("mxfp8", 8, 32), ("mxfp4", 4, 32)):
    for name in bad:
        results[f"MLX {mode} {bits}, {name}"] = mlx(mode, bits, size, with_bad(same, name, 31))
for name, numbers in results.items():
    print(f"{name:32s}", numbers[[0, 1, 30, 31]])

for name in ("ggml q8_0, AVX2", "ggml q4_0, AVX2", "ggml q4_0, portable"):
    assert np.isfinite(results[name]).all(), name
for name in ("ggml q8_0, portable", "gguf-py q8_0", "gguf-py q4_0"):
    assert np.isnan(results[name]).all(), name
first = results["ggml q8_0, portable, NaN first"]
assert np.isfinite(first).all() and first[0] == 0
assert all(np.allclose(results[f"MLX affine {bits}, NaN"], 3.3) for bits in (4, 8))
assert all((results[f"MLX mxfp8 8, {name}"] == 896).all() and (results[f"MLX mxfp4 4, {name}"] == 0).all() for name in bad)
PY
