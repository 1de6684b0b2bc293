"""From a model's config and weights to the arguments of `export_attention` for a layer."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from rope_cpu.arguments import scalars
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Array
from rope_cpu.configs.attention_facts import FACTS, FULL_LAYERS, WINDOW_LAYERS, Attention
from rope_cpu.configs.model_config import HEADS_KEYS, ModelConfig
from rope_cpu.configs.reader import read
from rope_cpu.functional import convert_weight

from .options import INPUT

# Names inside the attention module of a layer, from the modules of transformers.
QUERIES = ("q_proj", "query")
KEYS = ("k_proj", "key")
VALUES = ("v_proj", "value")
OUTPUTS = ("o_proj", "out_proj", "dense", "Wo")
PROJECTIONS = {"q": QUERIES, "k": KEYS, "v": VALUES, "o": OUTPUTS}
FUSED = ("qkv_proj", "query_key_value", "Wqkv", "in_proj")
# Names of query projections that only attention has: Mamba has an `in_proj`, too.
MARKS = (*QUERIES, *FUSED[:-1], "self_attn.in_proj")
QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "query_norm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "key_norm")
SINKS = ("sinks",)

# End of the prefix of modules without an output projection.
SELF = ".self."

# Buffers that older checkpoints hold beside the weights.
BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")

# Names of the parts of a multimodal model beside the language model.
OTHER_PARTS = ("vision", "visual", "audio", "image", "speech", "cross_attn", "mtp", "mimi.")

# Parts of the attention that no key of an unknown model type's config decides, and usual values.
ASSUMED = {
    "causal": "true",
    "qk_norm": "none",
    "scale": "none",
    "window": "none",
    "softcap": "none",
    "sinks": "none",
}

# Keys that concern these parts.
TELLING = re.compile("qk|sink|window|softcap|causal|bidirectional")

# Dtypes of safetensors files that weights may have; tensors of others can be listed, but not read.
DTYPES = ("F64", "F32", "F16", "BF16")

INDEX_SUFFIX = ".safetensors.index.json"
# The weights in the folder of a model, in the order in which transformers looks for them.
FOLDER_FILES = ("model.safetensors", f"model{INDEX_SUFFIX}")


def attention_options(
    config: str | PathLike[str] | Mapping[str, Any],
    *,
    layer: int | None = None,
    layer_type: str | None = None,
) -> dict[str, Any]:
    """Return the arguments of `export_attention` for one layer of a model.

    Norms and sinks are inputs of the graph; `attention_weights` has their values.

    Parameters
    ----------
    config : path or mapping
        A config.json, its folder, or its content, as in `RotaryEmbedding.from_config`.
    layer : int, optional
        The index of the layer, from 0. Needed if layers differ, unless `layer_type` is given.
    layer_type : str, optional
        The layer type instead ("full_attention", "sliding_attention").

    Returns
    -------
    dict
        num_heads, num_kv_heads, v_head_dim, causal, window, softcap and scale; qk_norm,
        norm_epsilon and norm_offset for a model that norms queries and keys; sinks for one with
        attention sinks.

    Raises
    ------
    TypeError, ValueError
        If the config is invalid, if its model type is not known, if layers differ and none is
        chosen, or if `export_attention` cannot express the model's attention.

    Examples
    --------
    >>> from rope_cpu import RotaryEmbedding, export
    >>> config = {"model_type": "gemma2", "num_hidden_layers": 26}
    >>> options = export.attention_options(config, layer=0)
    >>> options["window"], options["softcap"], options["scale"]
    (4096, 50.0, 0.0625)
    >>> rope = RotaryEmbedding.from_config(config, layer=0)
    >>> model = export.export_attention(rope, **options)
    """
    parsed = read(config)
    check_known(parsed)
    return layer_options(parsed, parsed.attention, layer, layer_type)


def attention_weights(
    tensors: Mapping[str, Any] | str | PathLike[str],
    config: str | PathLike[str] | Mapping[str, Any],
    layer: int,
) -> dict[str, Any]:
    """Return the weights of one layer as arguments of `export_attention`.

    With `attention_options` they are all that the model's own attention needs; the input of the
    graph is then the layer's hidden states, after the norm before the attention.

    Parameters
    ----------
    tensors : mapping of str to array, or path
        A state dict, of NumPy arrays or of PyTorch tensors; or a safetensors file, the
        *.safetensors.index.json of several, or a folder with model.safetensors or
        model.safetensors.index.json. Names are those of the checkpoint, with any prefix.
        They tell its pairing too: `in_proj` of Gradium's Phonon has pairs (2i, 2i+1), and its rows
        are reordered to those of `q_proj` and `k_proj`, as transformers loads them.
    config : path or mapping
        The model's config.json, its folder, or its content.
    layer : int
        The index of the layer, from 0.

    Returns
    -------
    dict
        weights: projections and biases, in the dtype of the checkpoint; no output projection where
        it is not in the attention module, as in RoFormer. qk_norm: weights of the norms of q and of
        k, as the checkpoint has them. sinks: attention sinks. The last two only for models that
        have them.

    Raises
    ------
    TypeError, ValueError
        If the config is invalid or `export_attention` cannot express the attention; if tensors are
        missing or not finite, have other shapes than the config says, or belong to a part of the
        attention that cannot be expressed, such as a gate.
    OSError
        If a file cannot be read.

    Examples
    --------
    >>> import numpy as np
    >>> from rope_cpu import RotaryEmbedding, export
    >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
    ...           "num_key_value_heads": 2, "num_hidden_layers": 1}
    >>> rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    >>> state = {f"model.layers.0.self_attn.{name}.weight": np.ones((count, 64))
    ...          for name, count in rows.items()}
    >>> weights = export.attention_weights(state, config, 0)
    >>> sorted(weights["weights"])
    ['k', 'o', 'q', 'v']
    >>> options = export.attention_options(config, layer=0)
    >>> rope = RotaryEmbedding.from_config(config, layer=0)
    >>> model = export.export_attention(rope, **options | weights)
    """
    scalars.whole_number("layer", layer, 0)
    parsed = read(config)
    check_known(parsed)
    facts = replace(parsed.attention, bidirectional_tokens=None)  # a matter of the mask alone
    options = layer_options(parsed, facts, layer, None)
    return layer_weights(tensors, options, parsed.model_type, layer)


def check_known(config: ModelConfig, stated: Container[str] = ()) -> None:
    """Raise ValueError for an unknown model type unless all of its attention is stated."""
    missing = [name for name in ASSUMED if name not in stated]
    if config.is_known or not missing:
        return
    keys = [key for key, value in config.values.items() if value and TELLING.search(str(key))]
    meaning = f", nor the meaning of {cut(', '.join(keys))}" if keys else ""
    settings = " ".join(f"--set {name}={ASSUMED[name]}" for name in missing)
    raise ValueError(
        f"`model_type` is {shown(config.model_type)}, whose attention is not known "
        f"({', '.join(missing)}){meaning}; give `export_attention` these arguments yourself, or "
        f"state each to the command: {settings}"
    )


def layer_options(
    config: ModelConfig, facts: Attention, layer: int | None, layer_type: str | None
) -> dict[str, Any]:
    """Return the arguments of `export_attention` for a layer, with norms and sinks as inputs.

    facts: those of the config, perhaps changed. layer, layer_type: at most one may be given. Raises
    ValueError or TypeError if the attention cannot be exported.
    """
    _check_parts(facts, config.model_type)
    # The pairing plays no part, and an unknown model type has none.
    spec = config.spec(layer_type, layer, interleaved=None if config.is_known else False)
    factor = float(np.max(spec.attention_factor))
    if facts.qk_norm == "after" and factor != 1:
        raise ValueError(
            f"norms of queries and keys follow a rotation with an attention factor of {factor:.6g}"
        )
    layer_type = _layer_type(config, facts, layer, layer_type)
    window = facts.window_of(layer_type) or None
    if window is not None and not facts.causal:
        raise ValueError(
            f"layers have a window of {window} keys on both sides; a mask can hold it (--set "
            "window=none --mask bool)"
        )
    num_heads, num_kv_heads = _head_counts(config, layer_type, layer)
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "v_head_dim": spec.head_dim,
        "causal": facts.causal,
        "window": window,
        "softcap": facts.softcap or None,
        "scale": spec.head_dim**-0.5 if facts.scale is None else facts.scale,
    }
    if facts.qk_norm is not None:
        ones = np.ones(spec.head_dim)
        options["qk_norm"] = INPUT if facts.norm_weighted else (ones, ones)
        options["norm_epsilon"] = facts.norm_epsilon
        options["norm_offset"] = facts.norm_offset
    if facts.sinks:
        options["sinks"] = INPUT
    return options


def _head_counts(config: ModelConfig, layer_type: str | None, layer: int | None) -> tuple[int, int]:
    try:
        num_heads, num_kv_heads = config.heads(layer_type, layer)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the config's {error}") from error
    if num_heads is None or num_kv_heads is None:
        raise ValueError(
            f"the config lacks the number of heads; add one of {', '.join(HEADS_KEYS)}"
        )
    return num_heads, num_kv_heads


def _check_parts(facts: Attention, model_type: str | None) -> None:
    """Raise ValueError if `export_attention` cannot express a part of a model's attention."""
    name = cut(str(model_type))
    part = next(_inexpressible_parts(facts), None)
    if part is not None:
        raise ValueError(f"model type {name} has {part}, which the export cannot write")
    if facts.bidirectional_tokens is not None and facts.causal:
        window = " --set window=none" if facts.window else ""
        raise ValueError(
            f"model type {name} has bidirectional attention among tokens of "
            f"{facts.bidirectional_tokens}; write it with a mask of order, window and these tokens "
            f"(--set causal=false{window} --mask bool, or the options of the text config with "
            'causal=False, window=None, mask="bool"), or causal attention, as for text (--set '
            "bidirectional_tokens=none)"
        )
    if facts.qk_norm is not None and facts.norm_epsilon is None:
        raise ValueError("the config lacks the epsilon of the norms; add rms_norm_eps")


