"""The axis orders of queries and keys that graphs are written for, a letter an axis."""

from __future__ import annotations

# "bsd" is the packed layout (batch, seq, heads·head_dim) that projections give.
LAYOUTS = ("bhsd", "bshd", "sbhd", "thd", "bsd")
AXES: dict[str, str | int] = {"b": "batch", "s": "sequence", "t": "tokens"}


def four_axes(layout: str) -> str:
    """Return the layout of four axes that tensors of `layout` are rotated in.

    A "thd" token is a batch row of its own, of one token: RotaryEmbedding refuses sequences longer than its table, and
    packed ones may be.
    """
    return {"thd": "bhsd", "bsd": "bshd"}.get(layout, layout)


def permutation(source: str, target: str) -> tuple[int, ...]:
    """Return the permutation of a transposition that brings the axes of `source` into the order of `target`."""
    return tuple(source.index(axis) for axis in target)


def shape_of(layout: str, heads: str | int, width: int) -> list[str | int]:
    """Return the declared shape of a tensor; strings are dynamic."""
    sizes = AXES | {"h": heads, "d": width}
    if layout == "bsd":
        sizes["d"] = int(heads) * width
    return [sizes[axis] for axis in layout]
