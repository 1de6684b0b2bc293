#!/usr/bin/env bash
# Expected: two equinox.nn.RotaryPositionalEmbedding of one width, with theta 10,000 and 1,000,000, rotate by their own frequencies; a module
#   of JAX is a pure function of its fields and arguments.
# Really: cos and sin are kept in a dictionary of the process by width and dtype. The second module rotates by the first one's theta, to
#   the bit, until a longer sequence replaces the tables, and from then on the first module rotates by the theta of the second.
# Who meets it: models with two bases, such as Gemma 3's local and global layers; two models in one process; tests that compare bases.
#   A single base is right.
# Versions: equinox 0.13.8, jax 0.10.2. Source: equinox/nn/_embedding.py, `internal_rope_embedding_cache`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import numpy as np
from equinox.nn import RotaryPositionalEmbedding

WIDTH = 64
x = np.ones((16, WIDTH), np.float32)
local, whole = (RotaryPositionalEmbedding(WIDTH, theta=theta) for theta in (1e4, 1e6))


def by_definition(theta, tokens):
    angles = np.arange(tokens)[:, None] * theta ** -(np.arange(0, WIDTH, 2) / WIDTH)
    return np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], 1)


def theta_of(rotated):
    near = [theta for theta in (1e4, 1e6) if np.abs(rotated - by_definition(theta, len(rotated))).max() < 1e-4]
    return near[0] if near else None


thetas = [theta_of(np.asarray(rope(x))) for rope in (local, whole)]
theta_of_long = theta_of(np.asarray(whole(np.ones((32, WIDTH), np.float32))))
after = theta_of(np.asarray(local(x)))
print("equinox", version("equinox"))
print(f"theta 1e4 rotates by {thetas[0]:.0e}, then theta 1e6 by {thetas[1]:.0e}")
print(f"32 tokens: theta 1e6 rotates by {theta_of_long:.0e}, then theta 1e4 by {after:.0e}")
assert thetas == [1e4, 1e4], "its own theta by now"
assert (theta_of_long, after) == (1e6, 1e6)
PY
