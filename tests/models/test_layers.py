"""Which layers are rotated, and by what, where layers of one model differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import inv_freq
from text_configs import FOUR_HEADS, GEMMA3, LLAMA, of, read

from rope_cpu.models import reader

OLD_GEMMA = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


NEW_GEMMA = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}


@pytest.mark.parametrize("given", [OLD_GEMMA, NEW_GEMMA], ids=["old", "new"])
def test_layer_types(given: dict[str, Any]) -> None:
    full, local = (
        read(GEMMA3, given, layer_type=name) for name in ("full_attention", "sliding_attention")
    )
    np.testing.assert_allclose(full.inv_freq, inv_freq(64, 1e6) / 8, rtol=1e-14)
    np.testing.assert_allclose(local.inv_freq, inv_freq(64, 1e4), rtol=1e-14)
    words = r"layers whose rope parameters are .* \(types: 'full_attention', 'slid"
    with pytest.raises(ValueError, match=words):
        read(GEMMA3, given)
    with pytest.raises(ValueError, match=r"`layer_type` is 'local'; .* \(types: 'full_attention',"):
        read(GEMMA3, given, layer_type="local")


def test_a_layer_type_without_rotation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`layer_type` is 'full_attention'; .* that is rotated"):
        read({"model_type": "beam"}, layer_type="full_attention")
    assert read({"model_type": "beam"}, layer_type="sliding_attention").head_dim == 128
    exaone = {"model_type": "exaone4", "layer_types": ["full_attention", "sliding_attention"]}
    for window in ({"sliding_window": 4096}, {}):
        with pytest.raises(ValueError, match="select a layer that is rotated"):
            read(exaone, window, layer_type="full_attention")
    assert read(exaone, {"sliding_window": None}, layer_type="full_attention") == read(exaone)


PLAIN = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 7.0}}


# Keys, and the bases of full and sliding layers as in transformers 5.24.
@pytest.mark.parametrize(
    ("keys", "full", "sliding"),
    [
        (of("qwen3", rope_parameters=PLAIN, rope_theta=5e5), 5e5, 7.0),
        (of("smollm3", rope_parameters=PLAIN), 2e6, 7.0),
        (of("modernbert", rope_scaling={"rope_theta": 5.0}, global_rope_theta=777.0), 5.0, 5.0),
    ],
)
def test_the_base_of_a_section_comes_from_the_first_place_that_has_it(
    keys: dict[str, Any], full: float, sliding: float
) -> None:
    for layer_type, theta in (("full_attention", full), ("sliding_attention", sliding)):
        rope = read(keys, layer_type=layer_type)
        np.testing.assert_allclose(rope.inv_freq, inv_freq(rope.rotary_dim, theta), rtol=1e-13)


def test_the_base_of_one_section_is_no_default_of_an_unknown_type() -> None:
    keys = LLAMA | {"model_type": "mystery", "rope_parameters": PLAIN}
    with pytest.raises(ValueError, match="`rope_theta` is missing"):
        read(keys, layer_type="full_attention", interleaved=False)


GRANITE: dict[str, Any] = {
    "model_type": "granite_swa",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rope_theta": 777.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "layer_rope_theta": [1e4, 5e6, 0],
}


@pytest.mark.parametrize(
    ("asked", "theta"),
    [({"layer_type": "full_attention"}, 5e6), ({"layer": 1}, 5e6), ({"layer": 0}, 1e4)],
)
def test_layers_with_bases_of_their_own(asked: dict[str, Any], theta: float) -> None:
    rope = read(GRANITE, **asked)
    np.testing.assert_allclose(rope.inv_freq, inv_freq(128, theta), rtol=1e-14)


def test_layers_whose_base_is_0_are_not_rotated() -> None:
    assert read(GRANITE, layer_type="sliding_attention") == read(GRANITE, layer=0)
    with pytest.raises(ValueError, match="`layer` is 2; it must select a layer that is rotated"):
        read(GRANITE, layer=2)
    with pytest.raises(
        ValueError, match=r"are \[{'rope_theta': 10000.0}, {'rope_theta': 5000000.0}\];"
    ):
        read(GRANITE)


def test_bases_of_layers_that_the_models_code_does_not_read() -> None:
    muse = {**GRANITE, "model_type": "muse_glimmer_text", "head_dim": 128}
    np.testing.assert_allclose(read(muse, layer=1).inv_freq, inv_freq(128, 777.0), rtol=1e-14)


FEW = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}


def typed(model_type: str, *layer_types: str, **keys: Any) -> dict[str, Any]:
    return of(model_type, layer_types=[f"{kind}_attention" for kind in layer_types], **keys)


# Keys, and which of six layers are rotated.
ROTATED: list[tuple[dict[str, Any], list[int]]] = [
    (of("llama"), [0, 1, 2, 3, 4, 5]),
    (of("smollm3"), [0, 1, 2, 4, 5]),
    (of("smollm3", no_rope_layer_interval=2), [0, 2, 4]),
    (of("smollm3", no_rope_layers=[0, 0, 1, 0, 0, 0]), [2]),
    (of("llama4_text", no_rope_layers=[]), [0, 1, 2, 4, 5]),
    (of("muse_glimmer_text"), [0, 2, 3, 4]),
    (of("lfm2", layer_types=["conv", "full_attention"] * 3), [1, 3, 5]),
    (of("mllama_text_model", cross_attention_layers=[0, 3]), [1, 2, 4, 5]),
    (typed("flint", *("sliding", "full") * 3), [0, 2, 4]),
    (typed("cohere2_moe", *("full",) * 6, first_k_dense_replace=2), [0, 1]),
]


@pytest.mark.parametrize(("keys", "expected"), ROTATED, ids=lambda value: str(value)[:50])
def test_which_layers_are_rotated(keys: dict[str, Any], expected: list[int]) -> None:
    one = read(FEW, keys)  # of those that are rotated, all alike
    for layer in range(6):
        if layer in expected:
            assert read(FEW, keys, layer=layer) == one
        else:
            with pytest.raises(ValueError, match=f"`layer` is {layer}; .* that is rotated"):
                read(FEW, keys, layer=layer)


TWO = {"num_hidden_layers": 2}
BASES = {"a": 1e4, "b": 2e4}
BY_TYPE = {name: {"rope_type": "default", "rope_theta": theta} for name, theta in BASES.items()}
UNLISTED = {"head_dim": 8, "rope_parameters": BY_TYPE, **TWO}  # without layer_types
FIRST = {"layer": 0}
FULL = {"layer_type": "full_attention"}
LINEAR = {"layer_type": "linear_attention"}
LAYERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        of("smollm3", no_rope_layers=[0] * 36),
        {},
        "`layer_type` is None; it must select a layer that is rotated",
    ),
    (
        of("smollm3", no_rope_layers=[1, 0]),
        {},
        r"`no_rope_layers` is \[1, 0\]; it must have a value for each of 36",
    ),
    (LLAMA | TWO, {"layer": 2}, "`layer` is 2; it must be below 2"),
    (LLAMA | TWO, {"layer": -1}, "`layer` is -1"),
    (of("plamo2"), FIRST, r"`layer` is 0; it must be below `num_hidden_layers` \(not known\)"),
    (GRANITE, FIRST | FULL, "`layer` is 0; it must be left out if `layer_type` is given"),
    (of("lara_mini", **TWO), FIRST, "`layer` is 0; it must be left out .*no `layer_types`"),
    (of("cohere2", sliding_window_pattern="LG", **TWO), FIRST, "the config has no `layer_types`"),
    (UNLISTED, {"interleaved": False}, r"rope parameters are .* \(types: 'a', 'b'\)"),
    (of("kolibri1"), FULL, "it must select a layer that is rotated"),
    (of("qwen3_next"), LINEAR, "it must select a layer that is rotated"),
]


@pytest.mark.parametrize(("keys", "asked", "words"), LAYERS, ids=lambda value: str(value)[:40])
def test_what_layers_do_not_determine_is_refused(
    keys: dict[str, Any], asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read(keys, **asked)


def test_a_layer_has_the_section_and_the_width_of_its_type() -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    for layer, layer_type in enumerate(types["layer_types"]):
        rope = read(GEMMA3, OLD_GEMMA, types, layer=layer)
        assert rope == read(GEMMA3, OLD_GEMMA, layer_type=layer_type)
    keys = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 128, **types}
    assert [read(keys, layer=layer).head_dim for layer in (0, 1)] == [256, 128]


@pytest.mark.parametrize("name", ["sliding_attention", "full_attention"])
def test_a_model_of_one_layer_type_needs_no_layer_type(name: str) -> None:
    types = {"num_hidden_layers": 2, "layer_types": [name, name]}
    assert read(GEMMA3, types) == read(GEMMA3, types, layer_type=name)


def test_a_layer_type_where_there_is_one_rotation() -> None:
    layered = {**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}
    assert read(layered, layer_type="full_attention") == read(LLAMA)
    with pytest.raises(ValueError, match=r"`layer_type` is 'full_attention'; .*types: none"):
        read(LLAMA, layer_type="full_attention")


def test_head_dim_by_layer_type() -> None:
    keys = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 128}
    full = read(keys, layer_type="full_attention")
    assert (full.head_dim, full.rotary_dim, int((full.inv_freq > 0).sum())) == (128, 128, 16)


def test_layers_of_their_own_width() -> None:
    keys = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"]}
    for index in ("1", 1):
        own = {"per_layer_config": {index: {"head_dim": 64}, "2": None}}
        assert read(keys, own, layer_type="full_attention").head_dim == 64
    own = {"global_head_dim": 128, "per_layer_config": {"1": {"num_key_value_heads": 2}}}
    assert read(keys, own, layer_type="full_attention").head_dim == 128
    with pytest.raises(TypeError, match="`per_layer_config` is 3; it must hold"):
        read(keys, {"per_layer_config": {"0": 3}}, layer_type="sliding_attention")


V4: dict[str, Any] = {"model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64}
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
MAIN = {"rope_theta": 1e4}
COMPRESS = {"rope_theta": 160000.0}


@pytest.mark.parametrize(
    "keys",
    [
        MAIN | {"compress_rope_theta": 160000, "rope_scaling": YARN | MAIN},
        {"rope_parameters": MAIN, "compress_rope_parameters": COMPRESS},
        {"rope_parameters": {"main": MAIN}, "compress_rope_parameters": COMPRESS},
        MAIN | {"compress_rope_theta": 2e4, "compress_rope_parameters": YARN | COMPRESS},
    ],
)
def test_the_section_of_some_layers_wins_over_that_of_the_model(keys: dict[str, Any]) -> None:
    for layer_type, theta in (("main", 1e4), ("compress", 160000)):
        frequency = read(V4, keys, layer_type=layer_type).inv_freq[1]
        assert frequency == pytest.approx(theta ** (-1 / 32), rel=1e-12)


@pytest.mark.parametrize(
    "keys",
    [
        # A section of all layers is that of compressed ones, but for its base.
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_scaling": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 1e4},
    ],
)
def test_the_base_of_compressed_layers_is_never_that_of_one_section(keys: dict[str, Any]) -> None:
    frequency = read(V4, keys, layer_type="compress").inv_freq[1]
    assert frequency == pytest.approx(160000 ** (-1 / 32), rel=1e-12)


def test_yarn_of_compressed_layers_has_no_attention_factor_under_either_name() -> None:
    for key in ("type", "rope_type"):
        section = {**COMPRESS, **YARN, key: "yarn"}
        section = {name: section[name] for name in section if name == key or "type" not in name}
        rope = read(V4, {"compress_rope_parameters": section}, layer_type="compress")
        assert (rope.rope_type, rope.attention_factor) == ("yarn", 1)


def test_a_section_of_some_layers_is_an_object() -> None:
    with pytest.raises(TypeError, match="`compress_rope_parameters` is 160000; it must be an"):
        read(V4, {"compress_rope_parameters": 160000}, layer_type="main")


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


@pytest.mark.parametrize("interval", [0, "4"])
def test_an_interval_is_a_whole_number(interval: Any) -> None:
    given = of("smollm3", no_rope_layers=None, no_rope_layer_interval=interval)
    with pytest.raises(ValueError, match="`no_rope_layer_interval` is"):
        read(FOUR_HEADS, given)


def test_a_layer_of_a_silent_config_is_one_of_its_class() -> None:
    assert read(of("gemma3_text"), layer=5) == read(of("gemma3_text"), **FULL)
    assert read(of("llama"), layer=31) == read(of("llama"))
    with pytest.raises(ValueError, match="`layer` is 32; it must be below 32"):
        read(of("llama"), layer=32)


@pytest.mark.parametrize(
    "keys",
    [
        of("mllama_text_model", cross_attention_layers=3),
        of("molmo2_text", rope_scaling_layers=3),
        of("molmo2_text", rope_scaling_layers=[0.5]),
        of("cohere2_moe", layer_types=["full_attention"], mlp_layer_types=3),
        of("nemotron-nas", block_configs=[{"attention": 3}]),
        of("deepseek_v4", rope_scaling=512),
        of("qwen", use_dynamic_ntk=True, rope_parameters=[1]),
    ],
    ids=str,
)
def test_malformed_keys_of_single_types_are_refused_by_name(keys: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"`{list(keys)[-1]}` "):
        read(keys)


def test_a_base_of_each_layer_beside_the_layers_that_are_rotated() -> None:
    given = GRANITE | {"layer_rope_theta": [1e4, 5e6, 1e4], "no_rope_layers": [1, 0, 1]}
    assert read(given) == read(GRANITE, layer=0)
    with pytest.raises(ValueError, match=r"`layer` is 1; .* that is rotated"):
        read(given, layer=1)


def test_layer_types_whose_rotations_are_equal_need_none() -> None:
    sections = {name: {"rope_type": "default", "rope_theta": 1e4} for name in TWO_TYPES}
    assert read(GEMMA3, {"rope_parameters": sections}) == read(GEMMA3, OLD_GEMMA, layer=0)


@pytest.mark.parametrize("types", [{}, {"layer_types": TWO_TYPES, "num_hidden_layers": 2}])
def test_the_only_section_is_that_of_all_layers_with_one(types: dict[str, Any]) -> None:
    assert read(of("mellum", **types)) == read(of("mellum", **types), **FULL)


def test_a_count_of_layers_may_be_a_numpy_integer() -> None:
    assert len(reader.read(FOUR_HEADS | {"num_hidden_layers": np.int64(3)}).layers) == 3


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (of("qwen2", use_sliding_window=True, max_window_layers=0), "SS"),
        (of("qwen2", use_sliding_window=True, max_window_layers=1), "FS"),
        (of("bamba", attn_layer_indices=(1,)), "LF"),
        (of("deepseek_v4", compress_ratios=(0, 4)), "mc"),
    ],
    ids=str,
)
def test_layer_types_by_the_rule_of_the_models_code(keys: dict[str, Any], expected: str) -> None:
    layers = reader.read(FEW | TWO | keys).layers
    names = {"sliding_attention": "S", "full_attention": "F", "linear_attention": "L"}
    assert "".join(names.get(str(x.layer_type), str(x.layer_type)[0]) for x in layers) == expected


def test_parameters_of_unrotated_layers_alone_are_refused() -> None:
    section = {"rope_type": "default", "rope_theta": 500000.0}
    given = of("exaone4", rope_parameters={"full_attention": section})
    with pytest.raises(ValueError, match="select a layer that is rotated"):
        read(FOUR_HEADS, given)


LINEAR_TYPES = {"L": "linear_attention", "F": "full_attention"}


def test_a_layer_type_of_the_models_code_needs_no_number_of_layers() -> None:
    one = read({"model_type": "gemma2"})
    for layer_type in ("sliding_attention", "full_attention"):
        assert read({"model_type": "gemma2"}, layer_type=layer_type) == one
    with pytest.raises(ValueError, match="`layer_type` is 'chunked_attention'"):
        read({"model_type": "gemma2"}, layer_type="chunked_attention")
