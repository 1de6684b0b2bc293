"""Vision towers and multimodal text models against the modules of transformers, every model type that has one."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding, positions, vision

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

RANDOM = np.random.default_rng(7)


def load(folder, name):
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)


def config_of(folder, name, **values):
    return getattr(importlib.import_module(f"transformers.models.{folder}.configuration_{folder}"), name)(**values)


def heads(tokens, count, head_dim):
    return RANDOM.normal(size=(1, tokens, count, head_dim)).astype(np.float32)


def agrees(ours, theirs, x, ids, inv_freq):
    """Both are within float32's rounding of the same rotation, and of angles that differ by a rounding of each factor.

    Theirs: frequency (a few roundings of a power), product, cos and sin, each half an ulp.
    """
    angle = np.abs(np.asarray(ids, float)) @ np.abs(inv_freq)
    bound = np.abs(x).max() * 2 * (6 * 2**-24 * angle.max() * 4 + 16 * 2**-24)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
    assert np.abs(ours - x).max() > 0.1, "nothing was rotated: the comparison proves nothing"


# Model folder, configuration class, rotary class, name of the applying function. Positions come as (tokens, 2).
HALF = "apply_rotary_pos_emb_vision"
TOWERS = [
    ("cohere_compass", "CohereCompassVisionConfig", "CohereCompassVisionRotaryEmbedding", HALF),
    ("dots3_note", "Dots3NoteVisionConfig", "Dots3NoteVisionRotaryEmbedding", HALF),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionConfig", "Ernie4_5_VLMoeVisionRotaryEmbedding", HALF),
    ("exaone4_5", "Exaone4_5_VisionConfig", "Exaone4_5_VisionRotaryEmbedding", HALF),
    ("glm4v", "Glm4vVisionConfig", "Glm4vVisionRotaryEmbedding", HALF),
    ("glm4v_moe", "Glm4vMoeVisionConfig", "Glm4vMoeVisionRotaryEmbedding", HALF),
    ("glm5_next", "Glm5NextVisionConfig", "Glm5NextVisionRotaryEmbedding", HALF),
    ("glm_ocr", "GlmOcrVisionConfig", "GlmOcrVisionRotaryEmbedding", HALF),
    ("inkling2", "Inkling2VisionConfig", "Inkling2VisionRotaryEmbedding", HALF),
    ("kimi_k25", "Kimi_K25VisionConfig", "Kimi_K25VisionRotaryEmbedding", HALF),
    ("lfm3_vl", "Lfm3VlVisionConfig", "Lfm3VlVisionRotaryEmbedding", HALF),
    ("minimax_m3_vl", "MiniMaxM3VLVisionConfig", "MiniMaxM3VLVisionRotaryEmbedding", HALF),
    ("mlcd", "MLCDVisionConfig", "MLCDRotaryEmbedding", HALF),
    ("muse_glimmer", "MuseGlimmerVisionConfig", "MuseGlimmerVisionRotaryEmbedding", HALF),
    ("muse_spark", "MuseSparkVisionConfig", "MuseSparkVisionRotaryEmbedding", HALF),
    ("paddleocr_vl", "PaddleOCRVisionConfig", "PaddleOCRVisionRotaryEmbedding", HALF),
    ("qwen2_5_omni", "Qwen2_5OmniVisionEncoderConfig", "Qwen2_5OmniVisionRotaryEmbedding", HALF),
    ("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VLVisionRotaryEmbedding", HALF),
    ("qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VLVisionRotaryEmbedding", HALF),
    ("qwen3_5", "Qwen3_5VisionConfig", "Qwen3_5VisionRotaryEmbedding", HALF),
    ("qwen3_5_moe", "Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionRotaryEmbedding", HALF),
    ("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoderConfig", "Qwen3OmniMoeVisionRotaryEmbedding", HALF),
    ("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionRotaryEmbedding", HALF),
    ("qwen3_vl_moe", "Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionRotaryEmbedding", HALF),
    ("qwen4_exp", "Qwen4ExpVisionConfig", "Qwen4ExpVisionRotaryEmbedding", HALF),
    ("step3p7", "Step3p7VisionConfig", "Step3p7VisionRotaryEmbedding", HALF),
    ("video_llama_3", "VideoLlama3VisionConfig", "VideoLlama3VisionRotaryEmbedding", HALF),
    ("pixtral", "PixtralVisionConfig", "PixtralVisionRotaryEmbedding", "apply_rotary_pos_emb"),
    ("sam3", "Sam3ViTConfig", "Sam3ViTRotaryEmbedding", "apply_rotary_pos_emb_2d"),
    ("sam2_video", "Sam2VideoConfig", "Sam2VideoVisionRotaryEmbedding", "apply_rotary_pos_emb_2d"),
    (
        "sam3_tracker_video",
        "Sam3TrackerVideoConfig",
        "Sam3TrackerVideoVisionRotaryEmbedding",
        "apply_rotary_pos_emb_2d",
    ),
    ("edgetam_video", "EdgeTamVideoConfig", "EdgeTamVideoVisionRotaryEmbedding", "apply_rotary_pos_emb_2d_self_attn"),
    ("gemma4", "Gemma4VisionConfig", "Gemma4VisionRotaryEmbedding", "apply_multidimensional_rope"),
]


def theirs_applied(function, apply, x, cos, sin, ids):
    """Call a model's own function the way its attention does; x is (1, tokens, heads, head_dim)."""
    q = torch.from_numpy(x)
    if function == HALF:
        return apply(q[0], q[0], cos, sin)[0][None]
    if function == "apply_multidimensional_rope":
        return apply(q, cos, sin, ids)
    rows = (cos[None], sin[None]) if function == "apply_rotary_pos_emb" else (cos, sin)
    return apply(q.transpose(1, 2), q.transpose(1, 2), *rows)[0].transpose(1, 2)


