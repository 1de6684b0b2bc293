"""The tensors of a layer's attention module: of a state dict, or of safetensors files.

Of files one tensor is read at a time. Names are those of the modules of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from rope_cpu.arguments import scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import DTYPES, Array
from rope_cpu.models.attention import FACTS
from rope_cpu.models.layer import Layer
from rope_cpu.models.model_types import Config
from rope_cpu.weight_pairing import convert_weight

# Dtypes of safetensors files that weights may have; tensors of others can be listed, but not read.
_READ = ("F64", "F32", "F16", "BF16")

# The weights in the folder of a model, in the order in which transformers looks for them.
FOLDER_FILES = ("model.safetensors", "model.safetensors.index.json")


def open_tensors(path: str | PathLike[str]) -> dict[str, Path]:
    """Return the file of each tensor of a safetensors file, of an index, or of a folder, by name.

    Raises ValueError if it is no such file, OSError if it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        files = [file / name for name in FOLDER_FILES]
        file = next(filter(Path.is_file, files), files[0])
    if file.suffix == ".json":
        return _files_of_index(file)
    with _opened(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def _files_of_index(index: Path) -> dict[str, Path]:
    """Return the file of each tensor in an index, which is beside the index."""
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        return {tensor: index.with_name(name) for tensor, name in names.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        text = f"{shown(str(index))} has no `weight_map` of tensors to file names"
        raise ValueError(text) from None


def read_tensor(file: Path, name: str) -> Array:
    """Return a tensor of a safetensors file, a new array.

    Raises ValueError if the file is damaged or lacks the tensor, or if it has another dtype.
    """
    with _opened(file) as opened:
        dtype = opened.get_slice(name).get_dtype()
        if dtype not in _READ:
            finding = Finding(f"has dtype {shown(dtype)} in {shown(str(file))}")
            raise ArgumentError(cut(name), finding, f"have one of {', '.join(_READ)}")
        tensor: Array = opened.get_tensor(name)
        return tensor


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; an error of the format becomes a ValueError that names the file."""
    from safetensors import SafetensorError, safe_open  # a package that few need

    path.open("rb").close()  # OSError with the path; those of safetensors lack it
    open_file: Any = safe_open
    try:
        with open_file(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        text = f"{shown(str(path))} cannot be read as safetensors: {cut(str(error))}"
        raise ValueError(text) from None


# Names inside the attention module of a layer, from the modules of transformers: `projections` by
# name of the weight ("qkv" is the fused one), then those of parts that few models have; `marks` are
# those of query projections that only attention has, as Mamba has an `in_proj`, too; `buffers`
# stand beside the weights in older checkpoints, or are the scales of a quantised cache;
# `other_parts` are those beside the language model.
_NAMES: Config = FACTS["tensors"]
_MARKS = tuple(f".{name}.weight" for name in _NAMES["marks"])

# End of the prefix of modules without an output projection, such as attention.self of RoFormer.
SELF = ".self."


def layer_arrays(
    layer: Layer, tensors: Mapping[str, Any] | str | PathLike[str], left_out: Collection[str] = ()
) -> dict[str, Array]:
    """Return the weights of a layer: "q", "q_bias", …, "q_norm", "k_norm" and "sinks".

    tensors: a state dict, or the path of a safetensors file, of an index, or of a folder. left_out:
    parts ("qk_norm", "sinks") that are left out on purpose, so that their tensors are ignored.
    Raises TypeError, ValueError or OSError unless it holds one module with all of them, and no
    other part of attention.
    """
    if isinstance(tensors, str | PathLike):
        tensors = open_tensors(tensors)
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        rule = "be a path, or a mapping of names, which are strings, to arrays"
        raise ArgumentTypeError("tensors", Finding.type_of(tensors), rule)
    prefix = attention_prefix(tensors, layer.index)
    module = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    has_norms = layer.qk_norm is not None and layer.norm_weighted
    names: dict[str, list[str]] = {**_NAMES["projections"]}
    needed = ["q", "k", "v"] if prefix.endswith(SELF) else ["q", "k", "v", "o"]
    ignored = [*_NAMES["buffers"]]
    for part, is_there in {"qk_norm": has_norms, "sinks": layer.has_sinks}.items():
        if is_there:
            names |= _NAMES[part]
            needed += _NAMES[part]
        elif part in left_out:
            ignored += chain(*_NAMES[part].values())
    arrays = _taken(module, names, tensors, layer)
    for name in needed:
        if name not in arrays:
            raise _other_model(prefix, f"none of {', '.join(names[name])}")
    _check_shapes(prefix, arrays, layer)
    unknown = sorted(module.keys() - {*ignored})
    if unknown:
        raise _other_model(prefix, cut(", ".join(unknown)))
    return arrays


def attention_prefix(tensors: Mapping[str, Any], layer: int | None) -> str:
    """Return the beginning of the names of a layer's attention tensors; None: of the only layer.

    Raises ValueError unless there is one attention module.
    """
    prefixes = set()
    for name in tensors:
        parts = name.split(".")
        indices = [part for part in parts if part.isdecimal()]
        is_other = any(word in name for word in _NAMES["other_parts"])
        is_of_layer = layer is None or indices[:1] == [str(layer)]
        if name.endswith(_MARKS) and is_of_layer and not is_other:
            prefixes.add(".".join(parts[:-2]) + ".")
    if len(prefixes) != 1:
        modules = f"{len(prefixes)} attention modules of layer {layer}, {shown(sorted(prefixes))}"
        rule = f"hold one, chosen by `layer`, with one of {', '.join(_NAMES['marks'])}"
        remedy = f"it has names such as {shown(list(tensors)[:3])}"
        raise ArgumentError("tensors", Finding(f"holds {modules}"), rule, remedy)
    return prefixes.pop()


def _taken(
    module: dict[str, str], names: Config, tensors: Mapping[str, Any], layer: Layer
) -> dict[str, Array]:
    """Take the tensors of weights out of a module, and return them by name of the weight.

    module: from the name of a tensor after the prefix to its whole name. names: those of each
    weight. A fused projection stands for three; further tensors of these stay in the module.
    """
    arrays: dict[str, Array] = {}
    for name, own_names in names.items():
        own = next((own for own in own_names if own in module), None)
        if own is None or name in arrays:
            continue
        whole_name = module.pop(own)
        array = _as_array(whole_name, tensors[whole_name])
        if name.startswith("qkv"):
            parts = zip("qkv", _split_rows(whole_name, array, layer), strict=True)
            arrays |= {name.replace("qkv", part): rows for part, rows in parts}
        else:
            arrays[name] = array
    return arrays


def _check_shapes(prefix: str, arrays: Mapping[str, Array], layer: Layer) -> None:
    """Raise ValueError for weights of other shapes than the config says.

    The hidden states, of which no key of attention tells the width, have that of q's inputs.
    """
    width = layer.head_dim
    hidden = arrays["q"].shape[-1:]
    shapes: dict[str, tuple[int, ...]] = {"sinks": (layer.num_heads,)}
    shapes |= dict.fromkeys(("q_norm", "k_norm"), (width,))
    for name, heads in zip("qkv", (layer.num_heads, *(layer.num_kv_heads,) * 2), strict=True):
        shapes[name] = (heads * width, *hidden)
        shapes[f"{name}_bias"] = (heads * width,)
    if "o" in arrays:
        shapes["o"] = (*arrays["o"].shape[:1], layer.num_heads * width)
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise _other_model(prefix, f"{name} of shape {arrays[name].shape}, not {shape},")


def _other_model(prefix: str, held: str) -> ArgumentError:
    """Return the error for a module that holds something else than the config describes."""
    finding = Finding(f"holds {held} under {shown(prefix)}")
    rule = "hold the attention that the config describes, and no other part of it, such as a gate"
    return ArgumentError("tensors", finding, rule, "take both from one model")


def _split_rows(name: str, fused: Array, layer: Layer) -> list[Array]:
    """Return the rows of queries, keys and values, in the order of the model type.

    "concatenated", or "grouped": for each key head its queries, key and value.
    """
    order = FACTS["fused_rows"].get(layer.model_type)
    if order is None:
        rule = "be one whose order of rows in the fused projection of q, k and v is known"
        remedy = "split it, and name the parts q_proj, k_proj, v_proj"
        raise ArgumentError("model_type", layer.model_type, rule, remedy)
    q_heads, kv_heads = layer.num_heads, layer.num_kv_heads
    rows = (q_heads + 2 * kv_heads) * layer.head_dim
    if fused.shape[:1] != (rows,):
        raise ArgumentError(cut(name), Finding.shape_of(fused), f"have {rows} rows by the config")
    groups = kv_heads if order == "grouped" else 1
    heads = fused.reshape(groups, -1, layer.head_dim, *fused.shape[1:])
    ends = [q_heads // groups, (q_heads + kv_heads) // groups]
    parts = [part.reshape(-1, *fused.shape[1:]) for part in np.split(heads, ends, axis=1)]
    if layer.model_type in FACTS["interleaved_weights"]:
        parts[0] = convert_weight(parts[0], q_heads, to="half")
        parts[1] = convert_weight(parts[1], kv_heads, to="half")
    return parts


def _as_array(name: str, tensor: Any) -> Array:
    """Return an array, also from a PyTorch tensor, or from a file that has it."""
    if isinstance(tensor, Path):
        tensor = read_tensor(tensor, name)
    if hasattr(tensor, "detach"):
        tensor = _from_torch(name, tensor)
    array = scalars.real_array(cut(name), tensor)
    if array.dtype.kind in "iu":
        remedy = "multiply quantised weights by their scales"
        raise ArgumentTypeError(cut(name), Finding.dtype_of(array), "hold floats", remedy)
    if not np.isfinite(array).all():
        raise ValueError(f"{shown(name)} holds NaN or infinities; the checkpoint is damaged")
    return array


def _from_torch(name: str, tensor: Any) -> Any:
    """Return an array; raise TypeError for a tensor without one: sparse, float8, meta."""
    try:
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":  # PyTorch makes no arrays of it
            return tensor.float().numpy().astype(DTYPES["bfloat16"])
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{shown(name)} cannot be made an array: {cut(str(error))}") from error
