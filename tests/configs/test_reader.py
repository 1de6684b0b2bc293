"""Configs in every form: old and new, flat and nested, sparse and wrong."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.configs import reader
from rope_cpu.configs.model_types import _rows, facts_of

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
NANOCHAT: dict[str, Any] = {"model_type": "nanochat", "hidden_size": 512, "num_attention_heads": 4}
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 64}


def omega(theta: float, width: int) -> np.ndarray:
    return theta ** (-np.arange(0, width, 2) / width)


def read(*keys: dict[str, Any], **arguments: Any) -> RotaryEmbedding:
    merged: dict[str, Any] = {}
    for part in keys:
        merged |= part
    return RotaryEmbedding.from_config(merged, **arguments)


def test_path_folder_and_dict_are_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_theta": 5e5}))
    rope = read(LLAMA, {"rope_theta": 5e5})
    assert rope == RotaryEmbedding.from_config(tmp_path) == RotaryEmbedding.from_config(str(tmp_path / "config.json"))


def test_old_and_new_forms_are_alike() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    old = read(LLAMA, {"rope_theta": 5e5, "rope_scaling": scaling})
    new = read(LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}})
    assert old == new
    np.testing.assert_allclose(old.inv_freq, omega(5e5, 128) / 4, rtol=1e-14)


def test_the_file_given_is_not_written_to() -> None:
    given = {**LLAMA, "rope_parameters": {"rope_type": "default"}}
    read(given)
    assert given == {**LLAMA, "rope_parameters": {"rope_type": "default"}}


def test_defaults_of_the_model_type_fill_a_sparse_file() -> None:
    np.testing.assert_allclose(read({"model_type": "qwen2_moe"}).inv_freq, omega(1e4, 128), rtol=1e-14)
    np.testing.assert_allclose(read({"model_type": "cohere"}).inv_freq, omega(5e5, 128), rtol=1e-14)
    assert read({"model_type": "gpt_oss"}).rope_type == "yarn"


# Keys, what they are added to, rotated width, head_dim and base.
PARTIAL = [
    ({"model_type": "glm4", "partial_rotary_factor": 0.25}, 32, 128, 1e4),
    ({"model_type": "stablelm", "rope_parameters": {"partial_rotary_factor": 0.5}}, 64, 128, 1e4),
    ({"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 2e4}, 32, 128, 2e4),
    ({"model_type": "gptj", "n_embd": 2048, "n_head": 16, "rotary_dim": 64}, 64, 128, 1e4),
    ({"model_type": "codegen", "n_embd": 2048, "n_head": 16, "rotary_dim": 32}, 32, 128, 1e4),
    ({"model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64, "rope_theta": 5e6}, 64, 128, 5e6),
    ({"model_type": "stablelm_epoch", "rope_pct": 0.25}, 32, 128, 1e4),
    ({"model_type": "chatglm", "kv_channels": 128, "rope_ratio": 50}, 64, 128, 5e5),
    ({"model_type": "llama", "partial_rotary_factor": 0.25}, 128, 128, 1e4),  # its default type takes no notice
    ({"model_type": "llama", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 128, 128, 1e4),
]


@pytest.mark.parametrize(("keys", "rotary_dim", "head_dim", "theta"), PARTIAL, ids=lambda value: str(value)[:60])
def test_partial_rotary_under_all_its_names(keys: dict[str, Any], rotary_dim: int, head_dim: int, theta: float) -> None:
    rope = read({"hidden_size": 2048, "num_attention_heads": 16}, keys)
    assert (rope.rotary_dim, rope.head_dim) == (rotary_dim, head_dim)
    np.testing.assert_allclose(rope.inv_freq, omega(theta, rotary_dim), rtol=1e-13)


def test_a_scaled_type_of_llama_honours_partial_rotary() -> None:
    assert (
        read(LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}).rotary_dim == 64
    )


def test_a_share_beside_a_section_fills_it_but_not_the_default_section() -> None:
    keys = {"model_type": "moonshine_streaming", "head_dim": 40, "partial_rotary_factor": 0.5}
    assert read(keys, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}).rotary_dim == 20
    assert read(keys).rotary_dim == 32


def test_latent_attention() -> None:
    rope = read({"model_type": "deepseek_v3", "qk_rope_head_dim": 32, "hidden_size": 512, "num_attention_heads": 4})
    assert (rope.head_dim, rope.rotary_dim, rope.interleaved) == (32, 32, True)
    assert not read({"model_type": "deepseek_v3", "rope_interleave": False}).interleaved


@pytest.mark.parametrize("width", [{}, {"qk_rope_head_dim": 64}, {"qk_rope_head_dim": 0}], ids=str)
def test_deepseek_without_latent_attention_is_llama(width: dict[str, Any]) -> None:
    keys = {"model_type": "deepseek_v2", "hidden_size": 1280, "num_attention_heads": 10, **width}
    rope = read(keys, {"use_mla": False})
    assert (rope.head_dim, rope.rotary_dim, rope.interleaved) == (128, 128, False)


@pytest.mark.parametrize("model_type", ["ministral3", "mistral4"])
def test_a_length_that_the_file_says_counts_for_the_models_own_section(model_type: str) -> None:
    keys = {"model_type": model_type, "hidden_size": 256, "num_attention_heads": 4}
    assert read(keys, {"max_position_embeddings": 4096}) == read(keys)  # yarn, which goes by the original length


def test_layers_of_their_own_width() -> None:
    keys = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"]}
    for index in ("1", 1):
        config = keys | {"per_layer_config": {index: {"head_dim": 64}, "2": None}}
        assert RotaryEmbedding.from_config(config, layer_type="full_attention").head_dim == 64
    with pytest.raises(TypeError, match="`per_layer_config` says 3 of layer 0; it must be an object"):
        RotaryEmbedding.from_config(keys | {"per_layer_config": {"0": 3}}, layer_type="sliding_attention")


@pytest.mark.parametrize(
    ("model_type", "interleaved"),
    [("llama", False), ("gptj", True), ("cohere2", True), ("glm", True), ("llama4_text", True), ("roformer", True)],
)
def test_pairing_comes_from_the_model_type(model_type: str, interleaved: bool) -> None:
    keys = {"model_type": model_type, "hidden_size": 512, "num_attention_heads": 8, "n_embd": 512, "n_head": 8}
    assert read(keys).interleaved is interleaved
    assert read(keys, interleaved=not interleaved).interleaved is not interleaved


def test_an_unknown_model_type_needs_the_pairing() -> None:
    keys = {**LLAMA, "model_type": "mymodel"}
    with pytest.raises(ValueError, match=r"`model_type` is 'mymodel'.*`interleaved`"):
        read(keys)
    assert read(keys, interleaved=True).interleaved
    with pytest.raises(TypeError, match="`interleaved` is 1"):
        read(keys, interleaved=1)


OLD_GEMMA = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
NEW_GEMMA = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}


@pytest.mark.parametrize("form", [OLD_GEMMA, NEW_GEMMA], ids=["old", "new"])
def test_layer_types(form: dict[str, Any]) -> None:
    full, local = (read(GEMMA3, form, layer_type=name) for name in ("full_attention", "sliding_attention"))
    np.testing.assert_allclose(full.inv_freq, omega(1e6, 64) / 8, rtol=1e-14)
    np.testing.assert_allclose(local.inv_freq, omega(1e4, 64), rtol=1e-14)
    with pytest.raises(ValueError, match=r"`layer_type` is None; it must be one of .*'full_attention'"):
        read(GEMMA3, form)
    with pytest.raises(ValueError, match="`layer_type` is 'local'; it must be one of"):
        read(GEMMA3, form, layer_type="local")


def test_a_layer_type_without_rotation_is_told() -> None:
    with pytest.raises(ValueError, match="`layer_type` is 'full_attention'; layers of this type are not rotated"):
        read({"model_type": "beam"}, layer_type="full_attention")
    assert read({"model_type": "beam"}, layer_type="sliding_attention").head_dim == 128
    exaone = {"model_type": "exaone4", "layer_types": ["full_attention", "sliding_attention"]}
    for said in ({"sliding_window": 4096}, {}):
        with pytest.raises(ValueError, match="not rotated"):
            read(exaone, said, layer_type="full_attention")
    assert read(exaone, {"sliding_window": None}, layer_type="full_attention") == read(exaone)


GRANITE: dict[str, Any] = {
    "model_type": "granite_swa",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rope_theta": 777.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "layer_rope_theta": [1e4, 5e6, 0],
}


def test_layers_with_bases_of_their_own() -> None:
    for asked, theta in (({"layer_type": "full_attention"}, 5e6), ({"layer": 1}, 5e6), ({"layer": 0}, 1e4)):
        np.testing.assert_allclose(read(GRANITE, **asked).inv_freq, omega(theta, 128), rtol=1e-14)
    assert read(GRANITE, layer_type="sliding_attention") == read(GRANITE, layer=0)  # the other one is not rotated
    with pytest.raises(ValueError, match="`layer` is 2; this layer is not rotated"):
        read(GRANITE, layer=2)
    with pytest.raises(
        ValueError, match=r"`layer_type` is None, but such layers have bases \[10000.0, 5000000.0\]; say"
    ):
        read(GRANITE)
    muse = {**GRANITE, "model_type": "muse_glimmer_text", "head_dim": 128}  # its code has one base for all layers
    np.testing.assert_allclose(read(muse, layer=1).inv_freq, omega(777.0, 128), rtol=1e-14)


FEW = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}
# Keys, and which of six layers are rotated.
ROTATED: list[tuple[dict[str, Any], list[int]]] = [
    ({"model_type": "llama"}, [0, 1, 2, 3, 4, 5]),
    ({"model_type": "smollm3"}, [0, 1, 2, 4, 5]),
    ({"model_type": "smollm3", "no_rope_layer_interval": 2}, [0, 2, 4]),
    ({"model_type": "smollm3", "no_rope_layers": [0, 0, 1, 0, 0, 0]}, [2]),
    ({"model_type": "llama4_text", "no_rope_layers": []}, [0, 1, 2, 4, 5]),
    ({"model_type": "muse_glimmer_text"}, [0, 2, 3, 4]),
    ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 3}, [1, 3, 5]),
    ({"model_type": "flint", "layer_types": ["sliding_attention", "full_attention"] * 3}, [0, 2, 4]),
    ({"model_type": "cohere2_moe", "layer_types": ["full_attention"] * 6, "first_k_dense_replace": 2}, [0, 1]),
]


@pytest.mark.parametrize(("keys", "expected"), ROTATED, ids=lambda value: str(value)[:50])
def test_which_layers_are_rotated(keys: dict[str, Any], expected: list[int]) -> None:
    one = read(FEW, keys)  # of those that are rotated, all alike
    for layer in range(6):
        if layer in expected:
            assert read(FEW, keys, layer=layer) == one
        else:
            with pytest.raises(ValueError, match=f"`layer` is {layer}; this layer is not rotated"):
                read(FEW, keys, layer=layer)


LAYERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model_type": "smollm3", "no_rope_layers": [0] * 36}, {}, "`layer_type` is None; no layer is rotated"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, {}, "`no_rope_layers` has 2 values, but there are 36 layers"),
    ({**LLAMA, "num_hidden_layers": 2}, {"layer": 2}, "`layer` is 2, but there are 2 layers"),
    ({**LLAMA, "num_hidden_layers": 2}, {"layer": -1}, "`layer` is -1"),
    (LLAMA, {"layer": 0}, "`layer` is 0, but the config does not say how many there are"),
    (GRANITE, {"layer": 0, "layer_type": "full_attention"}, "`layer` is 0 and `layer_type` 'full_attention'; give one"),
    ({**GEMMA3, "num_hidden_layers": 2}, {"layer": 0}, "`layer` is 0, but the config has no `layer_types`"),
    ({"model_type": "cohere2", "num_hidden_layers": 2}, {"layer": 0}, "the config has no `layer_types`"),
    ({"model_type": "kolibri1"}, {"layer_type": "full_attention"}, "layers of this type are not rotated"),
    ({"model_type": "qwen3_next"}, {"layer_type": "linear_attention"}, "layers of this type are not rotated"),
]


@pytest.mark.parametrize(("keys", "asked", "words"), LAYERS, ids=lambda value: str(value)[:40])
def test_what_layers_do_not_determine_is_refused(keys: dict[str, Any], asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(keys, **asked)


def test_a_layer_has_the_section_and_the_width_of_its_type() -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    for layer, layer_type in enumerate(types["layer_types"]):
        assert read(GEMMA3, OLD_GEMMA, types, layer=layer) == read(GEMMA3, OLD_GEMMA, layer_type=layer_type)
    keys = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 128, **types}
    assert [read(keys, layer=layer).head_dim for layer in (0, 1)] == [256, 128]


def test_a_layer_type_where_there_is_one_rotation() -> None:
    layered = {**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}
    assert read(layered, layer_type="full_attention") == read(LLAMA)
    with pytest.raises(ValueError, match="`layer_type` is 'full_attention', but this config has one rotation"):
        read(LLAMA, layer_type="full_attention")


def test_head_dim_by_layer_type() -> None:
    keys = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 128}
    assert read(keys, layer_type="sliding_attention").head_dim == 256
    full = read(keys, layer_type="full_attention")
    assert (full.head_dim, full.rotary_dim, int((full.inv_freq > 0).sum())) == (128, 128, 16)


def test_the_language_model_of_a_multimodal_config_is_followed() -> None:
    inner = {**LLAMA, "rope_theta": 7e5}
    assert read({"model_type": "llava", "text_config": inner, "rope_theta": 1.0}) == read(inner)
    assert read({"model_type": "somevlm", "llm_config": inner}) == read(inner)
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": {"rope_theta": 5e5, "max_position_embeddings": 8}}
    assert read({"model_type": "qwen2_5_omni", "thinker_config": thinker}).axes == 3
    gemma = {"model_type": "gemma", "head_dim": 64}
    for whole in ("colpali", "pi0"):
        assert read({"model_type": whole, "vlm_config": {"model_type": "paligemma", "text_config": gemma}}) == read(
            gemma
        )
    assert read({"model_type": "t5gemma", "decoder": {"head_dim": 64}}) == read(gemma)
    with pytest.raises(ValueError, match=r"`model_type` is 'blt'.*rotations of their own"):
        read({"model_type": "blt"})
    nameless = {"model_type": "gemma3", "text_config": {"head_dim": 64, "rope_theta": 1e6}}
    assert read(nameless, layer_type="full_attention").head_dim == 64


def test_sections_of_several_axes() -> None:
    keys = {"model_type": "qwen2_vl", "hidden_size": 1536, "num_attention_heads": 12, "rope_theta": 1e6}
    rope = read(keys, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}})
    assert (rope.axes, rope.rope_type, rope.interleaved) == (3, "default", False)
    np.testing.assert_allclose(rope.inv_freq.sum(axis=0), omega(1e6, 128), rtol=1e-14)
    assert np.flatnonzero(rope.inv_freq[1]).tolist() == list(range(16, 40))
    keys = {"model_type": "qwen3_vl_text", "head_dim": 128}
    section = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    assert np.flatnonzero(read(keys, {"rope_scaling": section}).inv_freq[1]).tolist() == list(range(1, 60, 3))


def test_how_pairs_are_dealt_out_is_said_once() -> None:
    keys = {"model_type": "qwen3_vl_text", "head_dim": 128}
    plain = {"mrope_section": [24, 20, 20]}
    both = {**plain, "interleaved": True, "mrope_interleaved": True}
    assert read(keys, {"rope_scaling": both}) == read(keys, {"rope_scaling": plain})
    with pytest.raises(ValueError, match="`mrope_interleaved` contradicts"):
        read(keys, {"rope_scaling": {**plain, "mrope_interleaved": False}})
    unknown = {**keys, "model_type": "llama"}
    assert read(unknown, {"rope_scaling": both}) == read(keys, {"rope_scaling": plain, "rope_theta": 1e4})


def test_phi3_forms_of_longrope() -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    keys = {"model_type": "phi3", "hidden_size": 128, "num_attention_heads": 4, "original_max_position_embeddings": 64}
    for name in ("su", "yarn", "longrope"):
        rope = read(keys, {"max_position_embeddings": 4096, "rope_scaling": {"type": name, **factors}})
        assert rope.rope_type == "longrope"
        assert rope.attention_factor == pytest.approx(np.sqrt(1 + np.log(64) / np.log(64)), rel=1e-15)
        np.testing.assert_allclose(rope.at_length(65).inv_freq, omega(1e4, 32) / 2, rtol=1e-14)


def test_qwen_doubles_its_base_with_the_length() -> None:
    rope = read({"model_type": "qwen", "use_dynamic_ntk": True, "seq_length": 1000, "rotary_emb_base": 10000})
    for length, alpha in ((1000, 1), (1001, 3), (2000, 3), (2001, 7), (4000, 7), (4001, 15)):
        expected = omega(1e4 * alpha ** (128 / 126), 128)
        np.testing.assert_allclose(rope.at_length(length).inv_freq, expected, rtol=1e-13)
    assert not read({"model_type": "qwen", "use_dynamic_ntk": False, "seq_length": 1000}).spec.needs_length


def test_own_names_of_keys() -> None:
    rope = read({"model_type": "dbrx", "d_model": 512, "n_heads": 4, "attn_config": {"rope_theta": 5e5}})
    np.testing.assert_allclose(rope.inv_freq, omega(5e5, 128), rtol=1e-14)
    assert read({"model_type": "llava_qwen", "hidden_size": 512, "num_attention_heads": 8}).head_dim == 64


def test_the_other_way_round() -> None:
    rope = read(NANOCHAT)
    np.testing.assert_allclose(rope.inv_freq, -omega(1e4, 128), rtol=1e-14)
    with pytest.raises(ValueError, match="read-only"):
        rope.inv_freq[0] = 5


def test_the_other_way_round_at_every_length() -> None:
    scaling = {"max_position_embeddings": 100, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    back, forth = read(NANOCHAT, scaling), read(LLAMA, scaling)
    np.testing.assert_array_equal(back.inv_freq, -forth.inv_freq)
    for length in (10, 1000, [10, 1000]):
        np.testing.assert_array_equal(back.at_length(length).inv_freq, -forth.at_length(length).inv_freq)
    assert pickle.loads(pickle.dumps(back)) == back == read(NANOCHAT, scaling) != forth


V4: dict[str, Any] = {"model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64}
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 1e4, "compress_rope_theta": 160000, "rope_scaling": {**YARN, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_theta": 1e4}, "compress_rope_parameters": {"rope_theta": 160000.0}},
        {"rope_parameters": {"main": {"rope_theta": 1e4}}, "compress_rope_parameters": {"rope_theta": 160000.0}},
        {"rope_theta": 1e4, "compress_rope_theta": 2e4, "compress_rope_parameters": {**YARN, "rope_theta": 160000.0}},
    ],
)
def test_what_is_said_of_some_layers_wins_over_what_is_said_of_the_model(keys: dict[str, Any]) -> None:
    assert read(V4, keys, layer_type="main").inv_freq[1] == pytest.approx(1e4 ** (-1 / 32), rel=1e-12)
    assert read(V4, keys, layer_type="compress").inv_freq[1] == pytest.approx(160000 ** (-1 / 32), rel=1e-12)


def test_a_section_of_some_layers_is_an_object() -> None:
    with pytest.raises(TypeError, match="`compress_rope_parameters` is 160000; it must be an object"):
        read(V4, {"compress_rope_parameters": 160000}, layer_type="main")


def test_a_spec_made_of_another_is_read_only_too() -> None:
    spec = read(LLAMA).spec
    for made in (spec, replace(spec, inv_freq=-spec.inv_freq), pickle.loads(pickle.dumps(spec))):
        assert not made.inv_freq.flags.writeable
        assert not made.attention_factor.flags.writeable


REFUSALS: list[tuple[Any, type[Exception], str]] = [
    (17, TypeError, "`config` is a int"),
    ("/no/such/folder", ValueError, "`config` is '/no/such/folder'"),
    ({**LLAMA, "rope_scaling": [1]}, TypeError, "`rope_scaling` is"),
    ({**LLAMA, "rope_scaling": {"rope_type": ["linear"]}}, ValueError, "not a known rope type"),
    ({**LLAMA, "model_type": ["llama"]}, TypeError, r"`model_type` is \['llama'\]; it must be a string"),
    ({**LLAMA, "layer_types": 3}, TypeError, "`layer_types` is 3; it must be a list"),
    ({"text_config": {**LLAMA, "layer_types": 3}}, TypeError, "`layer_types` is 3; it must be a list"),
    ({"model_type": "dbrx", "attn_config": [1]}, TypeError, r"`attn_config` is \[1\]; it must be an object"),
    ({"_class_name": ["Flux"]}, TypeError, r"`_class_name` is \['Flux'\]; it must be a string"),
    ({**LLAMA, "no_rope_layer_interval": 4, "num_hidden_layers": None}, ValueError, "`num_hidden_layers` is missing"),
    ({**LLAMA, "rope_scaling": {"type": "ntk"}}, ValueError, "`type` is 'ntk'"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}}, ValueError, "`factor` is missing"),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, ValueError, "`x` is not a key"),
    ({**LLAMA, "rope_theta": 0}, ValueError, "`rope_theta` is 0"),
    ({**LLAMA, "num_attention_heads": 0}, ValueError, "`num_attention_heads` is 0"),
    ({"model_type": "roformer", "hidden_size": "768"}, TypeError, "`hidden_size` is '768'"),
    ({"model_type": "llama", "head_dim": 128.0}, TypeError, "`head_dim` is 128.0"),
    ({"model_type": "falcon", "alibi": True}, ValueError, "`alibi` is True.*ALiBi"),
    ({"model_type": "esm"}, ValueError, "`position_embedding_type` is 'absolute'"),
    (
        {"model_type": "esm", "position_embedding_type": "rotary", "rope_parameters": {"rope_type": "linear"}},
        ValueError,
        "`rope_parameters` is .*knows no sections",
    ),
    ({"model_type": "chatglm", "position_encoding_2d": True}, ValueError, "`position_encoding_2d` is True"),
    ({"model_type": "qwen2_vl_text", "head_dim": 64}, ValueError, "`mrope_section` is"),
    ({"model_type": "nemotron_h"}, ValueError, "not rotated"),
    ({"model_type": "gemma4_text", "rope_scaling": {"factor": 2.0}}, ValueError, "`rope_scaling` is one section"),
    ({"model_type": "gemma4_text", "rope_parameters": {"factor": 2.0}}, ValueError, "`rope_parameters` is one section"),
    ({"model_type": "chatglm", "rope_ratio": "2"}, TypeError, "`rope_ratio` is '2'; it must be a number"),
    ({"model_type": "chatglm", "rope_scaling": {"rope_theta": "2"}}, TypeError, "`rope_theta` is '2'"),
    ({"model_type": "gpt2"}, ValueError, "`model_type` is 'gpt2': its positions are added"),
    ({"model_type": "inkling2", "text_config": {"model_type": "inkling2_text"}}, ValueError, "not rotated"),
    (
        {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}},
        ValueError,
        "`rope_theta` is None.*not rot",
    ),
    ({"model_type": "olmo_hybrid", "rope_theta": None}, ValueError, "`rope_theta` is None"),
]


@pytest.mark.parametrize(("given", "kind", "words"), REFUSALS, ids=[row[2] for row in REFUSALS])
def test_refusals(given: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        reader.read(given).spec()


FOUR_HEADS = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
TWO_TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("given", "layer_type"),
    [
        (FOUR_HEADS | {"num_hidden_layers": [4, 2]}, None),
        (FOUR_HEADS | {"num_hidden_layers": 4, "layer_types": TWO_TYPES}, None),
        (FOUR_HEADS | {"num_hidden_layers": 1, "layer_types": TWO_TYPES}, "full_attention"),
    ],
    ids=["counts that nobody needs", "fewer types than layers", "more types than layers"],
)
def test_layers_that_are_alike_need_no_count(given: Any, layer_type: str | None) -> None:
    assert reader.read(given).spec(layer_type=layer_type) == reader.read(FOUR_HEADS).spec()


def test_a_type_that_mostly_adds_positions_may_say_that_it_rotates() -> None:
    rotary = {"model_type": "xlm-roberta", "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="'xlm-roberta'"):
        reader.read(rotary).spec(interleaved=False)
    assert reader.read(rotary | {"position_embedding_type": "rotary"}).spec(interleaved=False).head_dim == 16


@pytest.mark.parametrize("interval", [0, "4"])
def test_an_interval_is_a_whole_number(interval: Any) -> None:
    with pytest.raises(ValueError, match="`no_rope_layer_interval` is"):
        reader.read(
            FOUR_HEADS | {"model_type": "smollm3", "no_rope_layers": None, "no_rope_layer_interval": interval}
        ).spec()


@pytest.mark.parametrize(("text", "words"), [("[]", "holds a list"), ("{", "config.json' is no JSON")])
def test_what_is_no_object_is_no_config(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        reader.read(tmp_path)


def test_saying_the_pairing_makes_no_rotation() -> None:
    with pytest.raises(ValueError, match="not rotated"):
        read({"model_type": "kimi_linear", "qk_rope_head_dim": 64}, interleaved=False)


def test_every_row_of_the_tables_can_be_made() -> None:
    for name in _rows():
        known = facts_of(name)
        assert known is not None
        assert known.part is not None or known.interleaved is not None or known.refuse, name


@pytest.mark.parametrize("length", [1024, 10**7])
def test_a_rotary_is_small_whatever_the_context(length: int) -> None:
    rope = read(LLAMA, {"max_position_embeddings": length, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert len(pickle.dumps(rope.at_length(2 * length))) < 100_000
