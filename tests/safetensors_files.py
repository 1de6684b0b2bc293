"""Safetensors files, written from the definition of the format."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from rope_cpu.array_types import Array

NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NAMES |= {"int64": "I64", "int8": "I8", "uint8": "U8"}


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write arrays to a file: the length of the header, the header, the data."""
    header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        start = len(data)
        data += array.tobytes()
        header[name] = {
            "dtype": NAMES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
