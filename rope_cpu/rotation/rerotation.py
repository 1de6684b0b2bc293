"""From one rotation to another in one pass: the checks, and cos and sin of the difference."""

from __future__ import annotations

from typing import Any

from rope_cpu.arguments.texts import shown
from rope_cpu.frequencies.spec import LARGEST_FACTOR, RopeSpec
from rope_cpu.rotation.cos_sin import CosSin


def check_rerotation(new: RopeSpec, old: RopeSpec) -> None:
    """Raise unless keys rotated as `old` says can be rotated on to `new`."""
    for spec in (new, old):
        spec.check_length()
    old_facts = _facts(old)
    for name, value in _facts(new).items():
        if old_facts[name] != value:
            raise ValueError(
                f"`old` has {name} {shown(old_facts[name])}, but this rotary embedding has {name} "
                f"{shown(value)}; they must be equal: undo the old rotation with "
                "old.rotate(keys, position_ids, inverse=True) and rotate again"
            )
    for name, spec in (("this rotary embedding", new), ("`old`", old)):
        if spec.angle_dtype == "float32":
            raise ValueError(
                f"{name} has angle_dtype 'float32': its angles are rounded at each position, so "
                "that no difference of frequencies gives the angle between the two rotations; undo "
                "the old one with old.rotate(keys, position_ids, inverse=True) and rotate again"
            )


def _facts(spec: RopeSpec) -> dict[str, Any]:
    """Return the facts in which two rotations must agree, by name."""
    return {
        "head_dim": spec.head_dim,
        "rotary_dim": spec.rotary_dim,
        "interleaved": spec.interleaved,
        "blocks": spec.blocks,
        "axes": spec.axes,
        "frequency heads": spec.inv_freq.shape[2],
    }


def rerotation(new: CosSin, old: CosSin) -> CosSin:
    """Return the cos and sin from an old rotation to a new one, a row for each sequence.

    new, old: of a row for each sequence, or of one for all.
    """
    rows = {len(new.frequencies), len(old.frequencies)} - {1}
    if len(rows) > 1:
        raise ValueError(
            f"`old` has lengths for {len(old.frequencies)} sequences, but this rotary embedding "
            f"has lengths for {len(new.frequencies)} (`at_length([...])`); the numbers must be "
            "equal, or one of them 1"
        )
    factors = new.factors["rotate"][:, 0] / old.factors["rotate"][:, 0]
    wrong = (factors < 1 / LARGEST_FACTOR) | (factors > LARGEST_FACTOR)
    if wrong.any():
        raise ValueError(
            f"the quotient of the attention factors of this rotary embedding and of `old` is "
            f"{factors[wrong][0]}; it must be from 2^-126 to 2^126"
        )
    return new.from_rotation_of(old)
