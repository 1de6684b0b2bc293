"""attention_layer: what a NumPy server needs of a model's layer, without onnx."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors_files import write_safetensors

import rope_cpu
from rope_cpu.models.reader import read

HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 16, 48
ROWS = {"q": HEADS * WIDTH, "k": KV_HEADS * WIDTH, "v": KV_HEADS * WIDTH}
SMALL = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "num_hidden_layers": 4,
}
MODULE = "model.layers.1.self_attn."


def of_type(model_type, **values):
    return SMALL | {"model_type": model_type} | values


@pytest.fixture
def tensors(rng):
    """Projections of a layer, with a bias of q."""
    shapes = {f"{name}_proj.weight": (rows, HIDDEN) for name, rows in ROWS.items()}
    shapes |= {"o_proj.weight": (HIDDEN, HEADS * WIDTH), "q_proj.bias": (HEADS * WIDTH,)}
    return {MODULE + name: rng.standard_normal(shape) for name, shape in shapes.items()}


# The facts of layer 1, from the classes of transformers.
FULL = {"window": None, "softcap": None}
LAYERS = {
    "llama": {"options": {"scale": 0.25} | FULL, "qk_norm": None, "query_factors": None},
    "gemma2": {"options": {"scale": 0.0625, "window": None, "softcap": 50.0}},
    "gemma3_text": {"options": {"scale": 0.0625, "window": 4096, "softcap": None}},
    "gpt_oss": {"options": {"scale": 0.25} | FULL, "has_sinks": True},
    "mistral": {"options": {"scale": 0.25, "window": 4096, "softcap": None}},
    "qwen3": {"qk_norm": "before", "norm_weighted": True, "norm_offset": 0.0},
    "nanochat": {"qk_norm": "after", "norm_weighted": False, "norm_epsilon": 1e-6},
    "roformer": {"causal": False},
}


@pytest.mark.parametrize("model_type", LAYERS)
def test_facts(model_type):
    layer = rope_cpu.attention_layer(of_type(model_type), 1)
    sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim)
    assert sizes == (HEADS, KV_HEADS, WIDTH, WIDTH)
    for name, value in LAYERS[model_type].items():
        assert getattr(layer, name) == value
    assert layer.rope == rope_cpu.RotaryEmbedding.from_config(of_type(model_type), layer=1)


def test_the_transformer_of_fla_has_its_window_and_norms():
    """The epsilon is that of its norm's class; `norm_eps` belongs to other norms (fla.layers)."""
    sizes = {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "norm_eps": 1e-6}
    keys = {"window_size": 7, "qk_norm": True, "num_kv_heads": 2}
    layer = rope_cpu.attention_layer({"model_type": "transformer", **sizes, **keys}, 1)
    assert layer.options == {"scale": 0.25, "window": 7, "softcap": None}
    assert (layer.num_kv_heads, layer.qk_norm, layer.norm_epsilon) == (2, "before", 1e-5)
    plain = rope_cpu.attention_layer({"model_type": "transformer", **sizes}, 1)
    assert (plain.options["window"], plain.qk_norm) == (None, None)


