"""`ModelConfig`: a config file, parsed once for `from_config`, the commands, the export and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import shown
from rope_cpu.configs.attention_facts import Attention
from rope_cpu.configs.layers import listed_for_type
from rope_cpu.configs.model_types import ModelFacts, value_at
from rope_cpu.configs.rope_parameters import RopeParameters, latent
from rope_cpu.frequencies.scaling import without_nulls
from rope_cpu.frequencies.spec import RopeSpec

HEADS_KEYS = ("num_attention_heads", "n_head", "num_heads")
KV_HEADS_KEYS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model, as its config file describes it.

    source: the file's object, as it was read.
    model_type: of the part that rotates, such as the language model of a multimodal file; None where none is named.
    values: that part's keys under standard names, with its model type's defaults where the file is silent.
    rope_parameters: by layer type, one for all layers under ""; None: layers of this type are not rotated. Empty for
        image and video models, which have one rotation for all layers.
    rotation: from this config, a layer type, a layer, a pairing and an angle_dtype to the spec; see `spec`.
    facts: what is known of the model type. is_known: whether anything is.
    """

    source: Mapping[str, Any]
    model_type: str | None
    values: Mapping[str, Any]
    rotation: Callable[[ModelConfig, str | None, int | None, bool | None, str], RopeSpec] = field(
        repr=False
    )
    rope_parameters: Mapping[str, RopeParameters | None] = field(default_factory=dict)
    facts: ModelFacts = field(default_factory=ModelFacts, repr=False)
    is_known: bool = True

    def spec(
        self,
        layer_type: str | None = None,
        layer: int | None = None,
        interleaved: bool | None = None,
        angle_dtype: str = "float64",
    ) -> RopeSpec:
        """Return the rotation of some layers; the arguments are `RotaryEmbedding.from_config`'s."""
        if interleaved is not None:
            interleaved = scalars.boolean("interleaved", interleaved)
        if layer_type is not None and not isinstance(layer_type, str):
            raise TypeError(f"`layer_type` is {shown(layer_type)}; it must be a string")
        return self.rotation(self, layer_type, layer, interleaved, angle_dtype)

    def heads(self, layer_type: str | None = None) -> tuple[int | None, int | None]:
        """Return the number of query heads and of key heads; None where neither the file nor its model type has it.

        layer_type: which layers, where they differ. Latent attention rotates one key, which all heads share.
        """
        own = self.facts.layer_heads.get(str(layer_type), {})
        found = {name: value_at(self.values, key) for name, key in own.items()}
        values = {**self.values, **without_nulls(found)}
        one_key, unless = self.facts.multi_query or ("", "")
        if values.get(one_key) and not values.get(unless):
            values["num_key_value_heads"] = 1
        heads = listed_for_type("num_attention_heads_per_layer", values, layer_type) or _number(
            HEADS_KEYS, values
        )
        return heads, 1 if latent(values) else _number(KV_HEADS_KEYS, values) or heads

    @property
    def attention(self) -> Attention:
        """What the model's attention has besides the rotation."""
        if not self.rope_parameters:
            return Attention(
                other="images and video attend to each other in ways that their configs do not hold"
            )
        return Attention.of({self.model_type, self.facts.like}, self.values)


def _number(keys: tuple[str, ...], values: Mapping[str, Any]) -> int | None:
    """Return the value of the first of these keys that is there."""
    return next(
        (scalars.whole_number(key, values[key], 1, limits.HEADS) for key in keys if key in values),
        None,
    )


def of_all_layers(
    build: Callable[[str], RopeSpec],
) -> Callable[[ModelConfig, str | None, int | None, bool | None, str], RopeSpec]:
    """Return the `rotation` of a model that has one for all layers; build: from an angle_dtype to it."""

    def rotation(
        config: ModelConfig,
        layer_type: str | None,
        layer: int | None,
        interleaved: bool | None,
        angle_dtype: str,
    ) -> RopeSpec:
        spec = build(angle_dtype)
        for name, given in (("layer_type", layer_type), ("layer", layer)):
            if given is not None:
                raise ValueError(
                    f"`{name}` is {shown(given)}, but this config has one rotation for all layers"
                )
        if interleaved not in (None, spec.interleaved):
            raise ValueError(
                f"`interleaved` is {interleaved}, but this config's model has {spec.interleaved}"
            )
        return spec

    return rotation
