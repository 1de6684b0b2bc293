"""Groups of layers that rotate alike, as `rope-cpu show`, `verify` and `check` take them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from rope_cpu.arguments.texts import escaped
from rope_cpu.cli.command_line import usage_errors
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.models.model import Model
from rope_cpu.rotation.embedding import RotaryEmbedding


@dataclass(frozen=True)
class Group:
    """Layers of one type, or all rotated ones.

    Parameters
    ----------
    config : Model
        The model whose layers they are.
    layer_type : str, optional
        Their type; None if the config names none.
    spec : RopeSpec, optional
        Their rotation; None for layers without one.
    parameters : mapping
        Their rope parameters.
    """

    config: Model
    layer_type: str | None
    spec: RopeSpec | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model type, with escapes."""
        return escaped(str(self.config.model_type or "unknown model type"))

    @property
    def name(self) -> str:
        """A name for these layers, with escapes."""
        name = self.layer_type
        if name is None:
            kinds = chain(*self.config.types.values())
            is_part = None in [kind.rope_parameters for kind in kinds]
            name = "all rotated layers" if is_part else "all layers"
        return escaped(name) + (": not rotated" if self.spec is None else "")

    @cached_property
    def ropes(self) -> dict[str, RotaryEmbedding]:
        """The rotary embedding at the original length, and one at a longer length, by a text.

        The text is "" where they depend on no length. Empty for layers without rotation.
        """
        if self.spec is None:
            return {}
        rope = RotaryEmbedding.from_spec(self.spec)
        rule = self.spec.length_rule
        if rule is None:
            return {"": rope}
        original = rule.original_length
        longer = max(self.config.maximum_length, original + 1)
        far = 4 * original
        if rule.representatives([longer]) != rule.representatives([far]):
            # Frequencies that go on changing above the original length: show one far above it.
            longer = max(longer, far)
        return {f"at {length} tokens": rope.at_length(length) for length in (original, longer)}


def from_arguments(config: Model, args: argparse.Namespace) -> list[Group]:
    """Return the groups of layers that the arguments --layer-type and --interleaved select.

    Raises UsageError if the config does not describe their rotations.
    """
    with usage_errors():
        return list(layer_groups(config, args.layer_type, args.interleaved))


def layer_groups(
    config: Model, layer_type: str | None = None, interleaved: bool | None = None
) -> Iterator[Group]:
    """Yield the layers of each type of a config, or of the given one."""
    by_type = config.rope_parameters
    names = list(by_type) if layer_type is None and by_type else [layer_type]
    for name in names:
        is_rotated = by_type.get(name, {}) is not None
        spec = config.spec(name, interleaved=interleaved) if is_rotated else None
        parameters = config.section(name, None) if by_type and is_rotated else {}
        yield Group(config, name, spec, parameters)