@pytest.mark.parametrize(
    ("folder", "config_name", "rotary_name", "function"), TOWERS, ids=lambda value: str(value)[:24]
)
def test_tower_equals_its_module(folder, config_name, rotary_name, function):
    config = config_of(folder, config_name)
    rope = RotaryEmbedding.from_spec(vision.read(config.to_dict()))
    grid = positions.grid((3, 7, 9)[3 - rope.axes :])
    x = heads(len(grid), 4, rope.head_dim)
    ids = torch.from_numpy(grid)
    ids = ids[None] if folder == "gemma4" else ids
    cos, sin = load(folder, rotary_name)(config)(torch.from_numpy(x), ids)
    theirs = theirs_applied(function, load(folder, function), x, cos, sin, ids).numpy()
    agrees(rope.rotate(x, grid), theirs, x, grid, rope.inv_freq)


@pytest.mark.parametrize(
    ("folder", "config_name", "rotary_name", "function"), TOWERS, ids=lambda value: str(value)[:24]
)
def test_float32_frequencies_are_theirs(folder, config_name, rotary_name, function):
    """Bit by bit but for the power function: torch's is off by a unit in the last place now and then."""
    config = config_of(folder, config_name)
    spec = vision.read(config.to_dict(), angle_dtype="float32")
    theirs = np.unique(load(folder, rotary_name)(config).inv_freq.double().numpy())
    ours = np.unique(spec.inv_freq[spec.inv_freq != 0])
    assert (ours == theirs).mean() > 0.9
    np.testing.assert_allclose(ours, theirs, rtol=2**-23)


def test_every_axial_configuration_of_transformers_is_here():
    """The sweep: each configuration whose default rope type is axial is compared above, under its own model type."""
    models = importlib.import_module("transformers.models")
    base = importlib.import_module("transformers").PreTrainedConfig
    found = {}
    for module in pkgutil.iter_modules(models.__path__):
        name = f"transformers.models.{module.name}.configuration_{module.name}"
        try:
            members = vars(importlib.import_module(name))
        except ModuleNotFoundError:
            continue
        for key, value in members.items():
            mine = inspect.isclass(value) and issubclass(value, base) and value.__module__ == name
            if mine and "axial" in inspect.getsource(value):
                section = getattr(value(), "rope_parameters", None) or {}
                if section.get("rope_type") == "axial":
                    found[module.name, key] = value.model_type
    compared = {(folder, config) for folder, config, *_ in TOWERS}
    deprecated = {("ernie4_5_vl_moe", "Ernie4_5_VL_MoeVisionConfig")}
    assert set(found) - compared - deprecated == set()
    assert all(model_type in vision.TOWERS for model_type in found.values())


def test_llama4_vision():
    config = config_of("llama4", "Llama4VisionConfig", image_size=112, patch_size=14)
    rope = RotaryEmbedding.from_spec(vision.read(config.to_dict()))
    side = 112 // 14
    # Positions start at 1; the class token comes last and stays unrotated.
    ids = positions.with_unrotated(positions.grid((side, side), start=1), after=1)
    x = heads(len(ids), 4, rope.head_dim)
    module = load("llama4", "Llama4VisionRotaryEmbedding")(config)
    q = torch.from_numpy(x)
    theirs, _ = load("llama4", "vision_apply_rotary_emb")(q, q, module(q))
    ours = rope.rotate(x, ids)
    agrees(ours, theirs.numpy(), x, ids, rope.inv_freq)
    assert np.array_equal(ours[:, -1], x[:, -1])


CENTRES = [
    ("dinov3_vit", "DINOv3ViTConfig", "DINOv3ViTRopePositionEmbedding", {}),
    ("eomt_dinov3", "EomtDinov3Config", "EomtDinov3RotaryEmbedding", {}),
    ("sapiens2", "Sapiens2Config", "Sapiens2RopePositionEmbedding", {"num_hidden_layers": 24}),
]


