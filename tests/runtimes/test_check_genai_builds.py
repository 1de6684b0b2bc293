"""`rope-cpu check` on models as the builder of onnxruntime-genai writes them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import oracle
import pytest
from onnx import numpy_helper
from text_configs import LLAMA3_SCALING

from rope_cpu import RotaryEmbedding
from rope_cpu.cli import main

pytestmark = pytest.mark.runtimes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("onnxruntime_genai")

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{index}": index for index in range(3, 64)}
SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": len(VOCABULARY),
    "head_dim": 64,
    "max_position_embeddings": 131072,
}
LLAMA3 = {"rope_theta": 5e5, **LLAMA3_SCALING}
MODELS = {
    "Llama 3.1": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("name", MODELS)
def test_builds(name, tmp_path, capsys):
    config_class, values = MODELS[name]
    config = getattr(transformers, config_class)(**SMALL | values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    config = model.config.to_dict() | values
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(tmp_path)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    arguments = ["-i", tmp_path, "-o", tmp_path / "build", "-p", "fp32", "-e", "cpu"]
    cache = ["-c", tmp_path / "cache"]
    subprocess.run([*builder, *arguments, *cache], check=True, capture_output=True)

    build = tmp_path / "build/model.onnx"
    fixed = tmp_path / "fixed.onnx"
    options = [str(build), str(tmp_path), "--json", "--fix", "-o", str(fixed)]
    capsys.readouterr()
    assert main.main(["check", *options]) == 0
    reports = json.loads(capsys.readouterr().out)
    ((before,), (after,)) = (report["rotations"] for report in reports)
    assert after["read from"] == "GroupQueryAttention, float32"
    assert before["largest error below 131072"] > 5e-3
    assert after["times the tolerance"] <= 1
    onnxruntime.InferenceSession(fixed)
    tensors = {tensor.name: tensor for tensor in onnx.load(fixed).graph.initializer}
    rope = RotaryEmbedding.from_config(config)
    rows = [0, 4000, 131000]
    cos, _ = oracle.cos_sin(rows, rope.inv_freq)
    table = numpy_helper.to_array(tensors["cos_cache"])[rows]
    assert np.abs(table - rope.attention_factor * cos).max() < 6.1e-8
