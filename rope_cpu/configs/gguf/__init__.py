"""From a GGUF file, the format of llama.cpp, to the rotation it describes.

`import rope_cpu` does not load the modules of this package: `is_gguf` alone decides on a file.
"""

import os

MAGIC = b"GGUF"


def is_gguf(path: str) -> bool:
    """Return True for a file whose name or first bytes are those of a GGUF file."""
    if not os.path.isfile(path):
        return False
    if path.endswith(".gguf"):
        return True
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
