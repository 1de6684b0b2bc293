"""`rope-cpu export`: write a config's rotation, or its attention, as a validated ONNX file."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
