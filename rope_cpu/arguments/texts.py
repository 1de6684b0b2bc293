"""Values in error texts: short, escaped, and formatted in microseconds, whatever their size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from reprlib import Repr
from typing import Any

import numpy as np

# Characters of one value. An error text holds a few values and stays below 2,000.
MAX_CHARACTERS = 300

_GAP = " … "

# Characters of a name that are compared with known names, and the share of them that must agree.
_LONGEST_NAME = 64
_SIMILAR = 0.875


class _ShortRepr(Repr):
    """`reprlib.Repr`, which shortens lists, dicts and strings, also for integers and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        for container in ("list", "tuple", "dict", "set", "frozenset"):
            setattr(self, f"max{container}", 12)
        self.maxstring = MAX_CHARACTERS
        self.maxother = MAX_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        # CPython refuses to format an integer of more than 4,300 digits.
        return repr(x) if x.bit_length() <= 512 else f"an integer of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # One entry more than shown, in the order of the dict: the base class would sort all keys.
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)

    def repr_ndarray(self, x: np.ndarray[Any, Any], level: int) -> str:
        if x.size > 16:
            return f"an array of shape {x.shape}"
        return " ".join(self.repr_instance(x, level).split())  # in one line


_SHORT = _ShortRepr()


def shown(value: object) -> str:
    """Return the repr of a value for an error text, cut if it is long."""
    return cut(_SHORT.repr(value))


def cut(text: str) -> str:
    """Return a text with escapes, without its middle if it is longer than `MAX_CHARACTERS`."""
    return _without_middle(escaped(_without_middle(text)))


def escaped(text: str) -> str:
    """Return a text with the escapes of `repr` for all characters that are not printable.

    These are control characters, line breaks, and marks that change the direction of text. Names in
    a file could otherwise drive the terminal that they are printed on. Letters of every script are
    printable.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _without_middle(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = (MAX_CHARACTERS - len(_GAP)) // 2
    return f"{text[:half]}{_GAP}{text[-half:]}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " (did you mean 'llama'?)" for a misspelt name, "" if no known one is similar.

    Another number is another version of a model, and no misspelling.
    """
    if not isinstance(name, str):
        return ""
    # Names from files may be of any length, and a comparison takes the product of the lengths.
    name = name[:_LONGEST_NAME].lower()
    same_version = [other for other in known if _digits(other) == _digits(name)]
    close = get_close_matches(name, same_version, n=1, cutoff=_SIMILAR)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _digits(name: str) -> str:
    """Return the digits of a name, without what stands between them."""
    return re.sub(r"\D", "", name)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its type if it has no text."""
    return escaped(next(iter(str(error).strip().splitlines()), type(error).__name__))
