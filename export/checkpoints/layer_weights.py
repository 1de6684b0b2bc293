"""Projections, norms and sinks of one layer, by the names that they have in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from rope_cpu.arguments import scalars
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Array
from rope_cpu.configs.reader import read

from .layer_attention import LayerAttention, describe_layer
from .safetensors_file import open_tensors

# Names inside the attention module of a layer, from the modules of transformers.
QUERIES = ("q_proj", "query")
KEYS = ("k_proj", "key")
VALUES = ("v_proj", "value")
OUTPUTS = ("o_proj", "out_proj", "dense", "Wo")
FUSED = ("qkv_proj", "query_key_value", "Wqkv")
QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "query_norm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "key_norm")
SINKS = ("sinks",)

# End of the prefix of modules without an output projection.
SELF = ".self."

# Buffers that older checkpoints hold beside the weights.
BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")

# The order of the rows of a fused projection. "grouped": for each key head its queries, key, value.
ROW_ORDERS = {
    "bailing_moe": "concatenated",
    "dbrx": "concatenated",
    "falcon": "grouped",
    "gpt_neox": "grouped",
    "gpt_neox_japanese": "grouped",
    "phi3": "concatenated",
    "phi3_v": "concatenated",
    "phi4_multimodal": "concatenated",
}

# Names of the parts of a multimodal model beside the language model.
OTHER_PARTS = ("vision", "visual", "audio", "image", "speech", "cross_attn", "mtp")


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
        A state dict, of NumPy arrays or of PyTorch tensors; or a safetensors file, or the
        *.safetensors.index.json of several. Names are those of the checkpoint, with any prefix.
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
    described = describe_layer(parsed, parsed.attention, layer, None)
    return layer_weights(tensors, described, parsed.model_type, layer)


def layer_weights(
    tensors: Mapping[str, Any] | str | PathLike[str],
    described: LayerAttention,
    model_type: str | None,
    layer: int,
    left_out: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the weights of a layer whose attention is known.

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
    arguments: dict[str, Any] = {"weights": _projections(module, described, model_type)}
    if described.facts.qk_norm is not None and described.facts.norm_weighted:
        norms = (module.first(QUERY_NORMS, ".weight"), module.first(KEY_NORMS, ".weight"))
        arguments["qk_norm"] = norms
    elif "qk_norm" in left_out:
        module.ignore((*QUERY_NORMS, *KEY_NORMS), ".weight")
    if described.facts.sinks:
        arguments["sinks"] = module.first(SINKS, "")
    elif "sinks" in left_out:
        module.ignore(SINKS, "")
    module.check_all_used()
    return arguments


def attention_prefix(tensors: Mapping[str, Any], layer: int) -> str:
    """Return the beginning of the names of a layer's attention tensors.

    Raises ValueError unless there is one attention module in the layer.
    """
    suffixes = tuple(f".{name}.weight" for name in (*QUERIES, *FUSED))
    prefixes = set()
    for name in tensors:
        parts = name.split(".")
        indices = [part for part in parts if part.isdecimal()]
        is_other = any(word in name for word in OTHER_PARTS)
        if name.endswith(suffixes) and indices[:1] == [str(layer)] and not is_other:
            prefixes.add(".".join(parts[:-2]) + ".")
    if len(prefixes) == 1:
        return prefixes.pop()
    if not prefixes:
        examples = shown(list(tensors)[:3])
        raise ValueError(
            f"`tensors` holds no query projection of layer {layer} "
            f"({', '.join((*QUERIES, *FUSED))}); it has names such as {examples}"
        )
    raise ValueError(
        f"`tensors` holds several attention modules of layer {layer}, {shown(sorted(prefixes))}; "
        "pass those of one model"
    )


class _AttentionTensors:
    """The tensors of one attention module; notes which are used."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str) -> None:
        self.tensors = tensors
        self.prefix = prefix
        self.unused = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
        self.unused -= set(BUFFERS)

    def first(self, names: tuple[str, ...], suffix: str) -> Array:
        """Return the tensor with one of the names; raise ValueError if there is none."""
        array = self.optional(names, suffix)
        if array is None:
            listed = ", ".join(f"{name}{suffix}" for name in names)
            raise ValueError(f"`tensors` holds none of {listed} under {shown(self.prefix)}")
        return array

    def optional(self, names: tuple[str, ...], suffix: str) -> Array | None:
        """Return the tensor with one of the names, None if there is none."""
        found = next((name for name in names if f"{name}{suffix}" in self.unused), None)
        if found is None:
            return None
        self.unused.remove(f"{found}{suffix}")
        name = f"{self.prefix}{found}{suffix}"
        return _as_array(name, self.tensors[name])

    def ignore(self, names: tuple[str, ...], suffix: str) -> None:
        """Note the tensors of these names as used."""
        self.unused -= {f"{name}{suffix}" for name in names}

    def check_all_used(self) -> None:
        """Raise ValueError if a tensor is left: it is a part of the attention that is not known."""
        if self.unused:
            names = cut(", ".join(sorted(self.unused)))
            raise ValueError(
                f"`tensors` holds {names} under {shown(self.prefix)}: a "
                "part of the attention that the export cannot write"
            )


