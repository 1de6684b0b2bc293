"""Compiled code: what rotates arrays and what computes cos and sin, written down as LLVM and compiled by Numba.

`builder`, `integers`, `flow`, `words`, `formats`, `conversions`, `memory` and `lanes` are what code is written with;
`objects`, `form`, `overlap` and `division` look at the arrays of a call and cut the work; `turn`, `part`, `rows` and
`units` rotate; `chains`, `circle` and `angles` compute cos and sin; `sharing` divides work between threads; `rotation`
is what is called. `compiler` makes a kernel of what is written: by `codegen`, or from the disk by `cache`; `loading`
makes it part of the process, and `entry` is how Python calls it.
"""
