"""The objects that a server passes: caches, batches of sequences, and norms."""

from __future__ import annotations


def set_fields(instance: object, **fields: object) -> None:
    """Set fields of a new object that is frozen, since kernels rely on checked data."""
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
