"""Shapes of known models."""
