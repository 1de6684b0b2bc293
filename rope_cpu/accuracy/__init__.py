"""The exact reference, and the tolerance of results."""
