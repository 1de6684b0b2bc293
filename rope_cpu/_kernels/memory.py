"""Memory as kernels see it: loads and stores of one storage format, past the caches as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from rope_cpu._kernels.builder import declared
from rope_cpu._kernels.conversions import conversions, even_first
from rope_cpu._kernels.formats import FORMATS, I8, I16, I32, I64, lanes_of, register_size, take, vector
from rope_cpu._kernels.integers import Integer
from rope_cpu._kernels.words import LINE


class Memory:
    """Loads and stores of one storage format, converted to and from the type that is computed in.

    aligned: of how many bytes the addresses are multiples that are stored to past the caches.
    """

    def __init__(self, b: Any, dtype: str, target: tuple[str, str, str], stream: bool) -> None:
        self.b, self.format, self.stream, self.aligned = b, FORMATS[dtype], stream, FORMATS[dtype].size
        self.widen, self.narrow, self.even_first = conversions(dtype, target)
        self.few_registers = register_size(target) < 64

    def order(self, lanes: int) -> Sequence[int]:
        """Return which of neighbouring numbers each lane holds that is loaded or to be stored."""
        return even_first(lanes) if self.even_first else range(lanes)

    def _read(self, at: Integer, element: Any, lanes: int, align: int) -> Any:
        value = self.b.load(self.b.inttoptr(at.value, vector(element, lanes).as_pointer()))
        value.align = align
        return value

    def load_real(self, at: Integer, lanes: int, order: Sequence[int]) -> Any:
        """Load cos or sin of so many pairs, and bring them into an order, in which they may come twice."""
        return take(self.b, self._read(at, self.format.real, lanes, self.format.real_size), order)

    def load(self, at: Integer, lanes: int) -> Any:
        form = self.format
        if self.widen:
            return self.widen(self.b, self._read(at, I16, lanes, form.size), lanes)
        value = self._read(at, form.stored, lanes, form.size)
        return value if form.stored == form.real else self.b.fpext(value, vector(form.real, lanes))

    def prefetch(self, at: Integer, size: int) -> None:
        """Ask for the cache lines of so many bytes, whether or not there is memory."""
        b, byte = self.b, I8.as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        fetch = declared(b, signature, "llvm.prefetch.p0")
        for offset in range(0, size, LINE):
            line = b.inttoptr((at + offset).value, byte)
            b.call(fetch, [line, I32(0), I32(3), I32(1)])  # to read, into all caches, as data

    def store(self, value: Any, at: Integer) -> None:
        form, lanes = self.format, lanes_of(value)
        if self.narrow:
            value = self.narrow(self.b, value, lanes)
        elif form.stored != form.real:
            value = self.b.fptrunc(value, vector(form.stored, lanes))
        self._put(value, at, form.size)

    def copy_word(self, x: Integer, out: Integer) -> None:
        """Copy 8 bytes as they are."""
        self._put(self._read(x, I64, 1, self.format.size), out, 8)

    def _put(self, value: Any, at: Integer, size: int) -> None:
        """Store a value, past the caches where this memory is for that; less than 8 bytes LLVM may store as usual."""
        words = size * lanes_of(value) // 4
        if not self.stream or not words:
            self._write(value, at, self.format.size)
            return
        # LLVM would split a vector itself, but one of bfloat16 by way of the stack and the caches. On x86, vectors at
        # addresses of which too little is known go past the caches as words of 8 bytes, which may start anywhere.
        value, together = self.b.bitcast(value, ir.VectorType(I32, words)), max(self.aligned // 4, 4)
        for first in range(0, words, together):
            part = take(self.b, value, range(first, min(first + together, words)))
            stored = self._write(part, at + 4 * first, self.aligned)
            stored.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(I32, 1)]))

    def _write(self, value: Any, at: Integer, align: int) -> Any:
        stored = self.b.store(value, self.b.inttoptr(at.value, value.type.as_pointer()))
        stored.align = align
        return stored
