"""The objects of a server: caches of keys and values, the sequences of a step, and norms."""
