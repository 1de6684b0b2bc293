"""The rotation of an indexer, the small attention by which sparse attention chooses its keys.

It has the frequencies of the attention of its layer, in wider heads of its own, of which it may
rotate another part in other pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.frequencies.rope_types import MISSING
from rope_cpu.frequencies.spec import RopeSpec, placed

# The key by which a file says how an indexer pairs, in the code of vLLM and SGLang.
PAIRING_KEY = "indexer_rope_interleave"
_WIDTH_KEY = "index_head_dim"


def indexer_spec(
    attention: RopeSpec,
    facts: Mapping[str, Any],
    values: Mapping[str, Any],
    interleaved: bool | None,
) -> RopeSpec:
    """Return the rotation of the heads of an indexer.

    Parameters
    ----------
    attention : RopeSpec
        The rotation of the attention of the same layers.
    facts : mapping
        `ModelFacts.indexer`.
    values : mapping
        The keys of the config under standard names.
    interleaved : bool, optional
        The pairing; by default that of the file, or of the model type.
    """
    if interleaved is None:
        interleaved = scalars.boolean(PAIRING_KEY, values.get(PAIRING_KEY, facts["interleaved"]))
    head_dim = _head_dim(values, attention.rotary_dim)
    spec = replace(
        attention, head_dim=head_dim, interleaved=interleaved, blocks=(attention.rotary_dim,)
    )
    return placed(spec, facts.get("rotates", ""))


def _head_dim(values: Mapping[str, Any], rotary_dim: int) -> int:
    """Return the width of a head of the indexer; raise unless the rotated part fits."""
    width = values.get(_WIDTH_KEY)
    if width is None:
        rule = "be in the config: without it, the model has no indexer"
        raise ArgumentError(_WIDTH_KEY, MISSING, rule)
    head_dim = scalars.whole_number(_WIDTH_KEY, width, 2, limits.HEAD_DIM)
    if head_dim < rotary_dim or head_dim % 2:
        raise ArgumentError(_WIDTH_KEY, head_dim, f"be even, and at least {rotary_dim}")
    return head_dim
