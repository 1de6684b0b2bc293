"""Decoders of examples/onnx_decoder.py in other runtimes: 64 greedy tokens as in transformers."""

import json
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from text_configs import LLAMA3_SCALING

pytestmark = pytest.mark.runtimes

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
EXAMPLE = runpy.run_path(str(HERE.parents[1] / "examples" / "onnx_decoder.py"))
STEPS = 64
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LENGTH = len(PROMPT) + STEPS

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
LLAMA3 = {"rope_theta": 5e5, **LLAMA3_SCALING, "original_max_position_embeddings": 64}
WINDOWS = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
CONFIGS = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", WINDOWS),
}
# Seeds of weights with which rounding errors are far below the margins of all greedy tokens.
SEEDS = {"llama": 0, "qwen3": 2, "gemma3": 35}


def random_model(name, seed):
    """Return a model of transformers in float32; a tied head does not repeat its last token."""
    config_class, keys = CONFIGS[name]
    config = getattr(transformers, config_class)(**SIZES, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1
            spread = 0.02 if "embed" in key else 0.2
            values = random.standard_normal(tuple(parameter.shape)) * spread + is_norm
            parameter.copy_(torch.from_numpy(values))
    return model


def greedy(model):
    """Return the tokens behind the prompt, and their logits."""
    result = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences[0, len(PROMPT) :].tolist(), torch.cat(result.logits).double().numpy()


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """Return a function: name → (folder, tokens, exact logits, largest error in float32)."""
    known = {}

    def decoder(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            model = random_model(name, SEEDS[name])
            tokens, logits = greedy(model)
            # onnxruntime-genai stops at this token, and at 0 without one.
            model.config.eos_token_id = min(set(range(199)) - set(tokens))
            model.save_pretrained(folder)
            _, exact = greedy(model.double())
            own_error = np.abs(logits - exact).max()
            top = np.sort(exact, axis=1)
            assert (top[:, -1] - top[:, -2]).min() > 100 * own_error
            assert len(set(tokens)) > STEPS / 4
            known[name] = folder, tokens, exact, own_error
        return known[name]

    return decoder


@pytest.fixture(scope="module")
def written(decoders, tmp_path_factory):
    """Return a function that writes a decoder in ONNX and returns its folder."""
    known = {}

    def write(name, target, cache):
        case = (name, target, cache)
        if case not in known:
            known[case] = tmp_path_factory.mktemp("-".join(case))
            options = ["--target", target, "--cache", cache, "--length", str(LENGTH)]
            EXAMPLE["main"]([str(decoders(name)[0]), "--out", str(known[case]), *options])
        return known[case]

    return write


def in_onnxruntime(folder, cache):
    """Return tokens and logits."""
    path = folder / "onnx" / "model.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    empty = np.zeros((1, 2, LENGTH if cache == "shared" else 0, 32), np.float32)
    past = {name.replace("present", "past_key_values"): empty for name in names}
    del past["logits"]
    tokens = list(PROMPT)
    ids = PROMPT
    all_logits = []
    for _ in range(STEPS):
        mask = np.ones((1, len(tokens)), np.int64)
        feeds = {"input_ids": np.array([ids]), "attention_mask": mask, **past}
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        all_logits.append(outputs["logits"][0, -1])
        ids = [int(all_logits[-1].argmax())]
        tokens += ids
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    return tokens[len(PROMPT) :], np.array(all_logits)


def in_genai(folder, cache):
    """Return tokens."""
    genai = pytest.importorskip("onnxruntime_genai")
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=LENGTH, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array([PROMPT], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0)[len(PROMPT) :].tolist()


def in_node(runtime):
    """Return a function that returns the tokens of a runtime of node."""

    def decode(folder, cache):
        if not (shutil.which("node") and (HERE / "node_modules").exists()):
            pytest.skip("needs node, and `npm ci` in tests/runtimes")
        words = [str(word) for word in (HERE / "decode.mjs", runtime, folder, cache, STEPS)]
        done = subprocess.run(
            ["node", *words, *map(str, PROMPT)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return decode


RUNTIMES = {
    "onnxruntime": lambda folder, cache: in_onnxruntime(folder, cache)[0],
    "onnxruntime-genai": in_genai,
    "onnxruntime-node": in_node("onnxruntime-node"),
    "onnxruntime-web": in_node("onnxruntime-web"),
    "transformers.js": in_node("transformers.js"),
}
# transformers.js has no shared caches.
CASES = [
    (runtime, cache)
    for runtime in RUNTIMES
    for cache in ("growing", "shared")
    if (runtime, cache) != ("transformers.js", "shared")
]


@pytest.mark.parametrize(("runtime", "cache"), CASES)
@pytest.mark.parametrize("target", EXAMPLE["OPSETS"])
@pytest.mark.parametrize("name", CONFIGS)
def test_64_tokens(decoders, written, name, target, runtime, cache):
    tokens = RUNTIMES[runtime](written(name, target, cache), cache)
    assert tokens == decoders(name)[1]


@pytest.mark.parametrize("cache", ["growing", "shared"])
@pytest.mark.parametrize("target", EXAMPLE["OPSETS"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(decoders, written, name, target, cache):
    _, _, exact, own_error = decoders(name)
    _, logits = in_onnxruntime(written(name, target, cache), cache)
    error = np.abs(logits - exact).max()
    print(f"{name} {target} {cache}: {error:.1e} of {np.abs(exact).max():.1f}")
    # Another order of sums may be a few times as far off as transformers in float32.
    assert error <= 4 * own_error <= 1e-4 * np.abs(exact).max()
