"""Values in error texts: however long or deep a value is, its text is short and made in microseconds."""

from __future__ import annotations

from itertools import islice
from reprlib import Repr
from typing import Any

import numpy as np

# Characters that one value takes: an error text holds a few values, and stays below 2,000.
LONGEST = 300

_GAP = " … "


class _Short(Repr):
    """`reprlib`, which cuts lists, dicts and strings short, with the cases that it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 12
        self.maxstring = self.maxother = LONGEST

    def repr_int(self, x: int, level: int) -> str:
        # Beyond 4,300 digits CPython refuses to write an integer.
        return repr(x) if x.bit_length() <= 512 else f"an integer of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # One entry more than is shown, in the order of the dict: the base class would sort all keys.
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)

    def repr_ndarray(self, x: np.ndarray[Any, Any], level: int) -> str:
        return self.repr_instance(x, level) if x.size <= 16 else f"an array of shape {x.shape}"


_SHORT = _Short()


def shown(value: object) -> str:
    """Return a value for an error text: its repr, cut where it is long."""
    return cut(_SHORT.repr(value))


def cut(text: str) -> str:
    """Return a text without its middle where it is longer than `LONGEST`."""
    if len(text) <= LONGEST:
        return text
    half = (LONGEST - len(_GAP)) // 2
    return f"{text[:half]}{_GAP}{text[-half:]}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its type where it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)
