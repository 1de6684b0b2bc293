"""Compiled code: what rotates arrays and what computes cos and sin, written down as LLVM and handed to Numba.

From the ground up: `compiler`, `integers`, `flow`, `words`, `formats` and `lanes` are what code is written with;
`objects`, `form`, `overlap` and `division` look at the arrays of a call and cut the work; `turn`, `part`, `rows` and
`units` rotate, `circle` computes; `sharing` divides work between threads. Kernels are in `angles`, `units`, `rotation`
and `sharing`.
"""
