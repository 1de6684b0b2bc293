"""Adapter for configs of diffusers transformers: image and video models with 2 to 4 coordinates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import check_table_size, real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.configs.model_config import OneRotationConfig
from rope_cpu.configs.model_types import data
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq

Config = Mapping[str, Any]

_COGVIDEOX = "use_rotary_positional_embeddings"


@dataclass(frozen=True, kw_only=True)
class DiffusersConfig(OneRotationConfig):
    """The config of a diffusers transformer; pairs are interleaved.

    Coordinates of positions:

    - Flux and its relatives (Chroma, Bria, LongCat-Image, Ovis-Image, Flux ControlNets): the three
      columns of `img_ids` and `txt_ids`; FLUX.2: the four.
    - Wan, VACE, Animate, SkyReels-V2, ChronoEdit, HunyuanVideo, HunyuanVideo-1.5: frame, row and
      column of the patch, from 0; ChronoEdit has two frames at 0 and 7. FramePack: the same for the
      current frames; the cos and sin of its history are averages over blocks, which is no rotation.
      HunyuanImage: row and column, in its refiner after the frame; text is not rotated.
    - CogVideoX, ConsisID: frame, row and column on the grid of the training resolution, so rows and
      columns may be fractional; text is not rotated.
    - Qwen-Image and its ControlNets: frame, row and column, the latter two centred, from
      -(n - n // 2); text continues along the diagonal.
    - LTX, LTX-2: frame (LTX-2: seconds), row and column of the patch (LTX-2: of its middle) in
      pixels, as fractions of the base size in the file, then 2·fraction - 1, so from -1 to 1; every
      head has its own frequencies. The rotation of LTX-2's video, not of its audio.
    """

    def _only_spec(self, angle_dtype: str) -> RopeSpec:
        build = BUILDERS[str(self.model_type)]
        return build(self.values, angle_dtype)


def is_transformer(config: Config) -> bool:
    """Return True for the config of a diffusers transformer of any class."""
    return (
        "_diffusers_version" in config
        or config.get("_class_name") in BUILDERS
        or _COGVIDEOX in config
    )


def parse(config: Config) -> DiffusersConfig:
    """Parse the config of a diffusers transformer.

    Raises ValueError for other classes. Missing keys are refused when the spec is built.
    Source: the transformers of the same names in diffusers 0.37, those added later in 0.42.
    """
    name = config.get("_class_name") or None
    if name is None and _COGVIDEOX in config:
        name = "CogVideoXTransformer3DModel"
    if name not in BUILDERS:
        known = ", ".join(sorted(BUILDERS))
        raise ValueError(
            f"`_class_name` is {shown(name)}, which does not determine a rotation; known are "
            f"{known}"
        )
    return DiffusersConfig(source=config, model_type=name, values=without_nulls(config))


def _from_widths_in_file(row: Config, config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation whose axes have the widths in the file, or those of a class's row."""
    key = row["key"]
    widths = config.get(key, row["widths"])
    theta = config.get("rope_theta", row["rope_theta"])
    counts = row.get("counts", [len(row["widths"])])
    return _axis_blocks(key, widths, theta, config, angle_dtype, counts)


def _wan(config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of Wan: two equal axes, and a first one that takes the remainder."""
    key = "attention_head_dim"
    head_dim = config.get(key)
    if head_dim is None:
        key = "dim"
        width = _required_number("dim", config, limits.HIDDEN_SIZE)
        head_dim = width // _required_number("num_heads", config, limits.HEADS)
    side = 2 * (whole_number(key, head_dim, 0, limits.HEAD_DIM) // 6)
    return _axis_blocks(key, (head_dim - 2 * side, side, side), 10000.0, config, angle_dtype)


def _cogvideox(config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of CogVideoX: a quarter of the head, and two times three eighths."""
    if not config.get(_COGVIDEOX):
        raise ValueError(
            f"`{_COGVIDEOX}` is {shown(config.get(_COGVIDEOX))}: this CogVideoX adds sinusoidal "
            "embeddings, it rotates nothing"
        )
    head_dim = _required_number("attention_head_dim", config, limits.HEAD_DIM)
    widths = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
    return _axis_blocks("attention_head_dim", widths, 10000.0, config, angle_dtype)


def _ltx(config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of LTX, which rotates the pairs of all heads as one vector.

    The n frequencies π/2·theta^(k/(n-1)) go to three axes by turns, after the pairs that three axes
    cannot share, which are not rotated.
    """
    head_dim = _required_number("attention_head_dim", config, limits.HEAD_DIM)
    heads = _required_number("num_attention_heads", config, limits.HEADS)
    if head_dim % 2:
        raise ValueError(f"`attention_head_dim` is {head_dim}; it must be even")
    pairing = config.get("rope_type", "interleaved")
    if pairing not in ("interleaved", "split"):
        raise ValueError(f"`rope_type` is {shown(pairing)}; it must be interleaved or split")
    check_table_size(
        "(attention_head_dim, num_attention_heads)",
        (head_dim, heads),
        3,
        heads,
        head_dim // 2,
        most=limits.FREQUENCIES,
    )
    theta = real_number("rope_theta", config.get("rope_theta", 10000.0))
    inv_freq = _ltx_frequencies(theta, head_dim * heads)
    return from_inv_freq(
        inv_freq.reshape(3, heads, head_dim // 2),
        head_dim=head_dim,
        interleaved=pairing == "interleaved",
        rope_type="axial",
        angle_dtype=angle_dtype,
    )


def _ltx_frequencies(theta: float, width: int) -> Float64:
    """Return the frequencies (3, width / 2) of LTX for all heads together, width elements."""
    count = width // 6
    pairs = width // 2
    with np.errstate(over="ignore"):  # an infinite frequency is refused later
        # float32 in the model, also where it computes them in float64.
        frequencies = np.float32(np.pi / 2 * theta ** np.linspace(0.0, 1.0, count))
    inv_freq = np.zeros((3, pairs))
    axis = np.tile(np.arange(3), count)
    pair = pairs - 3 * count + np.arange(3 * count)
    inv_freq[axis, pair] = np.repeat(frequencies, 3)
    return inv_freq


def _axis_blocks(
    key: str,
    widths: Any,
    theta: float,
    config: Config,
    angle_dtype: str,
    counts: Collection[int] = (3,),
) -> RopeSpec:
    """Return the rotation in which each axis rotates a block of the head.

    key: the source of the widths, for error texts. counts: the allowed numbers of axes.
    """
    if not _are_widths(widths, counts):
        number = " or ".join(map(str, sorted(counts)))
        raise ValueError(
            f"`{key}` gives the axes the widths {shown(widths)}; they must be {number} even "
            "numbers above 0"
        )
    head_dim = config.get("attention_head_dim", sum(widths))
    if head_dim != sum(widths):
        raise ValueError(
            f"`attention_head_dim` is {shown(head_dim)}, but the widths of the axes, {widths}, add "
            f"up to {sum(widths)}"
        )
    frequencies = [axes.base_frequencies(theta, width, angle_dtype) for width in widths]
    return axes.concatenated_axes(frequencies, interleaved=True, angle_dtype=angle_dtype)


def _are_widths(widths: Any, counts: Collection[int]) -> bool:
    """Return True for a sequence of even numbers above 0, as many as in counts."""
    if not isinstance(widths, Sequence) or isinstance(widths, str) or len(widths) not in counts:
        return False
    return all(
        isinstance(width, int | np.integer) and 0 < width <= limits.HEAD_DIM and width % 2 == 0
        for width in widths
    )


def _required_number(key: str, config: Config, most: int) -> int:
    """Return the whole number of a key, from 1 to most; raise for a missing key."""
    if config.get(key) is None:
        raise ValueError(f"`config` has no `{key}`")
    return whole_number(key, config[key], 1, most)


_DATA = data("diffusers.json")

# From the name of a class to the function that builds its rotation from (config, angle_dtype).
BUILDERS: dict[str, Callable[[Config, str], RopeSpec]] = {
    **{
        name: partial(_from_widths_in_file, row) for row in _DATA["axes"] for name in row["classes"]
    },
    **dict.fromkeys(_DATA["wan"], _wan),
    **dict.fromkeys(_DATA["cogvideox"], _cogvideox),
    **dict.fromkeys(_DATA["ltx"], _ltx),
}
