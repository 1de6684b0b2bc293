"""Writing models to disk, with large tables in a file beside them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnx.external_data_helper import set_external_data, uses_external_data

from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import shown

# Tables from this size on go into a separate file: protobuf cannot hold 2 GiB, and runtimes map
# such files into memory.
EXTERNAL_BYTES = 1 << 20

# onnxruntime maps external data by pages.
ALIGNMENT = 4096


def save(
    model: onnx.ModelProto, path: str | os.PathLike[str], *, external_bytes: int = EXTERNAL_BYTES
) -> None:
    """Write a model to a file, with its large initializers in `path` + ".data" beside it.

    Both files are written to a temporary folder beside `path`, and moved when they are
    complete. A file that is replaced keeps its permissions (a new ".data" file has those of the
    model that is replaced), and the ".data" file of a replaced model is removed where the new model
    needs none.

    Parameters
    ----------
    model : onnx.ModelProto
        From `export_rope` or `export_attention`, or any other ONNX model.
    path : str or os.PathLike
        File to write or to replace.
    external_bytes : int
        Size in bytes from which an initializer is stored in the second file, 1 MiB by default.

    Raises
    ------
    TypeError
        If `model` is not an ONNX model, or `path` not a path.
    ValueError
        If the suffix of `path` is not one that readers take for protobuf (.onnx, or .pb), or if
        something other than a regular file is there: a folder, a device or a link. (Readers look
        for tables beside the link, not beside its target.) If `model` was loaded without the
        tables that lie in a file beside it.
    OSError
        If the folder cannot be written. The error names `path`.

    Examples
    --------
    >>> import os, tempfile
    >>> from rope_cpu import RotaryEmbedding, export
    >>> model = export.export_rope(RotaryEmbedding(16), max_positions=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export.save(model, f"{folder}/rope.onnx", external_bytes=1024)
    ...     sorted(os.listdir(folder))
    ['rope.onnx', 'rope.onnx.data']
    """
    if not isinstance(model, onnx.ModelProto):
        raise ArgumentTypeError("model", Finding.type_of(model), "be an onnx.ModelProto")
    whole_number("external_bytes", external_bytes, 0)
    target = model_path(path)
    try:
        _replace(model, target, external_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None


def _replace(model: onnx.ModelProto, target: Path, external_bytes: int) -> None:
    """Write a model in place of the one that may be there."""
    data = Path(f"{target}.data")
    # A folder of its own has no name in common with files of others.
    with TemporaryDirectory(prefix=".rope_cpu-", dir=target.parent) as folder:
        new_target = Path(folder, "model")
        new_data = Path(folder, "data")
        small = _with_external_data(model, external_bytes, new_data, data.name)
        new_target.write_bytes(small.SerializeToString())
        is_stale = not new_data.exists() and data.exists() and _refers_to(target, data.name)
        if new_data.exists():
            _take_mode(new_data, data, target)
            new_data.replace(data)
        _take_mode(new_target, target)
        new_target.replace(target)
        if is_stale:
            data.unlink()


def _refers_to(model: Path, data_name: str) -> bool:
    """Return True if tensors of a saved model, also those of subgraphs, are in a file beside it."""
    location = onnx.StringStringEntryProto(key="location", value=data_name)
    return model.exists() and location.SerializeToString() in model.read_bytes()


def _take_mode(new: Path, *replaced: Path) -> None:
    """Give a new file the mode of the first of these files that exists."""
    for file in replaced:
        if file.exists():
            new.chmod(stat.S_IMODE(file.stat().st_mode))
            return


def model_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Return the path for a model; raise TypeError or ValueError as `save` does.

    name: that of the argument, for error texts.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ArgumentTypeError(name, path, "be a path")
    target = Path(path)
    suffix = target.suffix.lower()
    suffix_format = onnx.serialization.registry.get_format_from_file_extension(suffix)
    if suffix_format != "protobuf" or "\0" in str(target):
        rule = "name a file of protobuf, with the suffix .onnx and without null characters"
        raise ArgumentError(name, str(target), rule)
    for file in (target, Path(f"{target}.data")):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            exists = f"{shown(str(file))} exists and is not a regular file"
            finding = Finding(f"is {shown(str(target))}, but {exists}")
            raise ArgumentError(name, finding, "name a new or a regular file")
    return target


def _with_external_data(
    model: onnx.ModelProto, external_bytes: int, file: Path, location: str
) -> onnx.ModelProto:
    """Return a copy of a model with large tensors written to `file`, as data in `location`.

    Raises ValueError if it has tensors in a file already, which this one could replace.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if uses_external_data(tensor):
            finding = Finding(f"has the tensor {shown(tensor.name)} in a file beside it")
            rule = "hold all its tables"
            raise ArgumentError("model", finding, rule, "load it with them: onnx.load(path)")
        raw_data = tensor.raw_data
        if raw_data and len(raw_data) >= external_bytes:
            with file.open("ab") as stream:
                stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
                set_external_data(tensor, location, stream.tell(), len(raw_data))
                stream.write(raw_data)
            tensor.ClearField("raw_data")
    return copy
