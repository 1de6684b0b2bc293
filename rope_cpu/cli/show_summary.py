"""What `rope-cpu show` shows: the rotation of each kind of layers that a config has."""

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
class Layers:
    """The rotation of one kind of layers. lengths: the rotary embedding for each length at which it differs."""

    name: str
    section: Mapping[str, Any]
    lengths: Mapping[str, RotaryEmbedding]
    plain: Float64 | None

    @property
    def rope(self) -> RotaryEmbedding:
        """The rotary embedding, for the original length where there are several."""
        return next(iter(self.lengths.values()))


def one_axis(rope: RotaryEmbedding) -> Float64:
    """Return one frequency for each pair, whatever axis it belongs to, of the first head."""
    spec = rope.spec.inv_freq[0, :, 0]
    result: Float64 = np.abs(spec).max(axis=0)
    return result


def rotations(
    config: ModelConfig, layer_type: str | None, interleaved: bool | None
) -> Iterator[Layers]:
    """Yield the rotation of each kind of layers of a config, or of the one that is named."""
    values, facts, by_type = config.values, config.facts, config.rope_parameters
    if not by_type:
        rope = RotaryEmbedding.from_spec(config.spec(layer_type, interleaved=interleaved))
        yield Layers(f"{config.model_type}, all layers", {}, {"": rope}, None)
        return
    unrotated = (
        any(not one.rotated for one in model_layers(values, facts, by_type))
        or None in by_type.values()
    )
    for name in [layer_type] if layer_type is not None else [label or None for label in by_type]:
        every = "all rotated layers" if unrotated else "all layers"
        title = f"{config.model_type or 'unknown model type'}, {name or every}"
        if by_type.get(name or "", {}) is None:
            yield Layers(f"{title}: not rotated", {}, {}, None)
            continue
        rope = RotaryEmbedding.from_config(config, layer_type=name, interleaved=interleaved)
        section = layer_parameters(by_type, values, facts, name, None)[1]
        yield Layers(title, section, dict(_lengths(rope, values)), _plain(rope, section))


def _lengths(
    rope: RotaryEmbedding, values: Mapping[str, Any]
) -> Iterator[tuple[str, RotaryEmbedding]]:
    """Yield the rotary embedding by length: the original one, and a longer one where that is another rotation."""
    rule = rope.spec.length_rule
    if rule is None:
        yield "", rope
        return
    original = rule.original_length
    given = scalars.whole_number(
        "max_position_embeddings", values.get("max_position_embeddings", 0), 0
    )
    reached = max(given, 4 * original if rope.rope_type == "dynamic" else 0)
    for length in (original, max(reached, original + 1)):
        yield f"at {length} tokens", rope.at_length(length)


def _plain(rope: RotaryEmbedding, section: Mapping[str, Any]) -> Float64:
    """Return the frequencies before scaling: those of the base alone."""
    theta = section.get("rope_theta", scaling.DEFAULT_THETA)
    share = section.get("partial_rotary_factor")
    # Frequencies of an odd share are computed for the share itself, and one element more is rotated.
    odd = share is not None and int(rope.head_dim * share) == rope.rotary_dim - 1
    width: dict[str, Any] = (
        {"scaling": {"partial_rotary_factor": share}} if odd else {"rotary_dim": rope.rotary_dim}
    )
    spec = scaling.scaled(rope.head_dim, rope_theta=theta, **width)
    frequencies: Float64 = spec.inv_freq[0, 0, 0]
    return frequencies
