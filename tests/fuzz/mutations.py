"""JSON values, and changes to nested dicts and lists of them."""

from __future__ import annotations

import copy

from hypothesis import strategies as st

# The largest whole number that replaces another.
LARGEST_NUMBER = 2**70


def paths_in(value, path=()):
    """Yield the paths of all entries of nested dicts and lists."""
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in entries:
        yield (*path, key)
        yield from paths_in(inner, (*path, key))


def at(value, path):
    """Return the dict or list that holds the last key of a path."""
    for key in path[:-1]:
        value = value[key]
    return value


def values(scalars, keys):
    """Return the strategy of nested values."""
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=8,
    )


@st.composite
def mutated(draw, original, new_values, new_keys):
    """Draw a changed copy of a nested dict.

    One to four entries are dropped, replaced, swapped, renamed or added.
    """
    changed = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 4))):
        found = list(paths_in(changed))
        kind = draw(
            st.sampled_from(("drop", "replace", "replace", "swap", "rename", "nest", "add", "wrap"))
        )
        if kind == "add" or not found:
            changed[draw(new_keys)] = draw(new_values)
            continue
        path = draw(st.sampled_from(found))
        holder, key = at(changed, path), path[-1]
        if kind == "drop":
            del holder[key]
        elif kind == "replace":
            holder[key] = draw(new_values)
        elif kind == "swap":
            other = draw(st.sampled_from(found))
            if other[: len(path)] != path and path[: len(other)] != other:
                there = at(changed, other)
                value = holder[key]
                holder[key] = there[other[-1]]
                there[other[-1]] = value
        elif kind == "rename" and isinstance(holder, dict):
            holder[draw(new_keys)] = holder.pop(key)
        elif kind == "nest":
            holder[key] = {draw(new_keys): holder[key]}
        else:
            # Copies: one entry in two places could be swapped into itself.
            count = draw(st.integers(1, 3))
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(count)]
    return changed
