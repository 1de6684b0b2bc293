"""Numbers with their nouns, for names and tables."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return such as "1 thread" and "2 threads"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
