"""The tensors of a layer's attention module: of a state dict, or of safetensors files.

Of files one tensor is read at a time. Names are those of the modules of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
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

INDEX_SUFFIX = ".safetensors.index.json"
# The weights in the folder of a model, in the order in which transformers looks for them.
FOLDER_FILES = ("model.safetensors", f"model{INDEX_SUFFIX}")


class SafetensorsTensors(Mapping[str, Array]):
    """The tensors of safetensors files by name; each is read when it is looked up."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Store the file of each tensor."""
        self._files = files

    def __getitem__(self, name: str) -> Array:
        """Return a tensor, a new array; raise ValueError if it is not as the files say."""
        path = self._files[name]
        file = _opened(path)
        if name not in file.keys():  # noqa: SIM118 (it is no mapping)
            raise ValueError(
                f"{shown(str(path))} lacks {shown(name)}, which the index says is in it; the two "
                "belong to different checkpoints"
            )
        dtype_name = file.get_slice(name).get_dtype()
        if dtype_name not in _READ:
            raise ValueError(
                f"{shown(name)} in {shown(str(path))} has dtype {shown(dtype_name)}; it must be "
                f"{', '.join(_READ)}"
            )
        tensor: Array = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_tensors(path: str | PathLike[str]) -> SafetensorsTensors:
    """Return the tensors of a safetensors file, of those that an index lists, or of a folder.

    Raises ValueError if the file is another one, OSError if it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = _weights_in(file)
    if file.name.endswith(INDEX_SUFFIX):
        files = _weight_map(file)
        return SafetensorsTensors({name: file.parent / part for name, part in files.items()})
    if file.suffix != ".safetensors":
        rule = f"be a file *.safetensors or *{INDEX_SUFFIX}, or a folder"
        raise ArgumentError("tensors", str(path), rule)
    return SafetensorsTensors(dict.fromkeys(_opened(file).keys(), file))


def _weights_in(folder: Path) -> Path:
    """Return the weights of a model's folder: one file, or the index of several."""
    for name in FOLDER_FILES:
        if (folder / name).is_file():
            return folder / name
    finding = Finding(f"is the folder {shown(str(folder))}")
    raise ArgumentError("tensors", finding, f"hold {' or '.join(FOLDER_FILES)}")


def _opened(path: Path) -> Any:
    """Return an open safetensors file; raise ValueError, which names it, if it is damaged."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        text = "safetensors files need a package to read them: pip install safetensors"
        raise ImportError(text, name="safetensors") from error
    path.open("rb").close()  # OSError with the path; those of safetensors lack it
    opened: Any = safe_open
    try:
        return opened(path, framework="numpy")
    except SafetensorError as error:
        reason = cut(str(error))
        raise ValueError(f"{shown(str(path))} is not a safetensors file: {reason}") from None


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor in an index."""
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError):
        content = None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(map(_is_file_name, files.values())):
        raise ValueError(f"{shown(str(index))} has no `weight_map` of tensors to file names")
    return files


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value


# Names inside the attention module of a layer, from the modules of transformers: `marks` are those
# of query projections that only attention has, as Mamba has an `in_proj`, too; `buffers` stand
# beside the weights in older checkpoints, or are the scales of a quantised cache; `other_parts` are
# those beside the language model.
_NAMES: Config = FACTS["tensors"]
_MARKS = tuple(f".{name}.weight" for name in _NAMES["marks"])

# End of the prefix of modules without an output projection.
SELF = ".self."

# The tensors of parts that may be left out on purpose.
_OF_PARTS = {"qk_norm": [*chain(*_NAMES["norms"].values())], "sinks": _NAMES["sinks"]}


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
    elif not isinstance(tensors, Mapping):
        raise TypeError(
            f"`tensors` is a {type(tensors).__name__}; it must be a mapping of names to arrays, or "
            "a path"
        )
    other = next((name for name in tensors if not isinstance(name, str)), None)
    if other is not None:
        raise TypeError(f"`tensors` has the key {shown(other)}; keys must be names, strings")
    module = AttentionTensors(tensors, attention_prefix(tensors, layer.index))
    arrays = _projections(module, layer)
    if layer.qk_norm is not None and layer.norm_weighted:
        for name, names in _NAMES["norms"].items():
            arrays[name] = module.required(names, ".weight")
    if layer.has_sinks:
        arrays["sinks"] = module.required(_NAMES["sinks"], "")
    _check_shapes(module, arrays, layer)
    module.check_all_used({name for part in left_out for name in _OF_PARTS.get(part, ())})
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
    if len(prefixes) == 1:
        return prefixes.pop()
    of_layer = "" if layer is None else f" of layer {layer}"
    if not prefixes:
        examples = shown(list(tensors)[:3])
        finding = Finding(f"holds no query projection{of_layer}")
        rule = f"hold one of {', '.join(_NAMES['marks'])}"
        raise ArgumentError("tensors", finding, rule, f"it has names such as {examples}")
    names = shown(sorted(prefixes))
    finding = Finding(f"holds several attention modules{of_layer}, {names}")
    remedy = "choose one by `layer`" if layer is None else "pass the tensors of one model"
    raise ArgumentError("tensors", finding, "hold one", remedy)


