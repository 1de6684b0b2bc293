"""`rope-cpu show`: its facts and its table, checked by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from text_configs import LLAMA3, PHI3

from rope_cpu.cli import show
from rope_cpu.cli.command_line import UsageError
from rope_cpu.cli.groups import layer_groups
from rope_cpu.cli.pairs import Axis, Pairs
from rope_cpu.frequencies.rope_types import ROPE_TYPES, RopeType, dynamic
from rope_cpu.models import reader

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
UNKNOWN = {"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 1e4}
SIZES = {"hidden_size": 1536, "num_attention_heads": 12}
LTX = {"_class_name": "LTXVideoTransformer3DModel"}
LTX |= {"attention_head_dim": 64, "num_attention_heads": 32}
DYNAMIC = {"max_position_embeddings": 100, "rope_scaling": {"type": "dynamic", "factor": 2.0}}


def test_the_screen_of_llama3(shown):
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
        "0-28 6.283 to 1956 unscaled",
        "29-34 2900 to 3.52e+04 1.207 to 5.257 times as long",
        "35-63 6.575e+04 to 2.047e+07 8 times as long",
    ]


def test_both_sides_of_longrope(shown):
    lines = shown(PHI3)
    short = lines.index("0-15 6.283 to 3.533e+04 unscaled")
    long = lines.index("0-15 12.57 to 7.067e+04 2 times as long")
    assert lines.index("at 64 tokens") < short < lines.index("at 4096 tokens") < long
    assert lines.count("attention factor 1.41421") == 2


DATA = Path(__file__).parents[1] / "data"
REAL_CONFIGS = json.loads((DATA / "published_configs.json").read_text())


@pytest.mark.parametrize(
    "name",
    ["llama3.1-8b", "gemma3-27b", "gpt_oss-120b", "phi3-mini-128k", "diffusers/flux-schnell"],
)
def test_json_has_all_that_the_screen_has(name, shown):
    """The text is made of a document that JSON holds; its lists are in brackets, tuples are not."""
    config = REAL_CONFIGS[name]["config"]
    document = json.loads("".join(shown(config, "--json")))
    words = " ".join(line for group in document for line in show.text_lines(group)).split()
    assert [word.strip("[]") for word in words] == " ".join(shown(config)).split()
    for group in document:
        for part in group["by_length"].values():
            pairs = [pair for band in part["bands"] for pair in band["pairs"]]
            assert pairs == list(range(part["rotary_dim"] // 2))


def test_json_of_layers_without_rotation(shown):
    (group,) = json.loads(
        "".join(shown({"model_type": "beam"}, "--json", "--layer-type", "full_attention"))
    )
    assert group["layers"] == "full_attention: not rotated"
    assert group["facts"] == group["by_length"] == {}


def test_json_is_the_only_output_beside_a_picture(shown, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.svg"
    assert json.loads("".join(shown(LLAMA3, "--json", "--plot", str(picture))))
    assert picture.exists()


def with_yarn(**changes):
    """Return the config of DeepSeek with changes of its section."""
    return {**DEEPSEEK, "rope_scaling": {**YARN, **changes}}


RMS = "before the rotation: RMS norm of each head,"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PHI3, ["short_factor 16 values, 1 … 1", "frequencies by length up to 64 the short fac"]),
        ({**LLAMA3, **DYNAMIC}, ["frequencies by length up to 100 one base, from 101 another at"]),
        ({**SIZES, "model_type": "qwen2_vl_text", **DYNAMIC}, ["at 100 tokens", "at 400 tokens"]),
        # (0.1·μ·ln 40 + 1)² of the scores: 1.8738… for mscale_all_dim μ = 1, 1.4029… for 0.5;
        # the rotation has the ratio (0.1·ln 40 + 1) / (0.1·μ·ln 40 + 1).
        (DEEPSEEK, ["attention factor 1 = m(mscale) / m(m", "factor of scores 1.8738"]),
        (with_yarn(mscale_all_dim=0.5), ["attention factor 1.15572 =", "factor of scores 1.4029"]),
        (DEEPSEEK, ["widths 64 of the 192 elements", "cache compressed keys and values (latent"]),
        (
            DEEPSEEK,
            ["0-10 6.283 to 111.7 unscaled", "23-31 1.885e+05 to 1.885e+06 40 times as long"],
        ),
        ({"model_type": "gemma4_text"}, ["64-255 not rotated"]),
        ({"model_type": "beam"}, ["beam, full_attention: not rotated"]),
        ({"model_type": "nanochat"}, ["direction backwards: the angle"]),
        ({"model_type": "qwen3"}, [f"norms of q and k {RMS}", "eps 1e-06"]),
        ({"model_type": "gemma3_text"}, [f"norms of q and k {RMS}", "eps 1e-06, weights + 1"]),
        ({"model_type": "nanochat"}, ["norms of q and k after the rotation", "eps 1e-06, no w"]),
        ({"model_type": "olmo2"}, ["norms of q and k before the rotation: over the whole"]),
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 15},
            ["norm of v RMS norm of each head, eps", "shared keys and values in the last 15"],
        ),
        ({"model_type": "gptj"}, ["heads of q, and of k and v 16, 16"]),
        ({"model_type": "mistral"}, ["heads of q, and of k and v 32, 8"]),
        ({"model_type": "deepseek_v4"}, ["cache one vector is key and value, and the"]),
        (
            {**SIZES, "model_type": "qwen2_vl_text"},
            [
                "axes 3, which rotate 16, 24, 24 pairs",
                "height 16-39 198.7 to 2.847e+04 positions unsc",
            ],
        ),
        (
            {**SIZES, "model_type": "gemma4_vision", "head_dim": 64},
            ["axes 2", "row 16-31 6.283 to 471.2 patches unscaled"],
        ),
        (
            {"model_type": "sam3_vit_model"},
            ["positions in a window from 0; in layers of global", "column 0-15 6.283"],
        ),
        ({"model_type": "hy_v4"}, ["indexer (i, i+32), half-split, the last 64 of the 128"]),
        (LTX, ["heads 32 with own frequencies; below: the first", "none 0"]),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else value[0][:20],
)
def test_facts(config, expected, shown):
    lines = shown(config)
    for start in expected:
        assert any(line.startswith(start) for line in lines), lines


GEMMA3_27B = {"head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024}
NO_IMAGES = "no argument for attention in both directions among tokens of an image"
NO_BETA = (
    "no argument for queries scaled by their position, by 1 + llama_4_scaling_beta·ln(1 + ⌊pos"
)
NO_TUNING = "queries of layers without rotation, scaled by their position, by 1 + att"
CALLS = [
    ({"model_type": "llama"}, ["call attention(q, cache, batch)"], ["no argument"]),
    ({"model_type": "mistral"}, ["call attention(q, cache, batch, window=4096)"], []),
    (
        {"model_type": "gemma3", "text_config": GEMMA3_27B},
        [
            "call attention(q, cache, batch, window=1024, scale=0.07715167498104596)",
            "call attention(q, cache, batch, scale=0.07715167498104596)",
            NO_IMAGES,
        ],
        [],
    ),
    (
        {"model_type": "gpt_oss"},
        [
            "call, full_attention attention(q, cache, batch, sinks=sinks)",
            "call, sliding_attention attention(q, cache, batch, window=128, sinks=sinks)",
        ],
        [],
    ),
    (
        {"model_type": "gemma2"},
        ["call, full_attention attention(q, cache, batch, softcap=50.0"],
        [],
    ),
    ({"model_type": "ministral3"}, ["call attention(", NO_BETA], []),
    ({"model_type": "llama4_text"}, [NO_TUNING, "no argument for chunks of 8192 tokens"], []),
    ({"model_type": "llama4_text", "attn_temperature_tuning": False}, [], [NO_TUNING]),
    ({"model_type": "deepseek_v3"}, ["cache compressed keys and values"], ["call"]),
    ({"model_type": "esm", "position_embedding_type": "rotary"}, ["no argument for att"], ["call"]),
    (
        {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]},
        ["no argument for an attention of its own: `architectures` has 'DFlashDraftModel', no cl"],
        ["call"],
    ),
    ({"model_type": "llama", "sliding_window": 7}, ["window 7 keys, in layers that are"], ["call"]),
]


@pytest.mark.parametrize(("config", "expected", "absent"), CALLS)
def test_the_call_of_attention(config, expected, absent, shown):
    """A call, and each part of the attention that no argument of it expresses."""
    text = " ".join(shown(config))
    for words in expected:
        assert words in text
    for words in absent:
        assert words not in text


TOWER = {"hidden_size": 1024, "num_attention_heads": 16, "patch_size": 14, "image_size": 224}
PUBLISHED = {
    "gradium_phonon_tts": "in_proj",
    "kimi_k25_vision": "wqkv",
    "pixtral": "wq and wk",
    "step3p5_vision": "in_proj_weight",
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_weights_that_transformers_reorders_on_loading(model_type, shown):
    lines = shown({"model_type": model_type, **TOWER})
    assert lines[1].endswith("half-split")
    note = f"published weights ({PUBLISHED[model_type]}) pair (2i, 2i+1)"
    assert f"of weights as transformers loads them; {note}" in " ".join(lines[2:5])
    assert "published weights" not in " ".join(shown({"model_type": "llama"}))


@pytest.mark.parametrize("flag", [{}, {"use_qk_norm": True}])
def test_the_attention_of_an_unknown_type_is_not_known(flag, shown):
    assert "attention not known for this model type" in shown({**UNKNOWN, **flag}, "--half")


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama", "head_dim": 64, "qk_rope_head_dim": None},
        with_yarn(mscale_all_dim=0),
        with_yarn(mscale=None, mscale_all_dim=None),
        {"use_mla": False, "head_dim": 64},
    ],
)
def test_the_factor_of_scores_is_that_of_models_that_apply_it(shown, change):
    assert not any("factor of scores" in line for line in shown({**DEEPSEEK, **change}))


def test_an_attention_factor_of_the_file_is_no_ratio(shown):
    assert "attention factor 1.5" in shown(with_yarn(attention_factor=1.5))


def test_an_unknown_model_type_needs_the_pairing(shown):
    with pytest.raises(UsageError, match="so the pairing is not known"):
        shown({**LLAMA3, "model_type": "mymodel"})
    assert shown(UNKNOWN, "--half")[:2] == [
        "unknown model type, all layers",
        "pairs 16: (i, i+16), half-split",
    ]
    assert "pairs 16: (2i, 2i+1), interleaved" in shown(UNKNOWN, "--interleaved")


def test_a_new_rope_type_is_one_row_of_the_table(monkeypatch, shown):
    ranges = "others at every token"
    row = RopeType(dynamic, depends_on_length=lambda parameters: True, ranges=ranges)
    monkeypatch.setitem(ROPE_TYPES, "new", row)
    section = {"rope_theta": 1e4, "rope_type": "new", "factor": 4.0}
    config = {"model_type": "llama", "head_dim": 16, "max_position_embeddings": 64}
    lines = shown({**config, "rope_parameters": section})
    assert f"frequencies by length {ranges}" in lines
    assert "at 256 tokens" in lines


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "ministral3", "olmo2"])
def test_lines_fit_a_terminal(model_type):
    (group, *_) = layer_groups(reader.read({"model_type": model_type}))
    assert max(map(len, show.text_lines(show.description(group)))) <= 80


def bands(inv_freq, unscaled):
    """Return the rows of the table of bands without the header, with single spaces."""
    frequencies = np.array(inv_freq, float)
    pairs = Pairs(frequencies, np.zeros(frequencies.shape, int), np.array(unscaled, float))
    found = list(show.bands_by_axis(pairs, [Axis("", "tokens")]))
    return [" ".join(line.split()) for line in show.band_lines(found)][1:]


def test_bands_of_pairs_scaled_alike():
    unscaled = 2 * np.pi / np.array([10, 100, 1000, 2.5e4, 2e6, 4e6])
    assert bands(unscaled / [1, 1, 1.5, 3, 4, 4], unscaled) == [
        "0-1 10 to 100 unscaled",
        "2-3 1500 to 7.5e+04 1.5 to 3 times as long",
        "4-5 8e+06 to 1.6e+07 4 times as long",
    ]
    assert bands([1, 0, 0], [1, 0.5, 0.2]) == ["0 6.283 unscaled", "1-2 not rotated"]


def test_a_single_pair_of_the_largest_growth_ends_the_ramp():
    assert bands([1, 0.4, 0.1], [1, 0.8, 0.4])[1] == "1-2 15.71 to 62.83 2 to 4 times as long"


def test_roundings_are_no_scaling():
    unscaled = np.array([1.0, 0.5])
    assert bands(unscaled * (1 + 1e-12), unscaled) == ["0-1 6.283 to 12.57 unscaled"]
    pairs = Pairs(np.array([0.5, 0.0]), np.array([0, -1]), np.array([1.0, 1.0]))
    assert pairs.changed.tolist() == [True, False]


def test_long_lists_may_hold_anything():
    assert show._short_text([0.5] * 7) == "7 values, 0.5 … 0.5"
    assert show._short_text(["a", *range(5), [2]]) == "7 values, a … [2]"
