"""Everything that is compiled, as Numba functions of plain arrays and numbers."""
