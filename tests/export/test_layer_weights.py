"""attention_options and attention_weights: the arguments of export_attention from a checkpoint."""

import json

import ml_dtypes
import numpy as np
import pytest
from control_characters import MARK, WRITTEN
from safetensors_files import write_safetensors

from rope_cpu import RotaryEmbedding, export
from rope_cpu.models.tensors import attention_prefix

HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 16, 48
ROWS = {"q": HEADS * WIDTH, "k": KV_HEADS * WIDTH, "v": KV_HEADS * WIDTH}
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "num_hidden_layers": 3,
}
MODULE = "model.layers.1.self_attn."


@pytest.fixture
def parts(rng):
    """Weights of q, k, v and o, and biases, as export_attention names them."""
    arrays = {name: rng.standard_normal((rows, HIDDEN)) for name, rows in ROWS.items()}
    arrays |= {f"{name}_bias": rng.standard_normal(rows) for name, rows in ROWS.items()}
    return arrays | {"o": rng.standard_normal((HIDDEN, HEADS * WIDTH))}


def llama_tensors(parts, module=MODULE):
    """The tensors of a checkpoint of Llama."""
    names = {"": "weight", "_bias": "bias"}
    return {
        f"{module}{name}_proj.{leaf}": parts[f"{name}{kind}"]
        for name in "qkvo"
        for kind, leaf in names.items()
        if f"{name}{kind}" in parts
    }


