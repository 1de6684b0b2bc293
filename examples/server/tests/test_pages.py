"""Pages: reference counts, prefixes, and their end."""

from __future__ import annotations

import numpy as np
from rope_server.pages import Pages, prefix_hashes


def hashes(*tokens):
    return prefix_hashes(tokens, 2, b"")


def filled(pages, *tokens):
    """Compute a sequence of full pages, and return them."""
    taken, _ = pages.reserve(hashes(*tokens), len(tokens) // 2)
    for page, digest in zip(taken, hashes(*tokens), strict=True):
        pages.publish(page, digest)
    return taken


def test_hashes_are_of_full_pages_and_all_before():
    assert len(hashes(1, 2, 3)) == 1
    assert hashes(1, 2, 3, 4)[0] == hashes(1, 2)[0]
    assert hashes(1, 2, 3, 4)[1] != hashes(5, 6, 3, 4)[1]
    assert hashes(1, 2) != prefix_hashes([1, 2], 2, b"other frequencies")


def test_a_prefix_is_shared_and_counted():
    pages = Pages(4)
    first = filled(pages, 1, 2, 3, 4)
    second, shared = pages.reserve(hashes(1, 2, 9, 9), 2)
    assert shared == 1
    assert second[0] == first[0]
    assert second[1] not in first
    assert sorted(pages.states()) == [0, 1, 1, 2]
    pages.release(first)
    assert sorted(pages.states()) == [-1, 0, 1, 1]
    assert pages.reserve(hashes(1, 2, 3, 4), 2) == (first, 2)


def test_nothing_is_taken_where_pages_lack():
    pages = Pages(3)
    first = filled(pages, 1, 2, 3, 4)
    before = pages.states()
    assert pages.reserve(hashes(1, 2), 3) is None
    assert pages.states() == before
    pages.release(first)
    # A shared page without a user is not room for another page of the same sequence.
    before = pages.states()
    assert pages.reserve(hashes(1, 2), 4) is None
    assert pages.states() == before


def test_the_oldest_prefix_goes_first_and_its_end_before_its_start():
    pages = Pages(4)
    pages.release(filled(pages, 1, 2, 3, 4))
    pages.release(filled(pages, 5, 6, 7, 8))
    taken, _ = pages.reserve([], 1)
    assert pages.reserve(hashes(1, 2, 3, 4), 1)[1] == 1
    pages.release(taken)
    pages = Pages(4)
    pages.release(filled(pages, 1, 2, 3, 4))
    pages.release(filled(pages, 5, 6, 7, 8))
    pages.reserve([], 2)
    assert pages.reserve(hashes(1, 2), 1)[1] == 0
    assert pages.reserve(hashes(5, 6), 1)[1] == 1


def test_random_sequences_leave_no_page(rng):
    pages = Pages(20)
    running = []
    for _ in range(2000):
        if running and rng.random() < 0.5:
            pages.release(running.pop(rng.integers(len(running))))
            continue
        tokens = rng.integers(0, 2, 2 * rng.integers(1, 6)).tolist()
        reserved = pages.reserve(hashes(*tokens), len(tokens) // 2)
        if reserved is None:
            continue
        running.append(reserved[0])
        for page, digest in zip(reserved[0], hashes(*tokens), strict=True):
            pages.publish(page, digest)
        users = np.bincount(np.concatenate(running), minlength=20)
        assert pages.users == users.tolist()
        assert len(set(reserved[0])) == len(reserved[0])
    for taken in running:
        pages.release(taken)
    assert max(pages.states()) <= 0
    assert pages.reserve([], 20) is not None
