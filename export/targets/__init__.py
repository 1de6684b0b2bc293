"""The targets: one object for each, with its limits and its rotation and attention."""

from __future__ import annotations

from .base import Target
from .onnx import ONNX
from .ort import ORT
from .primitive import PRIMITIVE

__all__ = ["TARGETS", "Target"]

TARGETS: dict[str, Target] = {target.name: target for target in (PRIMITIVE, ONNX, ORT)}
