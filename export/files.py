"""Writing models to disk, large tables beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import shown

# Tables from this size on go into a file of their own: protobuf cannot hold 2 GiB, and runtimes map such files.
EXTERNAL_BYTES = 1 << 20

# Bytes that systems let paths and names of files have, less those of the suffix ".data.part".
LONGEST_PATH, LONGEST_NAME = 4096 - 11, 255 - 11

# onnxruntime maps external data by pages.
ALIGNMENT = 4096


def save(
    model: onnx.ModelProto, path: str | os.PathLike[str], *, external_bytes: int = EXTERNAL_BYTES
) -> None:
    """Write a model; initializers of at least `external_bytes` bytes go into `path` + ".data" beside it.

    The model itself stays as it is. Files are put in place once they are whole.

    Raises TypeError where `model` is not an ONNX model, ValueError where readers take the file's suffix for another
    format than protobuf or something other than a file is there (a folder, a device, a link: readers look for tables
    beside the link, not beside its target), OSError where the folder cannot be written.
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"`model` is a {type(model).__name__}; it must be an onnx.ModelProto")
    whole_number("external_bytes", external_bytes, 0)
    target = checked(path)
    data, parts = Path(f"{target}.data"), (Path(f"{target}.part"), Path(f"{target}.data.part"))
    large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= external_bytes]
    try:
        for part in parts:
            part.unlink(
                missing_ok=True
            )  # what an earlier process left, or a link that would be followed
        with _outside(large, parts[1], data.name):
            parts[0].write_bytes(model.SerializeToString())
        if large:
            parts[1].replace(data)
        parts[0].replace(target)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def checked(path: str | os.PathLike[str]) -> Path:
    """Return where a model is to be written; raise ValueError as `save` does."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"`path` is {shown(path)}; it must be a path")
    target = Path(path)
    if (
        "\0" in str(target)
        or len(os.fsencode(target)) > LONGEST_PATH
        or len(os.fsencode(target.name)) > LONGEST_NAME
    ):
        raise ValueError(
            f"`path` is {shown(str(target))}, which names no file that a system could hold"
        )
    suffix_format = onnx.serialization.registry.get_format_from_file_extension(target.suffix)
    if suffix_format not in (None, "protobuf"):
        raise ValueError(
            f"`path` is {shown(str(target))}; what is written is protobuf, and the suffix says {suffix_format}"
        )
    for place in (target, Path(f"{target}.data")):
        if place.is_symlink() or (place.exists() and not place.is_file()):
            raise ValueError(
                f"`path` is {shown(str(target))}; {shown(str(place))} is there and is no file that may be replaced"
            )
    return target


@contextmanager
def _outside(tensors: list[onnx.TensorProto], file: Path, location: str) -> Iterator[None]:
    """Write the tensors' bytes to `file` and let them point there for the time being: a copy doubles the memory."""
    kept: list[tuple[onnx.TensorProto, bytes]] = []
    try:
        if tensors:
            with file.open("wb") as stream:
                for tensor in tensors:
                    stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
                    entry = {
                        "location": location,
                        "offset": stream.tell(),
                        "length": len(tensor.raw_data),
                    }
                    stream.write(tensor.raw_data)
                    kept.append((tensor, tensor.raw_data))
                    tensor.ClearField("raw_data")
                    tensor.data_location = onnx.TensorProto.EXTERNAL
                    for key, value in entry.items():
                        tensor.external_data.add(key=key, value=str(value))
        yield
    finally:
        for tensor, raw in kept:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = raw
