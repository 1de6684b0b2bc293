"""The targets, one object each: what it can express, how it writes a rotation, and how it writes attention."""

from .base import Target
from .onnx import ONNX
from .ort import ORT
from .primitive import PRIMITIVE

TARGETS: dict[str, Target] = {target.name: target for target in (PRIMITIVE, ONNX, ORT)}
