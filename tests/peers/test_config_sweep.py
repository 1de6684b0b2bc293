"""Every rotary module that transformers builds from a config, against the spec from its dict."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rope_cpu.models import reader, vision

pytestmark = pytest.mark.peers

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
from rotary_modules import frequencies, modules  # noqa: E402

transformers.logging.set_verbosity_error()

# Modules that are not compared, and why. Keys are module class names.
NOT_COMPARED = {
    "HunYuanVLRotaryEmbedding": "refused: the members of a pair take different axes",
    "NeoMMERotaryEmbedding": "refused: two axes on alternate pairs, for which it has no key",
    "ClvpRotaryPositionalEmbedding": "refused: a width of its own, and it rotates values",
    "SeamlessM4TConformerRotaryPositionalEmbedding": "the rule of wav2vec2-conformer",
    "EvollaSaProtRotaryEmbedding": "no model type; ESM's rotation, read with interleaved=False",
    "EfficientLoFTRRotaryEmbedding": "refused: two axes, with a share of 4 heads",
    "EomtDinov3RotaryEmbedding": "refused: two axes; DINOv3's rotation",
    "Sapiens2RopePositionEmbedding": "refused: two axes; DINOv3's rotation",
    "MusicFlamingoRotaryEmbedding": "refused: rotates by seconds, and states, not heads",
    "MistralLarge4TextRotaryEmbedding": "refused: it multiplies frequencies by a weight",
    "NeuCodecRotaryEmbedding": "refused: it rotates each head by its index",
    "Xcodec2RotaryEmbedding": "refused: it rotates each head by its index",
    "Qwen2_5OmniDiTRotaryEmbedding": "it rotates one head; see test_whole_attention.py",
    "DINOv3ViTRopePositionEmbedding": "its coordinates hold the 2π; see test_vision.py",
    "Llama4VisionRotaryEmbedding": "holds angles, not frequencies; see test_vision.py",
}

# Default configs that fail in their own forward or lack a key for rotation, with keys to fix them.
MENDED: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridConfig": {
        "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * 32,
    },
    "Zamba2Config": {"use_mem_rope": True},
    "EsmConfig": {"position_embedding_type": "rotary"},
    "Wav2Vec2BertConfig": {"position_embeddings_type": "rotary"},
    "Wav2Vec2ConformerConfig": {"position_embeddings_type": "rotary"},
    "Glm4vTextConfig": {"partial_rotary_factor": 0.5},
    "Glm4vMoeTextConfig": {"head_dim": 128},
    "GlmImageTextConfig": {"partial_rotary_factor": 0.5},
    "Qwen3OmniMoeTextConfig": {"head_dim": 128},
    "Qwen3OmniMoeConfig": {"thinker_config": {"text_config": {"head_dim": 128}}},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in (("full_attention", 5e5), ("sliding_attention", 1e4))
        }
    },
}

# Modules annotated with the config of a whole model, and the part they are built from.
PARTS = {
    "BltRotaryEmbedding": "decoder_config",
    "DiaRotaryEmbedding": "decoder_config",
    "DeepseekOcr2VisionRotaryEmbedding": "encoder_config",
    "T5GemmaRotaryEmbedding": "decoder",
    "Nemotron3DiarizationRotaryEmbedding": "audio_config",
    "GlmAsrRotaryEmbedding": "audio_config",
}


def default_config(rotary: type, config_class: type) -> Any:
    """Return the default config, or of a whole model's config the part that the module takes."""
    whole = config_class(**MENDED.get(config_class.__name__, {}))
    if rotary.__name__ in PARTS:
        return getattr(whole, PARTS[rotary.__name__])
    if getattr(whole, "rope_parameters", None) is None:
        for key in ("text_config", "thinker_config"):
            if hasattr(whole, key):
                part = getattr(whole, key)
                return getattr(part, "text_config", part)
    return whole


def compare(given: dict[str, Any], expected: dict[str | None, tuple[np.ndarray, float]]) -> None:
    for layer_type, (inv_freq, factor) in expected.items():
        spec = reader.read(given).spec(layer_type=layer_type, angle_dtype="float32")
        ours = np.abs(spec.inv_freq[0, :, 0].sum(axis=0))  # nanochat rotates backwards
        ours = np.trim_zeros(ours, "f")  # DeepSeek V4 rotates the last elements
        is_ernie = given["model_type"].startswith("ernie4_5_vl")
        if (spec.axes > 1 and spec.rope_type != "default") or is_ernie:
            # test_vision.py tests which pair has which axis.
            ours, inv_freq = (np.unique(values) for values in (ours, inv_freq))
        assert ours.shape == inv_freq.shape
        np.testing.assert_allclose(ours, inv_freq, rtol=1e-6)
        assert float(spec.attention_factor[0]) == pytest.approx(factor, rel=1e-6)


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("form", ["to_dict", "to_diff_dict"])
@pytest.mark.parametrize(("folder", "rotary", "config_class"), modules(), ids=name_of)
def test_default_config(folder: str, rotary: type, config_class: type, form: str) -> None:
    if rotary.__name__ in NOT_COMPARED:
        pytest.skip(NOT_COMPARED[rotary.__name__])
    cfg = default_config(rotary, config_class)
    compare({"model_type": cfg.model_type, **getattr(cfg, form)()}, frequencies(rotary(cfg)))


