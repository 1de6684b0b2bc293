"""What a model's attention has besides the rotation: facts of its model type, and what its file says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Attention:
    """Placeholder."""

    @classmethod
    def of(cls, values: Mapping[str, Any], facts: Mapping[str, Any]) -> Attention:
        """Placeholder"""
        return cls()
