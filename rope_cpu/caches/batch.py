"""`Batch`: the sequences of one step of a server, packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.array_types import Int64
from rope_cpu.caches import set_fields


class BatchArrays(NamedTuple):
    """The attributes of a batch of the same names, whose shapes and flags nobody can change."""

    seq_lens: Int64
    query_lens: Int64
    page_table: Int64
    cache_position: Int64
    slot_mapping: Int64
    cu_seqlens: Int64


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Batch:
    """The sequences of one step: how many tokens each has, how many are new, and where they go.

    The new tokens of all sequences are packed one after the other (layout thd). A batch is made
    once for a step and serves every layer. It is immutable; its arguments are copied.

    For `attention` two new tokens may be in one slot: tokens that attend to all keys of a sequence,
    whatever their order, are a sequence each, of the same length and pages. `RotaryPlan.append`
    refuses such a batch. A write under another sequence's cached tokens is not seen: copy a shared
    page before writing to it, or moving its keys (`rotate_cached`).

    Parameters
    ----------
    seq_lens : sequence or array of int, (sequences,)
        Tokens of each sequence after this step, new ones included; 0 is allowed.
    query_lens : sequence or array of int, (sequences,)
        New tokens of each sequence, which are its last: 1 for decode, more for a chunk of a prompt,
        0 for an idle sequence.
    page_table : array of int, (sequences, pages), or a list of rows
        The page of each run of page_size tokens. Entries past a sequence's tokens are ignored. −1
        is a page that was given back: it must not be under a new token. The rows of a list,
        sequences or arrays, may differ in length.
    page_size : int
        Tokens on a page.

    Attributes
    ----------
    seq_lens, query_lens, page_table, page_size
        The arguments, as int64 arrays and an int.
    cache_position : array of int64, (tokens,)
        The index of each new token in its sequence.
    slot_mapping : array of int64, (tokens,)
        The slot of each new token, page · page_size + place.
    cu_seqlens : array of int64, (sequences + 1,)
        Where the new tokens of each sequence start, and the number of all.
    pages_needed : int
        The number of pages that a cache must have.

    Raises
    ------
    TypeError, ValueError
        If lengths are negative or do not fit each other, or if a sequence has too few pages.

    Examples
    --------
    Three tokens of a prompt, and the ninth token of another sequence:

    >>> import rope_cpu
    >>> batch = rope_cpu.Batch(
    ...     seq_lens=[3, 9], query_lens=[3, 1], page_table=[[4], [0, 2]], page_size=8
    ... )
    >>> batch.cache_position
    array([0, 1, 2, 8])
    >>> batch.slot_mapping
    array([32, 33, 34, 16])
    >>> batch.cu_seqlens
    array([0, 3, 4])
    """

    seq_lens: Int64
    query_lens: Int64
    page_table: Int64  # (sequences, pages of the longest sequence, or 1)
    page_size: int
    cache_position: Int64  # (tokens,), index of each new token in its sequence
    slot_mapping: Int64  # (tokens,), page · page_size + place of each new token
    cu_seqlens: Int64  # (sequences + 1,), where each sequence's new tokens start
    pages_needed: int  # pages that a cache must have
    _arrays: BatchArrays  # of which the attributes are views
    _shared_slot: int | None  # a slot of two new tokens, for which `append` refuses the batch
    _slots: Int64  # slot_mapping as (1, tokens)
    # The division of attention's work, by window and number of tokens that go over keys together.
    _work: dict[tuple[int, int], Any]

    def __init__(
        self,
        *,
        seq_lens: ArrayLike,
        query_lens: ArrayLike,
        page_table: ArrayLike,
        page_size: int,
    ) -> None:
        size = scalars.whole_number("page_size", page_size, most=limits.TABLE)
        lengths = _lengths("seq_lens", seq_lens)
        new = _lengths("query_lens", query_lens)
        _check_new_tokens(lengths, new)
        pages = _pages(page_table, lengths, size)
        bounds = np.concatenate([[0], np.cumsum(new)])
        sequence = np.repeat(np.arange(len(new)), new)
        position = np.arange(bounds[-1]) - bounds[sequence] + (lengths - new)[sequence]
        page = pages[sequence, position // size]
        slots = page * size + position % size
        _check_new_pages(page, sequence, position)
        arrays = BatchArrays(lengths, new, pages, position, slots, bounds)
        # A view that is made before `slots` becomes read-only stays writable. Nobody writes to it,
        # but Numba takes 0.05 µs longer to unbox a read-only array.
        set_fields(self, _slots=slots[None], _arrays=arrays, _work={})
        for name, array in arrays._asdict().items():
            array.flags.writeable = False
            set_fields(self, **{name: array.view()})
        set_fields(self, page_size=size, pages_needed=int(page.max(initial=-1)) + 1)
        in_order = np.sort(slots)
        shared = in_order[1:][in_order[1:] == in_order[:-1]]
        set_fields(self, _shared_slot=shared[0] if shared.size else None)

    def __repr__(self) -> str:
        return (
            f"Batch(sequences={len(self.seq_lens)}, tokens={len(self.slot_mapping)}, "
            f"page_size={self.page_size})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self._arrays._asdict()
        given = {name: arguments[name] for name in ("seq_lens", "query_lens", "page_table")}
        return partial(Batch, **given, page_size=self.page_size), ()


def _lengths(name: str, value: ArrayLike) -> Int64:
    """Return a copy of lengths; raise unless there is one of at least 0 for each sequence."""
    lengths = scalars.integers(name, value, most=limits.SEQUENCES)
    if lengths.ndim != 1:
        raise ArgumentError(name, Finding.shape_of(lengths), "be (sequences,)")
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= limits.TABLE:
        wrong = lengths[(lengths < 0) | (lengths > limits.TABLE)][0]
        raise ArgumentError(name, Finding.holds(wrong), f"hold lengths from 0 to {limits.TABLE}")
    return lengths


def _check_new_tokens(lengths: Int64, new: Int64) -> None:
    if len(new) != len(lengths):
        finding = Finding(f"is for {len(new)} sequences")
        rule = f"be for as many as `seq_lens`, {len(lengths)}"
        raise ArgumentError("query_lens", finding, rule)
    for index in np.flatnonzero(new > lengths)[:1]:
        finding = Finding(f"holds {new[index]} for sequence {index}")
        rule = f"hold at most its `seq_lens`, {lengths[index]}, which includes the new tokens"
        raise ArgumentError("query_lens", finding, rule)
    tokens = int(new.sum())
    if tokens > limits.SLOTS:
        finding = Finding(f"has {tokens} tokens in all")
        raise ArgumentError("query_lens", finding, f"have at most {limits.SLOTS} for a step")


def _pages(page_table: ArrayLike, lengths: Int64, page_size: int) -> Int64:
    """Return a copy of the columns of the page table that sequences need.

    Raise unless it has the pages of every sequence.
    """
    if isinstance(page_table, list | tuple):
        # NumPy converts lists of one length in half the time.
        is_regular = {*map(type, page_table)} == {list} and len({*map(len, page_table)}) == 1
        page_table = page_table if is_regular else _filled_up(page_table)
    given = scalars.regular_array("page_table", page_table)
    if given.size == 0 and not len(lengths):
        return np.empty((0, 1), np.int64)
    if given.ndim != 2 or len(given) != len(lengths):
        rule = f"be (sequences, pages), for {len(lengths)} sequences"
        raise ArgumentError("page_table", Finding.shape_of(given), rule)
    needed = -(-lengths // page_size)
    for index in np.flatnonzero(needed > given.shape[1])[:1]:
        finding = Finding(f"has {given.shape[1]} pages for a sequence")
        rule = (
            f"have {needed[index]} of {page_size} tokens, as sequence {index} has {lengths[index]} "
            "tokens in `seq_lens`"
        )
        raise ArgumentError("page_table", finding, rule)
    if given.shape[1] == 0:  # no sequence has a token
        return np.full((len(given), 1), -1)
    # Servers have room for the longest sequences. A column that no sequence needs is not read.
    columns = max(int(needed.max()), 1)
    pages = scalars.integers("page_table", given[:, :columns], most=limits.PAGES)
    used = np.arange(pages.shape[1]) < needed[:, None]
    most = limits.WHOLE // page_size
    wrong = used & ((pages < -1) | (pages >= most))
    for row, column in np.argwhere(wrong)[:1]:
        finding = Finding(f"holds {pages[row, column]} for sequence {row}")
        rule = f"hold pages from 0 to {most - 1}, or -1 where a page was given back"
        raise ArgumentError("page_table", finding, rule)
    return pages


def _filled_up(page_table: Sequence[Any]) -> Int64:
    """Return a page table from its rows, which are filled up with -1 if they differ in length."""
    longest = limits.PAGES // max(len(page_table), 1)
    rows: list[Int64] = []
    for row in page_table:
        if isinstance(row, range):  # whose array is large, though it is small itself
            scalars.check_length("page_table", row, longest)
        rows.append(scalars.integers("page_table", row, most=longest))
        if rows[-1].ndim != 1:
            finding = Finding(f"has a row of shape {rows[-1].shape}")
            raise ArgumentError("page_table", finding, "be (sequences, pages)")
    table = np.full((len(rows), max(map(len, rows), default=0)), -1)
    for filled, row in zip(table, rows, strict=True):
        filled[: len(row)] = row
    return table


def _check_new_pages(page: Int64, sequence: Int64, position: Int64) -> None:
    """Raise unless every new token has a page."""
    for token in np.flatnonzero(page < 0)[:1]:
        place = f"under token {position[token]} of sequence {sequence[token]}, which is new"
        raise ArgumentError("page_table", Finding(f"holds -1 {place}"), "give it a page")
