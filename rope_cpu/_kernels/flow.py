"""Branches and loops of compiled code, written down as LLVM like the numbers of `integers`: by `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from llvmlite import ir

from rope_cpu._kernels.integers import Integer

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


def separately(name: str, emit: Callable[..., Integer], *numbers: Integer) -> Integer:
    """Call the function `name`, which `emit` writes where there is none yet; it returns a truth value."""
    b = numbers[0].b

    def write(own: Any, given: Sequence[Any]) -> None:
        own.ret(emit(*(Integer(own, number) for number in given)).value)

    function = own_function(b.module, name, ir.FunctionType(ir.IntType(1), [_WORD] * len(numbers)), write)
    return Integer(b, b.call(function, [number.value for number in numbers]))


def own_function(
    module: Any, name: str, kind: Any, write: Callable[[Any, Sequence[Any]], None], where: str = "noinline"
) -> Any:
    """Return the function `name` of a module, which `write(builder, arguments)` writes where there is none yet."""
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, kind, name)
        function.linkage = "internal"
        function.attributes.add(where)
        write(ir.IRBuilder(function.append_basic_block()), function.args)
    return function


@contextmanager
def plain_loop(
    times: Integer, starts: Sequence[Integer | int], moves: Sequence[Integer | int]
) -> Iterator[list[Integer]]:
    """Emit a loop whose body sees `starts`, each further on by its move every time; the body may add to the moves.

    What the body does is as long as it should be. Nothing is known of values that have been through assembly, however
    empty: so LLVM does not repeat the body, and does not make of every address in it a variable to be counted up, more
    than there are registers for.
    """
    b = times.b
    before, loop, after = b.block, b.append_basic_block("row"), b.append_basic_block("rows.end")
    b.cbranch((times > 0).value, loop, after)
    b.position_at_end(loop)
    values = [b.phi(_WORD) for _ in (times, *starts)]
    seen = [Integer(b, b.asm(ir.FunctionType(_WORD, [_WORD]), "", "=r,0", [value], False)) for value in values]
    yield seen[1:]
    steps = [number + move for number, move in zip(seen, (-1, *moves), strict=True)]
    for value, start, step in zip(values, (times, *starts), steps, strict=True):
        value.add_incoming(start.value if isinstance(start, Integer) else _WORD(start), before)
        value.add_incoming(step.value, b.block)
    b.cbranch((steps[0] > 0).value, loop, after)
    b.position_at_end(after)
