"""Arrays at chosen places in memory: any strides, with known bytes or untouchable pages around."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

PAGE = mmap.PAGESIZE
ALIGNED = 64  # bytes, as the kernels' widest vectors


@dataclass(frozen=True)
class Place:
    """How an array lies in memory.

    order: its axes, outermost first. steps: the number of elements more than needed in the step of
    each axis. backwards: axes with negative strides. repeated: axes of stride 0. at_end: whether
    its memory ends at a multiple of 64 bytes (or a page's end), rather than starts at one.
    shift: bytes between there and the array.
    """

    order: tuple[int, ...] = (0, 1, 2, 3)
    steps: tuple[int, ...] = (0, 0, 0, 0)
    backwards: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()
    shift: int = 0
    at_end: bool = True


PLAIN = Place()


@st.composite
def places(draw, repeated=True):
    """Draw a place; every second one is plain."""
    if draw(st.booleans()):
        return Place(
            shift=draw(st.sampled_from((0, 0, 0, 1, 2, 4, 8, 32))), at_end=draw(st.booleans())
        )
    axes = st.sampled_from(range(4))
    return Place(
        tuple(draw(st.permutations(range(4)) | st.just([0, 1, 2, 3]))),
        tuple(draw(st.lists(st.sampled_from((0, 0, 1, 3, 16)), min_size=4, max_size=4))),
        tuple(draw(st.lists(axes, max_size=2, unique=True))),
        tuple(draw(st.lists(axes, max_size=2, unique=True)))
        if repeated and draw(st.booleans())
        else (),
        draw(st.sampled_from((0, 0, 1, 2, 3, 4, 8, 12, 16, 32))),
        draw(st.booleans()),
    )


def strides_of(shape, itemsize, place):
    """Return the strides, and where memory starts and stops, in bytes from the first element."""
    strides, span = [0] * len(shape), itemsize
    for axis in sorted(range(len(shape)), key=place.order.index, reverse=True):
        if axis in place.repeated:
            continue
        strides[axis] = span + place.steps[axis] * itemsize
        span = strides[axis] * max(shape[axis], 1)
        if axis in place.backwards:
            strides[axis] = -strides[axis]
    reach = [step * (count - 1) for step, count in zip(strides, shape, strict=True) if count > 1]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return tuple(strides), low, (high + itemsize if 0 not in shape else low)


class Memory:
    """Byte buffers whose contents are remembered."""

    def __init__(self, seed):
        self.random, self.buffers = np.random.default_rng(seed), []

    def allocate(self, size, at_end):
        """Return new bytes that hold noise, aligned to 64 where they start, or end."""
        raw = np.zeros(size + 2 * ALIGNED, np.uint8)
        edge = raw.ctypes.data + ALIGNED + (size if at_end else 0)
        start = ALIGNED - edge % ALIGNED
        return raw[start : start + size]

    def bytes(self, size, at_end=True):
        """Return new bytes that hold noise, and remember them."""
        buffer = self.allocate(size, at_end)
        buffer[:] = self.random.integers(0, 256, size, np.uint8)
        self.buffers.append(buffer)
        return buffer

    def array(self, shape, dtype, place=PLAIN):
        """Return a new array at a place, with random content."""
        strides, low, high = strides_of(shape, dtype.itemsize, place)
        before, behind = (0, place.shift) if place.at_end else (place.shift, 0)
        buffer = self.bytes(before + high - low + behind, place.at_end)
        # For arrays without elements, NumPy's constructor refuses strides beyond a small buffer.
        if not high - low:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, buffer, before - low, strides)

    def remember(self):
        """Remember what all memory holds."""
        self.before = [buffer.copy() for buffer in self.buffers]

    def changed_outside(self, outs):
        """Return how many bytes changed that are of no element of `outs`."""
        return sum(
            int(((buffer != before) & ~_covered(buffer, outs)).sum())
            for buffer, before in zip(self.buffers, self.before, strict=True)
        )


def _covered(buffer, arrays):
    """Return which bytes of a buffer are of an element of the arrays."""
    covered = np.zeros(buffer.size, bool)
    start = buffer.ctypes.data
    for x in arrays:
        if x.size and start <= x.ctypes.data < start + buffer.size:
            shape, strides = (*x.shape, x.itemsize), (*x.strides, 1)
            np.ndarray(shape, bool, covered, x.ctypes.data - start, strides)[...] = True
    return covered


class GuardedMemory(Memory):
    """Memory between two pages that nothing may read or write: the process dies of it."""

    def allocate(self, size, at_end):
        held = -(-max(size, 1) // PAGE) * PAGE
        region = mmap.mmap(-1, held + 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        for page in (start, start + PAGE + held):
            if _mprotect()(page, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        first = PAGE + held - size if at_end else PAGE
        return np.frombuffer(region, np.uint8, size, first)


def can_guard():
    """Return whether this system has what `GuardedMemory` needs."""
    return sys.platform.startswith(("linux", "darwin"))


def _mprotect():
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function
