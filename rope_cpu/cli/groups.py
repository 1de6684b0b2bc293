"""The rotations of a config's groups of layers, for `rope-cpu show`, `verify` and `check`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import escaped
from rope_cpu.array_types import Float64, Int64
from rope_cpu.cli.command_line import usage_errors
from rope_cpu.frequencies import scaling
from rope_cpu.frequencies.rope_types import ROPE_TYPES
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.models.layer import Layer
from rope_cpu.models.model import Model
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


def pair_frequencies(spec: RopeSpec) -> Float64:
    """Return one frequency for each pair of the first head, on whichever axis it rotates."""
    frequencies: Float64 = np.abs(spec.inv_freq[0, :, 0]).max(axis=0)
    return frequencies


def pair_axes(spec: RopeSpec) -> Int64:
    """Return the axis of each pair of the first head, -1 for a pair without rotation."""
    by_axis = np.abs(spec.inv_freq[0, :, 0])
    axis: Int64 = np.where(by_axis.any(axis=0), by_axis.argmax(axis=0), -1)
    return axis


def changed_pairs(frequencies: Float64, unscaled: Float64) -> NDArray[np.bool_]:
    """Return which rotated pairs have another wavelength than before scaling."""
    changed: NDArray[np.bool_] = np.abs(unscaled - frequencies) >= SAME * unscaled
    return changed & (frequencies > 0)


def from_arguments(config: Model, args: argparse.Namespace) -> list[Layer]:
    """Return the groups of layers that the arguments --layer-type and --interleaved select.

    Raises UsageError if the config does not describe their rotations.
    """
    with usage_errors():
        return list(layer_groups(config, args.layer_type, args.interleaved))


def layer_groups(
    config: Model, layer_type: str | None = None, interleaved: bool | None = None
) -> Iterator[Layer]:
    """Yield one layer of each layer type of a config, or of the given one, with its rotation."""
    by_type = config.rope_parameters
    names = list(by_type) if layer_type is None and by_type else [layer_type]
    for name in names:
        if by_type.get(name, {}) is None:
            yield Layer(layer_type=name, rotated=False)
        else:
            spec = config.spec(name, interleaved=interleaved)
            parameters = config.select(name).rope_parameters if by_type else {}
            yield Layer(layer_type=name, rope_parameters=parameters, spec=spec)


def name_of(config: Model, layer: Layer) -> str:
    """Return a name for the layers that a group consists of, with escapes."""
    rotated = "" if layer.rotated else ": not rotated"
    if layer.layer_type is not None:
        return f"{escaped(layer.layer_type)}{rotated}"
    sections = config.rope_parameters.values()
    are_rotated = None not in sections
    if are_rotated and sections:
        are_rotated = all(entry.rotated for entry in config.layers)
    return f"{'all layers' if are_rotated else 'all rotated layers'}{rotated}"


def position_axes(config: Model, count: int) -> tuple[Axis, ...]:
    """Return the axes of a config's positions; those without a known meaning have a number."""
    kinds = config.axes[-count:]
    if len(kinds) < count == len(_MROPE):
        kinds = _MROPE
    if len(kinds) < count:
        return tuple(Axis(f"axis {number}", "positions") for number in range(count))
    return tuple(AXES[kind] for kind in kinds)


def ropes_by_length(config: Model, layer: Layer) -> dict[str, RotaryEmbedding]:
    """Return the rotary embedding at the original length, and one at a longer length, by a text.

    The text is "" where they depend on no length. Empty for layers without rotation.
    """
    if layer.spec is None:
        return {}
    rope = RotaryEmbedding.from_spec(layer.spec)
    rule = rope.spec.length_rule
    if rule is None:
        return {"": rope}
    original = rule.original_length
    longer = max(maximum_context(config), original + 1)
    far = 4 * original
    if rule.representatives([longer]) != rule.representatives([far]):
        # Frequencies that go on changing above the original length: show one far above it.
        longer = max(longer, far)
    return {f"at {length} tokens": rope.at_length(length) for length in (original, longer)}


def unscaled(spec: RopeSpec, parameters: Mapping[str, Any]) -> Float64:
    """Return one frequency for each pair before scaling, which follows from rope_theta alone."""
    rule = spec.length_rule
    theta = parameters.get("rope_theta", scaling.DEFAULT_THETA)
    if not parameters:
        if not isinstance(rule, scaling.ScalingRule):
            return pair_frequencies(spec)
        theta = rule.settings.rope_theta
    share = parameters.get("partial_rotary_factor") or 1.0
    width = spec.rotary_dim
    if int(spec.head_dim * share) == width - 1:
        width -= 1  # frequencies are computed for an odd width, and one element more is rotated
    frequencies: Float64 = float(theta) ** -(np.arange(0, spec.rotary_dim, 2) / width)
    return frequencies


def contexts(config: Model, layer: Layer) -> dict[str, int]:
    """Return the original context, for rope types that have one, and the maximum context.

    Empty for positions that are no tokens. Types whose factor may follow from both, as YaRN's,
    reach `factor` times the original context if the config's maximum is not larger.
    """
    spec = layer.spec
    if spec is None or any(axis.extent for axis in position_axes(config, spec.axes)):
        return {}
    reads = ROPE_TYPES[spec.rope_type].parameters if spec.rope_type in ROPE_TYPES else {}
    maximum = maximum_context(config)
    original = 0
    if spec.length_rule is not None:
        original = spec.length_rule.original_length
    elif "original_max_position_embeddings" in reads:
        parameters = layer.rope_parameters
        original = int(parameters.get("original_max_position_embeddings", maximum))
        factor = parameters.get("factor")
        if maximum <= original and factor is not None and "max_position_embeddings" in reads:
            maximum = round(min(factor * original, limits.WHOLE))
    found = {"original context": original} if original else {}
    return found | ({"maximum context": maximum} if maximum > original else {})


def maximum_context(config: Model) -> int:
    """Return the max_position_embeddings of a config, 0 if it has none."""
    key = "max_position_embeddings"
    return scalars.whole_number(key, config.values.get(key, 0), 0)