@pytest.mark.parametrize(("folder", "config_name", "rotary_name", "values"), CENTRES)
@pytest.mark.parametrize("size", [(112, 112), (64, 160)])
def test_patch_centres(folder, config_name, rotary_name, values, size):
    config = config_of(folder, config_name, patch_size=16, hidden_size=384, num_attention_heads=6, **values)
    rope = RotaryEmbedding.from_spec(vision.read(config.to_dict()))
    rows, columns = size[0] // 16, size[1] // 16
    prefix = 1 + 4
    ids = positions.grid((rows, columns), centred=True, scale=(2 / rows, 2 / columns))
    # Patch centres have no zero id, so the class and register tokens in front are the only ones left alone.
    ids = positions.with_unrotated(ids, before=prefix)
    x = heads(len(ids), 6, 64)
    cos, sin = load(folder, rotary_name)(config).eval()(torch.zeros(1, 3, *size))
    q = torch.from_numpy(x).transpose(1, 2)
    theirs = load(folder, "apply_rotary_pos_emb")(q, q, cos, sin)[0].transpose(1, 2).numpy()
    ours = rope.rotate(x, ids)
    agrees(ours, theirs, x, ids, rope.inv_freq)
    assert np.array_equal(ours[:, :prefix], x[:, :prefix])


def test_efficientloftr_turns_all_heads_as_one_vector():
    config = config_of("efficientloftr", "EfficientLoFTRConfig")
    rope = RotaryEmbedding.from_spec(vision.read(config.to_dict()))
    assert rope.head_dim == config.hidden_size
    cos, sin = load("efficientloftr", "EfficientLoFTRRotaryEmbedding")(config)(torch.zeros(1, 256, 24, 32))
    ids = positions.grid(cos.shape[1:3], start=1)
    x = heads(len(ids), 1, rope.head_dim)
    q = torch.from_numpy(x)
    rows = (cos.reshape(1, len(ids), -1), sin.reshape(1, len(ids), -1))
    theirs = load("efficientloftr", "apply_rotary_pos_emb")(q, q, *rows, unsqueeze_dim=2)[0].numpy()
    agrees(rope.rotate(x, ids), theirs, x, ids, rope.inv_freq)


def test_ernie_text():
    config = config_of("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextConfig", head_dim=128)
    config.rope_parameters["mrope_section"] = [22, 22, 20]
    rope = RotaryEmbedding.from_spec(vision.read(config.to_dict()))
    ids = RANDOM.integers(0, 500, size=(1, 20, 3))
    x = heads(20, 4, 128)
    module = load("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextRotaryEmbedding")(config)
    q = torch.from_numpy(x).transpose(1, 2)
    cos, sin = module(q, torch.from_numpy(ids.transpose(2, 0, 1)))
    theirs = load("ernie4_5_vl_moe", "apply_rotary_pos_emb")(q, q, cos, sin)[0].transpose(1, 2).numpy()
    agrees(rope.rotate(x, ids), theirs, x, ids, rope.inv_freq)


# Folder, text configuration, rotary, and how a user writes it.
TEXTS = [
    ("qwen2_vl", "Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding", (16, 24, 24), False, False),
    ("qwen2_5_vl", "Qwen2_5_VLTextConfig", "Qwen2_5_VLRotaryEmbedding", (16, 24, 24), False, False),
    ("qwen3_vl", "Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", (24, 20, 20), True, False),
    ("glm4v", "Glm4vTextConfig", "Glm4vTextRotaryEmbedding", (8, 12, 12), False, True),
]


@pytest.mark.parametrize(("folder", "config_name", "rotary_name", "section", "dealt", "interleaved"), TEXTS)
def test_mrope_text_equals_its_module(folder, config_name, rotary_name, section, dealt, interleaved):
    config = config_of(folder, config_name, hidden_size=512, num_attention_heads=4)
    config.head_dim = 128
    theta = 1e6
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(section)}
    config.rope_parameters["partial_rotary_factor"] = 2 * sum(section) / 128
    rope = RotaryEmbedding.mrope(128, section, rope_theta=theta, mrope_interleaved=dealt, interleaved=interleaved)
    ids = RANDOM.integers(0, 500, size=(2, 20, 3))
    x = np.repeat(heads(20, 4, 128), 2, axis=0)
    q = torch.from_numpy(x).transpose(1, 2)
    cos, sin = load(folder, rotary_name)(config)(q, torch.from_numpy(ids.transpose(2, 0, 1)))
    theirs = load(folder, "apply_rotary_pos_emb")(q, q, cos, sin)[0].transpose(1, 2).numpy()
    agrees(rope.rotate(x, ids), theirs, x, ids, rope.inv_freq)
    text = rope.rotate(x)
    assert np.array_equal(text, rope.rotate(x, np.repeat(np.arange(20), 3).reshape(20, 3)))


def test_vjepa2_is_refused_because_it_is_no_rotation():
    config = config_of("vjepa2", "VJEPA2Config")
    with pytest.raises(ValueError, match="no rotation"):
        vision.read(config.to_dict())
    rotate = load("vjepa2", "rotate_queries_or_keys")
    x = torch.from_numpy(heads(6, 1, 8)).transpose(1, 2)
    turned = rotate(x, torch.arange(6.0))
    assert not torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-2), (
        "norms are kept: it is a rotation after all"
    )
