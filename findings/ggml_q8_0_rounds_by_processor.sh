#!/usr/bin/env bash
# Expected: q8_0 is one function of its 32 numbers: the bytes of a group are the same in gguf-py, in ggml's portable code and on every processor.
# Really: gguf-py and the portable code round half away from zero (0.5 of a level is 1), the code for AVX2 and AVX-512 half to even (0.5 is 0,
#   2.5 is 2). Random float32 numbers seldom show it; numbers of few bits do: with two fractional bits and a largest number of 127 one level
#   in eight differs.
# Who meets it: caches of keys in q8_0 (llama.cpp's --cache-type-k q8_0) that are saved on one machine and compared with another's, tests that
#   compare a NumPy cache with ggml byte by byte. q4_0, q4_1 and q5_0 agree.
# Versions: node-llama-cpp 3.22.1 (its build of ggml for Linux on x86-64), gguf 0.19.0, NumPy 2.4.6. Needs npm and a CPU with AVX2.
# Source: quantize_row_q8_0 of ggml, arch/x86/quants.c and ggml-quants.c.
set -euo pipefail
grep -q -w avx2 /proc/cpuinfo || { echo "needs a CPU with AVX2"; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check gguf==0.19.0 numpy==2.4.6
npm pack --silent @node-llama-cpp/linux-x64@3.22.1 > /dev/null
tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
venv/bin/python - <<'PY'
import ctypes

import gguf
import numpy as np

folder = "package/bins/linux-x64/"
ctypes.CDLL(folder + "libggml-base.so", mode=ctypes.RTLD_GLOBAL)
libraries = {name: ctypes.CDLL(f"{folder}libggml-cpu-{name}.so") for name in ("x64", "haswell")}


def levels(library, x):
    """Return the 32 integers of the group that a library makes of 32 float32."""
    group = np.zeros(34, np.uint8)
    library.quantize_row_q8_0(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(group.ctypes.data), ctypes.c_int64(32))
    return group[2:].view(np.int8)


rng = np.random.default_rng(0)
groups = {"halves": np.r_[127, np.arange(31) + 0.5].astype(np.float32), "random": rng.standard_normal(32).astype(np.float32)}
few_bits = rng.integers(-508, 509, (1000, 32)).astype(np.float32) / 4
few_bits[:, 0] = 127
for name, x in groups.items():
    results = {library: levels(code, x) for library, code in libraries.items()}
    results["gguf-py"] = gguf.quants.quantize(x[None], gguf.GGMLQuantizationType.Q8_0)[0, 2:].view(np.int8)
    for library, numbers in results.items():
        print(f"{name:8s} {library:8s}", numbers[:8])
    assert np.array_equal(results["x64"], results["gguf-py"])
    assert np.array_equal(results["haswell"], results["x64"]) is (name == "random")
    if name == "halves":
        assert results["x64"][1:5].tolist() == [1, 2, 3, 4] and results["haswell"][1:5].tolist() == [0, 2, 2, 4]
different = sum((levels(libraries["x64"], x) != levels(libraries["haswell"], x)).sum() for x in few_bits)
print(f"of {few_bits.size} numbers with two fractional bits {different} have other levels")
assert different > 1000
PY
