"""Serving: the caches of keys and values, the sequences of a step, and the pass between them."""