class AttentionTensors:
    """The tensors of one attention module; notes which are used."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str) -> None:
        """Store the tensors of a model, and the beginning of the names of the module's."""
        self.tensors = tensors
        self.prefix = prefix
        self.unused = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
        self.unused -= set(_NAMES["buffers"])

    def error(self, held: str, rule: str, remedy: str = "") -> ArgumentError:
        """Return the error for what the module holds."""
        finding = Finding(f"holds {held} under {shown(self.prefix)}")
        return ArgumentError("tensors", finding, rule, remedy)

    def optional(self, names: Sequence[str], suffix: str) -> Array | None:
        """Return the tensor with one of the names, None if there is none."""
        found = next((name for name in names if f"{name}{suffix}" in self.unused), None)
        if found is None:
            return None
        self.unused.remove(f"{found}{suffix}")
        name = f"{self.prefix}{found}{suffix}"
        return _as_array(name, self.tensors[name])

    def required(self, names: Sequence[str], suffix: str) -> Array:
        """Return the tensor with one of the names; raise ValueError if there is none."""
        array = self.optional(names, suffix)
        if array is None:
            listed = ", ".join(f"{name}{suffix}" for name in names)
            raise self.error(f"none of {listed}", "hold one of them")
        return array

    def check_all_used(self, ignored: set[str]) -> None:
        """Raise ValueError if a tensor is left: it is a part of the attention that is not known."""
        unused = {name for name in self.unused if name.removesuffix(".weight") not in ignored}
        if unused:
            rule = "hold no part of the attention that is not known"
            raise self.error(cut(", ".join(sorted(unused))), rule)


def _projections(module: AttentionTensors, layer: Layer) -> dict[str, Array]:
    """Return projections under "q", "k", "v" and "o", and biases under "q_bias" and so on.

    In modules such as attention.self of RoFormer there is no output projection: it is outside.
    """
    kv_heads = layer.num_kv_heads
    rows = (layer.num_heads + 2 * kv_heads) * layer.head_dim
    found: dict[str, Array] = {}
    for suffix, kind in ((".weight", ""), (".bias", "_bias")):
        fused = module.optional(_NAMES["fused"], suffix)
        if fused is not None:
            _check_shape(module, "a fused projection", fused, (rows, *fused.shape[1:]))
            parts = _split_rows(fused, layer)
            if layer.model_type in FACTS["interleaved_weights"]:
                parts[0] = convert_weight(parts[0], layer.num_heads, to="half")
                parts[1] = convert_weight(parts[1], kv_heads, to="half")
            found |= {f"{name}{kind}": part for name, part in zip("qkv", parts, strict=True)}
        for name in "qkvo" if fused is None else "o":
            array = module.optional(_NAMES["projections"][name], suffix)
            if array is not None:
                found[f"{name}{kind}"] = array
    needed = "qkv" if module.prefix.endswith(SELF) else "qkvo"
    missing = [f"{name}_proj" for name in needed if name not in found]
    if missing:
        remedy = "layers that take keys or values from elsewhere have none to return"
        raise module.error(f"no {' and no '.join(missing)}", "hold all of them", remedy)
    return found


def _check_shapes(module: AttentionTensors, arrays: Mapping[str, Array], layer: Layer) -> None:
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
        if name in arrays:
            _check_shape(module, name, arrays[name], shape)


def _check_shape(module: AttentionTensors, name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        remedy = "the config is of another model, or there is more in it, such as a gate"
        rule = f"have shape {shape} by the config"
        raise module.error(f"{name} of shape {array.shape}", rule, remedy)


def _split_rows(fused: Array, layer: Layer) -> list[Array]:
    """Return the rows of queries, keys and values, in the order of the model type.

    "concatenated", or "grouped": for each key head its queries, key and value.
    """
    order = FACTS["fused_rows"].get(layer.model_type)
    if order is None:
        raise ValueError(
            f"the order of queries, keys and values in the fused projection of model type "
            f"{shown(layer.model_type)} is not known; split it and name the parts q_proj, k_proj, "
            "v_proj"
        )
    group = layer.num_heads // layer.num_kv_heads
    rest = fused.shape[1:]
    if order == "concatenated":
        kv_rows = len(fused) // (group + 2)
        return np.split(fused, [group * kv_rows, (group + 1) * kv_rows])
    by_group = fused.reshape(-1, group + 2, layer.head_dim, *rest)
    parts = np.split(by_group, [group, group + 1], axis=1)
    return [part.reshape(-1, *rest) for part in parts]


def _as_array(name: str, tensor: Any) -> Array:
    """Return an array, also from a PyTorch tensor."""
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
