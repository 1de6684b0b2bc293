"""Exported models pass validation or their options are refused; damage is reported or refused."""

from __future__ import annotations

import numpy as np
import onnx
from fuzz import damaged
from fuzz.rotaries import rotaries
from fuzz.test_guarded import run_module
from hypothesis import strategies as st
from refusals import check_ours

from rope_cpu import export
from rope_cpu.array_types import DTYPES
from rope_cpu.export.targets import TARGETS

# The exact reference that validation computes takes a millisecond for each pair.
NARROW = rotaries().filter(lambda rotary: rotary.rope.rotary_dim * rotary.axes <= 48)
# With an attention factor of 2^126, scores and even rotated queries overflow in float32.
ATTENDING = NARROW.filter(lambda rotary: np.all(rotary.rope.attention_factor <= 2.0**20))
COUNTS = st.sampled_from((1, 2, 3, 4, 6))
ROPE_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "target": st.sampled_from(tuple(TARGETS)),
        "dtype": st.sampled_from(tuple(DTYPES)),
        "layout": st.sampled_from(("bhsd", "bshd", "sbhd", "thd", "bsd")),
        "inputs": st.sampled_from((("q", "k"), ("q",), ("a", "b", "c"))),
        "num_heads": COUNTS,
        "num_kv_heads": COUNTS,
        "positions": st.sampled_from(("position_ids", "offset", "none")),
        "max_positions": st.sampled_from((1, 2, 40, 100)),
        "inverse": st.booleans(),
        "opset": st.integers(12, 26),
        "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    },
)
ATTENTION_OPTIONS = st.fixed_dictionaries(
    {"num_heads": COUNTS},
    optional={
        "num_kv_heads": COUNTS,
        "target": st.sampled_from(tuple(TARGETS)),
        "dtype": st.sampled_from(tuple(DTYPES)),
        "layout": st.sampled_from(("bhsd", "bshd", "bsd")),
        "causal": st.booleans(),
        "window": st.sampled_from((1, 3, 100)),
        "softcap": st.sampled_from((0.5, 30.0)),
        "scale": st.sampled_from((0.1, 1.0)),
        "mask": st.sampled_from(("none", "padding", "bool", "float")),
        "norm_epsilon": st.sampled_from((1e-6, 1e-2)),
        "norm_offset": st.sampled_from((0.0, 1.0)),
        "past": st.booleans(),
        "cache": st.sampled_from(("growing", "shared")),
        "cache_dtype": st.just("int8"),
        "batch_chunks": st.booleans(),
        "name_prefix": st.sampled_from(("", "layers.0.")),
        "sinks": st.just("input"),
        "positions": st.sampled_from(("past", "position_ids")),
        "max_positions": st.sampled_from((40, 100)),
        "v_head_dim": st.sampled_from((1, 8, 16, 64)),
        "opset": st.integers(12, 26),
    },
)


def test_options_of_rotations(search):
    def check(rotary, options):
        check_exported(export.export_rope, rotary.rope, options)

    search(check, 10, rotary=NARROW, options=ROPE_OPTIONS)


def test_options_of_attention(search):
    def check(rotary, options, arrays, seed):
        options = dict(options)
        random = np.random.default_rng(seed)
        width = rotary.rope.head_dim
        heads = options["num_heads"]
        kv_heads = options.get("num_kv_heads", heads)
        v_width = options.get("v_head_dim", width)
        if "norms" in arrays:
            options["qk_norm"] = tuple(random.normal(1, 0.1, (2, width)))
        elif "norm inputs" in arrays:
            options["qk_norm"] = "input"
        if "sinks" in arrays:
            options["sinks"] = random.normal(0, 1, heads)
        if "weights" in arrays:
            sizes = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * v_width}
            options["weights"] = {
                name: random.normal(0, 0.3, (size, 12)) for name, size in sizes.items()
            }
        check_exported(export.export_attention, rotary.rope, options)

    search(
        check,
        12,
        rotary=ATTENDING,
        options=ATTENTION_OPTIONS,
        arrays=st.sets(st.sampled_from(("norms", "norm inputs", "sinks", "weights"))),
        seed=st.integers(0, 2**32),
    )


def check_exported(write, rope, options):
    """Raise unless a model passes validation, or its options are refused."""
    try:
        model = write(rope, **options)
    except (TypeError, ValueError) as error:
        check_ours(error)
        return
    report = export.validate(model, rope)
    assert report.passed, str(report)


def test_damaged_models(search):
    """Tensors of other shapes, nodes removed, bytes of the file changed.

    It is a process of its own, as damaged models may end the one that runs them.
    """

    def run_round(number):
        *_, last = run_module("fuzz.damaged", number, 40 if search.seconds else 6)
        return int(last)

    search.rounds(run_round)


def test_a_damaged_model_is_noticed():
    """Not every change is without effect: so this suite can fail."""
    rope, model = damaged.model_of("rope")
    assert export.validate(model, rope).passed
    table = next(one for one in model.graph.initializer if one.name.startswith("cos"))
    zeros = np.zeros_like(onnx.numpy_helper.to_array(table))
    table.CopyFrom(onnx.numpy_helper.from_array(zeros, table.name))
    assert not export.validate(model, rope).passed
