"""Facts of the model type alone: the pairing, defaults, names of keys, unrotated models."""

from __future__ import annotations

import pickle
import re
from importlib import resources
from typing import Any

import numpy as np
import pytest
from oracle import inv_freq
from text_configs import LLAMA, NANOCHAT, read

from rope_cpu.models import reader
from rope_cpu.models.model_types import data, known_types, model_facts

DATA = resources.files("rope_cpu.models.data")


@pytest.mark.parametrize(("model_type", "theta"), [("qwen2_moe", 1e4), ("cohere", 5e5)])
def test_defaults_of_the_model_type_fill_a_sparse_file(model_type: str, theta: float) -> None:
    rope = read({"model_type": model_type})
    np.testing.assert_allclose(rope.inv_freq, inv_freq(128, theta), rtol=1e-14)


def test_scaling_of_the_model_type_fills_a_sparse_file() -> None:
    assert read({"model_type": "gpt_oss"}).rope_type == "yarn"


NAMES = {"hidden_size": 512, "num_attention_heads": 8, "n_embd": 512, "n_head": 8}
# Besides three types those that tests/peers/test_whole_attention.py does not run; read by hand.
PAIRINGS = {
    **dict.fromkeys(("gptj", "roformer", "moonshine", "moonshine_streaming"), True),
    **dict.fromkeys(("llama", "kyutai_speech_to_text", "muse_glimmer_assistant"), False),
    **dict.fromkeys(("nemotron3_5_transcribe_asr_audio", "timesfm2_5"), False),
}


@pytest.mark.parametrize("model_type", PAIRINGS)
def test_pairing_comes_from_the_model_type(model_type: str) -> None:
    keys = {"model_type": model_type, **NAMES}
    interleaved = PAIRINGS[model_type]
    assert read(keys).interleaved is interleaved
    assert read(keys, interleaved=not interleaved).interleaved is not interleaved


def test_an_unknown_model_type_needs_the_pairing() -> None:
    keys = {**LLAMA, "model_type": "mymodel", "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"`interleaved` is None.*`model_type` is 'mymodel'"):
        read(keys)
    assert read(keys, interleaved=True).interleaved
    with pytest.raises(TypeError, match="`interleaved` is 1"):
        read(keys, interleaved=1)


def test_the_base_of_an_unknown_model_type_is_not_guessed() -> None:
    keys = {**LLAMA, "model_type": "mymodel", "rope_theta": None}
    with pytest.raises(ValueError, match="`rope_theta` is missing"):
        read(keys, interleaved=False)


def test_the_base_of_an_unknown_model_type_may_be_in_a_section() -> None:
    keys = {**LLAMA, "model_type": "mymodel", "rope_theta": None}
    section = {"rope_type": "default", "rope_theta": 777.0}
    rope = read({**keys, "rope_parameters": section}, interleaved=False)
    np.testing.assert_allclose(rope.inv_freq[1], 777.0 ** (-1 / len(rope.inv_freq)), rtol=1e-14)
    nested = {"full_attention": section, "sliding_attention": section}
    config = reader.read({**keys, "rope_parameters": nested})
    assert config.spec("full_attention", interleaved=False).pairs == len(rope.inv_freq)


def test_a_malformed_section_beside_another_is_no_place_for_a_base() -> None:
    keys = {**LLAMA, "model_type": "mymodel", "rope_theta": None}
    sections = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": [1]}
    with pytest.raises(TypeError, match=r"`rope_parameters` is \[1\]; it must be an object"):
        read({**keys, **sections}, interleaved=False)


# hunyuan_vl is refused for another reason.
MULTIMODAL = [
    name for name in known_types() if model_facts(name).part is not None and name != "hunyuan_vl"
]


def test_there_are_many_multimodal_model_types() -> None:
    assert len(MULTIMODAL) > 64


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_a_language_model_under_a_key_that_is_not_read_is_refused(model_type) -> None:
    vision = {"hidden_size": 1024, "num_attention_heads": 16}
    part = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 777777.0}
    for config, path in (
        ({"lm_config": part}, "lm_config"),
        ({"other_config": {"lm_config": part}}, "other_config.lm_config"),
        ({"vision_config": vision, "lm_config": {"rope_scaling": None}}, "lm_config"),
    ):
        with pytest.raises(ValueError, match=f"under .*'{re.escape(path)}'.* alone"):
            reader.read({"model_type": model_type, **config})


def test_a_width_beside_that_of_another_part_is_the_language_models() -> None:
    whole = {"model_type": "llava", "hidden_size": 4096, "vision_config": {"hidden_size": 1024}}
    assert read(whole) == read({"model_type": "llama"})


