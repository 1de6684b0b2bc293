"""Proof that a model of this package computes what it says, under onnxruntime."""
