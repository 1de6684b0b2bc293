#!/usr/bin/env bash
# Expected: eqx.nn.RotaryPositionalEmbedding(64, theta=500_000) rotates by its own theta, whatever was made before it.
# Really: cos and sin are cached in the process by width and dtype, not by theta: of two modules of one width both rotate by the theta of the
#   one that is called first. A model alone is right, so that its own tests pass; in another order of calls the results change.
# Who meets it: a model with two bases (Gemma 3: 10,000 in local layers, 1,000,000 in global ones), or two models in one process.
# Versions: equinox 0.13.8, jax 0.10.2, CPU. Source: `cache_key` in equinox/nn/_embedding.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$folder/rotated.py" <<'PY'
import sys

import equinox
import jax
import numpy as np

x = np.random.default_rng(0).standard_normal((1000, 64)).astype(np.float32)


def rotated(theta):
    return np.asarray(equinox.nn.RotaryPositionalEmbedding(64, theta=theta)(x))


def exact(theta):
    angles = np.arange(1000)[:, None] * theta ** (-np.arange(0, 64, 2) / 64)
    a, b = x[:, :32], x[:, 32:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], 1)


thetas = [float(theta) for theta in sys.argv[1:]]
results = [rotated(theta) for theta in thetas]
gaps = [float(abs(result - exact(theta)).max()) for result, theta in zip(results, thetas)]
print("equinox", equinox.__version__, "jax", jax.__version__, "- called in turn:", dict(zip(thetas, gaps)))
assert gaps[0] < 1e-2, "the first one is right"
assert len(thetas) == 1 or (gaps[1] > 1 and np.array_equal(*results)), "the second one has its own theta"
PY
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/rotated.py" 500000
"$folder/venv/bin/python" "$folder/rotated.py" 10000 500000
"$folder/venv/bin/python" "$folder/rotated.py" 500000 10000
