"""The axis orders of queries and keys that graphs are written for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One axis order.

    axes: names of the dimensions in order. to_bhsd: the permutation to (batch, heads, seq, head_dim), None where it is
    none. tables: how cos and sin, (batch, seq, pairs), meet it: a permutation (None: none) and the axis of heads.
    by_head: the permutation of those that have heads of their own, (batch, seq, heads, pairs).
    """

    axes: tuple[str, ...]
    to_bhsd: tuple[int, ...] | None = None
    tables: tuple[tuple[int, ...] | None, int] = (None, 2)
    by_head: tuple[int, ...] | None = None

    def axis(self, name: str) -> int:
        """Return where a dimension stands."""
        return self.axes.index(name)


# "bsd" is the form (batch, seq, heads·head_dim) that projections give. A "thd" token is a batch row of its own, of one
# token: RotaryEmbedding refuses sequences longer than its table, and packed ones may be.
LAYOUTS = {
    "bhsd": Layout(("batch", "heads", "sequence", "head_dim"), None, (None, 1), (0, 2, 1, 3)),
    "bshd": Layout(("batch", "sequence", "heads", "head_dim"), (0, 2, 1, 3)),
    "sbhd": Layout(("sequence", "batch", "heads", "head_dim"), (1, 2, 0, 3), ((1, 0, 2), 2), (1, 0, 2, 3)),
    "thd": Layout(("tokens", "heads", "head_dim"), None, (None, 1), (0, 2, 1, 3)),
    "bsd": Layout(("batch", "sequence", "hidden"), (0, 2, 1, 3)),
}


def back(permutation: tuple[int, ...]) -> list[int]:
    """Return the permutation that undoes another."""
    return sorted(range(len(permutation)), key=permutation.__getitem__)