def _inexpressible_parts(facts: Attention) -> Iterator[str]:
    """Yield the parts of a model's attention that `export_attention` cannot express."""
    if facts.latent:
        yield "latent attention (kv_lora_rank), of which only a part of each head rotates"
    if facts.qk_norm == "after" and facts.norm_weighted:
        yield "norms of queries and keys after the rotation"
    if facts.qk_norm is not None and facts.norm_other is not None:
        yield f"norms of queries and keys other than of each head: {facts.norm_other}"
    if facts.v_norm:
        yield "norms of values"
    if facts.own_cache:
        yield f"a cache of its own: {facts.own_cache}"
    yield from facts.unusual_parts()


def _layer_type(
    config: ModelConfig, facts: Attention, layer: int | None, layer_type: str | None
) -> str | None:
    """Return the layer type of a layer, or of all rotated layers; None if it plays no part.

    Raises ValueError if it is needed and not given, or if its kind of attention is not known.
    """
    if layer is not None:
        layer_type = layer_type_at(config, layer)
    elif layer_type is None:
        names = _rotated_types(config)
        if len(names) > 1:
            if facts.window is None or facts.window_in_all_layers:
                return None
            listed = cut(", ".join(sorted(map(str, names))))
            raise ValueError(f"layers differ ({listed}); give `layer` or `layer_type`")
        layer_type = next(iter(names), None)
    if layer_type not in (None, *FULL_LAYERS, *WINDOW_LAYERS):
        raise ValueError(f"the attention of layers of type {shown(layer_type)} is not known")
    return layer_type


