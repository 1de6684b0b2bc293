"""Validation: run an exported model under onnxruntime and compare it with the exact reference."""
