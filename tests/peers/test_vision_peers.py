"""Configs of vision towers, and multimodal text models, against all such of transformers."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.models import reader, vision

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

from configurations import configurations  # noqa: E402


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


def test_every_axial_configuration_of_transformers_is_here():
    """Axial by default: `test_whole_towers` compares each of them."""
    found = set()
    for cls in configurations():
        if "axial" in inspect.getsource(cls):
            section = getattr(cls(), "rope_parameters", None) or {}
            if section.get("rope_type") == "axial":
                found.add(cls.model_type)
    assert len(found) > 30
    assert found <= vision.TOWERS.keys()


MEMORY = "memory_attention"


# Towers of other code, by hand in tests/models/test_vision.py.
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


# Rotary classes of language models with several axes that are refused, and the reason in words.
REFUSED = {"HunYuanVLRotaryEmbedding": "no rotation", "NeoMMERotaryEmbedding": "kinds of layers"}


def language_modules():
    """Return (folder, rotary class, configuration class) of rotaries of several axes, but vision.

    Their sources put together frequencies of several axes.
    """
    root = Path(importlib.import_module("transformers").__file__).parent / "models"
    towers = {cls.__name__ for cls in configurations() if cls.model_type in vision.TOWERS}
    for path in sorted(root.glob("*/modeling_*.py")):
        text = path.read_text()
        if "def recomposition_frequencies" not in text:
            continue
        for node in ast.parse(text).body:
            parts = getattr(node, "body", ())
            methods = {part.name: part for part in parts if isinstance(part, ast.FunctionDef)}
            if "recomposition_frequencies" in methods:
                config_name = methods["__init__"].args.args[1].annotation.id
                if config_name not in towers:
                    yield path.parent.name, node.name, config_name


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
