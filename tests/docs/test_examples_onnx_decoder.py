"""The example that writes whole decoders, against decoders in NumPy."""

import json
import runpy
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import oracle
import pytest
from fewer_cases import pairwise
from safetensors_files import write_safetensors

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "onnx_decoder.py"))
PROMPT = 8
STEPS = 64
LENGTH = PROMPT + STEPS

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
THETA = {"rope_type": "default", "rope_theta": 1e4}
WINDOW_THETA = {"rope_type": "default", "rope_theta": 1e2}
CONFIGS = {
    "llama": {"hidden_act": "silu", "rope_parameters": THETA},
    "qwen3": {"hidden_act": "silu", "rope_parameters": THETA},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": THETA, "sliding_attention": WINDOW_THETA},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 7,
        "query_pre_attn_scalar": 24,
    },
}
LAYER_NORMS = {
    "llama": ["input_layernorm", "post_attention_layernorm"],
    "qwen3": ["input_layernorm", "post_attention_layernorm"],
    "gemma3_text": [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ],
}


def random_tensors(rng, model_type):
    """Return a checkpoint, in bfloat16 for Llama; only Llama has a head of its own."""
    width, inner, vocabulary = 64, 96, 97
    queries, keys = 4 * 32, 2 * 32
    shapes = {"model.embed_tokens": (vocabulary, width), "model.norm": (width,)}
    if model_type == "llama":
        shapes["lm_head"] = (vocabulary, width)
    for layer in range(3):
        module = f"model.layers.{layer}"
        shapes |= {f"{module}.{name}": (width,) for name in LAYER_NORMS[model_type]}
        shapes |= {f"{module}.mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes[f"{module}.mlp.down_proj"] = (width, inner)
        shapes[f"{module}.self_attn.q_proj"] = (queries, width)
        shapes |= {f"{module}.self_attn.{name}_proj": (keys, width) for name in "kv"}
        shapes[f"{module}.self_attn.o_proj"] = (width, queries)
        if model_type != "llama":
            shapes |= {f"{module}.self_attn.{name}_norm": (32,) for name in "qk"}
    dtype = ml_dtypes.bfloat16 if model_type == "llama" else np.float32
    tensors = {}
    for name, shape in shapes.items():
        # Small embeddings, or a decoder whose head is the embedding repeats its last token.
        spread = 0.02 if "embed" in name else 0.2
        tensor = rng.standard_normal(shape) * spread + (len(shape) == 1)
        tensors[f"{name}.weight"] = tensor.astype(dtype)
    return tensors


CASES = pairwise(CONFIGS, EXAMPLE["OPSETS"], ("growing", "shared"))


@pytest.fixture(params=CONFIGS)
def checkpoint(request, rng, tmp_path):
    """A folder, its config and its tensors."""
    config = SIZES | {"model_type": request.param} | CONFIGS[request.param]
    tensors = random_tensors(rng, request.param)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    halves = np.array_split(sorted(tensors), 2)
    for index, names in enumerate(halves):
        part = {str(name): tensors[name] for name in names}
        write_safetensors(tmp_path / f"model-{index}.safetensors", part)
    return tmp_path, config, tensors


class NumPyDecoder:
    """A decoder in one pass over all tokens, in one dtype."""

    def __init__(self, config, tensors, dtype):
        self.config = config
        self.weights = {
            name.removesuffix(".weight"): tensor.astype(dtype) for name, tensor in tensors.items()
        }
        self.is_gemma = config["model_type"] == "gemma3_text"
        self.dtype = np.dtype(dtype).type

    def norm(self, x, name):
        weight = self.weights[name] + self.dtype(self.is_gemma)
        mean = np.mean(x**2, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.dtype(self.config["rms_norm_eps"])) * weight

    def rotated(self, x, theta):
        """Rotate half-split pairs of (tokens, heads, head_dim) at positions 0, 1, …."""
        angles = np.outer(np.arange(len(x)), oracle.inv_freq(32, theta))
        return oracle.rotate(x, np.cos(angles), np.sin(angles))[0].astype(self.dtype)

    def attention(self, x, layer):
        module = f"model.layers.{layer}.self_attn"
        is_local = self.is_gemma and self.config["layer_types"][layer] == "sliding_attention"
        q, k, v = (
            (x @ self.weights[f"{module}.{name}_proj"].T).reshape(len(x), -1, 32) for name in "qkv"
        )
        if f"{module}.q_norm" in self.weights:
            q, k = self.norm(q, f"{module}.q_norm"), self.norm(k, f"{module}.k_norm")
        theta = WINDOW_THETA if is_local else THETA
        q, k = (self.rotated(vectors, theta["rope_theta"]) for vectors in (q, k))
        k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
        scale = self.config.get("query_pre_attn_scalar", 32) ** -0.5
        scores = np.einsum("qhd,khd->hqk", q, k) * self.dtype(scale)
        distance = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
        attended = (distance >= 0) & (distance < (7 if is_local else len(x)))
        scores = np.where(attended, scores, self.dtype(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        y = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return y @ self.weights[f"{module}.o_proj"].T

    def mlp(self, x, module):
        gate, up = (x @ self.weights[f"{module}.{name}_proj"].T for name in ("gate", "up"))
        if self.is_gemma:
            inner = self.dtype((2 / np.pi) ** 0.5) * (gate + self.dtype(0.044715) * gate**3)
            gate = self.dtype(0.5) * gate * (1 + np.tanh(inner))
        else:
            gate = gate / (1 + np.exp(-gate))
        return (gate * up) @ self.weights[f"{module}.down_proj"].T

    def logits(self, tokens):
        x = self.weights["model.embed_tokens"][tokens]
        if self.is_gemma:
            x = x * self.dtype(8)  # the root of the hidden size
        for layer in range(3):
            module = f"model.layers.{layer}"
            y = self.attention(self.norm(x, f"{module}.input_layernorm"), layer)
            if self.is_gemma:
                x = x + self.norm(y, f"{module}.post_attention_layernorm")
                y = self.mlp(self.norm(x, f"{module}.pre_feedforward_layernorm"), f"{module}.mlp")
                x = x + self.norm(y, f"{module}.post_feedforward_layernorm")
            else:
                x = x + y
                y = self.mlp(self.norm(x, f"{module}.post_attention_layernorm"), f"{module}.mlp")
                x = x + y
        head = self.weights.get("lm_head", self.weights["model.embed_tokens"])
        return self.norm(x, "model.norm") @ head.T


def generated(session, prompts, cache):
    """Return prompts with greedy tokens behind them, (rows, STEPS) logits, and the past.

    Shorter prompts are padded: on the left for a growing cache, on the right for a shared one.
    """
    lengths = [len(prompt) for prompt in prompts]
    mask = (np.arange(PROMPT) < np.array(lengths)[:, None]).astype(np.int64)
    last = np.array(lengths) - 1
    if cache == "growing":
        mask = mask[:, ::-1]
        last[:] = PROMPT - 1
    ids = np.zeros_like(mask)
    ids[mask == 1] = np.concatenate(prompts)
    shape = (len(prompts), 2, LENGTH if cache == "shared" else 0, 32)
    names = [value.name for value in session.get_outputs()]
    past = {
        name.replace("present", "past_key_values"): np.zeros(shape, np.float32) for name in names
    }
    del past["logits"]
    tokens = [list(prompt) for prompt in prompts]
    all_logits = []
    for _ in range(STEPS):
        feeds = {"input_ids": ids, "attention_mask": mask, **past}
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        logits = outputs["logits"][np.arange(len(prompts)), last]
        all_logits.append(logits)
        ids = logits.argmax(axis=1)[:, None]
        for row, token in zip(tokens, ids[:, 0], strict=True):
            row.append(int(token))
        mask = np.append(mask, np.ones_like(ids), axis=1)
        last[:] = 0
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    return tokens, np.stack(all_logits, axis=1)


@pytest.mark.parametrize(("checkpoint", "target", "cache"), CASES, indirect=["checkpoint"])
def test_64_tokens_are_decoded_as_in_numpy(checkpoint, rng, tmp_path, target, cache):
    folder, config, tensors = checkpoint
    out = tmp_path / "out"
    arguments = ["--target", target, "--cache", cache, "--length", str(LENGTH)]
    EXAMPLE["main"]([str(folder), "--out", str(out), *arguments])
    session = onnxruntime.InferenceSession(
        out / "onnx" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    lengths = [PROMPT] if (target, cache) == ("ort", "shared") else [PROMPT, PROMPT - 3]
    prompts = [rng.integers(0, config["vocab_size"], length).tolist() for length in lengths]
    for tokens, logits in zip(*generated(session, prompts, cache), strict=True):
        exact, rounded = (
            NumPyDecoder(config, tensors, dtype).logits(tokens[:-1])[-STEPS:]
            for dtype in (np.float64, np.float32)
        )
        # Another order of sums may be a few times as far off as NumPy in float32.
        tolerance = 4 * np.abs(rounded - exact).max()
        assert np.abs(logits - exact).max() <= tolerance <= 1e-4 * np.abs(exact).max()
        chosen = np.take_along_axis(exact, np.array(tokens[-STEPS:])[:, None], axis=1)
        assert (chosen[:, 0] >= exact.max(axis=1) - 2 * tolerance).all()
        assert len(set(tokens[-STEPS:])) > 2


def test_the_folder_has_the_configs_and_the_tokenizer(checkpoint, tmp_path):
    folder, config, _ = checkpoint
    out = tmp_path / "out"
    EXAMPLE["main"]([str(folder), "--out", str(out), "--cache", "shared", "--length", "16"])
    genai = json.loads((out / "genai_config.json").read_text())
    assert genai["model"]["decoder"]["head_size"] == 32
    assert genai["model"]["eos_token_id"] == [2, 3]
    assert genai["search"] == {"max_length": 16, "past_present_share_buffer": True}
    assert json.loads((out / "config.json").read_text()) == config
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    files = {"config.json", "genai_config.json", "tokenizer.json", "onnx/model.onnx"}
    assert names == files


LLAMA = SIZES | {"model_type": "llama"} | CONFIGS["llama"]
REFUSALS = {
    "model type": ({"model_type": "gpt_oss"}, "'gpt_oss' is not one of llama, qwen3, gemma3_text"),
    "activation": (LLAMA | {"hidden_act": "relu"}, "'relu' is not one of silu, gelu"),
    "capped logits": (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "no tensors": (LLAMA, "no tensor 'model.embed_tokens.weight'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_folders_of_others_are_refused(name, tmp_path):
    config, text = REFUSALS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=text):
        EXAMPLE["main"]([str(tmp_path), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("checkpoint", ["qwen3"], indirect=True)
def test_a_head_that_is_missing_is_not_taken_for_a_tied_one(checkpoint, tmp_path):
    folder, config, _ = checkpoint
    untied = config | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(untied))
    with pytest.raises(ValueError, match=r"no tensor 'lm_head\.weight'"):
        EXAMPLE["main"]([str(folder), "--out", str(tmp_path / "out")])


def test_the_folder_itself_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        EXAMPLE["main"]([str(tmp_path), "--out", str(tmp_path)])
    assert "--out must be another folder" in capsys.readouterr().err
