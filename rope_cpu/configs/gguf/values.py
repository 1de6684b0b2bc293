"""Metadata of a GGUF file: checked values by their key without the name of the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rope_cpu.arguments import limits, scalars
from rope_cpu.array_types import Float64

# The tensors of factors that are read, by their name here.
FREQS = "rope_freqs.weight"
SHORT = "rope_factors_short.weight"
LONG = "rope_factors_long.weight"
FACTOR_TENSORS = (FREQS, SHORT, LONG)

Default = TypeVar("Default")


@dataclass(frozen=True, eq=False)
class Metadata:
    """The metadata and the factors of a file.

    Parameters
    ----------
    values : mapping
        All values by key.
    tensors : {name: ndarray of float64, shape (elements,)}
        Those of `FACTOR_TENSORS` that the file has.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, Float64]

    def full_key(self, key: str) -> str:
        """Return a key with the name of the architecture."""
        return f"{self.values.get('general.architecture')}.{key}"

    def get(self, key: str) -> Any:
        """Return the value of a key of the architecture, None if it is missing."""
        return self.values.get(self.full_key(key))

    def whole(
        self, key: str, default: Default, least: int = 1, most: int = limits.WHOLE
    ) -> int | Default:
        """Return a whole number, or the default for a missing key."""
        value = self.get(key)
        if value is None:
            return default
        return scalars.whole_number(self.full_key(key), value, least, most)

    def real(self, key: str, default: Default, *, zero: bool = False) -> float | Default:
        """Return a number above 0, or at least 0 if `zero` is set; the default if it is missing."""
        value = self.get(key)
        if value is None:
            return default
        return scalars.real_number(self.full_key(key), value, zero=zero)

    def own_values(self) -> dict[str, Any]:
        """Return the values of the architecture and its name, as they are."""
        prefix = self.full_key("")
        name = "general.architecture"
        own = {key: value for key, value in self.values.items() if key.startswith(prefix)}
        return {name: self.values.get(name), **own}