def _projections(
    module: _AttentionTensors, described: LayerAttention, model_type: str | None
) -> dict[str, Array]:
    """Return projections and biases by their names in `export_attention`."""
    heads = described.num_heads or 0
    kv_heads = described.num_kv_heads or 0
    width = described.head_dim
    rows = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    projections: dict[str, Array] = {}
    for suffix, kind in ((".weight", ""), (".bias", "_bias")):
        fused = module.optional(FUSED, suffix)
        if fused is not None:
            _check_rows(module, "the fused projection", fused, sum(rows.values()))
            parts = _split_rows(fused, _row_order(model_type), heads // kv_heads, width)
            projections |= {f"{name}{kind}": part for name, part in zip("qkv", parts, strict=True)}
            continue
        for name, names in {"q": QUERIES, "k": KEYS, "v": VALUES}.items():
            array = module.optional(names, suffix)
            if array is not None:
                _check_rows(module, names[0] + suffix, array, rows[name])
                projections[f"{name}{kind}"] = array
    projections |= _output_projection(module)
    missing = [f"{name}_proj" for name in "kv" if name not in projections]
    if missing:
        raise ValueError(
            f"`tensors` holds no {' and no '.join(missing)} under {shown(module.prefix)}; layers "
            "that take keys or values from elsewhere cannot be written"
        )
    return projections


def _output_projection(module: _AttentionTensors) -> dict[str, Array]:
    """Return the weights and the bias of the output projection.

    In modules such as attention.self of RoFormer there is none: it is outside.
    """
    if module.prefix.endswith(SELF):
        return {}
    projection = {"o": module.first(OUTPUTS, ".weight")}
    bias = module.optional(OUTPUTS, ".bias")
    return projection if bias is None else projection | {"o_bias": bias}


def _check_rows(module: _AttentionTensors, name: str, array: Array, rows: int) -> None:
    if array.shape[:1] != (rows,):
        raise ValueError(
            f"{name} under {shown(module.prefix)} has shape {array.shape}; by the config it must "
            f"have {rows} rows: the config is of another model, or there is more in it, such as a "
            "gate"
        )


def _row_order(model_type: str | None) -> str:
    if model_type not in ROW_ORDERS:
        raise ValueError(
            f"the order of queries, keys and values in the fused projection of model type "
            f"{shown(model_type)} is not known; split it and name the parts q_proj, k_proj, v_proj"
        )
    return ROW_ORDERS[model_type]


def _split_rows(fused: Array, order: str, group: int, width: int) -> list[Array]:
    """Return the rows of queries, keys and values; group: number of query heads of a key head."""
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
