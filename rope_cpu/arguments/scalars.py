"""Checks of numbers, names and plain arrays, each with its error text: the argument, its value, the rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Float64

# What other libraries call the arguments of a rotary embedding.
_CALLED_HERE = {
    **dict.fromkeys(("dim", "rope_dim", "head_size", "d_head"), "head_dim"),
    **dict.fromkeys(("base", "theta", "rope_base", "freq_base"), "rope_theta"),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), "scaling"),
    **dict.fromkeys(("max_seq_len", "max_position", "max_length"), "max_position_embeddings"),
    **dict.fromkeys(("rotary_emb_dim", "rotary_embedding_dim", "n_rot"), "rotary_dim"),
}


def refuse_other_names(owner: str, arguments: Iterable[str]) -> None:
    """Raise TypeError where an argument goes by the name that another library has for it."""
    for name in arguments:
        if name in _CALLED_HERE:
            raise TypeError(
                f"{owner} has no argument `{name}`; here it is called `{_CALLED_HERE[name]}`"
            )


def whole_number(name: str, value: object, least: int = 1, most: int = limits.WHOLE) -> int:
    """Return `value` as an int; raise unless it is a whole number from `least` to `most`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` is {shown(value)}; it must be an integer")
    if value < least:
        raise ValueError(f"`{name}` is {shown(value)}; it must be at least {least}")
    if value > most:
        raise ValueError(f"`{name}` is {shown(value)}; it must be at most {most}")
    return int(value)


def whole_numbers(
    name: str,
    value: object,
    least: int = 1,
    *,
    most: int = limits.WHOLE,
    longest: int = limits.HEAD_DIM,
) -> tuple[int, ...]:
    """Return a sequence of whole numbers as a tuple; raise unless each is from `least` to `most`.

    longest: how many there may be.
    """
    if (
        not isinstance(value, Sequence | np.ndarray)
        or isinstance(value, str | bytes)
        or getattr(value, "ndim", 1) != 1
    ):
        raise TypeError(f"`{name}` is {shown(value)}; it must be a sequence of integers")
    not_longer(name, value, longest)
    return tuple(whole_number(name, entry, least, most) for entry in value)


def not_longer(name: str, value: Any, longest: int) -> None:
    """Raise where a sequence has more than `longest` entries."""
    # A slice, as `len` fails on a range of 2^63 and more.
    if len(value[: longest + 1]) > longest:
        raise ValueError(f"`{name}` is {shown(value)}; it may have at most {longest} entries")


def not_larger(what: str, value: object, *sizes: int, most: int = limits.TABLE) -> None:
    """Raise where a table of these sizes has more than `most` elements.

    what, value: the argument that the sizes follow from, as the error text says it ("`max_positions` is", 8).
    """
    if math.prod(sizes) > most:
        shape = " x ".join(map(shown, sizes))
        raise ValueError(
            f"{what} {shown(value)}: a table of {shape} elements; it may have at most {most}"
        )


def lengths(name: str, value: Any) -> list[int]:
    """Return sequence lengths, of which `value` is one or several, as a list; raise unless there is one at least."""
    if isinstance(value, np.ndarray) and value.ndim > 1:
        raise TypeError(
            f"`{name}` has shape {value.shape}; it must be a length, or one row of them"
        )
    several = isinstance(value, list | tuple | range) or (
        isinstance(value, np.ndarray) and value.ndim == 1
    )
    if several:
        not_longer(name, value, limits.LENGTHS)
    given = value.tolist() if isinstance(value, np.ndarray) else value
    found = [whole_number(name, length) for length in (given if several else [given])]
    if not found:
        raise ValueError(f"`{name}` is empty; it must be a length, or one per batch row")
    return found


def real_number(name: str, value: object, *, zero: bool = False) -> float:
    """Return `value` as a float; raise unless it is a finite number above 0, or 0 where `zero` allows it."""
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        raise TypeError(f"`{name}` is {shown(value)}; it must be a number")
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = np.inf
    if not np.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(
            f"`{name}` is {shown(value)}; it must be finite and {'at least' if zero else 'above'} 0"
        )
    return number


def boolean(name: str, value: object) -> bool:
    """Return `value` as a bool; raise unless it is one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` is {shown(value)}; it must be True or False")
    return bool(value)


def one_of(name: str, value: object, known: Sequence[str]) -> str:
    """Return `value`; raise unless it is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"`{name}` is {shown(value)}; it must be one of {', '.join(known)}")
    return value


def unmasked(name: str, value: object) -> None:
    """Raise where `value` is a masked array."""
    # What is plain is not masked; asking NumPy would load its module for that, a fiftieth of a start from the cache.
    if (
        isinstance(value, np.ndarray)
        and type(value) is not np.ndarray
        and isinstance(value, np.ma.MaskedArray)
    ):
        raise TypeError(
            f"`{name}` is a masked array; give its `.data`, as a mask has no place here"
        )


def regular_array(name: str, value: Any) -> NDArray[Any]:
    """Return `value` as an array; raise where it is masked, or its rows are of several lengths."""
    unmasked(name, value)
    if type(value) is range:  # NumPy would make a Python list of it first
        not_longer(name, value, limits.TABLE)
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        if not isinstance(value, list | tuple):
            raise  # another library's own reason
        raise ValueError(
            f"`{name}` is a {type(value).__name__} of unequal rows; it must be a regular array"
        ) from None


def integers(name: str, value: ArrayLike) -> NDArray[np.int64]:
    """Return `value` as int64; raise unless it holds integers of that size."""
    given = real_array(name, value)
    if given.size == 0 and not isinstance(value, np.ndarray):
        return given.astype(np.int64)  # NumPy takes an empty list for float64
    if given.dtype.kind not in "iu":
        raise TypeError(f"`{name}` has dtype {cut(str(given.dtype))}; it must hold integers")
    not_larger(f"`{name}` has shape", given.shape, given.size)
    if given.dtype.kind == "u" and given.size and given.max() > np.iinfo(np.int64).max:
        raise ValueError(f"`{name}` holds {given.max()}; integers must be below 2^63")
    return given.astype(np.int64)


def real_array(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return `value` as an array; raise unless it holds real numbers."""
    given = regular_array(name, value)
    if given.dtype.kind not in "fiu" and given.dtype != ml_dtypes.bfloat16:
        raise TypeError(f"`{name}` has dtype {cut(str(given.dtype))}; it must hold real numbers")
    return given


def finite_array(name: str, value: ArrayLike) -> Float64:
    """Return `value` as float64; raise unless it holds finite real numbers."""
    given = real_array(name, value)
    not_larger(f"`{name}` has shape", given.shape, given.size)
    given = given.astype(np.float64)
    if not np.isfinite(given).all():
        raise ValueError(f"`{name}` holds {given[~np.isfinite(given)][0]}; it must be finite")
    return given


def per_axis(name: str, value: ArrayLike, axes: int) -> Float64:
    """Return a finite number for each axis, from one for all or one for each."""
    numbers = finite_array(name, value)
    if numbers.shape not in ((), (axes,)):
        raise ValueError(
            f"`{name}` has shape {numbers.shape}; it must be one number, or one for each of {axes} axes"
        )
    return np.broadcast_to(numbers, (axes,))
