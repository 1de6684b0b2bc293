"""The rotation of each group of layers of a config, for `rope-cpu show` and `rope-cpu verify`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import escaped
from rope_cpu.array_types import Float64, Int64
from rope_cpu.cli.command_line import UsageError
from rope_cpu.frequencies import scaling
from rope_cpu.frequencies.rope_types import ROPE_TYPES
from rope_cpu.models.layer import Layer
from rope_cpu.models.layers import is_latent
from rope_cpu.models.model import ModelConfig
from rope_cpu.models.model_types import data
from rope_cpu.rotation.embedding import RotaryEmbedding


@dataclass(frozen=True)
class Axis:
    """A position axis: a row of axes.json.

    name: such as "row", "" for the only axis. unit: of its positions, in the plural.
    extent: largest distance between two positions, None if the config alone determines it.
    step: distance between the positions for which scores are computed.
    """

    name: str
    unit: str
    extent: float | None = None
    step: float = 1.0


AXES = {kind: Axis(**row) for kind, row in data("axes.json").items()}
_MROPE = ("time", "height", "width")

# Relative difference below which two wavelengths are the same: frequencies carry a few roundings.
SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class LayerRotation:
    """The rotation of a group of layers.

    config: the model. layer_type: the layer type, None for the one group of all layers.
    model, layers: names of the model and of the group, with escapes, as pictures have them too.
    parameters: its rope parameters.
    by_length: a rotary embedding for each sequence length at which it differs, under a text such as
        "at 8192 tokens", under "" if it depends on no length; empty for layers without rotation.
    unscaled: frequencies before scaling, one for each pair.
    axes: the position axes.
    contexts: the original and the maximum context in tokens, by name, as far as they are known.
    head_width: elements of a head, of which latent attention (MLA) rotates a slice.
    attention: the parts of the attention besides the rotation, None for an unknown model type.
    """

    config: ModelConfig
    layer_type: str | None
    model: str
    layers: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    by_length: Mapping[str, RotaryEmbedding] = field(default_factory=dict)
    unscaled: Float64 = field(default_factory=lambda: np.empty(0))
    axes: Sequence[Axis] = ()
    contexts: Mapping[str, int] = field(default_factory=dict)
    head_width: int = 0
    attention: Layer | None = None

    @property
    def rope(self) -> RotaryEmbedding:
        """The rotary embedding, for the original length if there are several."""
        return next(iter(self.by_length.values()))

    @property
    def pair_axes(self) -> Int64:
        """The axis of each pair of the first head, -1 for a pair without rotation."""
        by_axis = np.abs(self.rope.spec.inv_freq[0, :, 0])
        axis: Int64 = np.where(by_axis.any(axis=0), by_axis.argmax(axis=0), -1)
        return axis


def pair_frequencies(rope: RotaryEmbedding) -> Float64:
    """Return one frequency for each pair of the first head, on whichever axis it rotates."""
    frequencies: Float64 = np.abs(rope.spec.inv_freq[0, :, 0]).max(axis=0)
    return frequencies


def changed_pairs(frequencies: Float64, unscaled: Float64) -> NDArray[np.bool_]:
    """Return which rotated pairs have another wavelength than before scaling."""
    changed: NDArray[np.bool_] = np.abs(unscaled - frequencies) >= SAME * unscaled
    return changed & (frequencies > 0)


def rotations_from_arguments(config: ModelConfig, args: argparse.Namespace) -> list[LayerRotation]:
    """Return the rotations of a config that the arguments --layer-type and --interleaved select.

    Raises UsageError if the config does not describe them.
    """
    try:
        return list(layer_rotations(config, args.layer_type, args.interleaved))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def layer_rotations(
    config: ModelConfig, layer_type: str | None, interleaved: bool | None
) -> Iterator[LayerRotation]:
    """Yield the rotation of each layer type of a config, or of the given one."""
    by_type = config.rope_parameters
    names: list[str | None] = [layer_type]
    if layer_type is None and by_type:
        names = [label or None for label in by_type]
    model = escaped(str(config.model_type or "unknown model type"))
    attention = config.attention if config.unknown_type is None else None
    shared: dict[str, Any] = {"config": config, "model": model, "attention": attention}
    for name in names:
        layers = escaped(name or _all_layers(config))
        if by_type.get(name or "", {}) is None:
            yield LayerRotation(**shared, layer_type=name, layers=f"{layers}: not rotated")
        else:
            rotation = LayerRotation(**shared, layer_type=name, layers=layers)
            yield _with_rope(rotation, interleaved)


def _all_layers(config: ModelConfig) -> str:
    """Return a name for the layers that one rotation serves."""
    sections = config.rope_parameters.values()
    are_rotated = None not in sections
    if are_rotated and sections:
        are_rotated = all(layer.rotated for layer in config.layers.entries)
    return "all layers" if are_rotated else "all rotated layers"


def _with_rope(rotation: LayerRotation, interleaved: bool | None) -> LayerRotation:
    """Return a group of layers with its rotation."""
    config = rotation.config
    layer_type = rotation.layer_type
    rope = RotaryEmbedding.from_config(config, layer_type=layer_type, interleaved=interleaved)
    parameters: Mapping[str, Any] = {}
    if config.rope_parameters:
        parameters = config.layers.select(layer_type).rope_parameters or {}
    axes = position_axes(config, rope.axes)
    counts_tokens = all(axis.extent is None for axis in axes)
    return replace(
        rotation,
        parameters=parameters,
        by_length=dict(_by_length(rope, config.values)),
        unscaled=_unscaled(rope, parameters),
        axes=axes,
        contexts=_contexts(rope, parameters, config.values) if counts_tokens else {},
        head_width=rope.head_dim + _unrotated_slice(config),
    )


def _unrotated_slice(config: ModelConfig) -> int:
    """Return the elements of a head beside its rotated slice, with latent attention."""
    key = "qk_nope_head_dim"
    if not is_latent(config.values):
        return 0
    return scalars.whole_number(key, config.values.get(key, 0), 0, limits.HEAD_DIM)


def position_axes(config: ModelConfig, count: int) -> tuple[Axis, ...]:
    """Return the axes of a config's positions; those without a known meaning have a number."""
    kinds = config.axes[-count:]
    if len(kinds) < count == len(_MROPE):
        kinds = _MROPE
    if len(kinds) < count:
        return tuple(Axis(f"axis {number}", "positions") for number in range(count))
    return tuple(AXES[kind] for kind in kinds)


