"""Vision towers as a whole: queries and keys of their first layer, on a picture that is not square.

The caller of a rotary module, or even an image processor, decides which coordinate the module gets
first. So the order of the axes shows only in a whole tower that gets a picture.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding, positions
from rope_cpu.models import vision

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

from configurations import configurations  # noqa: E402

ROWS, COLUMNS = 4, 6
PATCHES = ROWS * COLUMNS
GRID = (1, ROWS, COLUMNS)

# One layer of two heads of 32 elements, under whichever of these keys a configuration has.
SMALL = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size"), 64),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("depth", "num_hidden_layers"), 1),
}


def row_major(**options: Any) -> np.ndarray:
    return positions.grid((ROWS, COLUMNS), **options)


def in_squares() -> np.ndarray:
    return positions.patches([GRID], merge_size=2)


def centres() -> np.ndarray:
    return row_major(centred=True, scale=(2 / ROWS, 2 / COLUMNS))


def in_patches(config: Any) -> dict[str, Any]:
    """Return the flattened patches of a picture, and its grid."""
    channels = getattr(config, "in_channels", 3)
    frames = getattr(config, "temporal_patch_size", getattr(config, "patch_temporal", 1))
    size = getattr(config, "patch_size", None) or config.spatial_patch_size
    return {"": torch.randn(PATCHES, channels * frames * size**2), **grid()}


def grid() -> dict[str, Any]:
    return {"grid_thw": torch.tensor([GRID])}


def apart(config: Any) -> dict[str, Any]:
    """Return the patches of a picture as small pictures, and its grid."""
    return {"": torch.randn(PATCHES, 3, config.patch_size, config.patch_size), **grid()}


def picture(config: Any) -> dict[str, Any]:
    return {"": torch.randn(1, 3, ROWS * config.patch_size, COLUMNS * config.patch_size)}


def processed(config: Any) -> dict[str, Any]:
    """Return a picture as the image processor of Gemma 4 prepares it, without the padding."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    size = config.patch_size
    pixels = np.random.default_rng(0).random((3, ROWS * size, COLUMNS * size), np.float32)
    made = Gemma4ImageProcessorPil(do_resize=False, do_rescale=False)(pixels, return_tensors="pt")
    ids = made["image_position_ids"][:, :PATCHES]
    return {"": made["pixel_values"][:, :PATCHES], "pixel_position_ids": ids}


def pair(config: Any) -> dict[str, Any]:
    """Return two pictures, of whose 32 x 32 pixels the first network makes one token."""
    return {"": torch.randn(1, 2, 3, 32 * ROWS, 32 * COLUMNS)}


def frames(config: Any) -> dict[str, Any]:
    """Return the features of a frame, and those of one frame in memory."""
    memory = torch.randn(PATCHES, 1, 64)
    features = torch.randn(PATCHES, 1, config.memory_attention_hidden_size)
    return {"": features, "memory": memory, "memory_posision_embeddings": memory}


@dataclass(frozen=True)
class Tower:
    """How transformers runs a tower.

    takes: a function from a config to the arguments of the model, of which the first is under "".
    ids: the positions that this library documents, of all tokens but `before` and `after`.
    """

    model: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    takes: Callable[[Any], dict[str, Any]] = in_patches
    ids: Callable[[], np.ndarray] = in_squares
    before: int = 0
    after: int = 0


