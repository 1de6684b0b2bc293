"""Everything that is compiled, as Numba functions of plain arrays and numbers.

rotate.py: the rotation kernel; vectors.py: the vectors it computes with; angles.py: the kernel of cos and sin;
threads.py: on how many threads they run; compile.py: signatures, names and the cache on disk.
"""