def layer_type_at(config: ModelConfig, layer: int) -> str | None:
    """Return the layer type of a layer of the model."""
    return config.layers.entries[layer].layer_type


def _rotated_types(config: ModelConfig) -> set[str | None]:
    """Return the layer types of the rotated layers; None among them stands for no type."""
    parameters = config.rope_parameters
    if config.layers.entries:
        return {entry.layer_type for entry in config.layers.entries if entry.rotated}
    return {name or None for name in parameters if parameters[name] is not None}


def layer_weights(
    tensors: Mapping[str, Any] | str | PathLike[str],
    options: Mapping[str, Any],
    model_type: str | None,
    layer: int | None,
    left_out: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the weights of a layer, or of the only one, with these options.

    left_out: facts ("qk_norm", "sinks") that are left out on purpose, so that their tensors are
    ignored.
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
    module = _AttentionTensors(tensors, attention_prefix(tensors, layer))
    arguments: dict[str, Any] = {"weights": _projections(module, options, model_type)}
    if options.get("qk_norm") == INPUT:
        norms = (module.required(QUERY_NORMS, ".weight"), module.required(KEY_NORMS, ".weight"))
        arguments["qk_norm"] = norms
    if "sinks" in options:
        arguments["sinks"] = module.required(SINKS, "")
    ignored = {"qk_norm": (*QUERY_NORMS, *KEY_NORMS), "sinks": SINKS}
    module.check_all_used({name for fact in left_out for name in ignored.get(fact, ())})
    return arguments


def attention_prefix(tensors: Mapping[str, Any], layer: int | None) -> str:
    """Return the beginning of the names of a layer's attention tensors; None: of the only layer.

    Raises ValueError unless there is one attention module.
    """
    suffixes = tuple(f".{name}.weight" for name in MARKS)
    prefixes = set()
    for name in tensors:
        parts = name.split(".")
        indices = [part for part in parts if part.isdecimal()]
        is_other = any(word in name for word in OTHER_PARTS)
        is_of_layer = layer is None or indices[:1] == [str(layer)]
        if name.endswith(suffixes) and is_of_layer and not is_other:
            prefixes.add(".".join(parts[:-2]) + ".")
    if len(prefixes) == 1:
        return prefixes.pop()
    of_layer = "" if layer is None else f" of layer {layer}"
    if not prefixes:
        examples = shown(list(tensors)[:3])
        finding = Finding(f"holds no query projection{of_layer}")
        rule = f"hold one of {', '.join(MARKS)}"
        raise ArgumentError("tensors", finding, rule, f"it has names such as {examples}")
    names = shown(sorted(prefixes))
    finding = Finding(f"holds several attention modules{of_layer}, {names}")
    remedy = "choose one by `layer`" if layer is None else "pass the tensors of one model"
    raise ArgumentError("tensors", finding, "hold one", remedy)


class _AttentionTensors:
    """The tensors of one attention module; notes which are used."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str) -> None:
        self.tensors = tensors
        self.prefix = prefix
        self.unused = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
        self.unused -= set(BUFFERS)

    def optional(self, names: tuple[str, ...], suffix: str) -> Array | None:
        """Return the tensor with one of the names, None if there is none."""
        found = next((name for name in names if f"{name}{suffix}" in self.unused), None)
        if found is None:
            return None
        self.unused.remove(f"{found}{suffix}")
        name = f"{self.prefix}{found}{suffix}"
        return _as_array(name, self.tensors[name])

    def required(self, names: tuple[str, ...], suffix: str) -> Array:
        """Return the tensor with one of the names; raise ValueError if there is none."""
        array = self.optional(names, suffix)
        if array is None:
            listed = ", ".join(f"{name}{suffix}" for name in names)
            finding = Finding(f"holds none of {listed} under {shown(self.prefix)}")
            raise ArgumentError("tensors", finding, "hold one of them")
        return array

    def check_all_used(self, ignored: set[str]) -> None:
        """Raise ValueError if a tensor is left: it is a part of the attention that is not known."""
        unused = {name for name in self.unused if name.removesuffix(".weight") not in ignored}
        if unused:
            names = cut(", ".join(sorted(unused)))
            finding = Finding(f"holds {names} under {shown(self.prefix)}")
            rule = "hold no part of the attention that the export cannot write"
            raise ArgumentError("tensors", finding, rule)


def _projections(
    module: _AttentionTensors, options: Mapping[str, Any], model_type: str | None
) -> dict[str, Array]:
    """Return projections and biases by their names in `export_attention`.

    In modules such as attention.self of RoFormer there is no output projection: it is outside.
    """
    heads = options["num_heads"]
    kv_heads = options["num_kv_heads"]
    width = options["v_head_dim"]
    rows = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    projections: dict[str, Array] = {}
    for suffix, kind in ((".weight", ""), (".bias", "_bias")):
        fused = module.optional(FUSED, suffix)
        if fused is not None:
            _check_rows(module, "the fused projection", fused, sum(rows.values()))
            parts = _split_rows(fused, _row_order(model_type), heads // kv_heads, width)
            if model_type in FACTS["interleaved_weights"]:
                parts[0] = convert_weight(parts[0], heads, to="half")
                parts[1] = convert_weight(parts[1], kv_heads, to="half")
            projections |= {f"{name}{kind}": part for name, part in zip("qkv", parts, strict=True)}
        separate = PROJECTIONS if fused is None else {"o": OUTPUTS}
        for name, names in separate.items():
            array = module.optional(names, suffix)
            if array is not None:
                if name in rows:
                    _check_rows(module, names[0] + suffix, array, rows[name])
                projections[f"{name}{kind}"] = array
    needed = "qkv" if module.prefix.endswith(SELF) else "qkvo"
    missing = [f"{name}_proj" for name in needed if name not in projections]
    if missing:
        absent = " and no ".join(missing)
        finding = Finding(f"holds no {absent} under {shown(module.prefix)}")
        remedy = "layers that take keys or values from elsewhere cannot be written"
        raise ArgumentError("tensors", finding, "hold all of them", remedy)
    return projections


def _check_rows(module: _AttentionTensors, name: str, array: Array, rows: int) -> None:
    if array.shape[:1] != (rows,):
        raise ValueError(
            f"{name} under {shown(module.prefix)} has shape {array.shape}; by the config it must "
            f"have {rows} rows: the config is of another model, or there is more in it, such as a "
            "gate"
        )


def _row_order(model_type: str | None) -> str:
    order = FACTS["fused_rows"].get(model_type)
    if order is None:
        raise ValueError(
            f"the order of queries, keys and values in the fused projection of model type "
            f"{shown(model_type)} is not known; split it and name the parts q_proj, k_proj, v_proj"
        )
    return str(order)


def _split_rows(fused: Array, order: str, group: int, width: int) -> list[Array]:
    """Return the rows of queries, keys and values; group: number of query heads of a key head.

    order: "concatenated", or "grouped": for each key head its queries, key and value.
    """
    rest = fused.shape[1:]
    if order == "concatenated":
        kv_rows = len(fused) // (group + 2)
        return np.split(fused, [group * kv_rows, (group + 1) * kv_rows])
    by_group = fused.reshape(-1, group + 2, width, *rest)
    parts = np.split(by_group, [group, group + 1], axis=1)
    return [part.reshape(-1, *rest) for part in parts]


def _as_array(name: str, tensor: Any) -> Array:
    """Return an array, also from a PyTorch tensor."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":  # NumPy itself has no bfloat16
            tensor = tensor.float()
        tensor = tensor.numpy()
    array = scalars.real_array(cut(name), tensor)
    if not np.isfinite(array).all():
        raise ValueError(f"{shown(name)} holds NaN or infinities; the checkpoint is damaged")
    return array


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
        if dtype_name not in DTYPES:
            raise ValueError(
                f"{shown(name)} in {shown(str(path))} has dtype {shown(dtype_name)}; it must be "
                f"{', '.join(DTYPES)}"
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
