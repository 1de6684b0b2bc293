#!/usr/bin/env bash
# Expected: jax.nn.dot_product_attention(is_causal=True) with one new query and 8 cached keys lets the query see all 8, as its position is the
#   last; or it sees as many as key_value_seq_lengths says.
# Really: query i sees keys 0 to i, whatever the number of keys: the one new token sees the first key alone, without an error or a word in the
#   docstring. key_value_seq_lengths=6 changes nothing, and local_window_size counts from the same place. A prompt, where both numbers are
#   equal, is right, so that only generated text is wrong.
# Who meets it: decoding with a cache in JAX: leave is_causal out and give key_value_seq_lengths, or pass a mask.
# Versions: jax 0.10.2, CPU (implementation "xla"). Source: the docstring of jax.nn.dot_product_attention.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import numpy as np

q, k = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 8, 1, 8), np.float32)
v = np.eye(8, dtype=np.float32)[None, :, None]  # a weight above 0 is a key that is attended to
lengths = np.array([6])


def seen(**options):
    return np.flatnonzero(np.asarray(jax.nn.dot_product_attention(q, k, v, **options)).ravel()).tolist()


cases = {
    "is_causal": seen(is_causal=True),
    "is_causal and key_value_seq_lengths 6": seen(is_causal=True, key_value_seq_lengths=lengths),
    "local_window_size (2, 0) and lengths 6": seen(local_window_size=(2, 0), key_value_seq_lengths=lengths),
    "key_value_seq_lengths 6 alone": seen(key_value_seq_lengths=lengths),
}
print("jax", jax.__version__)
for name, keys in cases.items():
    print(f"{name:40s} the new token sees keys {keys}")
assert list(cases.values()) == [[0], [0], [0], [0, 1, 2, 3, 4, 5]]
PY
