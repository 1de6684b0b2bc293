"""Adapter for configs of diffusers transformers: images, video and sound, 1 to 4 coordinates.

One table, diffusers.json: from the name of a class to its row, see `multi_axis.Row`.

Coordinates of positions:

- Flux and its relatives (Chroma, Bria, Fibo, LongCat-Image, Ovis-Image, Flux ControlNets,
  Krea 2): the three columns of `img_ids` and `txt_ids`; FLUX.2 and FLUX.3: the four. HiDream:
  0, row and column; text at 0. Z-Image, Fibo 2: index of the caption's token, from 1 (an image
  has the next one), row and column. Lumina 2 the same, from 0.
- Wan, VACE, Animate, SkyReels-V2, ChronoEdit, AnyFlow, Sana-Video, HunyuanVideo,
  HunyuanVideo-1.5, Motif-Video, JoyImage, Kandinsky 6: frame, row and column of the patch, from
  0; ChronoEdit has two frames at 0 and 7. Wan-Animate 2: the reference starts at the offsets in
  the file. FramePack, Helios: the same for the current frames; the cos and sin of their history
  are averages over blocks, which is no rotation. AnyFlow FAR: the same, and compressed frames
  at the middle of their patches (row 0.5 for rows 0 and 1). SanaWM: the rotation of the main
  branch; its camera branch rotates half of the head.
- HunyuanImage: row and column, in its refiner after the frame; text is not rotated. PRX,
  GLM-Image: row and column, CogView 4: row·256 // rows and column·256 // columns; text is not
  rotated. HunyuanDiT: column and row, on the grid of 512 pixels, so they may be fractional.
- CogVideoX, ConsisID, EasyAnimate: frame, row and column on the grid of the training
  resolution, so rows and columns may be fractional; text is not rotated. Kandinsky 5: frame,
  row and column divided by the pipeline's scale factor. The rotation of the video of
  Kandinsky 5 and 6, not of their text and audio.
- Qwen-Image and its ControlNets, Nucleus-Image: frame, row and column, the latter two centred,
  from -(n - n // 2); text continues along the diagonal. Qwen-Image 2.1: the first is the
  position in the text.
- Allegro: frame, row and column of the patch; the file's interpolation scales are in the
  frequencies. Cosmos: the same, the frame times base_fps / fps. Cosmos 3, Ideogram 4: time,
  height and width; text has the same id on all axes. MiniMax-H3: time, row and column.
- LTX, LTX-2, SanaWM's refiner: frame (LTX-2: seconds), row and column of the patch (LTX-2: of
  its middle) in pixels, as fractions of the base size in the file, then 2·fraction - 1, so from
  -1 to 1; every head has its own frequencies. The rotation of LTX-2's video, not of its audio.
- AceStep, LongCat-AudioDiT, MiniMax-Music, Stable Audio, OmniGen: the token, from 0.
"""

from __future__ import annotations

from rope_cpu.arguments.texts import shown
from rope_cpu.configs import multi_axis
from rope_cpu.configs.model_types import data
from rope_cpu.configs.multi_axis import Config, MultiAxisConfig
from rope_cpu.frequencies.scaling import without_nulls

_DATA = data("diffusers.json")
CLASSES = multi_axis.rows_by_name(_DATA["rows"], {})

# Classes whose config determines no rotation, with the reason.
REFUSED: dict[str, str] = {
    name: reason for reason, names in _DATA["refused"].items() for name in names
}

# Files of CogVideoX may lack the name of their class.
_COGVIDEOX = "use_rotary_positional_embeddings"


def is_transformer(config: Config) -> bool:
    """Return True for the config of a diffusers transformer of any class."""
    name = config.get("_class_name")
    return (
        "_diffusers_version" in config or name in CLASSES or name in REFUSED or _COGVIDEOX in config
    )


def parse(config: Config) -> MultiAxisConfig:
    """Parse the config of a diffusers transformer.

    Raises ValueError for other classes. Missing keys are refused when the spec is built.
    Source: the classes of the same names in diffusers 0.42.1.
    """
    name = config.get("_class_name") or None
    if name is None and _COGVIDEOX in config:
        name = "CogVideoXTransformer3DModel"
    if name in REFUSED:
        raise ValueError(f"`_class_name` is {shown(name)}: {REFUSED[name]}")
    if name not in CLASSES:
        raise ValueError(
            f"`_class_name` is {shown(name)}, which is not known here: docs/configs.md lists the "
            f"{len(CLASSES)} classes that are; describe the rotation of others with "
            "RotaryEmbedding.axial or RotaryEmbedding.from_inv_freq"
        )
    return multi_axis.parse(config, name, CLASSES[name], without_nulls(config))
