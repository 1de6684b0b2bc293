"""Names and units of the position axes of a config, for `rope-cpu show`."""

from __future__ import annotations

from dataclasses import dataclass

from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.model_types import data


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


def position_axes(config: ModelConfig, count: int) -> tuple[Axis, ...]:
    """Return the axes of a config's positions; those without a known meaning have a number."""
    kinds = config.axes[-count:]
    if len(kinds) < count == len(_MROPE):
        kinds = _MROPE
    if len(kinds) < count:
        return tuple(Axis(f"axis {number}", "positions") for number in range(count))
    return tuple(AXES[kind] for kind in kinds)