ORIGINAL = "original_max_position_embeddings"
SECTIONS = {
    "default": {"partial_rotary_factor": 0.5},
    "linear": {"factor": 3.5, "partial_rotary_factor": 0.5},
    "yarn": {"factor": 7.0, ORIGINAL: 1024, "beta_fast": 24.0, "beta_slow": 2.0},
    "llama3": {"factor": 6.0, ORIGINAL: 512, "low_freq_factor": 1.5, "high_freq_factor": 5.0},
}


# Sections that transformers takes but fails on, because the frequencies do not have the width of
# the rotated slice.
BROKEN = {("Mistral4RotaryEmbedding", "default"), ("DeepseekV4RotaryEmbedding", "default")}


# What transformers itself refuses or fails on, by module: rope types, and forms of old files.
THEIRS: dict[str, str] = {
    "BeamRotaryEmbedding": "old-scaling old-partial old-yarn",
    "CohereCompassRotaryEmbedding": "old-scaling old-partial old-yarn",
    "Cosmos3EdgeTextRotaryEmbedding": "default linear yarn llama3 old-scaling old-yarn",
    "DiffusionGemmaTextRotaryEmbedding": "old-scaling old-partial old-yarn",
    "DoryRotaryEmbedding": "old-scaling old-yarn",
    "EmbeddingGemma2RotaryEmbedding": "old-scaling old-partial old-yarn",
    "Ernie4_5_VLMoeTextRotaryEmbedding": "linear yarn llama3 old-scaling old-yarn",
    "Gemma4TextRotaryEmbedding": "old-scaling old-partial old-yarn",
    "Gemma4UnifiedTextRotaryEmbedding": "old-scaling old-partial old-yarn",
    "Glm4MoeRotaryEmbedding": "yarn old-yarn",
    "HunYuanDenseV1RotaryEmbedding": "yarn old-yarn",
    "HunYuanMoEV1RotaryEmbedding": "yarn old-yarn",
    "LagunaRotaryEmbedding": "old-scaling old-partial old-yarn",
    "Lfm3RotaryEmbedding": "old-scaling old-yarn",
    "MellumRotaryEmbedding": "old-scaling old-partial old-yarn",
    "MiMoV2FlashRotaryEmbedding": "old-scaling old-partial old-yarn",
    "MiniMaxRotaryEmbedding": "yarn old-yarn",
    "MinistralRotaryEmbedding": "yarn old-yarn",
    "MixtralRotaryEmbedding": "yarn old-yarn",
    "Phi3RotaryEmbedding": "linear yarn llama3 old-scaling old-yarn",
    "Phi4MultimodalRotaryEmbedding": "linear yarn llama3 old-scaling old-yarn",
    "PhimoeRotaryEmbedding": "linear yarn llama3 old-scaling old-yarn",
    "RecurrentGemmaRotaryEmbedding": "linear yarn llama3 old-scaling old-yarn",
    "UltrabertRotaryEmbedding": "old-theta old-scaling old-partial old-yarn",
    "Wav2Vec2BertRotaryPositionalEmbedding": "old-yarn",
    "Wav2Vec2ConformerRotaryPositionalEmbedding": "old-yarn",
    "ZayaRotaryEmbedding": "old-scaling old-partial old-yarn",
}


# A config class that shares a module, and on which the module does not fail.
NOT_THEIRS = ("SarvamMoEConfig",)


def theirs(rotary: type, config_class: type, form: str, make: Callable[[], Any]) -> Any:
    """Return the result of transformers for a file; skip only the known failures."""
    fails = form in THEIRS.get(rotary.__name__, "").split()
    if fails and config_class.__name__ not in NOT_THEIRS:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of any kind
            make()
        pytest.skip("transformers fails on this file")
    return make()


