"""`rope-cpu show`: its text, checked by hand."""

import pytest

from rope_cpu.cli import show
from rope_cpu.cli.show_summary import layer_rotations
from rope_cpu.command_line import UsageError
from rope_cpu.configs import reader

LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 64,
    "rope_scaling": LONGROPE,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN,
}


def test_llama3(shown):
    lines = shown(LLAMA3)
    assert lines[:3] == [
        "llama, all layers",
        "pairs 64: (i, i+64), half-split",
        "widths 128 of the 128 elements of a head are rotated",
    ]
    # Wavelengths 2π·b^(2i/d): below 8192/4 nothing is scaled, i < 28.2…;
    # above 8192 all is, i > 34.9…
    assert lines[-4:] == [
        "pairs wavelengths in tokens scale",
        "0-28 6.28 to 1960 unscaled",
        "29-34 2900 to 35200 1.21 to 5.26 times as long",
        "35-63 65700 to 2.05e7 8 times as long",
    ]
    assert "rope_theta 500000.0" in lines
    assert "attention factor 1" in lines


def test_both_sides_of_longrope(shown):
    lines = shown(PHI3)
    short = lines.index("0-15 6.28 to 35300 unscaled")
    long = lines.index("0-15 12.6 to 70700 2 times as long")
    assert lines.index("at 64 tokens") < short < lines.index("at 4096 tokens") < long
    assert "short_factor 16 values, 1 … 1" in lines
    assert lines.count("attention factor 1.41421") == 2


def test_pairs_that_are_not_rotated(shown):
    assert "64-255 not rotated" in shown({"model_type": "gemma4_text"})


def test_yarn(shown):
    lines = shown(DEEPSEEK)
    assert lines[-3:] == [
        "0-10 6.28 to 112 unscaled",
        "11-22 161 to 35300 1.08 to 10 times as long",
        "23-31 188000 to 1.88e6 40 times as long",
    ]


def test_one_band_without_scaling(shown):
    lines = shown({"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 1e4}, "--half")
    assert lines[-2:] == ["pairs wavelengths in tokens scale", "0-15 6.28 to 35300 unscaled"]


def test_latent_attention_rotates_a_slice_of_a_head(shown):
    lines = shown(DEEPSEEK)
    assert "widths 64 of the 192 elements of a head are rotated" in lines
    assert any("head_dim 64" in line and "slice" in line for line in lines)
    unknown = {key: value for key, value in DEEPSEEK.items() if key != "qk_nope_head_dim"}
    assert "widths 64 of the 64 elements of a head are rotated" in shown(unknown)


def test_factors_of_deepseek(shown):
    """(0.1·ln 40 + 1)² = 1.8738…, which the attention applies; the rotation has the ratio 1."""
    lines = shown(DEEPSEEK)
    assert "attention factor 1 = m(mscale) / m(mscale_all_dim)" in lines
    assert any(line.startswith("factor of scores 1.8738") for line in lines)


def test_mscale_all_dim_alone_determines_the_factor_of_scores(shown):
    """(0.1·0.5·ln 40 + 1)² = 1.4029…; the rotation has (0.1·ln 40 + 1) / (0.05·ln 40 + 1)."""
    lines = shown({**DEEPSEEK, "rope_scaling": {**YARN, "mscale_all_dim": 0.5}})
    assert any(line.startswith("factor of scores 1.4029") for line in lines)
    assert any(line.startswith("attention factor 1.15572") for line in lines)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama", "head_dim": 64},
        {"rope_scaling": {**YARN, "mscale_all_dim": 0}},
        {"rope_scaling": {key: value for key, value in YARN.items() if "mscale" not in key}},
        {"use_mla": False, "head_dim": 64},
    ],
)
def test_the_factor_of_scores_is_that_of_models_that_apply_it(shown, change):
    assert not any("factor of scores" in line for line in shown({**DEEPSEEK, **change}))


def test_an_attention_factor_of_the_file_is_no_ratio(shown):
    lines = shown({**DEEPSEEK, "rope_scaling": {**YARN, "attention_factor": 1.5}})
    assert "attention factor 1.5" in lines


def test_layers_that_are_not_rotated_get_one_line(shown):
    assert "beam, full_attention: not rotated" in shown({"model_type": "beam"})


def test_several_axes(shown):
    text = {"model_type": "qwen2_vl_text", "hidden_size": 1536, "num_attention_heads": 12}
    lines = shown(text)
    assert "axes 3, which rotate 16, 24, 24 pairs" in lines
    assert "height 16-39 199 to 28500 positions unscaled" in lines
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "head_dim": 64,
    }
    assert any(line.startswith("axes 2") for line in shown(vision))
    assert "column 16-31 6.28 to 471 patches unscaled" in shown(vision)


def test_heads_with_own_frequencies(shown):
    ltx = {
        "_class_name": "LTXVideoTransformer3DModel",
        "attention_head_dim": 64,
        "num_attention_heads": 32,
    }
    lines = shown(ltx)
    assert any(line.startswith("heads 32") and "first" in line for line in lines)
    assert any(line.startswith("none 0") and "not rotated" in line for line in lines)


def test_a_rotation_backwards_is_named(shown):
    assert "direction backwards: the angle is minus position times frequency" in shown(
        {"model_type": "nanochat"}
    )
    assert not any("direction" in line for line in shown(LLAMA3))


def test_a_model_without_a_type(shown):
    assert (
        shown({"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 1e4}, "--half")[0]
        == "unknown model type, all layers"
    )


def test_an_unknown_model_type_needs_the_pairing(shown):
    unknown = {**LLAMA3, "model_type": "mymodel"}
    with pytest.raises(UsageError, match="so the pairing is not known"):
        shown(unknown)
    assert "pairs 64: (2i, 2i+1), interleaved" in shown(unknown, "--interleaved")
    assert "pairs 64: (i, i+64), half-split" in shown(unknown, "--half")


@pytest.mark.parametrize("config", [LLAMA3, PHI3, DEEPSEEK, {"model_type": "gemma4_text"}])
def test_lines_fit_a_terminal(config):
    lines = [
        line
        for rotation in layer_rotations(reader.read(config), None, None)
        for line in show.describe(rotation)
    ]
    assert max(map(len, lines)) <= 80


def test_a_plot_of_nothing_is_refused(shown, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="not rotated"):
        shown(
            {"model_type": "beam"},
            "--layer-type",
            "full_attention",
            "--plot",
            str(tmp_path / "x.png"),
        )
    assert capsys.readouterr().out == ""
