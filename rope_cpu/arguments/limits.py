"""Upper bounds of numbers, lists and tables, far above every published model.

They are checked before anything is allocated.

A larger value is a mistake, or a file written to exhaust memory. The comment of each bound names
the largest value in published configs.
"""

from __future__ import annotations

# Any whole number; float64 holds every one up to here. Published: 10,485,760 positions.
WHOLE = 2**53

# Positions of either sign: float64 does not hold every whole number beyond it.
MAX_POSITION = 2.0**53

# Elements of a head vector, or of all heads if they are rotated as one vector. Published: 512, and
# 256.
HEAD_DIM = 2**16

# Elements of the hidden states, and of all heads together. Published: 16,384.
HIDDEN_SIZE = 2**24

# Heads of queries, or of keys; a check of an exported model draws all of them. Published: 128.
HEADS = 2**12

# Layers, and entries of lists with a value for each layer, which Python loops over. Published: 126.
LAYERS = 2**16

# Position coordinates of a token; each is a row of frequencies of the whole head. Published: 4.
AXES = 64

# Sequences of a step. Python computes the different frequencies of lengths in about 20 µs each.
SEQUENCES = 2**22

# Tokens of one step of a server, or slots of a call, which are sorted.
SLOTS = 2**22

# Entries of a page table, which are all compared. Large servers have 256 sequences of 2^13 pages.
PAGES = 2**24

# Elements of all frequencies of a rotation: sequences, axes, heads, pairs. Published: 3 x 32 x 64.
FREQUENCIES = 2**24

# Elements of one table: cos or sin of all tokens, the ids of a grid. In float32, 1 GiB.
TABLE = 2**28

# Tensors that one exported model rotates, each with nodes of its own.
INPUTS = 64

# Bytes of a config.json. Published: below 2^20.
CONFIG_BYTES = 2**24
