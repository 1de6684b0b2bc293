"""Vision towers and multimodal text models against all such modules of transformers."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding, positions
from rope_cpu.configs import reader, vision

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.peers


def load(folder, name):
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)


def config_of(folder, name, **values):
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    return getattr(module, name)(**values)


@pytest.fixture
def heads(rng):
    """Random float32 vectors, (1, tokens, heads, head_dim)."""
    return lambda *shape: rng.normal(size=(1, *shape)).astype(np.float32)


def agrees(ours, theirs, x, ids, inv_freq):
    """Assert that both are the same rotation within the rounding of float32.

    The angles may also differ by a rounding of each factor of theirs: frequency (a few roundings of
    a power), product, cos and sin, each half an ulp.
    """
    angle = np.abs(np.asarray(ids, float)) @ np.abs(inv_freq)
    bound = np.abs(x).max() * 2 * (6 * 2**-24 * angle.max() * 4 + 16 * 2**-24)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
    assert np.abs(ours - x).max() > 0.1, "nothing was rotated: the comparison proves nothing"


# Model folder, stems of the configuration class and of the rotary class, name of the apply
# function. Positions are (tokens, 2).
HALF = "apply_rotary_pos_emb_vision"
FLAT = "apply_rotary_pos_emb_2d"
STEMS = {
    "cohere_compass": "CohereCompassVision",
    "dots3_note": "Dots3NoteVision",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeVision",
    "exaone4_5": "Exaone4_5_Vision",
    "glm4v": "Glm4vVision",
    "glm4v_moe": "Glm4vMoeVision",
    "glm5_next": "Glm5NextVision",
    "glm_ocr": "GlmOcrVision",
    "inkling2": "Inkling2Vision",
    "kimi_k25": "Kimi_K25Vision",
    "lfm3_vl": "Lfm3VlVision",
    "minimax_m3_vl": "MiniMaxM3VLVision",
    "muse_glimmer": "MuseGlimmerVision",
    "muse_spark": "MuseSparkVision",
    "paddleocr_vl": "PaddleOCRVision",
    "qwen2_5_vl": "Qwen2_5_VLVision",
    "qwen2_vl": "Qwen2VLVision",
    "qwen3_5": "Qwen3_5Vision",
    "qwen3_5_moe": "Qwen3_5MoeVision",
    "qwen3_vl": "Qwen3VLVision",
    "qwen3_vl_moe": "Qwen3VLMoeVision",
    "qwen4_exp": "Qwen4ExpVision",
    "step3p7": "Step3p7Vision",
    "video_llama_3": "VideoLlama3Vision",
}
TOWERS = [
    *((folder, stem, stem, HALF) for folder, stem in STEMS.items()),
    ("mlcd", "MLCDVision", "MLCD", HALF),
    ("qwen2_5_omni", "Qwen2_5OmniVisionEncoder", "Qwen2_5OmniVision", HALF),
    ("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder", "Qwen3OmniMoeVision", HALF),
    ("pixtral", "PixtralVision", "PixtralVision", "apply_rotary_pos_emb"),
    ("sam3", "Sam3ViT", "Sam3ViT", FLAT),
    ("sam2_video", "Sam2Video", "Sam2VideoVision", FLAT),
    ("sam3_tracker_video", "Sam3TrackerVideo", "Sam3TrackerVideoVision", FLAT),
    ("edgetam_video", "EdgeTamVideo", "EdgeTamVideoVision", f"{FLAT}_self_attn"),
    ("gemma4", "Gemma4Vision", "Gemma4Vision", "apply_multidimensional_rope"),
]


@pytest.fixture(params=TOWERS, ids=lambda row: row[0])
def tower(request):
    """Return the folder of a tower, its config, its rotary module, and its apply function."""
    folder, config_stem, rotary_stem, function = request.param
    config = config_of(folder, f"{config_stem}Config")
    return folder, config, load(folder, f"{rotary_stem}RotaryEmbedding")(config), function


def theirs_applied(function, apply, x, cos, sin, ids):
    """Call a model's own function the way its attention does; x is (1, tokens, heads, head_dim)."""
    q = torch.from_numpy(x)
    if function == HALF:
        return apply(q[0], q[0], cos, sin)[0][None]
    if function == "apply_multidimensional_rope":
        return apply(q, cos, sin, ids)
    rows = (cos[None], sin[None]) if function == "apply_rotary_pos_emb" else (cos, sin)
    return apply(q.transpose(1, 2), q.transpose(1, 2), *rows)[0].transpose(1, 2)