@pytest.mark.parametrize(
    ("model_type", "part_type"),
    [
        ("exaone4_5", "exaone4"),
        ("cohere2_vision", "cohere2"),
        ("paligemma", "gemma"),
        ("llava_qwen", "qwen2"),
    ],
)
def test_an_unknown_type_of_a_known_whole_is_that_of_its_part(model_type, part_type) -> None:
    keys = {"hidden_size": 256, "num_attention_heads": 2, "rope_theta": 777.0}
    key = model_facts(model_type).part[0]
    whole = {"model_type": model_type, key: {"model_type": f"{model_type}_text", **keys}}
    assert read(whole) == read({"model_type": part_type, **keys})
    whole[key]["model_type"] = "mystery"
    with pytest.raises(ValueError, match="`model_type` is 'mystery'"):
        read(whole)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("DeepseekV2ForCausalLM", "deepseek_v2"),
        ("LlamaForCausalLM", "llama"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("GPTNeoXForCausalLM", "gpt_neox"),
        ("ModernBertModel", "modernbert"),
        ("QWenLMHeadModel", "qwen"),
    ],
)
def test_a_language_model_without_a_type_has_that_of_its_class(architecture, model_type) -> None:
    keys = {"hidden_size": 256, "num_attention_heads": 2, "use_mla": False, "head_dim": 128}
    layers = {"layer_type": "full_attention"} if model_type == "modernbert" else {}
    given = read({"architectures": [architecture], **keys}, **layers)
    assert given == read({"model_type": model_type, **keys}, **layers)


def test_own_names_of_keys() -> None:
    dbrx = {"model_type": "dbrx", "d_model": 512, "n_heads": 4, "attn_config": {"rope_theta": 5e5}}
    np.testing.assert_allclose(read(dbrx).inv_freq, inv_freq(128, 5e5), rtol=1e-14)
    llava = {"model_type": "llava_qwen", "hidden_size": 512, "num_attention_heads": 8}
    assert read(llava).head_dim == 64


def test_latent_attention() -> None:
    deepseek = {"model_type": "deepseek_v3"}
    rope = read(deepseek, {"qk_rope_head_dim": 32, "hidden_size": 512, "num_attention_heads": 4})
    assert (rope.head_dim, rope.rotary_dim, rope.interleaved) == (32, 32, True)
    assert not read(deepseek, {"rope_interleave": False}).interleaved


@pytest.mark.parametrize("width", [{}, {"qk_rope_head_dim": 64}, {"qk_rope_head_dim": 0}], ids=str)
def test_deepseek_without_latent_attention_is_llama(width: dict[str, Any]) -> None:
    keys = {"model_type": "deepseek_v2", "hidden_size": 1280, "num_attention_heads": 10, **width}
    rope = read(keys, {"use_mla": False})
    assert (rope.head_dim, rope.rotary_dim, rope.interleaved) == (128, 128, False)


def test_nanochat_rotates_backwards_at_every_length() -> None:
    section = {"rope_type": "dynamic", "factor": 2.0}
    scaling = {"max_position_embeddings": 100, "rope_scaling": section}
    back = read(NANOCHAT, scaling)
    forth = read(LLAMA, scaling)
    np.testing.assert_array_equal(back.inv_freq, -forth.inv_freq)
    for length in (10, 1000, [10, 1000]):
        expected = -forth.at_length(length).inv_freq
        np.testing.assert_array_equal(back.at_length(length).inv_freq, expected)
    assert pickle.loads(pickle.dumps(back)) == back == read(NANOCHAT, scaling) != forth


def test_a_type_that_mostly_adds_positions_may_rotate() -> None:
    keys = {"model_type": "xlm-roberta", "hidden_size": 64, "num_attention_heads": 4}
    keys |= {"rope_theta": 1e4}
    with pytest.raises(ValueError, match="'xlm-roberta'"):
        read(keys, interleaved=False)
    rotary = {"position_embedding_type": "rotary"}
    assert read(keys, rotary, interleaved=False).head_dim == 16


def test_a_given_pairing_makes_no_rotation() -> None:
    with pytest.raises(ValueError, match="not rotated"):
        read({"model_type": "kimi_linear", "qk_rope_head_dim": 64}, interleaved=False)


def test_every_row_of_the_tables_can_be_made() -> None:
    for name in known_types():
        known = model_facts(name)
        assert known is not None
        assert known.part is not None or known.interleaved is not None or known.refuse, name


def test_attention_facts_of_types_that_a_model_may_have_at_once_agree() -> None:
    """Those of its type, of the type whose row it extends, and of the file around it."""
    rows = data("attention.json")["types"]
    for name in known_types():
        own = name
        while (facts := model_facts(own)) is not None and facts.part is not None:
            own = facts.part[1]
        types = {name, own, *([facts.like] if facts and facts.like else [])}
        pairs = [pair for kind in types for pair in rows.get(kind, {}).items()]
        assert len({fact for fact, _ in pairs}) == len({str(pair) for pair in pairs}), name


def test_every_file_of_facts_names_its_source_and_licence() -> None:
    lines = DATA.joinpath("SOURCES.md").read_text("utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    files = {name for path in DATA.iterdir() if (name := path.name).endswith(".json")}
    assert {row[0].strip("`") for row in rows} == files
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)


def test_a_row_by_hand_names_its_source_unless_transformers_has_the_model_type() -> None:
    rows = data("other_models.json")
    others = rows.keys() - data("models.json")
    assert [name for name in others if not rows[name].get("source")] == []
