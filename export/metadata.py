"""What a file says about itself."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rope_cpu import RotaryEmbedding, __version__

TOLERANCE = "|result - exact| <= 1/2 ulp(exact) + 3 u A (|x_a| + |x_b|), u = 2^-53 for float64, else 2^-24"
# What is added where angles are computed in the graph, in float64; terms: axes that a pair rotates with.
ROUNDED = " + terms sum(|position inv_freq|) 2^-53 A (|x_a| + |x_b|)"


def pairing(rope: RotaryEmbedding) -> str:
    """Return in words which elements form a pair."""
    kind = "(2i, 2i+1), interleaved" if rope.interleaved else "(i, i+n), half-split"
    where = f" within each of the blocks {list(rope.blocks)}" if len(rope.blocks) > 1 else ""
    return f"{kind}{where}, over the first {rope.rotary_dim} of {rope.head_dim} elements"


def described(rope: RotaryEmbedding) -> str:
    """Return in words what a rotation is."""
    return (
        f"Rotary position embedding, rope type {rope.rope_type}: pair i rotates by position · inv_freq[i], its length "
        f"times {rope.attention_factor:.6g}. Pairs: {pairing(rope)}."
    )


def entries(
    rope: RotaryEmbedding, options: dict[str, str], further: Mapping[str, str] | None, *, tables: bool
) -> dict[str, str]:
    """Return all that a file says: of its rotation, of its export, and what a user adds; raise where that says less.

    tables: cos and sin are looked up rather than computed.
    """
    own = facts(rope) | {"rope_cpu.tolerance": TOLERANCE if tables else TOLERANCE + ROUNDED} | options
    if further is None:
        return own
    known = isinstance(further, Mapping)
    if not known or not all(isinstance(text, str) for pair in further.items() for text in pair):
        raise TypeError(f"`metadata` is {further!r}; it must be a mapping of strings to strings")
    taken = sorted(own.keys() & further.keys())
    if taken:
        raise ValueError(f"`metadata` holds {', '.join(taken)}, which the file says of itself; choose other names")
    return own | dict(further)


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
    return {
        "rope_cpu.version": __version__,
        "rope_cpu.rotation": json.dumps(rotation),
    }
