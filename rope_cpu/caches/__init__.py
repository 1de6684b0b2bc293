"""The objects that a server passes: caches, batches of sequences, and norms."""

from __future__ import annotations

from typing import NoReturn


class Immutable:
    """An object whose attributes are set once, when it is made."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse to set an attribute: kernels rely on checked data."""
        kind = type(self).__name__
        raise AttributeError(f"`{name}` of a {kind} cannot be set; make another {kind}")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuse to delete an attribute."""
        raise AttributeError(f"`{name}` of a {type(self).__name__} cannot be deleted")

    def _set(self, **attributes: object) -> None:
        """Set the attributes of a new object."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)
