"""Whole numbers and truth values as LLVM values that are written like numbers; branches and loops are in `flow`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

from llvmlite import ir

_WORD = ir.IntType(64)


@dataclass(frozen=True, eq=False)
class Integer:
    """An int64 or a truth value that is known when compiled code runs; Python's stand for their like among them."""

    b: Any
    value: Any

    def _of(self, other: Integer | int) -> Any:
        return other.value if isinstance(other, Integer) else self.value.type(int(other))

    def _with(self, value: Any) -> Integer:
        return Integer(self.b, value)

    def __bool__(self) -> bool:
        raise TypeError("what is true is known when compiled code runs; use &, |, ~ and `choose`")

    def __add__(self, other: Integer | int) -> Integer:
        return self._with(self.b.add(self.value, self._of(other)))

    def __sub__(self, other: Integer | int) -> Integer:
        return self._with(self.b.sub(self.value, self._of(other)))

    def __mul__(self, other: Integer | int) -> Integer:
        return self._with(self.b.mul(self.value, self._of(other)))

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Integer | int) -> Integer:
        """Divide what is not negative; numbers below one divide like one."""
        return self._with(self.b.udiv(self.value, self._divisor(other)))

    def __mod__(self, other: Integer | int) -> Integer:
        """Return the remainder, which is not negative; numbers below one divide like one."""
        divisor = self._with(self._divisor(other))
        rest = self._with(self.b.srem(self.value, divisor.value))
        return choose(rest < 0, rest + divisor, rest)

    def _divisor(self, other: Integer | int) -> Any:
        if isinstance(other, int):
            return _WORD(max(other, 1))
        return choose(other > 0, other, 1).value

    def __and__(self, other: Integer | int) -> Integer:
        return self._with(self.b.and_(self.value, self._of(other)))

    def __or__(self, other: Integer | int) -> Integer:
        return self._with(self.b.or_(self.value, self._of(other)))

    __rand__, __ror__ = __and__, __or__

    def __lshift__(self, bits: int) -> Integer:
        return self._with(self.b.shl(self.value, self._of(bits)))

    def __rlshift__(self, other: int) -> Integer:
        return self._with(self.b.shl(self._of(other), self.value))

    def __rshift__(self, bits: int) -> Integer:
        return self._with(self.b.ashr(self.value, self._of(bits)))

    def __invert__(self) -> Integer:
        return self._with(self.b.not_(self.value))

    def __abs__(self) -> Integer:
        return choose(self < 0, self * -1, self)

    def _compare(self, how: str, other: Integer | int) -> Integer:
        return self._with(self.b.icmp_signed(how, self.value, self._of(other)))

    def __lt__(self, other: Integer | int) -> Integer:
        return self._compare("<", other)

    def __le__(self, other: Integer | int) -> Integer:
        return self._compare("<=", other)

    def __gt__(self, other: Integer | int) -> Integer:
        return self._compare(">", other)

    def __ge__(self, other: Integer | int) -> Integer:
        return self._compare(">=", other)

    def __eq__(self, other: Integer | int) -> Integer:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: Integer | int) -> Integer:  # type: ignore[override]
        return self._compare("!=", other)

    # Words at addresses.

    def _word(self) -> Any:
        return self.b.inttoptr(self.value, _WORD.as_pointer())

    def words(self, count: int) -> Words:
        """Return the words at this address, which no other thread writes."""
        return tuple(self._with(self.b.load((self + 8 * n)._word())) for n in range(count))

    # Words at addresses that other threads read and write.

    def load(self) -> Integer:
        """Return the word at this address."""
        return self._with(self.b.load_atomic(self._word(), "seq_cst", 8))

    def exchange(self, value: Integer | int) -> Integer:
        """Write the word at this address, and return what it was."""
        return self._with(self.b.atomic_rmw("xchg", self._word(), self._of(value), "seq_cst"))

    def add(self, value: Integer | int) -> Integer:
        """Add to the word at this address, and return what it was."""
        return self._with(self.b.atomic_rmw("add", self._word(), self._of(value), "seq_cst"))

    def replace(self, old: Integer | int, new: Integer | int) -> Integer:
        """Write the word at this address if it is `old`; return whether it was."""
        done = self.b.cmpxchg(self._word(), self._of(old), self._of(new), "seq_cst", "seq_cst")
        return self._with(self.b.extract_value(done, 1))


Words = tuple[Integer, ...]


def choose(condition: Integer, then: Integer | int, otherwise: Integer | int) -> Integer:
    """Return `then` where the condition holds."""
    known = next((x for x in (then, otherwise) if isinstance(x, Integer)), condition._with(_WORD(0)))
    return condition._with(condition.b.select(condition.value, known._of(then), known._of(otherwise)))


def smaller(x: Integer, y: Integer | int) -> Integer:
    """Return the smaller one."""
    return choose(x < y, x, y)


def larger(x: Integer, y: Integer | int) -> Integer:
    """Return the greater one."""
    return choose(x > y, x, y)


def number(condition: Integer) -> Integer:
    """Return 1 where the condition holds, else 0."""
    return condition._with(condition.b.zext(condition.value, _WORD))


def every(*conditions: Integer) -> Integer:
    """Tell whether all conditions hold."""
    return reduce(and_, conditions)


def either(condition: Integer, otherwise: Callable[[], Integer]) -> Integer:
    """Tell whether the condition holds, or else what is computed only then."""
    b, before = condition.b, condition.b.block
    with b.if_then(b.not_(condition.value)):
        result, after = otherwise(), b.block
    chosen = b.phi(condition.value.type)
    chosen.add_incoming(condition.value, before)
    chosen.add_incoming(result.value, after)
    return condition._with(chosen)


def same(a: Words, b: Words) -> Integer:
    """Tell whether two tuples are equal."""
    return every(*(x == y for x, y in zip(a, b, strict=True)))