def test_every_layer_has_its_own_facts(tmp_path):
    """Gemma 3 has its own base and its window in five layers of six; read from a folder."""
    config = {"model_type": "gemma3_text", "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = [rope_cpu.attention_layer(tmp_path, index) for index in range(6)]
    assert [layer.window for layer in layers] == [4096] * 5 + [None]
    assert len({layer.rope for layer in layers}) == 2
    assert layers[0] == rope_cpu.attention_layer(config, 0)


@pytest.mark.parametrize("model_type", ["cohere2", "smollm3", "llama4_text"])
def test_a_layer_without_rotation(model_type):
    layer = rope_cpu.attention_layer(of_type(model_type), 3)
    assert (layer.rope, layer.head_dim, layer.window) == (None, WIDTH, None)
    own = read(of_type(model_type)).layers[3]
    assert (layer.layer_type, layer.rope_parameters) == (own.layer_type, None)


def log_factor(beta, lengths):
    return 1 + beta * np.log1p(np.floor(lengths))


LLAMA4_SCALE = {"attn_scale": 0.2, "floor_scale": 512}
POSITIONS = np.array([0, 1, 511, 512, 8191, 8192, 100_000, 2**31])
# The factors in float64, written from the code of transformers, and of Qwen for its first models.
QUERY_FACTORS = {
    "llama4_text": (of_type("llama4_text"), log_factor(0.1, (POSITIONS + 1) / 8192)),
    "keys of llama4_text": (
        of_type("llama4_text", **LLAMA4_SCALE),
        log_factor(0.2, (POSITIONS + 1) / 512),
    ),
    "ministral3": (of_type("ministral3"), log_factor(0.1, POSITIONS / 16384)),
    "qwen": (
        {"model_type": "qwen", "use_logn_attn": True, "seq_length": 512, "num_hidden_layers": 4},
        np.maximum(1, np.log(POSITIONS + 1) / np.log(512)),
    ),
    "beam": (
        of_type("beam", layer_types=["full_attention"] * 4),
        np.exp(0.1 * np.log1p((POSITIONS + 1) / 2048)),
    ),
}


@pytest.mark.parametrize("name", QUERY_FACTORS)
def test_queries_scaled_by_position(name):
    config, expected = QUERY_FACTORS[name]
    layer = rope_cpu.attention_layer(config, 3)
    assert layer == rope_cpu.attention_layer(config, 3)
    for same in (layer, pickle.loads(pickle.dumps(layer))):
        assert same == layer
        factors = same.query_factors(POSITIONS)
        assert factors.dtype == np.float32
        np.testing.assert_allclose(factors, expected, rtol=2**-24, atol=0)


def test_weights_of_a_layer(tensors):
    weights = rope_cpu.attention_layer(of_type("llama"), 1).weights(tensors)
    for name in "qkvo":
        assert getattr(weights, name) is tensors[f"{MODULE}{name}_proj.weight"]
    assert weights.q_bias is tensors[f"{MODULE}q_proj.bias"]
    assert (weights.k_bias, weights.q_norm, weights.k_norm, weights.sinks) == (None,) * 4


# A tensor of another shape than the config says, and the model type that has it.
OTHER_SHAPES = [
    ("q_proj.weight", (64,), "llama"),
    ("k_proj.weight", (), "llama"),
    ("q_proj.weight", (64, HIDDEN, 1), "llama"),
    ("v_proj.weight", (32, HIDDEN + 1), "llama"),
    ("o_proj.weight", (HIDDEN, 63), "llama"),
    ("q_proj.bias", (64, 1), "llama"),
    ("k_norm.weight", (WIDTH - 1,), "qwen3"),
    ("sinks", (HEADS - 1,), "gpt_oss"),
]
PARTS = {
    "llama": {},
    "qwen3": {"q_norm.weight": np.ones(WIDTH), "k_norm.weight": np.ones(WIDTH)},
    "gpt_oss": {"sinks": np.ones(HEADS)},
}


@pytest.mark.parametrize(("name", "shape", "model_type"), OTHER_SHAPES)
def test_weights_of_other_shapes_are_refused(tensors, name, shape, model_type):
    layer = rope_cpu.attention_layer(of_type(model_type), 1)
    tensors |= {MODULE + part: array for part, array in PARTS[model_type].items()}
    layer.weights(tensors)
    tensors[MODULE + name] = np.ones(shape)
    with pytest.raises(ValueError, match=re.escape(f"of shape {shape}")):
        layer.weights(tensors)


class SparseTensor:
    """As a sparse tensor of PyTorch, or one of dtype float8."""

    dtype = "torch.float32"

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        raise TypeError("can't convert Sparse layout tensor to numpy")


def test_a_tensor_that_is_no_array_is_named(tensors):
    layer = rope_cpu.attention_layer(of_type("llama"), 1)
    with pytest.raises(TypeError, match=r"k_proj\.weight' cannot be made an array: can't convert"):
        layer.weights(tensors | {f"{MODULE}k_proj.weight": SparseTensor()})


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
def test_quantised_weights_are_refused_as_from_files(tensors, tmp_path, dtype):
    """Without scales their values mean nothing."""
    layer = rope_cpu.attention_layer(of_type("llama"), 1)
    name = f"{MODULE}k_proj.weight"
    tensors[name] = np.ones(tensors[name].shape, dtype)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    for source in (tensors, tmp_path):
        with pytest.raises((TypeError, ValueError), match=r"k_proj\.weight.* has dtype"):
            layer.weights(source)


NORM_WEIGHT = np.linspace(0.5, 1.5, WIDTH)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen3", rope_cpu.RMSNorm(NORM_WEIGHT, 1e-5)),
        ("gemma3_text", rope_cpu.RMSNorm(NORM_WEIGHT, 1e-5, offset=1)),
        ("nanochat", rope_cpu.RMSNorm(None, 1e-5)),
        ("gemma4_text", rope_cpu.RMSNorm(NORM_WEIGHT, 1e-5)),
    ],
)
def test_norms_are_those_of_append(tensors, model_type, expected):
    if expected.weight is not None:
        tensors |= dict.fromkeys((f"{MODULE}q_norm.weight", f"{MODULE}k_norm.weight"), NORM_WEIGHT)
    layer = rope_cpu.attention_layer(of_type(model_type, rms_norm_eps=1e-5), 1)
    weights = layer.weights(tensors)
    for norm in (weights.q_norm, weights.k_norm):
        assert (norm.eps, norm.offset) == (expected.eps, expected.offset)
        np.testing.assert_array_equal(norm.weight, expected.weight)
    assert (weights.v_norm is not None) == (model_type == "gemma4_text")
    assert weights.v_norm is None or (weights.v_norm.weight, weights.v_norm.eps) == (None, 1e-5)


def test_sinks(tensors):
    tensors[f"{MODULE}sinks"] = np.arange(HEADS, dtype=np.float32)
    weights = rope_cpu.attention_layer(of_type("gpt_oss"), 1).weights(tensors)
    assert weights.sinks is tensors[f"{MODULE}sinks"]


