"""Errors of arguments: each text names the argument, its value, the rule and the remedy."""

from __future__ import annotations

from typing import Any, Self

from numpy.typing import NDArray

from rope_cpu.arguments.texts import cut, shown


class Finding(str):
    """A statement on a value, such as "has shape (2, 3)", where the value itself is no help."""

    __slots__ = ()

    @classmethod
    def shape_of(cls, array: NDArray[Any]) -> Self:
        """State the shape of an array."""
        return cls(f"has shape {shown(array.shape)}")

    @classmethod
    def dtype_of(cls, array: NDArray[Any]) -> Self:
        """State the dtype of an array, whose name may come from a file."""
        return cls(f"has dtype {cut(str(array.dtype))}")

    @classmethod
    def type_of(cls, value: object) -> Self:
        """State the type of a value."""
        return cls(f"is a {type(value).__name__}")

    @classmethod
    def holds(cls, entry: object) -> Self:
        """State an entry of an array."""
        return cls(f"holds {entry}")


class AnyArgumentError(Exception):
    """An argument that breaks a rule, the base of `ArgumentError` and `ArgumentTypeError`.

    Parameters
    ----------
    argument : str
        Name of the argument, or of an entry such as ``out[0]``, kept as an attribute so that a
        command can name its option instead. Of two arguments, it is the one to change.
    value : object
        The value, or a `Finding` on it.
    rule : str
        The words after "it must".
    remedy : str
        Advice, if the rule alone gives none.

    Examples
    --------
    >>> str(ArgumentError("num_heads", 0, "be at least 1", "leave it out"))
    '`num_heads` is 0; it must be at least 1; leave it out'
    """

    def __init__(self, argument: str, value: object, rule: str, remedy: str = "") -> None:
        self.argument = argument
        # A text rather than the value, which may be large, or nothing that can be pickled.
        self.finding = value if isinstance(value, Finding) else Finding(f"is {shown(value)}")
        self.rule = rule
        self.remedy = remedy
        super().__init__(argument, self.finding, rule, remedy)

    def __str__(self) -> str:
        return self.text(f"`{self.argument}`")

    def text(self, subject: str, finding: str = "") -> str:
        """Return the text with another subject, such as an option, and another finding."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{subject} {finding or self.finding}; it must {self.rule}{remedy}"


class ArgumentError(AnyArgumentError, ValueError):
    """An argument with a wrong value."""


class ArgumentTypeError(AnyArgumentError, TypeError):
    """An argument of a wrong type or dtype."""
