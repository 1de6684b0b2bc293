"""Branches and loops of compiled code, written down as LLVM like the numbers of `_integers`: by `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from llvmlite import ir

from rope_cpu._integers import Integer

_WORD = ir.IntType(64)


class Variable:
    """A number that changes while compiled code runs."""

    def __init__(self, b: Any, start: Integer | int) -> None:
        self._b = b
        with b.goto_entry_block():
            self._place = b.alloca(_WORD)
        self.set(start)

    def set(self, number: Integer | int) -> None:
        """Make it another number from here on."""
        self._b.store(number.value if isinstance(number, Integer) else _WORD(number), self._place)

    @property
    def now(self) -> Integer:
        """What it is here."""
        return Integer(self._b, self._b.load(self._place))


class Ending:
    """The end of a function of many ends, with the answer given there."""

    def __init__(self, b: Any) -> None:
        self._b, self._answer, self._block = b, Variable(b, 0), b.append_basic_block("end")

    def leave(self, answer: Integer | int) -> None:
        """End here."""
        self._answer.set(answer)
        self._b.branch(self._block)

    def leave_if(self, condition: Integer, answer: Integer | int) -> None:
        """End here where the condition holds."""
        with when(condition):
            self.leave(answer)

    def reached(self, answer: Integer | int) -> Integer:
        """Return what was answered, here or before."""
        self.leave(answer)
        self._b.position_at_end(self._block)
        return self._answer.now


def when(condition: Integer) -> AbstractContextManager[Any]:
    """Emit what is done where a condition holds."""
    return condition.b.if_then(condition.value)  # type: ignore[no-any-return]


def whether(condition: Integer) -> AbstractContextManager[Any]:
    """Emit what is done where a condition holds, and what is done where it does not: the body sees two managers."""
    return condition.b.if_else(condition.value)  # type: ignore[no-any-return]


@contextmanager
def each(start: Integer | int, stop: Integer, step: Integer | int = 1) -> Iterator[Integer]:
    """Emit a loop from `start` to before `stop`, whose body sees the number."""
    b, number = stop.b, Variable(stop.b, start)
    with repeat(b) as end_if:
        end_if(number.now >= stop)
        yield number.now
        number.set(number.now + step)


@contextmanager
def repeat(b: Any) -> Iterator[Callable[[Integer], None]]:
    """Emit a loop that goes on until its body ends it: the body sees what does that where a condition holds."""
    again, end = b.append_basic_block("again"), b.append_basic_block("again.end")

    def end_if(condition: Integer) -> None:
        further = b.append_basic_block("further")
        b.cbranch(condition.value, end, further)
        b.position_at_end(further)

    b.branch(again)
    b.position_at_end(again)
    yield end_if
    b.branch(again)
    b.position_at_end(end)