def test_tower_equals_its_module(tower, heads):
    folder, config, module, function = tower
    rope = RotaryEmbedding.from_config(config.to_dict())
    grid = positions.grid((3, 7, 9)[3 - rope.axes :])
    x = heads(len(grid), 4, rope.head_dim)
    ids = torch.from_numpy(grid)
    ids = ids[None] if folder == "gemma4" else ids
    cos, sin = module(torch.from_numpy(x), ids)
    theirs = theirs_applied(function, load(folder, function), x, cos, sin, ids).numpy()
    agrees(rope.rotate(x, grid), theirs, x, grid, rope.inv_freq)


def test_float32_frequencies_are_theirs(tower):
    """They agree bit by bit, except that torch's power may err by a unit in the last place."""
    _, config, module, _ = tower
    rope = RotaryEmbedding.from_config(config.to_dict(), angle_dtype="float32")
    theirs = np.unique(module.inv_freq.double().numpy())
    ours = np.unique(rope.inv_freq[rope.inv_freq != 0])
    assert (ours == theirs).mean() > 0.9
    np.testing.assert_allclose(ours, theirs, rtol=2**-23)


def configurations():
    """Return the configuration classes of transformers that have a model type."""
    models = importlib.import_module("transformers.models")
    base = importlib.import_module("transformers").PreTrainedConfig
    found = []
    for module in pkgutil.iter_modules(models.__path__):
        name = f"transformers.models.{module.name}.configuration_{module.name}"
        try:
            members = vars(importlib.import_module(name)).values()
        except ModuleNotFoundError:
            continue
        own = [cls for cls in members if inspect.isclass(cls) and cls.__module__ == name]
        found += [cls for cls in own if issubclass(cls, base) and cls.model_type]
    return found


def test_every_axial_configuration_of_transformers_is_here():
    """Each axial configuration by default is compared above, under its own model type."""
    found = {}
    for cls in configurations():
        if "axial" in inspect.getsource(cls):
            section = getattr(cls(), "rope_parameters", None) or {}
            if section.get("rope_type") == "axial":
                found[cls.__module__.split(".")[2], cls.__name__] = cls.model_type
    compared = {(folder, f"{stem}Config") for folder, stem, *_ in TOWERS}
    deprecated = {("ernie4_5_vl_moe", "Ernie4_5_VL_MoeVisionConfig")}
    assert set(found) - compared - deprecated == set()
    assert all(model_type in vision.TOWERS for model_type in found.values())


MEMORY = "memory_attention"


# Towers of other code, by hand in tests/configs/test_vision.py.
OTHERS = {"moonvit"}


@pytest.mark.parametrize("model_type", sorted(vision.TOWERS.keys() - OTHERS))
def test_missing_keys_have_the_values_of_the_class(model_type):
    (cls, *_) = (cls for cls in configurations() if cls.model_type == model_type)
    whole = cls().to_dict()
    assert reader.read({"model_type": model_type}).spec() == reader.read(whole).spec()
    (heads,) = {"num_heads", "num_attention_heads", f"{MEMORY}_num_attention_heads"} & whole.keys()
    changed = cls(**{heads: 2 * whole[heads]}).to_dict()
    saved = {key: value for key, value in changed.items() if value != whole[key]}
    spec = reader.read({**saved, "model_type": model_type}).spec()
    assert spec == reader.read(changed).spec()


def test_vision_parts_have_the_type_that_transformers_gives_them():
    found = {
        cls.model_type: spec.model_type
        for cls in configurations()
        for key, spec in (cls.sub_configs_defaults or {}).items()
        if key == "vision_config"
    }
    # The vision parts of two models are those of their thinkers.
    thinkers = {
        name: vision.PARTS[f"{name}_thinker"] for name in ("qwen2_5_omni", "qwen3_omni_moe")
    }
    assert found | thinkers == vision.PARTS


