#!/usr/bin/env bash
# Expected: LlamaBackbone(rope_position_scaling_factor=4.0) of KerasHub rotates by a quarter of the positions, as the factor of its base class
#   RotaryEmbedding(scaling_factor=4.0) does: both docstrings call it the factor of the rotary embedding, and it is saved in the preset.
# Really: the layer of Llama has a _get_inverse_freq of its own, which never reads the factor: the outputs of the model have equal bits for 1
#   and 4. Beside it, rope_type="dynamic" of the base class divides all frequencies by 4^(d/(d-2)) at every length, and is no NTK scaling.
# Who meets it: a Llama 2 with linear scaling (LongChat, Vicuna 16k) in KerasHub: it loads, and runs as if it were not scaled.
# Versions: keras-hub 0.32.0, keras 3.15.1, jax 0.10.2, CPU. Source: llama_rotary_embedding.py and rotary_embedding.py of keras_hub.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check)
"${pip[@]}" jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 absl-py h5py namex optree packaging regex rich sentencepiece tokenizers
"${pip[@]}" --no-deps keras==3.15.1 keras-hub==0.32.0
HOME="$folder" KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PY'
import keras
import keras_hub
import numpy as np

tokens = {"token_ids": np.arange(64)[None], "padding_mask": np.ones((1, 64), int)}
SIZES = {"vocabulary_size": 64, "num_layers": 1, "num_query_heads": 2, "hidden_dim": 64, "intermediate_dim": 8, "num_key_value_heads": 2}


def output(**options):
    keras.utils.set_random_seed(0)
    return np.asarray(keras_hub.models.LlamaBackbone(**SIZES, **options)(tokens))


def divisor(**options):
    plain, scaled = keras_hub.layers.RotaryEmbedding(), keras_hub.layers.RotaryEmbedding(**options)
    return np.asarray(plain._get_inverse_freq(64)) / np.asarray(scaled._get_inverse_freq(64))


x = np.random.default_rng(0).standard_normal((1, 64, 2, 32)).astype(np.float32)
base = [np.asarray(keras_hub.layers.RotaryEmbedding(scaling_factor=factor)(x)) for factor in (1.0, 4.0)]
dynamic = divisor(rope_type="dynamic", scaling_factor=4.0)
print("keras-hub", keras_hub.__version__)
print("RotaryEmbedding, factor 1 against 4: largest difference", abs(base[0] - base[1]).max())
plain, scaled, other = output(), output(rope_position_scaling_factor=4.0), output(rope_max_wavelength=100)
print("LlamaBackbone, factor 1 against 4: largest difference", abs(plain - scaled).max(), "- another base:", abs(plain - other).max())
print("dynamic, factor 4: frequencies are divided by", dynamic.min(), "to", dynamic.max())
assert abs(base[0] - base[1]).max() > 0.1
assert np.array_equal(plain, scaled) and abs(plain - other).max() > 1e-6
assert np.allclose(dynamic, 4 ** (64 / 62), rtol=1e-5)
PY
