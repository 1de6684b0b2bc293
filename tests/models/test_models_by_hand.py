"""Model types that transformers does not have, each by the formula of its own code."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle import inv_freq
from text_configs import of

from rope_cpu.models import reader

TIME, ROW, COLUMN = 0, 1, 2

# Bailing's M-RoPE: row and column alternate in the fast pairs, time has the slow ones.
VIDEO_AXES = [ROW, COLUMN] * 12 + [TIME] * 8


class Row(NamedTuple):
    """A config and the rotation of its model's own code.

    inv_freq: (pairs,). layer_type: the layers that it belongs to, None for all.
    """

    config: dict[str, Any]
    interleaved: bool
    inv_freq: Any
    attention_factor: float = 1.0
    layer_type: str | None = None
    heads: tuple[int, int] | None = None


def yarn_frequencies(dim: int, base: float, factor: float, original: int) -> Any:
    """YaRN with 32 and 1 revolutions at the ends of a ramp of whole pairs."""
    pairs = [
        dim * math.log(original / (revolutions * 2 * math.pi)) / (2 * math.log(base))
        for revolutions in (32, 1)
    ]
    low = max(math.floor(pairs[0]), 0)
    high = min(math.ceil(pairs[1]), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    plain = inv_freq(dim, base)
    return plain / factor * ramp + plain * (1 - ramp)


def fixed_ntk(dim: int, base: float, factor: float) -> Any:
    return inv_freq(dim, base * factor) / factor ** (2 / dim)


def widths(hidden: int, heads: int, **keys: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_attention_heads": heads, **keys}


LING = of("bailing_moe", **widths(2048, 16), num_key_value_heads=4, rope_theta=600000)
LING_2 = LING | {"model_type": "bailing_moe_v2", "head_dim": 128, "partial_rotary_factor": 0.5}
V41 = of(
    "deepseek_v41_text",
    head_dim=512,
    qk_rope_head_dim=64,
    rope_theta=10000,
    compress_rope_theta=160000,
    rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
)
TELECHAT3 = of("telechat3", **widths(6144, 48), rope_theta=1000000.0)
TELECHAT3_YARN = {"type": "telechat3-yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
PLAMO3 = of("plamo3", rope_theta=1000000, rope_local_theta=20000)
PHI3_SMALL = of("phi3small", rope_position_scale=1.0)
LONGROPE = {
    "type": "su",
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "short_mscale": 1.0,
    "long_mscale": 1.25,
    "original_max_position_embeddings": 8192,
}
MOLMO = of("molmo", **widths(3584, 28), num_key_value_heads=4, rope_theta=1000000.0)
MOLMO_E = of("molmo", d_model=2048, n_heads=16, rope_theta=10000.0, rope_impl="cockatoo")
GTE = of("new", rope_theta=20000, position_embedding_type="rope")
GTE_LONGER = GTE | {"rope_scaling": {"type": "ntk", "factor": 8.0}}
ROTARY = {"position_embedding_type": "rotary"}
FLA = of("transformer", hidden_size=1024, num_heads=16, num_kv_heads=4, head_dim=32)
PANGU = of("pangu_ultra_moe", attention_qk_rope_dim=32)
GIGACHAT = of("gigachat3_5", layer_types=["linear_attention", "attention"])
LLAMA = of("llama", **widths(2048, 32))
DEEPSEEK_TINY = of("deepseek_vl_v2", language_config=widths(1280, 10, use_mla=False))
JET = of("jet_nemotron", layer_types=["jet", "attn", "swa"])
MINIMAX = of("minimax_text_01", **widths(6144, 64), head_dim=128, rotary_dim=64, rope_theta=1e7)

ROWS: dict[str, Row] = {
    "Ling": Row(LING | {"rope_scaling": None}, False, inv_freq(128, 6e5), heads=(16, 4)),
    "Ling 2": Row(LING_2, False, inv_freq(64, 6e5), heads=(16, 4)),
    "Ling 2, type 1": Row(LING_2 | {"model_type": "bailing_moe"}, False, inv_freq(64, 6e5)),
    "Ling 2, rotary_dim": Row(LING | {"rotary_dim": 32}, False, inv_freq(32, 6e5)),
    "Ring-linear": Row(LING_2 | {"model_type": "bailing_moe_linear"}, False, inv_freq(64, 6e5)),
    "DeepSeek-V4.1, main": Row(V41, True, inv_freq(64, 1e4), layer_type="main"),
    "DeepSeek-V4.1, compress": Row(
        of("deepseek_v41", text_config=V41),
        *(True, yarn_frequencies(64, 160000, 16, 65536)),
        layer_type="compress",
    ),
    "TeleChat3": Row(TELECHAT3, False, inv_freq(128, 1e6), heads=(48, 48)),
    "TeleChat3, longer": Row(
        TELECHAT3 | {"rope_scaling": TELECHAT3_YARN},
        *(False, yarn_frequencies(128, 1e6, 4, 8192), 0.07 * math.log(4) + 1),
    ),
    "PLaMo": Row(of("plamo", **widths(5120, 40)), False, inv_freq(128), heads=(40, 5)),
    "PLaMo 2": Row(of("plamo2", hidden_size=2048, hidden_size_per_head=64), False, inv_freq(64)),
    "PLaMo 3, full": Row(PLAMO3, False, inv_freq(128, 1e6), layer_type="full_attention"),
    "PLaMo 3, sliding": Row(PLAMO3, False, inv_freq(128, 2e4), layer_type="sliding_attention"),
    "Nanbeige": Row(of("nanbeige"), False, inv_freq(64, 5e4)),
    "Phi-3-small": Row(PHI3_SMALL, False, inv_freq(128, 1e6), heads=(32, 8)),
    "Phi-3-small, base": Row(PHI3_SMALL | {"rope_embedding_base": 7.0}, False, inv_freq(128, 7.0)),
    "Molmo": Row(MOLMO, False, inv_freq(128, 1e6), heads=(28, 4)),
    "MolmoE": Row(MOLMO_E, False, inv_freq(128), heads=(16, 16)),
    "NeoBERT": Row(of("neobert", rope=True), True, inv_freq(64), heads=(12, 12)),
    "GTE": Row(GTE, False, inv_freq(64, 2e4)),
    "GTE, longer": Row(GTE_LONGER, False, fixed_ntk(64, 2e4, 8)),
    "ESM-2 by NVIDIA": Row(of("nv_esm", **ROTARY, **widths(320, 20)), False, inv_freq(16)),
    "RNA-FM": Row(of("rnafm", **ROTARY), False, inv_freq(32), heads=(20, 20)),
    "RiNALMo": Row(of("rinalmo"), False, inv_freq(64)),
    "UTR-LM": Row(of("utrlm"), False, inv_freq(8)),
    "CaLM": Row(of("calm"), True, inv_freq(64)),
    "LucaOne": Row(of("lucaone_gplm", no_position_embeddings=True), False, inv_freq(64)),
    "LucaOne, HF": Row(of("lucaone", no_position_embeddings=False), False, inv_freq(64)),
    "LucaGPLM": Row(of("lucagplm"), False, inv_freq(64)),
    "AMPLIFY": Row(of("AMPLIFY", **widths(640, 10)), True, inv_freq(64)),
    "AMPLIFY, HF": Row(of("amplify"), True, inv_freq(64)),
    "Reward model": Row(of("gpt_neox_reward_model", **widths(2048, 16)), False, inv_freq(32)),
    "fla, grouped": Row(FLA, False, inv_freq(64), heads=(16, 4)),
    "Yuan 2.0": Row(of("yuan"), False, inv_freq(64), heads=(32, 32)),
    "Grok 1": Row(of("grok-1"), False, inv_freq(128), heads=(48, 8)),
    "openPangu Embedded": Row(of("PanguEmbedded"), False, inv_freq(128, 1.6e7), heads=(32, 8)),
    "openPangu Pro": Row(of("PanguProMoE"), False, inv_freq(128, 1.6e7), heads=(40, 8)),
    "openPangu Ultra": Row(of("pangu_ultra_moe"), True, inv_freq(64, 2.56e7)),
    "openPangu Ultra, widths": Row(PANGU, True, inv_freq(32, 2.56e7)),
    "openPangu Ultra, halves": Row(PANGU | {"rope_interleave": False}, False, inv_freq(32, 2.56e7)),
    "GigaChat 3.5": Row(GIGACHAT, True, inv_freq(64, 1e5), layer_type="attention"),
    "GigaChat 3.5, halves": Row(GIGACHAT | {"rope_interleave": False}, False, inv_freq(64, 1e5)),
    "Kimi-VL": Row(of("kimi_vl", text_config={"rope_theta": 8e5}), True, inv_freq(64, 8e5)),
    "DeepSeek-VL2": Row(of("deepseek_vl_v2", language_config=widths(2048, 16)), True, inv_freq(64)),
    "DeepSeek-VL2, tiny": Row(DEEPSEEK_TINY, False, inv_freq(128), heads=(10, 10)),
    "H2OVL": Row(of("h2ovl_chat", llm_config=LLAMA), False, inv_freq(64)),
    "Intern-S1": Row(of("interns1", text_config=LLAMA), False, inv_freq(64)),
    "OpenCUA": Row(of("opencua", text_config=widths(3584, 28)), False, inv_freq(128)),
    "Jet-Nemotron": Row(JET, False, inv_freq(128, 1e6), layer_type="swa", heads=(12, 2)),
    "Step 3": Row(of("step3_text"), False, inv_freq(256, 5e5), heads=(64, 1)),
    "Step 3, VL": Row(of("step3_vl", text_config=of("step3_text")), False, inv_freq(256, 5e5)),
    "Ouro": Row(of("ouro", **widths(2048, 16), rope_theta=1e6), False, inv_freq(128, 1e6)),
    "MiniMax-Text-01": Row(MINIMAX, False, inv_freq(64, 1e7), heads=(64, 8)),
    "MiniMax-M1": Row(MINIMAX | {"model_type": "minimax_m1"}, False, inv_freq(64, 1e7)),
    "Granite Switch": Row(of("granite_switch", **widths(2048, 32)), False, inv_freq(64)),
    "BlueLM": Row(of("BlueLM"), False, inv_freq(128), heads=(32, 32)),
    "Keye-VL": Row(of("Keye", **widths(4096, 32)), False, inv_freq(128, 1e6)),
    "Keye-VL 1.5, text": Row(of("KeyeVL1_5", **widths(4096, 32)), False, inv_freq(128, 1e6)),
}


@pytest.mark.parametrize("name", ROWS)
def test_rotation_of_the_models_code(name: str) -> None:
    row = ROWS[name]
    config = reader.read(row.config)
    spec = config.spec(row.layer_type)
    assert spec.interleaved is row.interleaved
    assert spec.inv_freq.shape == (1, 1, 1, len(row.inv_freq))
    # A few roundings of powers and logarithms on either side.
    np.testing.assert_allclose(spec.inv_freq[0, 0, 0], row.inv_freq, rtol=1e-13)
    assert float(spec.attention_factor[0]) == pytest.approx(row.attention_factor, rel=1e-15)
    if row.heads is not None:
        assert config.heads(row.layer_type) == row.heads


def test_phi3_small_has_two_lists_of_factors() -> None:
    spec = reader.read(PHI3_SMALL | {"rope_scaling": LONGROPE}).spec()
    short, long = spec.at_length([8192]), spec.at_length([8193])
    np.testing.assert_allclose(short.inv_freq[0, 0, 0], inv_freq(128, 1e6), rtol=1e-13)
    np.testing.assert_allclose(long.inv_freq[0, 0, 0], inv_freq(128, 1e6) / 2, rtol=1e-13)
    assert short.attention_factor.tolist() == [1.0]
    assert long.attention_factor.tolist() == [1.25]


def ming(section_type: str, **section: Any) -> dict[str, Any]:
    return LING_2 | {"rope_scaling": {"type": section_type, **section}}


@pytest.mark.parametrize(
    "config",
    [
        ming("video_rope", factor=None),
        ming("default", video_rope=True, mrope_section=[8, 12, 12]),
        of("bailingmm", llm_config=ming("video_rope")),
    ],
    ids=["type", "key", "part"],
)
def test_video_rope_of_ming(config: dict[str, Any]) -> None:
    spec = reader.read(config).spec()
    assert spec.interleaved is False
    assert spec.shared_id
    check_axes(spec, VIDEO_AXES, inv_freq(64, 6e5))


def test_video_rope_of_ling_3() -> None:
    section = {"rope_theta": 6e6, "mrope_section": [12, 10, 10]}
    spec = reader.read({"model_type": "bailing_hybrid", "rope_parameters": section}).spec()
    assert spec.interleaved
    check_axes(spec, [ROW, COLUMN] * 10 + [TIME] * 12, inv_freq(64, 6e6))


@pytest.mark.parametrize("model_type", ["Keye", "KeyeVL1_5", "KeyeVL2"])
@pytest.mark.parametrize("part", ["", "text_config"])
def test_sections_of_keye(part: str, model_type: str) -> None:
    keys = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "head_dim": 128}
    spec = reader.read(of(model_type, **({part: keys} if part else keys))).spec()
    check_axes(spec, [TIME] * 16 + [ROW] * 24 + [COLUMN] * 24, inv_freq(128, 1e6))


@pytest.mark.parametrize(
    ("config", "rotated"),
    [
        (JET, [0, 1, 1]),
        (of("gigachat3_5", num_hidden_layers=3, full_attention_layers=[1]), [0, 1, 0]),
        (MINIMAX | {"attn_type_list": [0, 0, 1], "num_hidden_layers": 3}, [0, 0, 1]),
    ],
    ids=["Jet-Nemotron", "GigaChat 3.5", "MiniMax-Text-01"],
)
def test_linear_layers_are_not_rotated(config: dict[str, Any], rotated: list[int]) -> None:
    model = reader.read(config)
    assert [int(layer.rope_parameters is not None) for layer in model.layers[:3]] == rotated


def test_interleaved_sections_of_glm() -> None:
    """Pair j takes axis j % 3, or the next one in turn that has pairs left."""
    section = {"type": "default", "mrope_section": [8, 12, 12], "mrope_interleaved_glm": True}
    config = {"model_type": "glm4v_text", "partial_rotary_factor": 0.5, "rope_scaling": section}
    spec = reader.read(config).spec()
    # Time is used up after 24 pairs; rows take its turns until they are used up too.
    after = [ROW, ROW, COLUMN, ROW, ROW, COLUMN, COLUMN, COLUMN]
    check_axes(spec, [TIME, ROW, COLUMN] * 8 + after, inv_freq(64))


def check_axes(spec: Any, pair_axis: list[int], frequencies: Any) -> None:
    """Assert that each pair has its frequency on its axis, and 0 on the others."""
    expected = np.zeros((3, len(frequencies)))
    for pair, axis in enumerate(pair_axis):
        expected[axis, pair] = frequencies[pair]
    assert spec.pair_axis == tuple(pair_axis)
    np.testing.assert_allclose(spec.inv_freq[0, :, 0], expected, rtol=1e-13)


SECTION = [8, 12, 12]
LINEAR = {"type": "linear", "factor": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (LING | {"rope_theta": None}, "`rope_theta` is missing; it must be a number in the config"),
    (TELECHAT3 | {"rope_theta": None}, "`rope_theta` is missing"),
    (PLAMO3 | {"rope_theta": None}, "`rope_theta` is missing"),
    (PLAMO3 | {"rope_scaling_factor": 4}, "`rope_scaling_factor` is 4"),
    (LING_2 | {"model_type": "bailing_moe_linear", "linear_rope": False}, "`linear_rope` is False"),
    (of("bailing_moe_v3_vl", text_config=of("bailing_hybrid")), "`model_type` is 'bailing_moe_v3"),
    (
        of("bailingmm", mrope_section=SECTION, llm_config=LING_2),
        r" is \[8, 12, 12\]; it must be in `llm_",
    ),
    (
        ming("video_rope", mrope_interleaved=True),
        "`mrope_interleaved` is contradicted; it must agree with the other keys",
    ),
    (ming("video_rope", mrope_section=[8, 11, 13]), r"is \[8, 11, 13\].*as many rows as columns"),
    (ming("video_rope", mrope_section=[8, 8, 8]), "`mrope_section` adds up to 24; it must add up"),
    (ming("3D"), "`rope_type` is '3D'; it must be a rope type"),
    (of("plamo", rope_scaling=LINEAR), "`rope_scaling` is"),
    (PHI3_SMALL | {"rope_position_scale": 2.0}, "`rope_position_scale` is 2.0"),
    (MOLMO_E | {"rope_impl": "interleave"}, "`rope_impl` is 'interleave'"),
    (of("neobert", rope=False), "`rope` is False"),
    (GTE | {"position_embedding_type": "absolute"}, "`position_embedding_type` is 'absolute'"),
    (of("yuan", attention_projection_size=4096), " is 4096.*rounds its frequencies"),
    (of("nv_esm"), "`position_embedding_type` is 'absolute'"),
    (of("esm", position_embedding_type="relative_key"), " is 'relative_key'.*no rotation"),
    (of("rnafm"), "`position_embedding_type` is 'absolute'"),
    (of("utrlm", position_embedding_type="relative_key"), "is 'relative_key'.*no rotation"),
    (of("lucaone_gplm", no_position_embeddings=False), "`no_position_embeddings` is False"),
    (of("AMPLIFY", rope_scaling=LINEAR), "`rope_scaling` is"),
    (of("falcon_perception"), "`freqs_cis_golden`; pass frequencies"),
    (of("phi4flash"), "`model_type` is 'phi4flash'.*: its attention layers are not"),
    (of("kimi_k3", text_config=widths(7168, 64)), "is 'kimi_linear': its attention layers are not"),
    (of("telechat", n_head=32), "`model_type` is 'telechat'.*its base grows with the length"),
    (of("git", rope_theta=208533496), "Grok 2's file has this type too.*'grok-1'"),
    (of("grok-1", rope_scaling=LINEAR), "`rope_scaling` is"),
    (of("grok-1", rope_type="yarn_log"), "`rope_type` is 'yarn_log'"),
    (of("PanguProMoE", qk_rope_dim=64), "`qk_rope_dim` is 64.*rotates the end of a head"),
    (PANGU | {"rope_interleaved": False}, "`rope_interleaved` is False"),
    (PANGU | {"rope_scaling": LINEAR}, "`rope_scaling` is"),
    (of("openpangu_vl"), "pairs to axes in an order of its own"),
    (of("interns1_pro", text_config=of("interns1_pro_text")), "weights of each head"),
    (of("BlueLM", rope_scaling={"type": "ntkmixed", "power": 0.3}), "`rope_type` is 'ntkmixed'"),
    (of("ouro"), "`rope_theta` is missing"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reader.read(config).spec()


@pytest.mark.parametrize("model_type", ["plamo2", "plamo3"])
def test_a_layer_needs_the_layer_types(model_type: str) -> None:
    """The code derives them from keys that are not read."""
    config = reader.read({"model_type": model_type, "rope_theta": 1e6, "num_hidden_layers": 8})
    with pytest.raises(ValueError, match=r"`layer` is 0; .* config has no `layer_types`"):
        config.spec(layer=0)