def test_llama4_vision(heads):
    config = config_of("llama4", "Llama4VisionConfig", image_size=112, patch_size=14)
    rope = RotaryEmbedding.from_config(config.to_dict())
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
def test_patch_centres(folder, config_name, rotary_name, values, size, heads):
    config = config_of(
        folder, config_name, patch_size=16, hidden_size=384, num_attention_heads=6, **values
    )
    rope = RotaryEmbedding.from_config(config.to_dict())
    rows, columns = size[0] // 16, size[1] // 16
    prefix = 1 + 4
    ids = positions.grid((rows, columns), centred=True, scale=(2 / rows, 2 / columns))
    # Patch centres have no zero id, so only the class and register tokens in front stay unrotated.
    ids = positions.with_unrotated(ids, before=prefix)
    x = heads(len(ids), 6, 64)
    cos, sin = load(folder, rotary_name)(config).eval()(torch.zeros(1, 3, *size))
    q = torch.from_numpy(x).transpose(1, 2)
    theirs = load(folder, "apply_rotary_pos_emb")(q, q, cos, sin)[0].transpose(1, 2).numpy()
    ours = rope.rotate(x, ids)
    agrees(ours, theirs, x, ids, rope.inv_freq)
    assert np.array_equal(ours[:, :prefix], x[:, :prefix])


def test_efficientloftr_turns_all_heads_as_one_vector(heads):
    config = config_of("efficientloftr", "EfficientLoFTRConfig")
    rope = RotaryEmbedding.from_config(config.to_dict())
    assert rope.head_dim == config.hidden_size
    cos, sin = load("efficientloftr", "EfficientLoFTRRotaryEmbedding")(config)(
        torch.zeros(1, 256, 24, 32)
    )
    ids = positions.grid(cos.shape[1:3], start=1)
    x = heads(len(ids), 1, rope.head_dim)
    q = torch.from_numpy(x)
    rows = (cos.reshape(1, len(ids), -1), sin.reshape(1, len(ids), -1))
    theirs = load("efficientloftr", "apply_rotary_pos_emb")(q, q, *rows, unsqueeze_dim=2)[0].numpy()
    agrees(rope.rotate(x, ids), theirs, x, ids, rope.inv_freq)


# Rotary classes of language models with several axes that are refused, and the reason in words.
REFUSED = {"HunYuanVLRotaryEmbedding": "no rotation", "NeoMMERotaryEmbedding": "kinds of layers"}


def language_modules():
    """Return (folder, rotary class, configuration class) of rotaries of several axes, but vision.

    Their sources put together frequencies of several axes. Those compared above are left out.
    """
    root = Path(importlib.import_module("transformers").__file__).parent / "models"
    compared = {f"{stem}RotaryEmbedding" for _, _, stem, _ in TOWERS}
    for path in sorted(root.glob("*/modeling_*.py")):
        text = path.read_text()
        if "def recomposition_frequencies" not in text:
            continue
        for node in ast.parse(text).body:
            parts = getattr(node, "body", ())
            methods = {part.name: part for part in parts if isinstance(part, ast.FunctionDef)}
            if "recomposition_frequencies" in methods and node.name not in compared:
                yield path.parent.name, node.name, methods["__init__"].args.args[1].annotation.id


LANGUAGE = list(language_modules())


def test_the_sweep_finds_the_models_it_must():
    found = {folder for folder, *_ in LANGUAGE}
    known = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe", "qwen2_5_omni"}
    assert known | {"qwen3_5"} <= found
    assert len(found) >= 17


