"""Sequences of different lengths: lengths of equal frequencies share one row of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rope_cpu.frequencies.spec import LengthRule, RopeSpec
from rope_cpu.rotation.cos_sin import CosSin

# Rows of frequencies that are remembered together. "longrope" has two for any lengths and
# "dynamic_powers" some ten; those of "dynamic" change at every token, and do not come back.
_FEW = 16


def rows_of_lengths(
    spec: RopeSpec, rule: LengthRule, lengths: Sequence[int]
) -> tuple[RopeSpec, CosSin, list[int]]:
    """Return the distinct frequencies of sequences, as spec and as cos and sin, and their rows.

    spec, rule: a rotation, and its rule.
    lengths: checked lengths in tokens. For each, the last result has the index of its row.
    """
    spec.check_rows(len(lengths))
    representatives = rule.representatives(lengths)
    distinct = sorted(set(representatives))
    row_of = {length: row for row, length in enumerate(distinct)}
    evaluate = _remembered if len(distinct) <= _FEW else _evaluated
    try:
        evaluated, cos_sin = evaluate(spec, tuple(distinct))
    except ValueError:
        spec.at_length(lengths)  # raises again, with the length that was given in the text
        raise
    return evaluated, cos_sin, [row_of[length] for length in representatives]


def _evaluated(spec: RopeSpec, lengths: tuple[int, ...]) -> tuple[RopeSpec, CosSin]:
    at_lengths = spec.at_length(lengths)
    return at_lengths, CosSin.from_spec(at_lengths)


_remembered = lru_cache(maxsize=16)(_evaluated)
