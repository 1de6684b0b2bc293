"""The pages of the caches: who uses them, and which hold a prefix that others may share.

A page holds page_size tokens of one sequence, in every layer: a page has the same number in all
caches. A full page of a prompt is known by the hash of all tokens up to its end, and stays after
its last user until the room is needed, the page unused for longest first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def prefix_hashes(tokens: Sequence[int], page_size: int, frequencies: bytes) -> list[bytes]:
    """Return a hash for each full page of tokens, which stands for all tokens up to its end.

    frequencies: a value that differs where keys are rotated otherwise. Equal tokens have other
    keys then.
    """
    hashes = []
    state = hashlib.sha256(frequencies)
    full = len(tokens) // page_size * page_size
    for page in np.array(tokens[:full], np.int64).reshape(-1, page_size):
        state.update(page.tobytes())
        hashes.append(state.digest())
    return hashes


class Pages:
    """Reference counts of pages, and the pages of known prefixes.

    Parameters
    ----------
    count : int
        Number of pages.
    """

    def __init__(self, count: int) -> None:
        self.users = [0] * count
        self._empty = list(reversed(range(count)))
        self._known: dict[bytes, int] = {}  # hash → page
        self._hashes: dict[int, bytes] = {}  # page → hash
        self._unused: dict[int, None] = {}  # pages of prefixes without a user, oldest first

    def reserve(self, hashes: Sequence[bytes], count: int) -> tuple[list[int], int] | None:
        """Take pages for a sequence; return them and how many hold its prefix already.

        Returns None, with nothing taken, if there are too few.

        Parameters
        ----------
        hashes : sequence of bytes
            Those of its leading full pages that may be shared.
        count : int
            Number of pages that it needs in all.
        """
        shared = []
        for digest in hashes:
            if digest not in self._known:
                break
            shared.append(self._known[digest])
        unused = len(self._unused) - sum(page in self._unused for page in shared)
        if count - len(shared) > len(self._empty) + unused:
            return None
        for page in shared:
            self._unused.pop(page, None)
        pages = shared + [self._take() for _ in range(count - len(shared))]
        for page in pages:
            self.users[page] += 1
        return pages, len(shared)

    def publish(self, page: int, digest: bytes) -> None:
        """Let others share a page that is full now; of two equal ones the first is shared."""
        if digest not in self._known:
            self._known[digest] = page
            self._hashes[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Give back the pages of a sequence, the last first: a prefix outlives its extensions."""
        for page in reversed(pages):
            self.users[page] -= 1
            if self.users[page]:
                continue
            if page in self._hashes:
                self._unused[page] = None
            else:
                self._empty.append(page)

    def states(self) -> list[int]:
        """Return for each page its number of users, -1 for a prefix without a user."""
        return [-1 if page in self._unused else users for page, users in enumerate(self.users)]

    def _take(self) -> int:
        """Return an empty page, or that of the prefix unused for longest."""
        if self._empty:
            return self._empty.pop()
        page = next(iter(self._unused))
        del self._unused[page]
        del self._known[self._hashes.pop(page)]
        return page
