"""Content of `rope-cpu show`: groups of layers, and the lengths at which they differ."""

import sys

import numpy as np
import pytest

from rope_cpu.cli.show_summary import layer_rotations
from rope_cpu.configs import reader

SIZES = {"hidden_size": 512, "num_attention_heads": 4}


def kinds(config, layer_type=None):
    """Return the kinds of layers of a config by name."""
    return {
        layers.name: layers for layers in layer_rotations(reader.read(config), layer_type, None)
    }


def test_an_odd_share_is_no_scaling():
    """Exponents are over the share itself, 25 elements, though 26 are rotated."""
    sizes = {"hidden_size": 400, "num_attention_heads": 4}
    layers = kinds({"model_type": "stablelm", **sizes, "partial_rotary_factor": 0.25})[
        "stablelm, all layers"
    ]
    assert (layers.rope.rotary_dim, layers.rope.head_dim) == (26, 100)
    np.testing.assert_allclose(layers.unscaled, layers.rope.inv_freq, rtol=1e-14)


@pytest.mark.parametrize("model_type", ["nanochat", "qwen2_vl_text"])
def test_two_lengths_whatever_the_rule_is_part_of(model_type):
    scaling = {
        "max_position_embeddings": 100,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    }
    (layers,) = kinds({"model_type": model_type, **SIZES, **scaling}).values()
    assert list(layers.by_length) == ["at 100 tokens", "at 400 tokens"]


def test_every_layer_type_or_the_one_named():
    gemma = {"model_type": "gemma4_text"}
    assert list(kinds(gemma)) == ["gemma4_text, sliding_attention", "gemma4_text, full_attention"]
    assert list(kinds(gemma, "sliding_attention")) == ["gemma4_text, sliding_attention"]


def test_layers_that_are_not_rotated_are_no_part_of_all():
    sizes = {**SIZES, "num_hidden_layers": 2}
    (granite,) = kinds(
        {**sizes, "model_type": "granite_swa", "layer_rope_theta": [5e6, 0]}
    ).values()
    assert granite.name == "granite_swa, all rotated layers"
    assert granite.parameters["rope_theta"] == 5e6
    assert not kinds({**sizes, "model_type": "cohere2"})[
        "cohere2, full_attention: not rotated"
    ].by_length


def lines_run(call):
    """Return how many lines of Python a call runs: its work, without a clock."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def many_types(count, **keys):
    """Return a config with so many layer types, and a section for each."""
    names = [f"type {number}" for number in range(count)]
    sections = {name: {"rope_type": "default"} for name in names}
    sections[names[-1]] = {"rope_type": "default", "rope_theta": 1e4}
    return {**SIZES, "layer_types": names, "rope_parameters": sections, **keys}


@pytest.mark.parametrize("model_type", ["llama", "gemma4_text", "unknown"])
def test_work_grows_with_the_number_of_layer_types_and_not_with_its_square(model_type):
    def work(count):
        config = many_types(count, model_type=model_type)
        return lines_run(lambda: list(layer_rotations(reader.read(config), None, False)))

    work(1)  # reads tables that are kept
    assert work(400) < 9 * work(50)
