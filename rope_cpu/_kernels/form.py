"""What kernels are told of the form of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rope_cpu._kernels.objects import dtype_word

LAYOUTS = {"bshd": 0, "bhsd": 1, "sbhd": 2, "thd": 0}  # thd comes as a batch of one

# Bytes of the heads that go together: what is read, fetched ahead and written fits three times into the first cache.
_NEAREST = 2**14
# Bytes of a run of tokens of one head that are in the first cache: cos and sin, what is read and what is written.
_RUN = 2**15


class Form(NamedTuple):
    """What a kernel is told of the form of arrays, in whole numbers.

    work: where `rows` is. layout: of LAYOUTS. width: of a head, in elements. cos_sin, sign: of a rotation on the way,
    where `cos_sin` is, and −1 to turn back. array_kind, tuple_kind: where `numpy.ndarray` and `tuple` lie. rank: how
    many axes arrays have. dtype_word: of their dtype. worth: how many elements are worth a thread. in_use: where the
    address of the pool stands whose threads share the work: at that place 0 means none, −1 that it is not started.
    stream_above: bytes above which results are stored past the caches. run: how many tokens of one head go together.
    together: how many heads do. rotated, kept: bytes of a head that are rotated, and that are not. fewest: pairs of a
    block.
    """

    work: Any
    layout: Any
    width: Any
    cos_sin: Any
    sign: Any
    array_kind: Any
    tuple_kind: Any
    rank: Any
    dtype_word: Any
    worth: Any
    in_use: Any
    stream_above: Any
    run: Any
    together: Any
    rotated: Any
    kept: Any
    fewest: Any


def form_words(
    work: int,
    dtype: np.dtype[Any],
    layout: str,
    head_dim: int,
    stream_above: int,
    in_use: int,
    pairs: Sequence[int],
    angles: Sequence[int] = (0, 0),
    worth: int = 2**15,
) -> NDArray[np.int64]:
    """Return what a kernel is told of the form of arrays: the words of a Form, then the pairs of each block.

    angles: for a rotation on the way, where `cos_sin` is, and the sign. The rest: see Form.
    """
    size, rotated = dtype.itemsize, 2 * sum(pairs) * dtype.itemsize
    row = head_dim * size
    tile, together = _RUN // (head_dim * (max(size, 4) + 2 * size)), max(_NEAREST // row, 1)
    form = Form._make((
        work, LAYOUTS[layout], head_dim, *angles, id(np.ndarray), id(tuple), 3 if layout == "thd" else 4,
        dtype_word(dtype), worth, in_use, stream_above, max(tile, 8), together, rotated, row - rotated, min(pairs),
    ))  # fmt: skip
    return np.array([*form, *pairs], np.int64)
