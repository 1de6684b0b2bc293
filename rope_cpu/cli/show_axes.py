"""Names and units of the position axes of a config, for `rope-cpu show`."""

from __future__ import annotations

from typing import NamedTuple

from rope_cpu.configs.diffusers.config import DiffusersConfig
from rope_cpu.configs.ernie import ErnieConfig
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.vision import VisionConfig


class Axis(NamedTuple):
    """A position axis.

    name: such as "row", "" for the only axis. unit: of its positions, in the plural.
    extent: largest distance between two positions, None if the config alone determines it.
    step: distance between the positions for which scores are computed.
    """

    name: str
    unit: str
    extent: float | None = None
    step: float = 1.0


TOKENS = Axis("", "tokens")

# Positions from -1 to 1 across an image, or across the base size in the file, are no whole numbers.
_FRACTION_STEP = 1 / 64

# No config has the largest grid of an image or a video; 1024 patches are 14,000 pixels or more.
_GRID = 1024


def _fractions(name: str, unit: str) -> Axis:
    return Axis(name, unit, extent=2, step=_FRACTION_STEP)


_TIME = Axis("time", "frames", _GRID)
_FRAME = Axis("frame", "latent frames", _GRID)
_ROW = Axis("row", "patches", _GRID)
_COLUMN = Axis("column", "patches", _GRID)
_FIRST_ID = Axis("axis 0", "positions", _GRID)
_TEXT = Axis("text", "tokens", _GRID)

_MROPE = tuple(Axis(name, "positions") for name in ("time", "height", "width"))
_FLUX = (_FIRST_ID, _ROW, _COLUMN)
_LTX = tuple(_fractions(name, "half base sizes") for name in ("time", "row", "column"))
_CENTRES = tuple(_fractions(name, "half images") for name in ("row", "column"))
_TOKEN_FIRST = (_TEXT, _ROW, _COLUMN)

# Axes of diffusers classes that are not tokens, (row, column) or (frame, row, column), in the order
# of the position ids: see `DiffusersConfig`.
_DIFFUSERS = {
    **dict.fromkeys(
        (
            "FluxTransformer2DModel",
            "FluxControlNetModel",
            "BriaTransformer2DModel",
            "BriaFiboTransformer2DModel",
            "ChromaTransformer2DModel",
            "HiDreamImageTransformer2DModel",
            "Krea2Transformer2DModel",
            "LongCatImageTransformer2DModel",
            "OvisImageTransformer2DModel",
        ),
        _FLUX,
    ),
    "Flux2Transformer2DModel": (*_FLUX, _TEXT),
    "Flux3Transformer2DModel": (*_FLUX, _TEXT),
    **dict.fromkeys(
        (
            "BriaFibo2Transformer2DModel",
            "Lumina2Transformer2DModel",
            "QwenImage21Transformer2DModel",
            "ZImageTransformer2DModel",
        ),
        _TOKEN_FIRST,
    ),
    "HunyuanDiT2DModel": (_COLUMN, _ROW),
    "HunyuanDiT2DControlNetModel": (_COLUMN, _ROW),
    "Ideogram4Transformer2DModel": _MROPE,
    "Cosmos3OmniTransformer": _MROPE,
    "LTXVideoTransformer3DModel": _LTX,
    "LTX2VideoTransformer3DModel": _LTX,
    "SanaWMLTX2RefinerTransformer3DModel": _LTX,
}
_GRIDS = {1: (TOKENS,), 2: (_ROW, _COLUMN), 3: (_FRAME, _ROW, _COLUMN)}


def position_axes(config: ModelConfig, count: int) -> tuple[Axis, ...]:
    """Return the axes of a config's positions, `count` of them.

    Axes without a known meaning are named by their number.
    """
    known = _known_axes(config, count)
    if len(known) == count:
        return known
    return tuple(Axis(f"axis {number}", "positions") for number in range(count))


def _known_axes(config: ModelConfig, count: int) -> tuple[Axis, ...]:
    """Return the axes of a kind of config; not necessarily `count`, if the config is unusual."""
    if isinstance(config, DiffusersConfig):
        return _DIFFUSERS.get(str(config.model_type), _GRIDS.get(count, ()))
    if isinstance(config, VisionConfig):
        if config.tower.pairs == "revolutions":
            return _CENTRES
        return (_TIME, _ROW, _COLUMN)[-count:]
    if count > 1 or isinstance(config, ErnieConfig):
        return _MROPE
    return (TOKENS,)
