"""Models that were exported and then damaged; also the program that validates them."""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from refusals import check_text

from rope_cpu import RotaryEmbedding, export

KINDS = ("rope", "attention", "computed", "ort", "shared")


@cache
def _exported(kind):
    rope = RotaryEmbedding(16, rope_theta=100.0)
    models = {
        "rope": lambda: export.export_rope(rope, max_positions=40, num_heads=2),
        "attention": lambda: export.export_attention(
            rope, num_heads=2, max_positions=40, past=True
        ),
        "computed": lambda: export.export_rope(rope, target="primitive"),
        "ort": lambda: export.export_rope(rope, target="ort", max_positions=40),
        "shared": lambda: export.export_attention(
            rope, num_heads=2, target="ort", max_positions=40, cache="shared", cache_dtype="int8"
        ),
    }
    return rope, models[kind]().SerializeToString()


def model_of(kind):
    """Return a rotary embedding, and a new copy of a model of it."""
    rope, written = _exported(kind)
    return rope, onnx.ModelProto.FromString(written)


def _reshaped(model, draw):
    """Give an initializer another shape, dtype or name."""
    tensor = draw.choice(model.graph.initializer)
    x = numpy_helper.to_array(tensor)
    changes = (
        lambda: x.reshape(-1),
        lambda: x[:0] if x.ndim else x.reshape(1),
        lambda: np.concatenate([x, x]) if x.ndim else x.reshape(1, 1),
        lambda: x.astype(draw.choice((np.float64, np.int64, np.float16))),
        lambda: x * 0,
        lambda: np.full_like(x, 3) if x.dtype.kind == "i" else np.full_like(x, np.nan),
    )
    tensor.CopyFrom(
        numpy_helper.from_array(
            draw.choice(changes)(), draw.choice((tensor.name, tensor.name, "x"))
        )
    )


def _dropped(model, draw):
    """Remove a node, an initializer, an input, an output, an opset or a function."""
    parts = (
        model.graph.node,
        model.graph.initializer,
        model.graph.input,
        model.graph.output,
        model.opset_import,
    )
    part = draw.choice([p for p in (*parts, model.functions, model.metadata_props) if len(p)])
    del part[draw.randrange(len(part))]


def _renamed(model, draw):
    """Rename an input, an output or the operator of a node."""
    node = draw.choice(model.graph.node)
    part = draw.choice([p for p in (node.input, node.output) if len(p)] or [[]])
    if part and draw.random() < 0.7:
        part[draw.randrange(len(part))] = draw.choice(("", "q", "x", node.output[0]))
    else:
        node.op_type = draw.choice(("Add", "Identity", "NoSuchOperator", ""))


def _declared(model, draw):
    """Declare an input or output with another type or shape."""
    value = draw.choice([*model.graph.input, *model.graph.output])
    kind = value.type.tensor_type
    if draw.random() < 0.5 and len(kind.shape.dim):
        kind.shape.dim[draw.randrange(len(kind.shape.dim))].dim_value = draw.choice(
            (0, 1, 3, -1, 2**40)
        )
    elif draw.random() < 0.5:
        kind.ClearField("shape")
    else:
        kind.elem_type = draw.choice((0, 1, 7, 11, 16))


CHANGES = (_reshaped, _dropped, _renamed, _declared)


def damage(kind, draw):
    """Return a rotary embedding, the name of a damage, and the damaged model or file content."""
    rope, model = model_of(kind)
    if draw.random() < 0.3:
        written = bytearray(model.SerializeToString())
        for _ in range(draw.randrange(1, 4)):
            written[draw.randrange(len(written))] = draw.randrange(256)
        if draw.random() < 0.3:
            del written[draw.randrange(len(written)) :]
        return rope, "bytes", bytes(written)
    names = []
    for _ in range(draw.randrange(1, 3)):
        change = draw.choice(CHANGES)
        names.append(change.__name__)
        try:
            change(model, draw)
        except (IndexError, ValueError):
            continue  # there is nothing left to change so
    return rope, "+".join(names), model


def check_damaged(model, rope):
    """Raise unless validation reports on a model, or refuses it."""
    try:
        report = export.validate(model, rope)
        assert str(report)
    except (TypeError, ValueError, OSError) as error:
        check_text(error)


def main(number, examples):
    """Validate so many damaged models; print each before."""
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(examples):
            draw = random.Random(f"{number} {index}")
            kind = draw.choice(KINDS)
            rope, what, model = damage(kind, draw)
            print(f"example {index} of seed {number}: {kind}, {what}", flush=True)
            if isinstance(model, bytes):
                path = Path(folder) / "model.onnx"
                path.write_bytes(model)
                model = path
            check_damaged(model, rope)
    print(examples)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
