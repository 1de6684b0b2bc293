"""Rotary position embeddings for NumPy and ONNX on the CPU: exact, fast, in every variant."""

__version__ = "0.1.0"
