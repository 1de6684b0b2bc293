"""`rope-cpu check` on models as torch.onnx and transformers write them: angles, and logits."""

from __future__ import annotations

import json
import warnings
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import oracle
import pytest
from text_configs import LLAMA3_SCALING

from rope_cpu import RotaryEmbedding
from rope_cpu.cli import main

pytestmark = pytest.mark.runtimes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
exporters = pytest.importorskip("transformers.exporters")
pytest.importorskip("onnxscript")

POSITIONS = [0, 4000, 131000, 1000000]
TOKENS = 7
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "attn_implementation": "eager",
}
LLAMA3 = {"rope_theta": 5e5, **LLAMA3_SCALING}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
MODELS = {
    "Llama": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "Qwen 3": ("Qwen3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Gemma 3": ("Gemma3TextConfig", {"layer_types": ["sliding_attention", "full_attention"]}),
    "YaRN": ("LlamaConfig", {"rope_parameters": YARN}),
}


class Logits(torch.nn.Module):
    """A model without a cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids):
        ids = {"input_ids": input_ids, "position_ids": position_ids}
        return self.model(**ids, use_cache=False).logits


class ExactAngles(torch.nn.Module):
    """The rotary embedding of a model in float64, from cos and sin in 200 bits."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, position_ids, layer_type=None):
        rope = RotaryEmbedding.from_config(self.config, layer_type=layer_type)
        cos_sin = oracle.cos_sin(position_ids.numpy(), rope.inv_freq)
        cos_sin = [rope.attention_factor * values for values in cos_sin]
        return tuple(torch.from_numpy(np.concatenate([x, x], axis=-1)) for x in cos_sin)


@pytest.fixture(params=MODELS)
def model(request):
    name, values = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SMALL | values)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def by_torch(model, path, opset):
    """Write a model by torch.onnx; the number of tokens is dynamic."""
    ids = torch.zeros((1, TOKENS), dtype=torch.int64)
    dynamic = {"input_ids": {1: "sequence"}, "position_ids": {1: "sequence"}}
    torch.onnx.export(
        Logits(model),
        (ids, torch.arange(TOKENS)[None]),
        path,
        input_names=list(dynamic),
        opset_version=opset,
        dynamo=True,
        external_data=False,
        dynamic_shapes=dynamic,
        verbose=False,
    )


def by_transformers(model, path, fused_for):
    """Write a model by transformers' own exporter, plain or fused for a provider of onnxruntime."""
    ids = torch.zeros((1, TOKENS), dtype=torch.int64)
    inputs = {"input_ids": ids, "position_ids": torch.arange(TOKENS)[None]}
    config = exporters.OnnxConfig(dynamic=True, ort_fusions=fused_for)
    exporters.OnnxExporter().export(model, inputs, config=config).save_pretrained(path.parent)


WRITERS = {
    "torch.onnx, opset 18": partial(by_torch, opset=18),
    "torch.onnx, opset 23": partial(by_torch, opset=23),
    "transformers": partial(by_transformers, fused_for=None),
    "transformers, fused": partial(by_transformers, fused_for="cpu"),
}


def errors(path, model, position):
    """The largest error of logits of tokens from a position on."""
    ids = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (1, TOKENS))
    positions = position + np.arange(TOKENS)[None]
    session = onnxruntime.InferenceSession(path)
    logits, *_ = session.run(None, {"input_ids": ids, "position_ids": positions})
    with torch.no_grad():
        exact = Logits(model)(torch.from_numpy(ids), torch.from_numpy(positions))
    return float(np.abs(logits - exact.numpy()).max())


@pytest.mark.parametrize("writer", WRITERS)
def test_exports_of_models(model, writer, tmp_path, capsys):
    path = tmp_path / "model.onnx"
    fixed = tmp_path / "fixed.onnx"
    config = json.loads(model.config.to_json_string(use_diff=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WRITERS[writer](model, path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    options = [str(path), str(tmp_path), "--json", "--fix", "-o", str(fixed)]
    assert main.main(["check", *options]) == 0
    before, after = (report["rotations"] for report in json.loads(capsys.readouterr().out))
    assert len(before) == len(after) == (2 if config["model_type"] == "gemma3_text" else 1)
    for rotation in before:
        assert rotation["against the config"] is None
        assert not rotation["interleaved"]
        assert 1e-3 < rotation["largest error below 131072"] < 1e-2
    assert all(rotation["times the tolerance"] <= 1 for rotation in after)
    if "fused" not in writer:  # onnx does not know onnxruntime's operators
        onnx.checker.check_model(onnx.load(fixed), full_check=True)
    # In float64, transformers has no other error than that of its angles, which are exact here.
    exact = model.double()
    exact.model.rotary_emb = ExactAngles(config)
    sizes = {p: (errors(path, exact, p), errors(fixed, exact, p)) for p in POSITIONS}
    # At position 0 angles are exact before, too: the other operators' roundings are left.
    rounding = sizes[0][0]
    for position, (old, new) in sizes.items():
        assert new < 3 * rounding
        assert old > 10 * rounding or position < 131000
