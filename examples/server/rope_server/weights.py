"""From a Hugging Face folder to the layers of a model: facts of the config, tensors as float32."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - gives NumPy the bfloat16 of safetensors files
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

import rope_cpu

Array = NDArray[np.float32]


class Family(NamedTuple):
    """Differences between families of decoders that no key of a config tells.

    norm_offset: added to the weights of norms. norms_after: the results of attention and MLP are
    normed, too. embedding_scaled: embeddings are multiplied by the root of their width.
    """

    norm_offset: float = 0.0
    norms_after: bool = False
    embedding_scaled: bool = False


LLAMA = Family()
GEMMA = Family(norm_offset=1.0, norms_after=True, embedding_scaled=True)
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "phi3": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
}


ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # model.py has the functions


class Config(dict[str, Any]):
    """The keys of a config.json; one that is missing is the user's error."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"config.json has no {key}")


class Linear(NamedTuple):
    """A projection: weight (outputs, inputs) and perhaps a bias."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    rope: the index of its rotation among those of the model. options: arguments of
    `rope_cpu.attention`, sinks included. norms: weights of the hidden states' norms, by their place
    in the layer.
    """

    facts: rope_cpu.AttentionLayer
    rope: int
    options: dict[str, Any]
    qkv: Linear
    out: Linear
    q_norm: rope_cpu.RMSNorm | None
    k_norm: rope_cpu.RMSNorm | None
    gate_up: Linear
    down: Linear
    norms: dict[str, Array]


@dataclass(frozen=True)
class Weights:
    """All of a model: layers, embeddings, and the numbers of its config that the layers share."""

    layers: list[Layer]
    ropes: list[rope_cpu.RotaryEmbedding]
    embedding: Array
    embedding_scale: np.float32
    norm: Array
    head: Array
    epsilon: np.float32
    activation: str
    logit_softcap: float | None
    context: int

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return len(self.head)


class Tensors(Mapping[str, Any]):
    """The tensors in the safetensors files of a folder, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="numpy")
            self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise ValueError(f"{folder} has no tensors; it must hold *.safetensors")

    def __contains__(self, name: object) -> bool:  # that of `Mapping` would read the tensor
        return name in self._files

    def __getitem__(self, name: str) -> Any:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load(folder: str | Path) -> Weights:
    """Return the model of a folder with config.json and *.safetensors.

    Raises ValueError for a model type without a row in FAMILIES, for other ACTIVATIONS, for queries
    that are scaled by their position, and where `attention_layer` does.
    """
    folder = Path(folder)
    config = Config(json.loads((folder / "config.json").read_bytes()))
    activation = config.get("hidden_activation") or config["hidden_act"]
    _check_served("model type", config["model_type"], FAMILIES)
    _check_served("activation", activation, ACTIVATIONS)
    family = FAMILIES[config["model_type"]]
    tensors = Tensors(folder)
    ropes: list[rope_cpu.RotaryEmbedding] = []
    layers = [
        _layer(config, family, tensors, index, ropes)
        for index in range(config["num_hidden_layers"])
    ]
    embedding = _float32(tensors["model.embed_tokens.weight"])
    is_tied = "lm_head.weight" not in tensors
    scale = config["hidden_size"] ** 0.5 if family.embedding_scaled else 1.0
    return Weights(
        layers=layers,
        ropes=ropes,
        embedding=embedding,
        embedding_scale=np.float32(scale),
        norm=_norm(tensors, "model.norm", family),
        head=embedding if is_tied else _float32(tensors["lm_head.weight"]),
        epsilon=np.float32(config["rms_norm_eps"]),
        activation=activation,
        logit_softcap=config.get("final_logit_softcapping"),
        context=config["max_position_embeddings"],
    )


def _check_served(kind: str, name: str, served: Collection[str]) -> None:
    if name not in served:
        raise ValueError(f"{kind} {name!r} is not served, only {', '.join(served)}")


def _layer(
    config: dict[str, Any],
    family: Family,
    tensors: Tensors,
    index: int,
    ropes: list[rope_cpu.RotaryEmbedding],
) -> Layer:
    """Return a layer; add its rotation to `ropes` unless an earlier layer has it."""
    facts = rope_cpu.attention_layer(config, index)
    if facts.query_factors is not None:
        raise ValueError("the config scales queries by their position, which is not served")
    attention = facts.weights(tensors)
    rope = facts.rope or _no_rotation(facts.head_dim)
    if rope not in ropes:
        ropes.append(rope)
    prefix = f"model.layers.{index}"
    sinks = {} if attention.sinks is None else {"sinks": attention.sinks}
    return Layer(
        facts=facts,
        rope=ropes.index(rope),
        options=facts.options | sinks,
        qkv=_stacked(
            [attention.q, attention.k, attention.v],
            [attention.q_bias, attention.k_bias, attention.v_bias],
        ),
        out=_stacked([attention.o], [attention.o_bias]),
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        gate_up=_gate_up(tensors, f"{prefix}.mlp"),
        down=_linear(tensors, f"{prefix}.mlp.down_proj"),
        norms=_norms(tensors, prefix, family),
    )


def _no_rotation(head_dim: int) -> rope_cpu.RotaryEmbedding:
    return rope_cpu.RotaryEmbedding.from_inv_freq(np.zeros(head_dim // 2))


def _gate_up(tensors: Tensors, prefix: str) -> Linear:
    """Return the gate and the up projection as one, as Phi-3 stores them."""
    if f"{prefix}.gate_up_proj.weight" in tensors:
        return _linear(tensors, f"{prefix}.gate_up_proj")
    parts = [_linear(tensors, f"{prefix}.{name}_proj") for name in ("gate", "up")]
    return _stacked([part.weight for part in parts], [part.bias for part in parts])


def _norms(tensors: Tensors, prefix: str, family: Family) -> dict[str, Array]:
    """Return the norms of a layer; a family with four has other names for them."""
    names = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
    if family.norms_after:
        names = {
            "attention": "input_layernorm",
            "after_attention": "post_attention_layernorm",
            "mlp": "pre_feedforward_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
    return {place: _norm(tensors, f"{prefix}.{name}", family) for place, name in names.items()}


def _norm(tensors: Tensors, name: str, family: Family) -> Array:
    return _float32(tensors[f"{name}.weight"]) + np.float32(family.norm_offset)


def _linear(tensors: Tensors, name: str) -> Linear:
    return _stacked([tensors[f"{name}.weight"]], [tensors.get(f"{name}.bias")])


def _stacked(weights: list[Any], biases: list[Any]) -> Linear:
    """Return several projections of the same inputs as one matrix product."""
    weight = _float32(np.concatenate(weights))
    has_bias = biases[0] is not None
    return Linear(weight, _float32(np.concatenate(biases)) if has_bias else None)


def _float32(tensor: Any) -> Array:
    return np.ascontiguousarray(tensor, dtype=np.float32)
