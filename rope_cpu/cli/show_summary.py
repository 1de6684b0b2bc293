"""Content of `rope-cpu show`: the rotation of each group of layers of a config."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rope_cpu.arguments.texts import escaped
from rope_cpu.array_types import Float64, Int64
from rope_cpu.cli.show_axes import Axis, position_axes
from rope_cpu.cli.show_model import contexts, head_width, maximum_context, mscale_of_scores
from rope_cpu.cli.show_serving import serving_lines
from rope_cpu.command_line import UsageError
from rope_cpu.configs.layers import layer_parameters
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.frequencies import scaling
from rope_cpu.rotation.embedding import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class LayerRotation:
    """The rotation of a group of layers.

    model: its model type. layers: name of the group; both with escapes, as pictures have them too.
    parameters: its rope parameters.
    by_length: a rotary embedding for each sequence length at which it differs, under a text such as
        "at 8192 tokens", under "" if it depends on no length; empty for layers without rotation.
    unscaled: frequencies before scaling, one for each pair.
    axes: name and unit of each position axis.
    contexts: the original and the maximum context in tokens, by name, as far as they are known.
    head_width: elements of a head, of which latent attention (MLA) rotates a slice.
    mscale_of_scores: the m of YaRN whose square multiplies the scores in the model, None if there
        is none.
    layer_type: the layer type, None for the one group of all layers.
    serving: the calls that write to a cache of keys and values, one a line.
    pairing_note: what to know about the pairing.
    """

    model: str
    layers: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    by_length: Mapping[str, RotaryEmbedding] = field(default_factory=dict)
    unscaled: Float64 = field(default_factory=lambda: np.empty(0))
    axes: Sequence[Axis] = ()
    contexts: Mapping[str, int] = field(default_factory=dict)
    head_width: int = 0
    mscale_of_scores: float | None = None
    layer_type: str | None = None
    serving: Sequence[str] = ()
    pairing_note: str | None = None

    @property
    def name(self) -> str:
        """The title of the group."""
        return f"{self.model}, {self.layers}"

    @property
    def rope(self) -> RotaryEmbedding:
        """The rotary embedding, for the original length if there are several."""
        return next(iter(self.by_length.values()))


def pair_frequencies(rope: RotaryEmbedding) -> Float64:
    """Return one frequency for each pair of the first head, on whichever axis it rotates."""
    by_axis = rope.spec.inv_freq[0, :, 0]
    frequencies: Float64 = np.abs(by_axis).max(axis=0)
    return frequencies


def pair_axes(rope: RotaryEmbedding) -> Int64:
    """Return the axis of each pair of the first head, -1 for a pair without rotation."""
    by_axis = np.abs(rope.spec.inv_freq[0, :, 0])
    axis: Int64 = np.where(by_axis.any(axis=0), by_axis.argmax(axis=0), -1)
    return axis


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
    if not config.rope_parameters:
        yield _only_rotation(config, layer_type, interleaved)
        return
    names: list[str | None]
    if layer_type is not None:
        names = [layer_type]
    else:
        names = [label or None for label in config.rope_parameters]
    layers = "all rotated layers" if _has_unrotated_layers(config) else "all layers"
    for name in names:
        yield _layer_rotation(config, name, interleaved, title=name or layers)


def _only_rotation(
    config: ModelConfig, layer_type: str | None, interleaved: bool | None
) -> LayerRotation:
    """Return the rotation of a config without rope parameters: of images, video or sound."""
    rope = RotaryEmbedding.from_spec(config.spec(layer_type, interleaved=interleaved))
    axes = position_axes(config, rope.axes)
    counts_tokens = all(axis.extent is None for axis in axes)
    return LayerRotation(
        model=escaped(str(config.model_type)),
        layers="all layers",
        by_length=dict(_by_length(rope, config.values)),
        unscaled=_unscaled_by_rule(rope),
        axes=axes,
        contexts=contexts(rope, {}, config.values) if counts_tokens else {},
        head_width=rope.head_dim,
        layer_type=layer_type,
        serving=tuple(serving_lines(config, rope)),
    )


def _has_unrotated_layers(config: ModelConfig) -> bool:
    by_type = config.rope_parameters
    return any(not layer.rotated for layer in config.layers.entries) or None in by_type.values()


def _layer_rotation(
    config: ModelConfig, layer_type: str | None, interleaved: bool | None, title: str
) -> LayerRotation:
    """Return the rotation of a layer type; None: of all layers."""
    model = escaped(config.model_type or "unknown model type")
    title = escaped(title)
    label = layer_type or ""
    if label in config.rope_parameters and config.rope_parameters[label] is None:
        return LayerRotation(model=model, layers=f"{title}: not rotated", layer_type=layer_type)
    rope = RotaryEmbedding.from_config(config, layer_type=layer_type, interleaved=interleaved)
    _, parameters = layer_parameters(config.layers, config.rope_parameters, layer_type, None)
    return LayerRotation(
        model=model,
        layers=title,
        parameters=parameters,
        by_length=dict(_by_length(rope, config.values)),
        unscaled=_unscaled(rope, parameters),
        axes=position_axes(config, rope.axes),
        contexts=contexts(rope, parameters, config.values),
        head_width=head_width(rope, config.values),
        mscale_of_scores=mscale_of_scores(config, rope, parameters),
        layer_type=layer_type,
        serving=tuple(serving_lines(config, rope)),
        pairing_note=config.pairing_note,
    )


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


def _unscaled_by_rule(rope: RotaryEmbedding) -> Float64:
    """Return the frequencies before those of a length rule, or the only ones."""
    rule = rope.spec.length_rule
    if isinstance(rule, scaling.ScalingRule):
        return 1 / rule.settings.wavelengths().astype(np.float64)
    return pair_frequencies(rope)


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
