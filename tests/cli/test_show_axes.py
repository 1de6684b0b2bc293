"""Names and units of position axes, by the kind of config."""

import pytest

from rope_cpu.cli.show_axes import position_axes
from rope_cpu.configs import reader
from rope_cpu.configs.diffusers.config import BUILDERS

LLAMA = {"model_type": "llama", "head_dim": 64, "num_attention_heads": 2}
DINO = {"model_type": "dinov3_vit", "hidden_size": 128, "num_attention_heads": 2}


def axes(config, count):
    """Return the names and units of the axes of a config."""
    return [(axis.name, axis.unit) for axis in position_axes(reader.read(config), count)]


def test_text_counts_tokens():
    assert axes(LLAMA, 1) == [("", "tokens")]


@pytest.mark.parametrize("model_type", ["qwen2_vl_text", "ernie4_5_vl_moe"])
def test_mrope(model_type):
    names = [name for name, _ in axes({**LLAMA, "model_type": model_type}, 3)]
    assert names == ["time", "height", "width"]


def test_vision_towers():
    assert axes({**DINO, "model_type": "pixtral"}, 2) == [("row", "patches"), ("column", "patches")]
    assert [name for name, _ in axes({**DINO, "model_type": "minimax_m3_vl_vision"}, 3)] == [
        "time",
        "row",
        "column",
    ]


def test_centres_of_patches_are_fractions():
    for axis in position_axes(reader.read(DINO), 2):
        assert axis.extent == 2
        assert axis.step < 1


# Numbers of axes other than 3.
NUMBERS_OF_AXES = {
    **dict.fromkeys(("Flux2Transformer2DModel", "Flux3Transformer2DModel"), 4),
    **dict.fromkeys(("HunyuanDiT2DModel", "HunyuanDiT2DControlNetModel"), 2),
    **dict.fromkeys(("CogView4Transformer2DModel", "GlmImageTransformer2DModel"), 2),
    **dict.fromkeys(("PRXTransformer2DModel", "HunyuanImageTransformer2DModel"), 2),
    **dict.fromkeys(("AceStepTransformer1DModel", "LongCatAudioDiTTransformer"), 1),
    **dict.fromkeys(("StableAudioDiTModel", "StableAudio3DiTModel"), 1),
    **dict.fromkeys(("MiniMaxMusic3Transformer1DModel", "OmniGenTransformer2DModel"), 1),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_diffusers_rotate_tokens_or_rows_and_columns(name):
    count = NUMBERS_OF_AXES.get(name, 3)
    names = [name for name, _ in axes({"_class_name": name}, count)]
    assert len(names) == count
    if count == 1:
        assert names == [""]
    elif count == 2:
        assert sorted(names) == ["column", "row"]
    else:
        assert names[1:3] in (["row", "column"], ["height", "width"])


def test_hunyuan_dit_counts_columns_first():
    assert [name for name, _ in axes({"_class_name": "HunyuanDiT2DModel"}, 2)] == ["column", "row"]


def test_an_unknown_number_of_axes_is_numbered():
    assert axes(LLAMA, 2) == [("axis 0", "positions"), ("axis 1", "positions")]
