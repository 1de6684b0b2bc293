"""What arrays may be rotated into which: shapes, strides, and memory that is shared; in compiled code.

Axes are in the order batch, token, head, element; sizes and strides in bytes.
"""

from __future__ import annotations

from typing import Any

from rope_cpu._kernels.flow import separately
from rope_cpu._kernels.integers import Integer, Words, choose, either, every, same
from rope_cpu._kernels.objects import ArrayView


def _range(array: ArrayView, size: int) -> tuple[Integer, Integer]:
    """First byte and last byte + 1 of an array."""
    start, shape, strides = array
    low, high = start, start + size
    for count, step in zip(shape, strides, strict=True):
        span = (count - 1) * step
        low, high = low + choose(span < 0, span, 0), high + choose(span < 0, 0, span)
    return low, high


def _lie_apart(a: ArrayView, b: ArrayView, size: int) -> Integer:
    """Tell whether one array ends before the other begins."""
    (low_a, high_a), (low_b, high_b) = _range(a, size), _range(b, size)
    return (high_a <= low_b) | (high_b <= low_a)


def _interleave(a: ArrayView, b: ArrayView, size: int) -> Integer:
    """Tell whether two arrays share no element as views that interleave in one packed buffer.

    In such a buffer all strides are multiples of a period (from token to token, or from head to head), and the
    innermost parts of the two views (a token's heads, or one head vector) lie in different places of the period.
    """
    return _interleave_by(1, a, b, size) | _interleave_by(2, a, b, size)


def _interleave_by(axis: int, a: ArrayView, b: ArrayView, size: int) -> Integer:
    (start_a, shape_a, strides_a), (start_b, _, strides_b) = a, b
    period, row = strides_a[axis], shape_a[3] * size
    outer = _batch_step(a), *strides_a[1:axis], _batch_step(b), *strides_b[1 : axis + 1]
    span_a, span_b = (row + _reach(shape[axis + 1 : 3], strides[axis + 1 : 3]) for _, shape, strides in (a, b))
    shift = (start_b - start_a) % period
    ascending = every(period > 0, strides_a[2] >= 0, strides_b[2] >= 0)
    return every(ascending, *(step % period == 0 for step in outer), span_a <= shift, shift + span_b <= period)


def _batch_step(array: ArrayView) -> Integer:
    _, shape, strides = array
    return choose(shape[0] == 1, 0, strides[0])


def _reach(counts: Words, steps: Words) -> Any:
    """Return how far it is from the first to the last along these axes."""
    return sum((count - 1) * step for count, step in zip(counts, steps, strict=True))


def _apart(a: ArrayView, b: ArrayView, size: int) -> Integer:
    """Tell whether two arrays certainly share no element."""

    def interleave(*numbers: Integer) -> Integer:
        a, b = numbers[:9], numbers[9:]
        return _interleave((a[0], a[1:5], a[5:]), (b[0], b[1:5], b[5:]), size)

    # There are five pairs of arrays, and many divisions for each: the same code serves all.
    numbers = [number for start, shape, strides in (a, b) for number in (start, *shape, *strides)]
    return either(_lie_apart(a, b, size), lambda: separately("interleave", interleave, *numbers))


def in_place(a: ArrayView, b: ArrayView) -> Integer:
    """Tell whether two arrays of one shape are the very same elements."""
    (start_a, shape, strides_a), (start_b, _, strides_b) = a, b
    steps = zip(shape[:3], strides_a[:3], strides_b[:3], strict=True)
    return every(start_a == start_b, *((count <= 1) | (one == other) for count, one, other in steps))


def _apart_within(shape: Words, strides: Words, row: Integer) -> Integer:
    """Tell whether rows certainly share nothing: every axis steps over all that lies closer together."""
    steps = [abs(step) for step in strides[:3]]
    apart = []
    for axis, step in enumerate(steps):
        span = row
        for other, inner in enumerate(steps):
            if other != axis:
                closer = inner <= step if other < axis else inner < step
                span += choose(closer, inner * (shape[other] - 1), 0)
        apart.append((shape[axis] <= 1) | (step >= span))
    return every(*apart)


def are_tables(cos: ArrayView, sin: ArrayView, size: int) -> Integer:
    """Tell whether arrays of rank 4 are alike and of elements of a size, without gaps."""
    (_, cos_shape, cos_strides), (_, sin_shape, sin_strides) = cos, sin
    return every(same(cos_shape, sin_shape), cos_strides[3] == size, sin_strides[3] == size)


def fits(x: ArrayView, out: ArrayView, table: Words, size: int, width: Integer) -> Integer:
    """Tell whether an array can be rotated as it stands; table: the shape of cos."""
    (_, x_shape, x_strides), (_, out_shape, out_strides) = x, out
    return every(
        same(x_shape, out_shape),
        x_shape[3] == width,
        x_strides[3] == size,
        out_strides[3] == size,
        x_shape[1] == table[1],
        (table[0] == 1) | (x_shape[0] == table[0]),
        x_shape[2] % table[2] == 0,
        _apart_within(out_shape, out_strides, width * size),
    )


def aliasing_allowed(
    q: ArrayView,
    q_in_place: Integer,
    k: ArrayView,
    k_in_place: Integer,
    out_q: ArrayView,
    out_k: ArrayView,
    both: Integer,
    size: int,
) -> Integer:
    """Tell whether no element is overwritten before it is read."""
    return either(q_in_place, lambda: _apart(q, out_q, size)) & either(
        ~both,
        lambda: every(
            either(k_in_place, lambda: _apart(k, out_k, size) & _apart(k, out_q, size)),
            either(q_in_place, lambda: _apart(q, out_k, size)),
            _apart(out_q, out_k, size),
        ),
    )
