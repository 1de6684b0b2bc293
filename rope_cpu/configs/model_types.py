"""What is known of model types: where their config files are silent, and which elements their code pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

# Made by tests/tools/make_model_table.py from transformers' classes, and written by hand from models' own code.
TABLES = ("models.json", "other_models.json")

_ADDED = "its positions are added to what it reads, and nothing is rotated"
_RELATIVE = "its positions are relative, and nothing is rotated"
_STATE = "its layers have a state and no positions, and nothing is rotated"
_NONE = "its attention layers are not rotated"

# Model types without a rotation, and why.
UNROTATED: dict[str, str] = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_bigcode", "openai-gpt", "opt", "biogpt", "xglm", "ctrl"), _ADDED),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "albert", "electra"), _ADDED),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "led", "longformer"), _ADDED),
    **dict.fromkeys(("whisper", "trocr", "clip_text_model", "siglip_text_model"), _ADDED),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "longt5", "switch_transformers", "deberta", "deberta-v2", "mpnet"), _RELATIVE
    ),
    **dict.fromkeys(("bloom", "mpt"), "it has attention biases (ALiBi), and nothing is rotated"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(("nemotron_h", "jamba", "zamba", "kimi_linear", "glm5_next_text"), _NONE),
    **dict.fromkeys(("inkling_text", "inkling2_text"), _NONE),
    "clvp_encoder": "its width is a rule of its own, max(projection_dim / (2·heads), 32)",
}


@dataclass(frozen=True)
class Model:
    """One row: the facts of a model type, each as its classes or its code have it, none a rule of ours.

    interleaved: the pairing of the model's code, or the name of the config key that decides it.
    names: this type's own names of standard keys, "part.key" inside a part.
    defaults: values of standard keys where a file has none.
    rope_parameters: the section where a file has none; by layer type where layers differ.
    filled: layer type → what a section of its own is filled up with.
    theta, partial: which old top-level key fills the base and the rotated share of which section ("": the flat one).
    scaled: the layer types that an old flat `rope_scaling` applies to.
    types: rope types that mean another one here. assumed, assumed_old: rope type → what its section (of the new form,
        of the old one) holds where it is silent.
    ignored_with_alpha: keys that the model's code takes no notice of in a section with `alpha`.
    whole_head: the default rope type takes no notice of partial_rotary_factor.
    head_dim_derived: `head_dim` follows from other keys whatever it says. head_dim_ratio: head_dim over hidden_size /
        num_attention_heads. layer_head_dim: layer type → (key, default) of a head_dim of its own.
    mrope_section, mrope_interleaved: how pairs are shared out among axes where the section does not say.
    direction: -1 where the code turns the other way. theta_ratio: a key whose value multiplies the base.
    implied: key, value and the section that they stand for.
    unrotated: layer types that the model's code does not rotate, with the key whose null undoes it ("": none).
    rotated_dense: the key that is 1 where dense layers are rotated whatever their type.
    refuse: key → (values, or "*" for any, why): the model has no rotation that could be described.
    null_theta: what a base of null says, where that is not the default base.
    part: the key of the language model's config inside this one, and its model type.
    """

    interleaved: bool | str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_parameters: Mapping[str, Any] | None = None
    filled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    theta: Mapping[str, str] = field(default_factory=lambda: {"": "rope_theta"})
    partial: Mapping[str, str] = field(default_factory=lambda: {"": "partial_rotary_factor"})
    scaled: tuple[str, ...] = ("",)
    types: Mapping[str, str] = field(default_factory=dict)
    ignored_with_alpha: tuple[str, ...] = ()
    assumed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    assumed_old: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    whole_head: bool = False
    head_dim_derived: bool = False
    head_dim_ratio: int = 1
    layer_head_dim: Mapping[str, Any] = field(default_factory=dict)
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool | None = None
    direction: int = 1
    unrotated: Mapping[str, str] = field(default_factory=dict)
    rotated_dense: str | None = None
    implied: tuple[str, Any, Mapping[str, Any]] | None = None
    theta_ratio: str | None = None
    refuse: Mapping[str, Any] = field(default_factory=dict)
    null_theta: str | None = None
    part: tuple[str, str] | None = None

    @property
    def layered(self) -> bool:
        """Whether layer types have sections of their own."""
        return any(value is None or isinstance(value, Mapping) for value in (self.rope_parameters or {}).values())


@cache
def _rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name in TABLES:
        for model_type, row in json.loads(
            resources.files("rope_cpu.configs.data").joinpath(name).read_text("utf-8")
        ).items():
            like = rows.get(row.pop("like", model_type), {})
            rows[model_type] = {**like, **row, "defaults": {**like.get("defaults", {}), **row.get("defaults", {})}}
    return rows


@cache
def model(model_type: str) -> Model | None:
    """Return what is known of a model type, or None."""
    row = _rows().get(model_type)
    if row is None:
        return None
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items() if key != "source"
    }
    return Model(**fields)