def language_config(folder, config_name):
    """Return a configuration with heads of 128 and fitting shares of the axes.

    The defaults often do not fit.
    """
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    # Some classes are annotated with the whole model's configuration but get the language model's.
    part = (
        re.sub(r"(VL|Text)?Config$", "TextConfig", config_name),
        re.sub("Config$", "TextConfig", config_name),
    )
    name = next((name for name in part if hasattr(module, name)), config_name)
    values = getattr(module, name)(hidden_size=512, num_attention_heads=4, num_key_value_heads=4)
    if not hasattr(values, "qk_rope_head_dim"):  # which latent attention rotates alone
        values.head_dim = 128
    sections = values.rope_parameters or {kind: {} for kind in set(values.layer_types)}
    nested = isinstance(next(iter(sections.values())), dict)
    for section in sections.values() if nested else [sections]:
        pairs = int(values.head_dim * section.get("partial_rotary_factor", 1)) // 2
        third = pairs // 3
        shares = [pairs - 2 * third, third, third]
        section.setdefault("rope_type", "default")
        section.setdefault("rope_theta", 20000.0)
        section["mrope_section"] = shares[::-1] if folder == "ernie4_5_vl_moe" else shares
    values.rope_parameters = sections
    return values


@pytest.mark.parametrize(
    ("folder", "rotary_name", "config_name"), LANGUAGE, ids=lambda value: value[:24]
)
def test_language_model_with_several_axes_equals_its_module(
    folder, rotary_name, config_name, heads, rng
):
    values = language_config(folder, config_name)
    nested = {key for key, section in values.rope_parameters.items() if isinstance(section, dict)}
    for layer_type in nested or {None}:
        if rotary_name in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[rotary_name]):
                RotaryEmbedding.from_config(values.to_dict(), layer_type=layer_type)
            continue
        rope = RotaryEmbedding.from_config(values.to_dict(), layer_type=layer_type)
        ids = rng.integers(0, 500, size=(2, 20, 3))
        x = np.repeat(heads(20, 4, rope.head_dim), 2, axis=0)
        q = torch.from_numpy(x).transpose(1, 2)
        more = () if layer_type is None else (layer_type,)
        by_axis = torch.from_numpy(ids.transpose(2, 0, 1))
        cos, sin = load(folder, rotary_name)(values)(q, by_axis, *more)
        theirs = load(folder, "apply_rotary_pos_emb")(q, q, cos, sin)[0].transpose(1, 2).numpy()
        agrees(rope.rotate(x, ids), theirs, x, ids, rope.inv_freq)
        # A text token has the same id on all axes, so none need be given.
        equal = np.repeat(np.arange(20), 3).reshape(20, 3)
        assert np.array_equal(rope.rotate(x), rope.rotate(x, equal))


# How a user writes them without a configuration.
BY_HAND = [
    ("qwen2_vl", "Qwen2VLTextConfig", (16, 24, 24), False, False),
    ("qwen2_5_vl", "Qwen2_5_VLTextConfig", (16, 24, 24), False, False),
    ("qwen3_vl", "Qwen3VLTextConfig", (24, 20, 20), True, False),
    ("glm4v", "Glm4vTextConfig", (8, 12, 12), False, True),
]


@pytest.mark.parametrize(
    ("folder", "config_name", "section", "mrope_interleaved", "interleaved"), BY_HAND
)
def test_mrope_by_hand_is_the_configured_one(
    folder, config_name, section, mrope_interleaved, interleaved
):
    values = config_of(folder, config_name, hidden_size=512, num_attention_heads=4).to_dict()
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(section)}
    if sum(section) != 64:
        parameters["partial_rotary_factor"] = 2 * sum(section) / 128
    values |= {"head_dim": 128, "rope_parameters": parameters}
    by_hand = RotaryEmbedding.mrope(
        128, section, rope_theta=1e6, mrope_interleaved=mrope_interleaved, interleaved=interleaved
    )
    assert by_hand == RotaryEmbedding.from_config(values)


def test_vjepa2_is_refused_because_it_is_no_rotation(heads):
    config = config_of("vjepa2", "VJEPA2Config")
    with pytest.raises(ValueError, match="no rotation"):
        RotaryEmbedding.from_config(config.to_dict())
    rotate = load("vjepa2", "rotate_queries_or_keys")
    x = torch.from_numpy(heads(6, 1, 8)).transpose(1, 2)
    rotated = rotate(x, torch.arange(6.0))
    assert not torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1), atol=1e-2), (
        "norms are kept: it is a rotation after all"
    )
