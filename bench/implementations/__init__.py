"""Rotations to time, ours and others', each used as its users use it."""