@pytest.mark.parametrize("rope_type", SECTIONS)
@pytest.mark.parametrize(("folder", "rotary", "config_class"), modules(), ids=name_of)
def test_other_sections(folder: str, rotary: type, config_class: type, rope_type: str) -> None:
    if rotary.__name__ in NOT_COMPARED:
        pytest.skip(NOT_COMPARED[rotary.__name__])
    if config_class.default_rope_type != "default" or config_class.model_type in vision.TOWERS:
        pytest.skip("a vision tower: test_vision.py")
    default = default_config(rotary, config_class)
    section = {"rope_type": rope_type, "rope_theta": 54321.0, **SECTIONS[rope_type]}
    if not getattr(default, "rope_parameters", None) or (rotary.__name__, rope_type) in BROKEN:
        pytest.skip("this model has no rope section, or fails on this one")
    of_axes = default.model_type.startswith("qwen3_omni")
    if (
        of_axes
        or hasattr(default, "qk_rope_head_dim")
        or any("mrope" in inspect.getsource(cls) for cls in rotary.__mro__[:-2])
    ):
        section.pop("partial_rotary_factor", None)  # another key has the width, which axes share
    layers = default.nested_rope_parameter_keys(getattr(default, "rope_parameters", None) or {})
    nested = {layer: dict(section) for layer in layers} if layers else section
    keys = {**MENDED.get(type(default).__name__, {}), "rope_parameters": nested}

    def read() -> tuple[Any, Any]:
        cfg = type(default)(**keys)
        return cfg, frequencies(rotary(cfg))

    cfg, expected = theirs(rotary, config_class, rope_type, read)
    compare({"model_type": cfg.model_type, **cfg.to_dict()}, expected)


# Files in the old form, as far as they speak of the rotation; each is read by the class itself.
OLD_FORMS: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 54321.0},
    "scaling": {"rope_theta": 54321.0, "rope_scaling": {"rope_type": "linear", "factor": 3.5}},
    "partial": {"rope_theta": 54321.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 5.0, ORIGINAL: 777}},
}


# Differences in the answers, and why: by module, forms of files. Refusals of ours stand below.
IGNORED = "transformers takes no notice of rope_theta; the model's own code, or vLLM, does"
WIDTH = "transformers' frequencies do not have the width of the slice that it rotates"
OTHERWISE = {
    "GPTJRotaryEmbedding": ("theta partial", IGNORED),
    "CodeGenRotaryEmbedding": ("theta partial", IGNORED),
    "MiMoV2FlashRotaryEmbedding": ("theta", IGNORED),
    "Glm4MoeLiteRotaryEmbedding": ("partial", WIDTH),
    "MistralLarge4TextRotaryEmbedding": ("partial", WIDTH),
    "Mistral4RotaryEmbedding": ("scaling yarn", WIDTH),
}
REFUSED_OLD = {
    # Its code knows no scaling.
    "CodeGenRotaryEmbedding": "scaling yarn",
    "EsmRotaryEmbedding": "scaling yarn",
    "GPTJRotaryEmbedding": "scaling yarn",
    "Wav2Vec2BertRotaryPositionalEmbedding": "scaling",
    "Wav2Vec2ConformerRotaryPositionalEmbedding": "scaling",
    # Its class reads rope_parameters only.
    "Cohere2MoeRotaryEmbedding": "scaling yarn",
    # One section for layers with a base each.
    "Dots3NoteTextRotaryEmbedding": "scaling yarn",
    # Its default mrope_section does not fit.
    "GlmOcrTextRotaryEmbedding": "partial",
}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("form", OLD_FORMS)
@pytest.mark.parametrize(("folder", "rotary", "config_class"), modules(), ids=name_of)
def test_old_forms(folder: str, rotary: type, config_class: type, form: str) -> None:
    if rotary.__name__ in NOT_COMPARED or config_class.default_rope_type != "default":
        pytest.skip(NOT_COMPARED.get(rotary.__name__, "a vision tower: test_vision.py"))
    if config_class.model_type in vision.TOWERS:
        pytest.skip("a vision tower: test_vision.py")
    cls = type(default_config(rotary, config_class))
    given = {"model_type": cls.model_type, **MENDED.get(cls.__name__, {}), **OLD_FORMS[form]}

    def make() -> Any:
        return frequencies(rotary(cls.from_dict(copy.deepcopy(given))))

    expected = theirs(rotary, config_class, f"old-{form}", make)
    forms, reason = OTHERWISE.get(rotary.__name__, ("", ""))
    if form in forms.split():
        pytest.skip(reason)
    if form in REFUSED_OLD.get(rotary.__name__, "").split():
        with pytest.raises(ValueError, match="`"):
            reader.read(given).spec()
        return
    compare(given, expected)