def fused_by_group(parts, kind):
    """The rows of q, k and v together, written from the definition, group by group."""
    rows = []
    for group in range(KV_HEADS):
        for head in range(HEADS // KV_HEADS):
            number = group * (HEADS // KV_HEADS) + head
            rows.extend(parts[f"q{kind}"][number * WIDTH : (number + 1) * WIDTH])
        for name in "kv":
            rows.extend(parts[f"{name}{kind}"][group * WIDTH : (group + 1) * WIDTH])
    return np.array(rows)


def check_equal(weights, parts):
    assert weights.keys() == parts.keys()
    for name, array in parts.items():
        np.testing.assert_array_equal(weights[name], array)


def test_separate_projections(parts):
    tensors = llama_tensors(parts)
    tensors |= {name.replace(".1.", ".11."): 2 * array for name, array in tensors.items()}
    tensors |= {f"vision_tower.layers.1.self_attn.{name}_proj.weight": parts["o"] for name in "qk"}
    check_equal(export.attention_weights(tensors, LLAMA, 1)["weights"], parts)
    with pytest.raises(ValueError, match="`tensors` holds 0 attention modules of layer 2"):
        export.attention_weights(tensors, LLAMA, 2)


@pytest.mark.parametrize(
    ("model_type", "module", "fused", "output"),
    [
        ("phi3", "model.layers.1.self_attn.", "qkv_proj", "o_proj"),
        ("falcon", "transformer.h.1.self_attention.", "query_key_value", "dense"),
    ],
)
def test_a_fused_projection(parts, model_type, module, fused, output):
    config = LLAMA | {"model_type": model_type, "num_kv_heads": KV_HEADS}
    config |= {"new_decoder_architecture": True} if model_type == "falcon" else {}
    tensors = {f"{module}{output}.weight": parts["o"]}
    for kind, leaf in {"": "weight", "_bias": "bias"}.items():
        array = np.concatenate([parts[f"{name}{kind}"] for name in "qkv"])
        if model_type == "falcon":
            array = fused_by_group(parts, kind)
        tensors[f"{module}{fused}.{leaf}"] = array
    check_equal(export.attention_weights(tensors, config, 1)["weights"], parts)


def test_weights_of_a_model_with_bidirectional_tokens(parts):
    """They do not depend on the mask."""
    config = {"model_type": "paligemma", "text_config": {**LLAMA, "model_type": "gemma"}}
    check_equal(export.attention_weights(llama_tensors(parts), config, 1)["weights"], parts)


def test_norms_and_sinks(parts, rng):
    norms = [rng.standard_normal(WIDTH) for _ in "qk"]
    tensors = llama_tensors(parts)
    tensors |= {f"{MODULE}{name}_norm.weight": norm for name, norm in zip("qk", norms, strict=True)}
    qwen = export.attention_weights(tensors, LLAMA | {"model_type": "qwen3"}, 1)
    np.testing.assert_array_equal(qwen["qk_norm"], norms)
    sinks = rng.standard_normal(HEADS)
    tensors = llama_tensors(parts) | {f"{MODULE}sinks": sinks}
    gpt_oss = export.attention_weights(tensors, LLAMA | {"model_type": "gpt_oss"}, 1)
    np.testing.assert_array_equal(gpt_oss["sinks"], sinks)
    assert "qk_norm" not in gpt_oss


@pytest.mark.parametrize(
    "name",
    ["rotary_emb.inv_freq", "k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale"],
)
def test_buffers_and_scales_of_caches_are_ignored(parts, name):
    tensors = llama_tensors(parts) | {f"{MODULE}{name}": np.ones(8)}
    assert export.attention_weights(tensors, LLAMA, 1).keys() == {"weights"}


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_a_safetensors_file_and_a_state_dict_give_the_same(parts, tmp_path, dtype):
    tensors = {name: array.astype(dtype) for name, array in llama_tensors(parts).items()}
    file = tmp_path / "model.safetensors"
    write_safetensors(file, tensors)
    expected = export.attention_weights(tensors, LLAMA, 1)["weights"]
    for source in (file, str(file)):
        found = export.attention_weights(source, LLAMA, 1)["weights"]
        check_equal(found, expected)
        assert {array.dtype for array in found.values()} == {np.dtype(dtype)}


def test_an_index_of_several_files(parts, tmp_path):
    tensors = llama_tensors(parts)
    weight_map = {}
    for number, (name, array) in enumerate(tensors.items()):
        file_name = f"model-{number % 2}.safetensors"
        weight_map[name] = file_name
        shard = {other: tensors[other] for other in weight_map if weight_map[other] == file_name}
        write_safetensors(tmp_path / file_name, shard | {name: array})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    check_equal(export.attention_weights(index, LLAMA, 1)["weights"], parts)


# The rows of changed tensors (None: there is no such tensor), the model type, and words.
OTHER_MODELS = [
    ({"gate_proj.weight": 0}, "llama", "holds gate_proj.weight under"),
    ({"q_norm.weight": 0, "k_norm.weight": 0}, "llama", "k_norm.weight, q_norm.weight"),
    ({"k_proj.weight": None}, "llama", "holds none of k_proj.weight, key.weight under"),
    ({"o_proj.weight": None}, "llama", "holds none of o_proj.weight"),
    ({"qkv_proj.weight": sum(ROWS.values())}, "llama", "order of rows in the fused projection"),
    ({}, "qwen3", "holds none of q_norm.weight"),
    ({}, "gpt_oss", "holds none of sinks"),
    ({}, "olmo2", "over the whole projection"),
]


@pytest.mark.parametrize(("changed", "model_type", "text"), OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused(parts, changed, model_type, text):
    tensors = llama_tensors(parts)
    for name, rows in changed.items():
        tensors.pop(MODULE + name, None)
        if rows is not None:
            tensors[MODULE + name] = np.zeros((rows, HIDDEN))
    with pytest.raises(ValueError, match=text):
        export.attention_weights(tensors, LLAMA | {"model_type": model_type}, 1)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(parts, number):
    parts["q"][3, 2] = number
    with pytest.raises(ValueError, match=r"q_proj\.weight' holds NaN or infinities"):
        export.attention_weights(llama_tensors(parts), LLAMA, 1)


def test_an_output_projection_outside_of_the_module(parts):
    names = {"q": "query", "k": "key", "v": "value"}
    module = "roformer.encoder.layer.1.attention.self."
    tensors = {f"{module}{name}.weight": parts[key] for key, name in names.items()}
    tensors["roformer.encoder.layer.1.attention.output.dense.weight"] = parts["o"]
    weights = export.attention_weights(tensors, LLAMA, 1)["weights"]
    check_equal(weights, {name: parts[name] for name in names})


TENSORS_REFUSED = [
    (({3: np.ones(2)}, LLAMA, 0), TypeError, "`tensors` is a dict; it must be a path, or a map"),
    (([], LLAMA, 0), TypeError, "`tensors` is a list; it must be a path, or a mapping"),
    ((__file__, LLAMA, 0), ValueError, "test_layer_weights.py' cannot be read as safetensors"),
    (({}, LLAMA, None), TypeError, "`layer` is None; it must be an integer"),
    (
        ({}, LLAMA | {"num_kv_shared_layers": 2}, 2),
        ValueError,
        "`layer` is 2; it must be below 1, the number of layers with keys of their own",
    ),
    (("missing.safetensors", LLAMA, 0), FileNotFoundError, "No such file"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), TENSORS_REFUSED)
def test_other_types_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        export.attention_weights(*arguments)


MARKED = {"model_type": MARK, "head_dim": WIDTH, "num_attention_heads": HEADS, "rope_theta": 1e4}


def test_names_are_escaped_in_errors(parts):
    tensors = llama_tensors(parts, f"{MARK}.1.")
    types = {"model_type": "gemma2", "layer_types": ["full_attention", MARK], "sliding_window": 8}
    for call, text in (
        (
            lambda: export.attention_weights(tensors | {f"{MARK}.1.{MARK}": 1}, LLAMA, 1),
            "no other part of it",
        ),
        (lambda: export.attention_weights({**tensors, **strings(tensors)}, LLAMA, 1), "numbers"),
        (lambda: export.attention_options(MARKED), "attention is not known"),
        (lambda: export.attention_options(LLAMA | types), "is not known"),
    ):
        with pytest.raises((TypeError, ValueError), match=text) as caught:
            call()
        assert str(caught.value).isprintable()
        assert WRITTEN in str(caught.value)


def strings(tensors):
    """Return arrays of strings under the names of tensors."""
    return {name: array.astype(str) for name, array in tensors.items()}


def test_two_models_in_one_state_dict_are_refused(parts):
    tensors = llama_tensors(parts) | llama_tensors(parts, "draft.layers.1.self_attn.")
    with pytest.raises(ValueError, match="holds 2 attention modules of layer 1"):
        export.attention_weights(tensors, LLAMA, 1)


@pytest.mark.parametrize(
    "prefix",
    [
        "model.layers.1.self_attn.",
        "model.language_model.layers.1.self_attn.",
        "transformer.h.1.attn.",
        "layers.1.attention.",
    ],
)
def test_prefixes(prefix):
    names = ["q_proj.weight", "mlp.experts.1.q_proj.weight", "o_proj.weight"]
    tensors = dict.fromkeys([prefix + names[0], prefix + names[2]])
    tensors |= dict.fromkeys(["vision_tower.encoder.layers.1.self_attn.q_proj.weight"])
    tensors |= dict.fromkeys(["model.layers.2.mlp.experts.1.q_proj.weight"])
    assert attention_prefix(tensors, 1) == prefix


def test_options_and_weights_make_the_models_attention(parts, rng):
    config = LLAMA | {"model_type": "gemma3_text", "query_pre_attn_scalar": 9}
    tensors = llama_tensors(parts)
    norms = {f"{MODULE}{name}_norm.weight": rng.standard_normal(WIDTH) for name in "qk"}
    options = export.attention_options(config, layer=1)
    assert options["scale"] == 1 / 3
    assert (options["window"], options["norm_offset"]) == (4096, 1.0)
    weights = export.attention_weights(tensors | norms, config, 1)
    rope = RotaryEmbedding.from_config(config, layer=1)
    model = export.export_attention(rope, **options | weights)
    assert model.graph.input[0].name == "hidden"
    assert export.validate(model, rope).passed


def of_type(model_type, **values):
    return LLAMA | {"model_type": model_type} | values


BAILING = of_type("bailing_moe", use_qk_norm=True, rope_theta=1e4)
CHUNKED = of_type("gemma4_text", attention_chunk_size=4)
NO_OPTIONS = [
    (LLAMA, {"layer": 3}, "`layer` is 3; it must be below 3"),
    (of_type("gemma2"), {}, r"layers whose windows are \[4096, None\]"),
    (of_type("gemma2"), {"layer_type": "local"}, r"types: 'full_attention', 'sliding_att"),
    (of_type("gemma3_text", num_hidden_layers=6), {}, "layers whose rope parameters are"),
    (of_type("cohere2"), {"layer_type": "full_attention"}, "layer that is rotated"),
    (BAILING, {}, "lacks the epsilon of the norms; add rms_norm_eps"),
    (CHUNKED, {"layer_type": "full_attention"}, "norms of values"),
    (of_type("my_own", rope_theta=1e4), {}, "`export_attention` its arguments yourself"),
    (of_type(None, rope_theta=1e4), {"layer": 0}, "`model_type` is None, whose attention is not"),
    (
        of_type("xyz", use_qk_norm=True, rope_theta=1e4),
        {},
        "`model_type` is 'xyz', whose attention is not known; give",
    ),
]


@pytest.mark.parametrize(("config", "arguments", "text"), NO_OPTIONS)
def test_options_that_a_config_does_not_give(config, arguments, text):
    with pytest.raises(ValueError, match=text):
        export.attention_options(config, **arguments)


def test_a_projection_of_mamba_is_no_attention(parts):
    tensors = llama_tensors(parts) | {"model.layers.1.mamba.in_proj.weight": parts["q"]}
    check_equal(export.attention_weights(tensors, LLAMA, 1)["weights"], parts)