def _by_length(
    rope: RotaryEmbedding, values: Mapping[str, Any]
) -> Iterator[tuple[str, RotaryEmbedding]]:
    """Yield the rotary embedding at the original length, and one at a longer length."""
    rule = rope.spec.length_rule
    if rule is None:
        yield "", rope
        return
    original = rule.original_length
    longer = max(maximum_context(values), original + 1)
    far = 4 * original
    if rule.representatives([longer]) != rule.representatives([far]):
        # Frequencies that go on changing above the original length: show one far above it.
        longer = max(longer, far)
    for length in (original, longer):
        yield f"at {length} tokens", rope.at_length(length)


def _unscaled(rope: RotaryEmbedding, parameters: Mapping[str, Any]) -> Float64:
    """Return the frequencies before scaling, which follow from rope_theta alone."""
    rule = rope.spec.length_rule
    theta = parameters.get("rope_theta", scaling.DEFAULT_THETA)
    if not parameters:
        if not isinstance(rule, scaling.ScalingRule):
            return pair_frequencies(rope)
        theta = rule.settings.rope_theta
    share = parameters.get("partial_rotary_factor") or 1.0
    width = rope.rotary_dim
    if int(rope.head_dim * share) == width - 1:
        width -= 1  # frequencies are computed for an odd width, and one element more is rotated
    frequencies: Float64 = float(theta) ** -(np.arange(0, rope.rotary_dim, 2) / width)
    return frequencies


def _contexts(
    rope: RotaryEmbedding, parameters: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, int]:
    """Return the original context, for rope types that have one, and the maximum context.

    Types whose factor may follow from both, as YaRN's, reach `factor` times the original context if
    the config's maximum is not larger.
    """
    rule = rope.spec.length_rule
    reads = ROPE_TYPES[rope.rope_type].parameters if rope.rope_type in ROPE_TYPES else {}
    maximum = maximum_context(values)
    original = 0
    if rule is not None:
        original = rule.original_length
    elif "original_max_position_embeddings" in reads:
        original = int(parameters.get("original_max_position_embeddings", maximum))
        factor = parameters.get("factor")
        if maximum <= original and factor is not None and "max_position_embeddings" in reads:
            maximum = round(min(factor * original, limits.WHOLE))
    found = {"original context": original} if original else {}
    return found | ({"maximum context": maximum} if maximum > original else {})


def maximum_context(values: Mapping[str, Any]) -> int:
    """Return the max_position_embeddings of a config, 0 if it has none."""
    key = "max_position_embeddings"
    return scalars.whole_number(key, values.get(key, 0), 0)
