"""What arrays may be rotated into which: shapes, strides, and memory that is shared; in compiled code.

An array is (address, shape, strides), with axes in the order batch, token, head, element; sizes and strides in bytes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from rope_cpu._compile import helper


@helper
def _range(start, shape, strides, size):
    """First byte and last byte + 1 of an array."""
    low, high = start, start + size
    for axis in range(4):
        span = (shape[axis] - 1) * strides[axis]
        low, high = (low + span, high) if span < 0 else (low, high + span)
    return low, high


@helper
def _apart(a, b, size):
    """Tell whether two arrays certainly share no element: by range, or as views that interleave in one packed buffer.

    In such a buffer all strides are multiples of a period (from token to token, or from head to head), and the
    innermost parts of the two views (a token's heads, or one head vector) lie in different places of the period.
    """
    (start_a, shape_a, strides_a), (start_b, shape_b, strides_b) = a, b
    low_a, high_a = _range(start_a, shape_a, strides_a, size)
    low_b, high_b = _range(start_b, shape_b, strides_b, size)
    if high_a <= low_b or high_b <= low_a:
        return True
    for by_token in range(2):
        period, span = strides_a[1] if by_token else strides_a[2], shape_a[3] * size
        if period <= 0 or strides_a[2] < 0 or strides_b[2] < 0:
            continue
        fits = (shape_a[0] == 1 or strides_a[0] % period == 0) and strides_a[1] % period == 0
        fits = fits and (shape_b[0] == 1 or strides_b[0] % period == 0) and strides_b[1] % period == 0
        fits = fits and (by_token or strides_b[2] % period == 0)
        span_a = span + by_token * (shape_a[2] - 1) * strides_a[2]
        span_b = span + by_token * (shape_b[2] - 1) * strides_b[2]
        shift = (start_b - start_a) % period
        if fits and span_a <= shift and shift + span_b <= period:
            return True
    return False


@helper
def in_place(a, b):
    """Tell whether two arrays (address, shape, strides) of one shape are the very same elements."""
    (start_a, shape, strides_a), (start_b, _, strides_b) = a, b
    same = start_a == start_b
    for axis in range(3):
        same = same and (shape[axis] <= 1 or strides_a[axis] == strides_b[axis])
    return same


@helper
def _apart_within(shape, strides, row):
    """Tell whether rows certainly share nothing: every axis steps over all that lies closer together."""
    for axis in range(3):
        step, span = abs(strides[axis]), row
        for other in range(3):
            inner = abs(strides[other])
            if inner < step or (inner == step and other < axis):
                span += inner * (shape[other] - 1)
        if shape[axis] > 1 and step < span:
            return False
    return True


@helper
def fits(x, out, table, size, width):
    """Tell whether an array (address, shape, strides) can be rotated as it stands; table: the shape of cos."""
    (_, x_shape, x_strides), (_, out_shape, out_strides) = x, out
    fit = x_shape == out_shape and x_shape[3] == width and x_strides[3] == size and out_strides[3] == size
    fit = fit and x_shape[1] == table[1] and (table[0] == 1 or x_shape[0] == table[0])
    return fit and x_shape[2] % table[2] == 0 and _apart_within(out_shape, out_strides, width * size)


@helper
def aliasing_allowed(q, q_in_place, k, k_in_place, out_q, out_k, both, size):
    """Tell whether no element is overwritten before it is read; each array is (address, shape, strides)."""
    if not q_in_place and not _apart(q, out_q, size):
        return False
    if not both:
        return True
    if not k_in_place and not (_apart(k, out_k, size) and _apart(k, out_q, size)):
        return False
    return (q_in_place or _apart(q, out_k, size)) and _apart(out_q, out_k, size)
