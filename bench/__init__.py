"""Micro-benchmarks: how fast is it here, and how close to the limit of this machine."""
