"""What a file says about itself, and what `validate` reads of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import onnx

from rope_cpu import RotaryEmbedding, __version__
from rope_cpu.arguments.scalars import choice
from rope_cpu.arguments.texts import cut, shown

from .attention_options import AttentionOptions
from .options import RopeOptions
from .targets.base import pairing

OPTIONS_KEY = "rope_cpu.export"
KINDS: dict[str, type[RopeOptions | AttentionOptions]] = {
    kind.kind: kind for kind in (RopeOptions, AttentionOptions)
}

# Characters of the options; those of the most inputs with names of a line each take a tenth of it.
LONGEST_ENTRY = 2**16

TOLERANCE = (
    "|result - exact| <= 1/2 ulp(exact) + 3 u A (|x_a| + |x_b|), u = 2^-53 for float64, else 2^-24"
)
# What is added where angles are computed in the graph, in float64; terms: axes that a pair rotates with.
ROUNDED = " + terms sum(|position inv_freq|) 2^-53 A (|x_a| + |x_b|)"


def described(rope: RotaryEmbedding) -> str:
    """Return in words what a rotation is."""
    return (
        f"Rotary position embedding, rope type {rope.rope_type}: pair i rotates by position · inv_freq[i], its length "
        f"times {rope.attention_factor:.6g}. Pairs: {pairing(rope)}."
    )


def entries(
    rope: RotaryEmbedding,
    options: RopeOptions | AttentionOptions,
    further: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return all that a file says of its rotation and its export, and what a user adds; raise where names clash."""
    rotation = options.rotation if isinstance(options, AttentionOptions) else options
    own = facts(rope) | {
        "rope_cpu.tolerance": TOLERANCE if rotation.tables else TOLERANCE + ROUNDED,
        OPTIONS_KEY: json.dumps({"kind": options.kind, **asdict(options)}),
    }
    if further is None:
        return own
    known = isinstance(further, Mapping)
    if not known or not all(isinstance(text, str) for pair in further.items() for text in pair):
        raise TypeError(
            f"`metadata` is {shown(further)}; it must be a mapping of strings to strings"
        )
    taken = sorted(own.keys() & further.keys())
    if taken:
        raise ValueError(
            f"`metadata` holds {', '.join(taken)}, which the file says of itself; choose other names"
        )
    return own | dict(further)


def options_of(model: onnx.ModelProto) -> RopeOptions | AttentionOptions:
    """Return what a model was exported with; raise where it does not say all of it."""
    entry = next((entry.value for entry in model.metadata_props if entry.key == OPTIONS_KEY), None)
    if entry is None:
        raise ValueError(
            f"`model` has no metadata {OPTIONS_KEY!r}; it must come from this package's export"
        )
    try:
        given = _object(entry)
        kind = choice("kind", given.pop("kind", None), tuple(KINDS))
        return KINDS[kind](**given)
    except (TypeError, ValueError) as error:
        found = f"`model` has metadata {OPTIONS_KEY!r} of {cut(entry)}"
        raise ValueError(
            f"{found}, which no export of this version writes: {cut(str(error))}"
        ) from None


def _object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text holds; raise unless it does."""
    if len(text) > LONGEST_ENTRY:
        raise ValueError(f"it has {len(text)} characters")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(given, dict):
        raise TypeError("it is no JSON object")
    return given


def facts(rope: RotaryEmbedding) -> dict[str, str]:
    """Return what a file says about its rotation and its maker."""
    spec = rope.spec
    rotation = {
        "rope_type": rope.rope_type,
        "head_dim": rope.head_dim,
        "rotary_dim": rope.rotary_dim,
        "interleaved": rope.interleaved,
        "blocks": list(rope.blocks),
        "axes": rope.axes,
        "attention_factor": rope.attention_factor,
        "angle_dtype": spec.angle_dtype,
        "lengths": spec.lengths,
        "inv_freq": rope.inv_freq.tolist(),
    }
    return {"rope_cpu.version": __version__, "rope_cpu.rotation": json.dumps(rotation)}
