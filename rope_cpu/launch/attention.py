"""`attention`: from rotated queries and a cache to the results of a layer's attention."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.arrays import check_array, check_output, refuse_shared
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.array_types import Array, CacheKind, Int64
from rope_cpu.caches.batch import Batch
from rope_cpu.caches.kv_cache import CACHE_ARRAYS, KVCache
from rope_cpu.caches.slots import check_page_size
from rope_cpu.kernels import threads
from rope_cpu.kernels.attention import (
    ITEM,
    RANGE,
    ROWS,
    Item,
    Step,
    attention_kernel,
    attention_part,
    scratch_size,
    transform_kernel,
)
from rope_cpu.kernels.compile import address_of
from rope_cpu.launch.append import refuse_float64

# New tokens of a sequence that go over its keys together: each range of keys is read from the
# caches of a core for all but the first. Sequences of no more new tokens are split into ranges.
# Where few heads share a key head, more tokens make up for them.
_LEAST_TOKENS = 8
_LEAST_ROWS = 32  # tokens · query heads of a key head

_INPUTS = ("q", *(f"cache.{name}" for name in CACHE_ARRAYS))

_ZERO = np.float32(0)

_TRANSFORMED = 64  # elements that the kernel transforms at a time

# Products of q and keys below which several threads take longer to start than they save.
_PARALLEL_FROM = 2**19


def attention(
    q: Array,
    cache: KVCache,
    batch: Batch,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    out: Array | None = None,
) -> Array:
    """Attend from the new tokens of a step to the cached keys and values of their sequences.

    Attention is causal, by place in the cache: token i of the n new ones of a sequence attends to
    its keys 0 … seq_len − n + i. `RotaryPlan.append` writes the keys of a step before. Key head h
    serves the query heads h · heads / kv_heads and following.

    Parameters
    ----------
    q : array of float32, float16 or bfloat16, (tokens, heads, head_dim)
        Rotated queries of the new tokens, packed as in `batch`. Any strides.
    cache : KVCache
        The keys and values, those of the new tokens included. Of any dtype.
    batch : Batch
        The sequences. Pages may be shared by several, the slots of new tokens too.
    scale : float, optional
        Factor of the scores, above 0; by default head_dim^-½.
    window : int, optional
        The number of keys that a token attends to: its own and those before it. By default all.
        (flash-attention's `window_size` on the left plus 1.)
    softcap : float, optional
        Scores become softcap · tanh(score / softcap).
    sinks : array of float, (heads,), optional
        For each head a score of no key, which takes its share of the weights.
    out : array like the result, optional
        Where to write the result. It shares no memory with `q` or the cache.

    Returns
    -------
    y : array of the dtype of q, (tokens, heads, value width)
        The results, computed in float32 and rounded once.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, dtype, shape or range, if `cache` has another page size
        than `batch` or too few pages, if a page that is attended to was given back, or if `out`
        shares memory with an input. Nothing is written then.
    MemoryError
        If memory is lacking. Nothing is written then.

    Notes
    -----
    The bits of a result depend on the query, keys and values of its own sequence alone: not on the
    number of threads, the pages, or the other tokens of the step. (Those of a matrix product
    around it do depend on them: a BLAS adds in another order for another number of rows.) Keys
    outside of window and length are never read: their pages may be −1, and their memory may hold
    NaN. No weight is less than e^-87 of the largest weight of its token, and keys whose scores are
    all −inf have the same weight. "Serve from NumPy" in the manual has a bound on the errors.

    References
    ----------
    T. Dao et al., FlashAttention, arXiv:2205.14135. ONNX operator Attention.

    Examples
    --------
    Two sequences, of 3 and 9 tokens, each with one new token:

    >>> import numpy as np, rope_cpu
    >>> cache = rope_cpu.KVCache(*np.ones((2, 5, 8, 2, 16), np.float32))
    >>> batch = rope_cpu.Batch(
    ...     seq_lens=[3, 9], query_lens=[1, 1], page_table=[[4, -1], [0, 2]], page_size=8
    ... )
    >>> y = rope_cpu.attention(np.ones((2, 4, 16), np.float32), cache, batch)
    >>> y.shape, y.min(), y.max()
    ((2, 4, 16), np.float32(1.0), np.float32(1.0))
    """
    scalars.check_type("cache", cache, KVCache)
    scalars.check_type("batch", batch, Batch)
    check_page_size("batch", batch, cache)
    _check_queries(q, cache, batch)
    keys = limits.WHOLE if window is None else scalars.whole_number("window", window)
    numbers = {
        "scale": np.float32(cache.head_dim**-0.5)
        if scale is None
        else scalars.float32_number("scale", scale),
        "softcap": _ZERO if softcap is None else scalars.float32_number("softcap", softcap),
        "sinks": _no_sinks(q.shape[1]) if sinks is None else _sinks(sinks, q.shape[1]),
    }
    work = _work(batch, keys, q.shape[1] // cache.kv_heads)
    if work.pages_needed > cache.pages:
        finding = Finding(f"has page {work.pages_needed - 1}")
        raise ArgumentError("batch", finding, f"fit the {cache.pages} pages of `cache`")
    shape = (*q.shape[:2], cache.value_dim)
    result: Array = np.empty(shape, q.dtype) if out is None else out
    if out is not None:
        check_output("out", out, "y", shape, q.dtype)
        refuse_shared("out", out, dict(zip(_INPUTS, (q, *cache._kernel_arrays), strict=True)))
    is_direct = result.dtype == np.float32 and result.flags.carray
    y = result if is_direct else np.empty(shape, np.float32)
    if q.shape[0]:
        _launch(_queries(q, cache), cache, batch, work, numbers, y)
    if not is_direct:
        with np.errstate(all="ignore"):
            result[...] = y
    return result


class _Work(NamedTuple):
    """The division of a batch into items.

    first_states: (tokens + 1,), where the states of each token start, and `states`, their number.
    pages_needed: number of pages that a cache must have. scores: number of scores of a head.
    tokens: of the largest item.
    """

    items: Array
    first_states: Int64
    states: int
    pages_needed: int
    scores: int
    tokens: int


def _work(batch: Batch, window: int, shared: int) -> _Work:
    """Return the items of a batch, divided once for all layers of a window.

    shared: number of query heads that share a key head.

    Raise if a page that is attended to was given back.
    """
    tile = max(_LEAST_TOKENS, _LEAST_ROWS // shared)
    work: _Work | None = batch._work.get((window, tile))
    if work is None:
        work = _divided(batch, window, tile)
        batch._work[window, tile] = work
    return work


def _divided(batch: Batch, window: int, tile: int) -> _Work:
    """Return the items, of at most `tile` tokens."""
    arrays = batch._arrays
    pages_needed = _pages_needed(batch, window)
    sequence, index = _members(-(-arrays.query_lens // tile))
    new = arrays.query_lens[sequence]
    done = index * tile
    token = arrays.cu_seqlens[sequence] + done
    tokens = np.minimum(tile, new - done)
    position = arrays.seq_lens[sequence] - new + done
    stop = position + tokens
    start = np.maximum(0, position - window + 1) // RANGE * RANGE
    ranges = np.where(new <= tile, -((start - stop) // RANGE), 1)
    first_states = np.concatenate([[0], np.cumsum(np.repeat(ranges, tokens))])
    tiles = np.empty(len(token), ITEM)
    columns = Item(
        sequence, token, tokens, position, window, start, stop, first_states[token], ranges
    )
    for name, column in columns._asdict().items():
        tiles[name] = column
    owner, index = _members(ranges)
    parts = tiles[owner]
    parts["start"] += index * RANGE
    parts["state"] += index
    is_split = parts["step"] > 1
    parts["stop"][is_split] = np.minimum(parts["start"] + RANGE, parts["stop"])[is_split]
    items = parts.view(np.int64)
    scores = int(np.minimum(arrays.cache_position + 1, window).sum())
    largest = int(tokens.max(initial=0))
    return _Work(items, first_states, int(first_states[-1]), pages_needed, scores, largest)


def _members(counts: Int64) -> tuple[Int64, Int64]:
    """Return the group of each member of groups of these sizes, and its index in the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def _pages_needed(batch: Batch, window: int) -> int:
    """Return the number of pages that a cache must have; raise if one was given back."""
    arrays = batch._arrays
    first_key = np.maximum(arrays.seq_lens - arrays.query_lens - window + 1, 0)
    first_page = first_key // batch.page_size
    stop_page = np.where(arrays.query_lens > 0, -(-arrays.seq_lens // batch.page_size), 0)
    column = np.arange(arrays.page_table.shape[1])
    needed = (column >= first_page[:, None]) & (column < stop_page[:, None])
    for row, given_back in np.argwhere(needed & (arrays.page_table < 0))[:1]:
        start = given_back * batch.page_size
        finding = Finding(
            f"has page -1 under tokens {start} … {start + batch.page_size - 1} of sequence {row}, "
            f"whose new tokens attend to keys from {first_key[row]} on"
        )
        rule = "have a page under every key that they attend to"
        raise ArgumentError("batch", finding, rule, "give back pages outside of `window` alone")
    return int(arrays.page_table.max(where=needed, initial=-1)) + 1


def _check_queries(q: Array, cache: KVCache, batch: Batch) -> None:
    """Raise unless the queries are those of a batch, for a cache."""
    refuse_float64("q", check_array("q", q, "thd"), "attention is")
    tokens, heads, width = q.shape
    new = len(batch._arrays.slot_mapping)
    if tokens != new:
        rule = f"have the {new} new tokens of `batch`"
        raise ArgumentError("q", Finding(f"has {tokens} tokens"), rule)
    if width != cache.head_dim:
        rule = f"have that of the keys of `cache`, {cache.head_dim}"
        raise ArgumentError("q", Finding(f"has head_dim {width}"), rule)
    if heads == 0 or heads % cache.kv_heads:
        rule = f"have a multiple of the {cache.kv_heads} heads of `cache`"
        raise ArgumentError("q", Finding(f"has {heads} heads"), rule)


@functools.cache
def _no_sinks(heads: int) -> Array:
    """Return the logits of sinks that have no weight."""
    return np.full(heads, -np.inf, np.float32)


def _sinks(sinks: ArrayLike, heads: int) -> Array:
    """Return the logits of sinks as float32; raise unless there is one for each head."""
    logits = scalars.float32_array("sinks", sinks)
    if logits.shape != (heads,):
        raise ArgumentError("sinks", Finding.shape_of(logits), f"be (heads,), ({heads},)")
    return logits


def _queries(q: Array, cache: KVCache) -> Array:
    """Return queries as contiguous float32, without a copy if they are, for the keys of a cache."""
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        if not cache.hadamard:
            return np.ascontiguousarray(q, np.float32)
        transformed = np.zeros(-(-q.size // _TRANSFORMED) * _TRANSFORMED, np.float32)
        result = transformed[: q.size].reshape(q.shape)
        result[...] = q
    transform_kernel()(transformed, cache.head_dim)
    return result


@functools.cache
def _kernel_and_parts(kind: CacheKind) -> tuple[Any, int, int]:
    """Return the kernel for caches of a kind, and the addresses of its parts."""
    attend, finish = (address_of(attention_part(kind, name)) for name in ("attend", "finish"))
    return attention_kernel(kind), attend, finish


def _launch(
    q: Array, cache: KVCache, batch: Batch, work: _Work, numbers: dict[str, Any], out: Array
) -> None:
    """Write the results to `out`.

    q, out: contiguous float32. numbers: those of a `Step`.
    """
    key, value, key_scale, value_scale = cache._kernel_arrays
    # The kernel is loaded before `threads.serial` is read, as in `CosSin._compute`.
    kernel, attend, finish = _kernel_and_parts(cache._kind._replace(hadamard=False))
    usable = 1 if threads.serial else threads.limit
    tokens, heads, width = q.shape
    if work.scores * heads * width < _PARALLEL_FROM:
        usable = 1
    rows = -(-work.tokens * (heads // cache.kv_heads) // ROWS) * ROWS
    room = scratch_size(rows, width, cache.value_dim, value_scale.shape[3])
    step = Step(
        q=q,
        key=key,
        value=value,
        key_scale=key_scale,
        value_scale=value_scale,
        pages=batch._arrays.page_table,
        items=work.items,
        first_states=work.first_states,
        states=np.empty((work.states, heads, cache.value_dim + 2), np.float32),
        scratch=np.empty((usable, room), np.int64),
        out=out,
        tokens=tokens,
        heads=heads,
        value_dim=cache.value_dim,
        columns=batch._arrays.page_table.shape[1],
        count=len(work.items) // len(Item._fields),
        room=room,
        rows=rows,
        **numbers,
    )
    kernel(attend, finish, tuple(step), usable)