MEMORY = {
    "memory_attention_rope_feat_sizes": [COLUMNS, ROWS],
    "memory_attention_hidden_size": 64,
    "memory_attention_feed_forward_hidden_size": 64,
}
SAM3 = {"patch_size": 2, "image_size": (2 * COLUMNS, 2 * ROWS), "pretrain_image_size": 4}
TOWERS = {
    "cohere_compass_vision": Tower("CohereCompassVisionModel"),
    "dots3_note_vision_encoder": Tower(
        "Dots3NoteVisionModel", {"mlp_layer_types": ["dense"], "adapter_in_dim": 64}
    ),
    "ernie4_5_vl_moe_vision": Tower("Ernie4_5_VLMoeVisionTransformerPretrainedModel"),
    "exaone4_5_vision": Tower("Exaone4_5_VisionModel"),
    "glm4v_moe_vision": Tower("Glm4vMoeVisionModel"),
    "glm4v_vision": Tower("Glm4vVisionModel"),
    "glm5_next_vision": Tower("Glm5NextVisionModel"),
    "glm_ocr_vision": Tower("GlmOcrVisionModel"),
    "muse_glimmer_vision": Tower("MuseGlimmerVisionModel", ids=lambda: row_major(start=1)),
    "muse_spark_vision": Tower("MuseSparkVisionModel", ids=lambda: row_major(start=1)),
    "paddleocr_vl_vision": Tower(
        "PaddleOCRVisionTransformer",
        takes=lambda config: {**apart(config), "": apart(config)[""][None]},
        ids=row_major,
    ),
    "qwen2_5_omni_vision_encoder": Tower("Qwen2_5OmniVisionEncoder"),
    "qwen2_5_vl_vision": Tower("Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen2_vl_vision": Tower("Qwen2VisionTransformerPretrainedModel"),
    "qwen3_5_moe_vision": Tower("Qwen3_5MoeVisionModel"),
    "qwen3_5_vision": Tower("Qwen3_5VisionModel"),
    "qwen3_omni_moe_vision_encoder": Tower("Qwen3OmniMoeVisionEncoder"),
    "qwen3_vl_moe_vision": Tower("Qwen3VLMoeVisionModel"),
    "qwen3_vl_vision": Tower("Qwen3VLVisionModel"),
    "qwen4_exp_vision": Tower("Qwen4ExpVisionModel"),
    "video_llama_3_vision": Tower(
        "VideoLlama3VisionModel",
        takes=lambda config: {**in_patches(config), "merge_sizes": torch.tensor([2])},
    ),
    "lfm3_vl_vision": Tower("Lfm3VlVisionModel", {"layer_types": ["full_attention"]}),
    "minimax_m3_vl_vision": Tower(
        "MiniMaxM3VLVisionModel", ids=lambda: np.pad(in_squares(), [(0, 0), (1, 0)])
    ),
    "kimi_k25_vision": Tower("Kimi_K25VisionModel", takes=apart, ids=row_major),
    "inkling2_vision": Tower(
        "Inkling2VisionModel",
        {"projection_hidden_dim": 64},
        lambda config: {
            "": torch.randn(PATCHES // 4, 2 * config.patch_size, 2 * config.patch_size, 3),
            "image_grid_thw": torch.tensor([[1, ROWS // 2, COLUMNS // 2]]),
        },
        ids=lambda: in_squares() + 1,
        before=1,
    ),
    # The class token of MLCD has angles of its own, which are weights.
    "mlcd_vision_model": Tower("MLCDVisionModel", {}, picture, row_major, before=1),
    "step3p5_vision": Tower("Step3p7VisionModel", {"image_size": 56}, picture, row_major),
    "pixtral": Tower("PixtralVisionModel", {}, picture, row_major),
    "llama4_vision_model": Tower(  # it takes square pictures alone
        "Llama4VisionModel",
        {"image_size": 56, "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64},
        lambda config: {"": torch.randn(1, 3, 56, 56)},
        lambda: positions.grid((4, 4), start=1),
        after=1,
    ),
    "sam3_vit_model": Tower(
        "Sam3ViTModel",
        {**SAM3, "window_size": 3, "global_attn_indexes": [0]},
        picture,
        lambda: row_major(scale=3 / COLUMNS),
    ),
    "sam3_vit_model in windows": Tower(
        "Sam3ViTModel",
        {**SAM3, "window_size": 2, "global_attn_indexes": []},
        picture,
        lambda: positions.grid((2, 2)),
    ),
    "gemma4_vision": Tower("Gemma4VisionModel", {"head_dim": 32}, processed, row_major),
    "dinov3_vit": Tower("DINOv3ViTModel", {"num_register_tokens": 4}, picture, centres, before=5),
    "eomt_dinov3": Tower(
        "EomtDinov3ForUniversalSegmentation",
        {"num_register_tokens": 4, "num_hidden_layers": 2, "num_blocks": 1},
        picture,
        centres,
        before=5,
    ),
    "sapiens2": Tower(
        "Sapiens2Model",
        {"num_register_tokens": 4, "num_hidden_layers": 16},
        picture,
        centres,
        before=5,
    ),
    "efficientloftr": Tower(
        "EfficientLoFTRModel",
        {
            "stage_num_blocks": [1] * 4,
            "hidden_size": 256,
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 8),
        },
        pair,
        lambda: row_major(start=1),
    ),
    "sam2_video": Tower("Sam2VideoMemoryAttention", MEMORY, frames, row_major),
    "sam3_tracker_video": Tower("Sam3TrackerVideoMemoryAttention", MEMORY, frames, row_major),
    "edgetam_video": Tower(
        "EdgeTamVideoMemoryAttention",
        {**MEMORY, "memory_attention_rope_k_sizes": [COLUMNS, ROWS]},
        lambda config: {**frames(config), "num_spatial_memory_tokens": 1},
        row_major,
    ),
}


class SeenError(Exception):
    """Ends a run: the queries and keys of the first layer are known."""


def stop(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> None:
    """Take the place of an attention function of transformers."""
    raise SeenError(query, key)


def first_queries_and_keys(model: Any, inputs: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return the vectors that the first attention computes scores of, (2, tokens, heads, …)."""
    others = {name: value for name, value in inputs.items() if name}
    with torch.no_grad(), pytest.raises(SeenError) as seen:
        model(inputs[""], **others)
    vectors = torch.stack(seen.value.args)[:, 0].transpose(1, 2)
    return vectors.reshape(2, vectors.shape[1], -1, head_dim).numpy()


def stop_rotation(model: Any) -> None:
    """Set every angle of a model to zero, by new buffers, since angles may be cached by buffer."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name == "inv_freq":
                module.inv_freq = torch.zeros_like(buffer)
            elif name == "freqs_ci":
                module.freqs_ci = torch.ones_like(buffer)


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the small random model of a tower, and the arguments of its call."""
    row = TOWERS[name]
    model_type = name.partition(" ")[0]
    config_class = next(cls for cls in configurations() if cls.model_type == model_type)
    known = config_class()
    keys = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    config = config_class(**{**keys, **row.keys})
    vars(config).update(row.keys)  # the configuration of SAM 3's tracker computes its grid again
    transformers.AttentionInterface.register("stop", stop)
    config._attn_implementation = "stop"
    folder = config_class.__module__.replace("configuration", "modeling")
    torch.manual_seed(0)
    model = getattr(importlib.import_module(folder), row.model)(config).eval()
    return model, row.takes(config)


def test_every_tower_of_transformers_is_here() -> None:
    known = {cls.model_type for cls in configurations()}
    assert {name.partition(" ")[0] for name in TOWERS} == known & vision.TOWERS.keys()


@pytest.mark.parametrize("name", TOWERS)
def test_rows_and_columns_are_right_in_the_whole_tower(name: str) -> None:
    row = TOWERS[name]
    model, inputs = made(name)
    rope = RotaryEmbedding.from_config(model.config.to_dict())
    theirs = first_queries_and_keys(model, inputs, rope.head_dim)
    stop_rotation(model)
    x = first_queries_and_keys(model, inputs, rope.head_dim)
    tokens = slice(row.before, x.shape[1] - row.after)
    ids = row.ids()
    # A few roundings of a power, product, cos and sin, each half an ulp.
    angle = (np.abs(ids) @ np.abs(rope.inv_freq)).max()
    bound = np.abs(x).max() * 2 * (24 * angle + 16) * 2**-24
    np.testing.assert_allclose(rope.rotate(x[:, tokens], ids), theirs[:, tokens], 0, bound)
    assert np.abs(theirs - x).max() > np.abs(x).max() / 10, "nothing was rotated: no proof"


@pytest.mark.parametrize("name", TOWERS)
def test_float32_frequencies_are_theirs(name: str) -> None:
    """They agree bit by bit, except that torch's power may err by a unit in the last place."""
    model, _ = made(name)
    rope = RotaryEmbedding.from_config(model.config.to_dict(), angle_dtype="float32")
    unit = vision.TOWERS[model.config.model_type].unit
    buffers = [module.inv_freq for module in model.modules() if hasattr(module, "inv_freq")]
    theirs = [unit * buffer.double().numpy() for buffer in buffers]
    if not theirs:
        assert name == "llama4_vision_model", "only Llama 4 has no frequencies, but cos and sin"
        return
    ours = np.unique(rope.inv_freq[rope.inv_freq != 0])
    exact = np.unique(np.concatenate(theirs))
    assert (ours == exact).mean() > 0.9
    np.testing.assert_allclose(ours, exact, rtol=2**-23)