MY_VLA = {"model_type": "my_vla", "architectures": ["MyVLAForCausalLM"]}
MY_VLA["text_config"] = of_type("qwen2")
MY_CODE = {"AutoConfig": "my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"}
OTHER_TASK = {"AutoModel": "bidirectional.LlamaModel"}
GEMMA4 = of_type("gemma4_text", use_bidirectional_attention="vision")
PALIGEMMA = {"model_type": "paligemma", "text_config": of_type("gemma")}
FALCON = of_type("falcon", num_key_value_heads=None, new_decoder_architecture=True)
REFUSED = [
    (of_type("llama"), 4, "`index` is 4; it must be below 4, the number of layers"),
    (of_type("llama"), True, "`index` is True; it must be an integer"),
    (
        of_type("gemma3n_text", num_kv_shared_layers=1),
        3,
        "below 3, the number of layers with keys of their own",
    ),
    (of_type("llama", num_key_value_heads=3), 0, "_heads` is 3; it must divide .* heads, 4"),
    (of_type("llama", num_key_value_heads=8), 0, "_heads` is 8; it must divide .* heads, 4"),
    (FALCON | {"num_kv_heads": 3}, 0, "_heads` is 3; it must divide .* heads, 4"),
    (of_type("my_own", rope_theta=1e4), 0, "attention is not known; give `AttentionLayer`"),
    (PALIGEMMA, 0, "among tokens of image and prompt .*give its `text_config`"),
    (PALIGEMMA | {"num_attention_heads": 4}, 0, "among tokens of image and prompt"),
    (
        {"model_type": "gemma4_unified", "text_config": of_type("gemma4_text")},
        0,
        r"among tokens of an image \(",
    ),
    (of_type("llama4_text"), 0, "chunks of 8192 tokens"),
    (of_type("olmo2"), 0, "over the whole projection, which is not supported"),
    (of_type("hunyuan_v1_dense"), 0, "after the rotation .*the weights of both norms, as"),
    (of_type("timesfm2_5"), 0, r"· softplus\(scaling\)·1.44.*, and scale=1, as in"),
    (of_type("muse_glimmer_text"), 0, "queries are scaled by `qk_scale_factor`"),
    (MY_VLA, 0, "`model_type` is 'my_vla', whose attention is not known"),
    ({"text_config": of_type("qwen2")}, 0, "`model_type` is '', whose attention is not known"),
    (of_type("llama", auto_map=MY_CODE), 0, "`auto_map` has 'modeling_my.MyForCausalLM', no class"),
    (of_type("llama", auto_map=OTHER_TASK), 0, "`auto_map` has 'bidirectional.LlamaModel'"),
    (GEMMA4, 0, "of an image, in sliding layers .*give .* without `use_bidirectional_attention`"),
    (of_type("pangu_ultra_moe"), 0, "latent attention"),
    (of_type("KeyeVL2", sa_config={"top_k": 8}), 0, "an indexer chooses its keys"),
    (
        of_type("llama", llama_4_scaling_beta=0.1),
        0,
        "`original_max_position_embeddings` is missing",
    ),
]


@pytest.mark.parametrize(("config", "index", "text"), REFUSED)
def test_refusals(config, index, text):
    with pytest.raises((TypeError, ValueError), match=text):
        rope_cpu.attention_layer(config, index)


def test_attention_in_both_directions_has_no_options():
    layer = rope_cpu.attention_layer(of_type("roformer"), 0)
    with pytest.raises(ValueError, match="in both directions, and `attention` is causal"):
        _ = layer.options


def test_only_files_need_safetensors(run_program, tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": np.ones(3)})
    program = f"""
    import sys
    sys.modules["safetensors"] = None
    import rope_cpu
    layer = rope_cpu.attention_layer({of_type("llama")!r}, 1)
    print({{"onnx", "onnxruntime", "torch"}} & set(sys.modules))
    layer.weights({str(tmp_path)!r})
    """
    out, err = run_program(program, exits=1)
    assert out == "set()\n"
    assert "ModuleNotFoundError: import of safetensors" in err.splitlines()[-1]


DATA = Path(__file__).parents[1] / "data"
PUBLISHED = json.loads((DATA / "published_configs.json").read_text())
PUBLISHED_LAYERS = json.loads((DATA / "published_layers.json").read_text())
# The facts that published_layers.json leaves out.
USUAL = {
    "causal": True,
    "window": None,
    "softcap": None,
    "qk_norm": None,
    "norm_weighted": True,
    "norm_offset": 0.0,
    "norm_epsilon": 1e-6,
    "has_sinks": False,
}


@pytest.mark.parametrize("name", PUBLISHED_LAYERS)
def test_layers_of_published_configs(name):
    """They are those that were exported before this function was; "-": not exported."""
    config = PUBLISHED[name]["config"]
    expected = PUBLISHED_LAYERS[name]
    for index, kind in enumerate(expected["layers"]):
        if kind != "-":
            layer = rope_cpu.attention_layer(config, index)
            facts = USUAL | expected["facts"][int(kind)]
            assert {fact: getattr(layer, fact) for fact in facts} == facts
