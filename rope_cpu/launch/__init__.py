"""From NumPy arrays to kernels: fast paths without copies, slow paths, and precise errors."""
