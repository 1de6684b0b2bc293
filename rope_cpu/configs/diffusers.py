"""Configurations of diffusers transformers → spec: image and video models with positions of two to four coordinates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import check_table_size, real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.configs.model_config import ModelConfig, of_all_layers
from rope_cpu.configs.model_types import data
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq

Config = Mapping[str, Any]


def is_transformer(config: Config) -> bool:
    """Return True if this is the configuration of a diffusers transformer, of any class."""
    return (
        "_diffusers_version" in config
        or config.get("_class_name") in MODELS
        or _COGVIDEOX in config
    )


def parse(config: Config) -> ModelConfig:
    """Return the config of a diffusers transformer, parsed; pairs are interleaved, coordinates as follows.

    - Flux and its kind (Chroma, Bria, LongCat-Image, Ovis-Image, Flux ControlNets): the three columns of `img_ids` and
      `txt_ids`; FLUX.2: the four.
    - Wan, VACE, Animate, SkyReels-V2, ChronoEdit, HunyuanVideo, HunyuanVideo-1.5: frame, row and column of the patch,
      from 0; ChronoEdit has two frames at 0 and 7. FramePack: likewise, of the current frames; cos and sin of its
      history are averages over blocks, which is no rotation. HunyuanImage: row and column, in its refiner after the
      frame; text stays unrotated.
    - CogVideoX, ConsisID: frame, row and column on the grid of the training resolution, so rows and columns may be
      fractional; text tokens stay unrotated.
    - Qwen-Image and its ControlNets: frame, row and column, the latter two centred: from -(n - n // 2); text goes on
      along the diagonal.
    - LTX, LTX-2: frame (LTX-2: seconds), row and column of the patch (LTX-2: of its middle) in pixels, as fractions of
      the base size in the file, then 2·fraction - 1, so from -1 to 1; every head has frequencies of its own. The
      rotation of LTX-2's video, not of its audio.

    Raises ValueError for other classes, missing keys, and files that do not determine the rotation.
    Source: the transformers of the same names in diffusers 0.37, those added later in 0.42.
    """
    name = config.get("_class_name") or (
        "CogVideoXTransformer3DModel" if _COGVIDEOX in config else None
    )
    if name not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ValueError(
            f"`_class_name` is {shown(name)}, which does not determine a rotation; known are {known}"
        )
    values = without_nulls(config)
    rotation = of_all_layers(partial(MODELS[name], values))
    return ModelConfig(source=config, model_type=name, values=values, rotation=rotation)


_COGVIDEOX = "use_rotary_positional_embeddings"


def _given_widths(row: Config, config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation whose axes have the widths that stand in the file, as many as in the row of their class."""
    widths, theta = (
        config.get(row["key"], row["widths"]),
        config.get("rope_theta", row["rope_theta"]),
    )
    return _blocks(
        row["key"], widths, theta, config, angle_dtype, row.get("counts", [len(row["widths"])])
    )


def _wan(config: Config, angle_dtype: str) -> RopeSpec:
    key, head_dim = "attention_head_dim", config.get("attention_head_dim")
    if head_dim is None:
        key = "dim"
        head_dim = _required("dim", config, limits.HIDDEN_SIZE) // _required(
            "num_heads", config, limits.HEADS
        )
    side = 2 * (whole_number(key, head_dim, 0, limits.HEAD_DIM) // 6)
    return _blocks(key, (head_dim - 2 * side, side, side), 10000.0, config, angle_dtype)


def _cogvideox(config: Config, angle_dtype: str) -> RopeSpec:
    if not config.get(_COGVIDEOX):
        raise ValueError(
            f"`{_COGVIDEOX}` is {shown(config.get(_COGVIDEOX))}: this CogVideoX adds sinusoidal embeddings"
        )
    head_dim = _required("attention_head_dim", config, limits.HEAD_DIM)
    widths = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
    return _blocks("attention_head_dim", widths, 10000.0, config, angle_dtype)


def _ltx(config: Config, angle_dtype: str) -> RopeSpec:
    """Return frequencies π/2·theta^(k/(n-1)), axis by axis over the pairs of all heads, after unrotated ones."""
    head_dim = _required("attention_head_dim", config, limits.HEAD_DIM)
    heads = _required("num_attention_heads", config, limits.HEADS)
    if head_dim % 2:
        raise ValueError(f"`attention_head_dim` is {head_dim}; it must be even")
    layout = config.get("rope_type", "interleaved")
    if layout not in ("interleaved", "split"):
        raise ValueError(f"`rope_type` is {shown(layout)}; it must be interleaved or split")
    given = "(attention_head_dim, num_attention_heads)"
    check_table_size(given, (head_dim, heads), 3, heads, head_dim // 2, most=limits.FREQUENCIES)
    width = head_dim * heads
    rounds, theta = width // 6, real_number("rope_theta", config.get("rope_theta", 10000.0))
    # These are float32 in the model, also where they are computed in float64.
    with np.errstate(over="ignore"):  # an infinite one is refused below
        powers = np.float32(np.pi / 2 * theta ** np.linspace(0.0, 1.0, rounds))
    matrix = np.zeros((3, width // 2))
    spare = width // 2 - 3 * rounds
    matrix[np.tile(np.arange(3), rounds), spare + np.arange(3 * rounds)] = np.repeat(powers, 3)
    return from_inv_freq(
        matrix.reshape(3, heads, head_dim // 2),
        head_dim=head_dim,
        interleaved=layout == "interleaved",
        rope_type="axial",
        angle_dtype=angle_dtype,
    )


def _blocks(
    key: str,
    widths: Any,
    theta: float,
    config: Config,
    angle_dtype: str,
    counts: Collection[int] = (3,),
) -> RopeSpec:
    """Return the rotation in which each axis rotates a block of the head.

    key: where the widths come from. counts: how many of them there may be.
    """
    fit = isinstance(widths, Sequence) and not isinstance(widths, str) and len(widths) in counts
    if not fit or not all(
        isinstance(w, int | np.integer) and 0 < w <= limits.HEAD_DIM and w % 2 == 0 for w in widths
    ):
        number = " or ".join(map(str, sorted(counts)))
        raise ValueError(
            f"`{key}` gives the axes the widths {shown(widths)}; they must be {number} even numbers above 0"
        )
    head_dim = config.get("attention_head_dim", sum(widths))
    if head_dim != sum(widths):
        raise ValueError(
            f"`attention_head_dim` is {shown(head_dim)}, but the axes are {widths} wide together"
        )
    rows = [axes.base_frequencies(theta, width, angle_dtype) for width in widths]
    return axes.axis_after_axis(rows, interleaved=True, angle_dtype=angle_dtype)


def _required(key: str, config: Config, most: int) -> int:
    if config.get(key) is None:
        raise ValueError(f"`config` has no `{key}`")
    return whole_number(key, config[key], 1, most)


_DATA = data("diffusers.json")
_BUILDERS = {"wan": _wan, "cogvideox": _cogvideox, "ltx": _ltx}
MODELS: dict[str, Callable[[Config, str], RopeSpec]] = {
    **{name: partial(_given_widths, row) for row in _DATA["axes"] for name in row["classes"]},
    **{name: build for kind, build in _BUILDERS.items() for name in _DATA[kind]},
}
