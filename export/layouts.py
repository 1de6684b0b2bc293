"""Axis orders of queries and keys in exported graphs, written with one letter per axis."""

from __future__ import annotations

# "bsd" is the packed layout (batch, seq, heads·head_dim) of a projection's output.
LAYOUTS = ("bhsd", "bshd", "sbhd", "thd", "bsd")
DIM_NAMES: dict[str, str | int] = {"b": "batch", "s": "sequence", "t": "tokens"}


def four_axes(layout: str) -> str:
    """Return the layout of four axes in which tensors of `layout` are rotated.

    A "thd" token becomes a batch row with one token: RotaryEmbedding refuses sequences longer than
    its table, and packed tokens may be more than the table has rows.
    """
    return {"thd": "bhsd", "bsd": "bshd"}.get(layout, layout)


def permutation(source: str, target: str) -> tuple[int, ...]:
    """Return the permutation with which a Transpose brings layout `source` into layout `target`."""
    return tuple(source.index(axis) for axis in target)


def tensor_shape(layout: str, heads: str | int, width: int) -> list[str | int]:
    """Return the declared shape of a tensor; strings name dynamic dimensions."""
    sizes = DIM_NAMES | {"h": heads, "d": width}
    if layout == "bsd":
        sizes["d"] = int(heads) * width
    return [sizes[axis] for axis in layout]
