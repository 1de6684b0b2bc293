"""A NumPy layer of `attention_layer`, append and attention, against transformers' modules."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from peers.attention_cases import ALL_CASES, expected, rotary
from peers.numpy_layers import in_steps

import rope_cpu

pytestmark = pytest.mark.peers


STEPS = (300, 37, 1, 1, 1)  # a prompt, a chunk, decode steps
TOKENS = sum(STEPS)


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_layer_of_a_server_is_that_of_the_model(name):
    """A different order of sums may be 4 times as far off as the module in float32."""
    index = ALL_CASES[name].layer
    peer = expected(name, TOKENS)
    layer = rope_cpu.attention_layer(peer.config, index)
    if layer.rope is not None:  # with the float32 angles of transformers
        layer = replace(layer, rope=rotary(peer.config, index, TOKENS))
    result = in_steps(layer, layer.weights(peer.state), peer.hidden, STEPS)
    error = np.abs(result - peer.result[0]).max()
    print(f"{name:<20} {error:.1e}, the module in float32 {peer.own_error:.1e}")
    assert error <= 4 * peer.own_error
