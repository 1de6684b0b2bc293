"""An inference server in NumPy on rope_cpu."""

import os

# Threads of OpenBLAS wait for the next matrix product by spinning, some 20 ms by default, and take
# processor time from the kernels in between. NumPy reads the variable when it is imported.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "8")
