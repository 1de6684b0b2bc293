"""Content of `rope-cpu show`: the rotation of each group of layers of a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rope_cpu.arguments import scalars
from rope_cpu.array_types import Float64
from rope_cpu.configs.layers import layer_parameters, model_layers
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.frequencies import scaling
from rope_cpu.rotation.embedding import RotaryEmbedding


@dataclass(frozen=True)
class LayerRotation:
    """The rotation of a group of layers.

    name: title of the group. parameters: its rope parameters.
    by_length: a rotary embedding for each sequence length at which it differs, under a text such as
        "at 8192 tokens", under "" if it depends on no length; empty for layers without rotation.
    unscaled: frequencies before scaling, None if the config has no rope parameters.
    """

    name: str
    parameters: Mapping[str, Any]
    by_length: Mapping[str, RotaryEmbedding]
    unscaled: Float64 | None

    @property
    def rope(self) -> RotaryEmbedding:
        """The rotary embedding, for the original length if there are several."""
        return next(iter(self.by_length.values()))


def pair_frequencies(rope: RotaryEmbedding) -> Float64:
    """Return one frequency for each pair of the first head, on whichever axis it rotates."""
    by_axis = rope.spec.inv_freq[0, :, 0]
    frequencies: Float64 = np.abs(by_axis).max(axis=0)
    return frequencies


def layer_rotations(
    config: ModelConfig, layer_type: str | None, interleaved: bool | None
) -> Iterator[LayerRotation]:
    """Yield the rotation of each layer type of a config, or of the given one."""
    if not config.rope_parameters:
        rope = RotaryEmbedding.from_spec(config.spec(layer_type, interleaved=interleaved))
        yield LayerRotation(f"{config.model_type}, all layers", {}, {"": rope}, None)
        return
    names: list[str | None]
    if layer_type is not None:
        names = [layer_type]
    else:
        names = [label or None for label in config.rope_parameters]
    model = config.model_type or "unknown model type"
    layers = "all rotated layers" if _has_unrotated_layers(config) else "all layers"
    for name in names:
        yield _layer_rotation(config, name, interleaved, title=f"{model}, {name or layers}")


def _has_unrotated_layers(config: ModelConfig) -> bool:
    by_type = config.rope_parameters
    layers = model_layers(config.values, config.facts, by_type)
    return any(not layer.rotated for layer in layers) or None in by_type.values()


def _layer_rotation(
    config: ModelConfig, layer_type: str | None, interleaved: bool | None, title: str
) -> LayerRotation:
    """Return the rotation of a layer type; None: of all layers."""
    label = layer_type or ""
    if label in config.rope_parameters and config.rope_parameters[label] is None:
        return LayerRotation(f"{title}: not rotated", {}, {}, None)
    rope = RotaryEmbedding.from_config(config, layer_type=layer_type, interleaved=interleaved)
    _, parameters = layer_parameters(
        config.rope_parameters, config.values, config.facts, layer_type, None
    )
    by_length = dict(_by_length(rope, config.values))
    return LayerRotation(title, parameters, by_length, _unscaled(rope, parameters))


def _by_length(
    rope: RotaryEmbedding, values: Mapping[str, Any]
) -> Iterator[tuple[str, RotaryEmbedding]]:
    """Yield the rotary embedding at the original length, and one at a longer length."""
    rule = rope.spec.length_rule
    if rule is None:
        yield "", rope
        return
    original = rule.original_length
    longer = scalars.whole_number(
        "max_position_embeddings", values.get("max_position_embeddings", 0), 0
    )
    if rope.rope_type == "dynamic":
        # Its frequencies depend on every length above the original one: show one far above.
        longer = max(longer, 4 * original)
    for length in (original, max(longer, original + 1)):
        yield f"at {length} tokens", rope.at_length(length)


def _unscaled(rope: RotaryEmbedding, parameters: Mapping[str, Any]) -> Float64:
    """Return the frequencies before scaling, which follow from rope_theta alone."""
    theta = parameters.get("rope_theta", scaling.DEFAULT_THETA)
    factor = parameters.get("partial_rotary_factor")
    width: dict[str, Any] = {"rotary_dim": rope.rotary_dim}
    if factor is not None and int(rope.head_dim * factor) == rope.rotary_dim - 1:
        # An odd rotated width: frequencies are computed for it, but one element more is rotated.
        width = {"scaling": {"partial_rotary_factor": factor}}
    spec = scaling.scaled(rope.head_dim, rope_theta=theta, **width)
    frequencies: Float64 = spec.inv_freq[0, 0, 0]
    return frequencies
