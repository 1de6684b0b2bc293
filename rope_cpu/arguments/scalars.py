"""Checks of numbers, names and plain arrays.

Each function returns the checked value, or raises an error that names the argument, its value and
the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64


def check_type(name: str, value: object, expected: type) -> None:
    """Raise unless a value is of this class of rope_cpu, and of no subclass.

    A subclass could behave differently where kernels rely on checked data.
    """
    if type(value) is not expected:
        rule = f"be a {expected.__name__} of rope_cpu (no subclass)"
        raise ArgumentTypeError(name, Finding.type_of(value), rule)


def whole_number(name: str, value: object, least: int = 1, most: int = limits.WHOLE) -> int:
    """Return `value` as an int; raise unless it is a whole number from `least` to `most`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(name, value, "be an integer")
    if value < least:
        raise ArgumentError(name, value, f"be at least {least}")
    if value > most:
        raise ArgumentError(name, value, f"be at most {most}")
    return int(value)


def whole_numbers(
    name: str,
    value: object,
    least: int = 1,
    *,
    most: int = limits.WHOLE,
    longest: int = limits.HEAD_DIM,
) -> tuple[int, ...]:
    """Return a sequence of at most `longest` whole numbers, each from `least` to `most`."""
    if (
        not isinstance(value, Sequence | np.ndarray)
        or isinstance(value, str | bytes)
        or getattr(value, "ndim", 1) != 1
    ):
        raise ArgumentTypeError(name, value, "be a sequence of integers")
    check_length(name, value, longest)
    return tuple(whole_number(name, entry, least, most) for entry in value)


def check_length(name: str, value: Any, longest: int) -> None:
    """Raise if a sequence has more than `longest` entries."""
    # `len` fails on a range of 2^63 and more; not every sequence can be sliced.
    if len(value[: longest + 1] if isinstance(value, range) else value) > longest:
        raise ArgumentError(name, value, f"have at most {longest} entries")


def check_table_size(name: str, value: object, *sizes: int, most: int = limits.TABLE) -> None:
    """Raise if a table of these sizes, which the argument determines, has over `most` elements."""
    if math.prod(sizes) > most:
        table = f"is {shown(value)}: a table of {' x '.join(map(shown, sizes))} elements"
        raise ArgumentError(name, Finding(table), f"have at most {most}", "reduce a size")


def lengths(name: str, value: Any) -> list[int]:
    """Return one or several sequence lengths as a list of at least one.

    A sequence without tokens, among several, has length 0, and so has a step without sequences.
    """
    if hasattr(value, "__array__"):  # also one of another library
        value = regular_array(name, value)
        if value.ndim > 1:
            rule = "be one length, or one-dimensional"
            raise ArgumentTypeError(name, Finding.shape_of(value), rule)
        check_table_size(name, value, value.size, most=limits.SEQUENCES)
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return [whole_number(name, value)]
    check_length(name, value, limits.SEQUENCES)
    entries = list(value) or [0]
    # A server gives lengths at every step: a coarse test of all takes a fifth of the time.
    if {*map(type, entries)} == {int} and min(entries) >= 0 and max(entries) <= limits.WHOLE:
        return entries
    return [whole_number(name, entry, 0) for entry in entries]


def real_number(name: str, value: object, *, zero: bool = False) -> float:
    """Return `value` as a float; raise unless it is finite and above 0, or 0 if `zero` is set."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool | np.bool_) or not is_number:
        raise ArgumentTypeError(name, value, "be a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int beyond every float
        number = np.inf
    if not np.isfinite(number) or number < 0 or (number == 0 and not zero):
        bound = "at least 0" if zero else "above 0"
        raise ArgumentError(name, value, f"be finite and {bound}")
    return number


def boolean(name: str, value: object) -> bool:
    """Return `value` as a bool; raise unless it is one."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(name, value, "be True or False")
    return bool(value)


def choice(name: str, value: object, names: Sequence[str]) -> str:
    """Return `value`; raise unless it is one of `names`."""
    if not isinstance(value, str) or value not in names:
        raise ArgumentError(name, value, f"be one of {', '.join(names)}")
    return value


def refuse_masked(name: str, value: object) -> None:
    """Raise if `value` is a masked array."""
    # A plain array is not masked. `np.ma` is loaded on first use, which takes a fiftieth of the
    # start-up time of a process with a kernel cache.
    is_subclass = isinstance(value, np.ndarray) and type(value) is not np.ndarray
    if is_subclass and isinstance(value, np.ma.MaskedArray):
        finding = Finding("is a masked array")
        raise ArgumentTypeError(name, finding, "be a plain array", "pass its `.data`")


def regular_array(name: str, value: Any) -> NDArray[Any]:
    """Return `value` as an array; raise if it is masked or its rows differ in length."""
    refuse_masked(name, value)
    if type(value) is range:  # NumPy would first convert it to a list
        check_length(name, value, limits.TABLE)
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        if not isinstance(value, list | tuple):
            raise  # another library's own reason
        finding = Finding(f"is a {type(value).__name__} of unequal rows")
        remedy = "give every row the same length"
        raise ArgumentError(name, finding, "be a regular array", remedy) from None


def integers(name: str, value: ArrayLike, *, most: int = limits.TABLE) -> NDArray[np.int64]:
    """Return a copy in C order as int64; raise unless `value` holds at most `most` integers."""
    array = real_array(name, value)
    if array.size == 0 and not isinstance(value, np.ndarray):
        return array.astype(np.int64)  # NumPy converts an empty list to float64
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(name, Finding.dtype_of(array), "hold integers")
    check_table_size(name, array, array.size, most=most)
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ArgumentError(name, Finding.holds(array.max()), "hold integers below 2^63")
    return array.astype(np.int64, order="C")


def real_array(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return `value` as an array; raise unless it holds real numbers."""
    array = regular_array(name, value)
    if array.dtype.kind not in "fiu" and array.dtype != ml_dtypes.bfloat16:
        raise ArgumentTypeError(name, Finding.dtype_of(array), "hold real numbers")
    return array


def finite_array(name: str, value: ArrayLike) -> Float64:
    """Return `value` as float64; raise unless it holds finite real numbers."""
    array = real_array(name, value)
    check_table_size(name, array, array.size)
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ArgumentError(name, Finding.holds(array[~np.isfinite(array)][0]), "be finite")
    return array


def float32_array(name: str, value: ArrayLike) -> NDArray[np.float32]:
    """Return a copy as float32; raise unless `value` holds real numbers that are finite there."""
    array = finite_array(name, value)
    with np.errstate(over="ignore", under="ignore"):
        rounded = array.astype(np.float32, order="C")
    if not np.isfinite(rounded).all():
        wrong = array[~np.isfinite(rounded)][0]
        raise ArgumentError(name, Finding.holds(wrong), "be finite in float32")
    return rounded


def float32_number(name: str, value: object) -> np.float32:
    """Return a number as float32; raise unless it is above 0 and finite."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(real_number(name, value))
    if not 0 < rounded < np.inf:
        raise ArgumentError(name, value, "be above 0 and finite in float32")
    return rounded


def per_axis(name: str, value: ArrayLike, axes: int) -> Float64:
    """Return a finite number for each axis, from one for all axes or one for each."""
    numbers = finite_array(name, value)
    if numbers.shape not in ((), (axes,)):
        rule = f"be one number, or one for each of {axes} axes"
        raise ArgumentError(name, Finding.shape_of(numbers), rule)
    return np.broadcast_to(numbers, (axes,))
