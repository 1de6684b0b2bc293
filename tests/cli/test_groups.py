"""Groups of layers of a config, their axes, and the work to find them."""

import sys

import numpy as np
import pytest

from rope_cpu.cli.groups import layer_groups
from rope_cpu.cli.pairs import AXES, axes_of, pairs_of
from rope_cpu.models import reader
from rope_cpu.models.vision import CLASSES, TOWERS

SIZES = {"hidden_size": 1536, "num_attention_heads": 12}
TWO_AXES = {"model_type": "qwen2_vl", "head_dim": 6}
TWO_AXES |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}


def test_layers_that_are_not_rotated_are_no_part_of_all():
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    granite = {**sizes, "model_type": "granite_swa", "layer_rope_theta": [5e6, 0]}
    (group,) = layer_groups(reader.read(granite))
    assert group.name == "all rotated layers"
    assert group.parameters["rope_theta"] == 5e6


def test_every_layer_type_or_the_one_named():
    config = reader.read({"model_type": "gemma4_text"})
    names = [group.name for group in layer_groups(config)]
    assert names == ["sliding_attention", "full_attention"]
    (group,) = layer_groups(config, "sliding_attention")
    assert group.name == "sliding_attention"


def test_an_odd_share_is_no_scaling():
    """Exponents are over the share itself, 25 elements, though 26 are rotated."""
    sizes = {"hidden_size": 400, "num_attention_heads": 4, "partial_rotary_factor": 0.25}
    (group,) = layer_groups(reader.read({"model_type": "stablelm", **sizes}))
    assert group.spec.rotary_dim == 26
    before = pairs_of(group)[""].before
    np.testing.assert_allclose(before, group.spec.inv_freq[0, 0, 0], rtol=1e-14)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({**SIZES, "model_type": "ernie4_5_vl_moe"}, ["time", "height", "width"]),
        (
            {**SIZES, "model_type": "minimax_m3_vl_vision", "head_dim": 60},
            ["time", "row", "column"],
        ),
        ({"_class_name": "HunyuanDiT2DModel"}, ["column", "row"]),
        ({"_class_name": "HunyuanImageTransformer2DModel"}, ["row", "column"]),
        ({"_class_name": "AceStepTransformer1DModel"}, [""]),
        ({**SIZES, **TWO_AXES}, ["axis 0", "axis 1"]),
    ],
)
def test_axes_in_the_order_of_position_ids(config, names):
    (group,) = layer_groups(reader.read(config))
    assert [axis.name for axis in axes_of(group)] == names


def test_every_row_names_axes_of_the_table():
    rows = [*TOWERS.values(), *CLASSES.values()]
    assert {name for row in rows for name in row.axes} <= set(AXES)


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
    sections = {name: {"rope_type": "default", "rope_theta": 1e4} for name in names}
    return {**SIZES, "layer_types": names, "rope_parameters": sections, **keys}


@pytest.mark.parametrize("model_type", ["llama", "gemma4_text", "unknown"])
def test_work_grows_with_the_number_of_layer_types_and_not_with_its_square(model_type):
    def work(count):
        config = many_types(count, model_type=model_type)
        return lines_run(lambda: list(layer_groups(reader.read(config), None, False)))

    work(1)  # reads tables that are kept
    assert work(400) < 9 * work(50)
