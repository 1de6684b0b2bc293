"""A whole decoder as one ONNX model, from a Hugging Face folder of Llama, Qwen 3 or Gemma 3 (text).

    python examples/onnx_decoder.py FOLDER --out OUT

FOLDER holds config.json and *.safetensors. OUT gets onnx/model.onnx in float32, genai_config.json,
and copies of the configs and of the tokenizer, if there is one. onnxruntime-genai runs OUT with
both caches, transformers.js with --cache growing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open

from rope_cpu import RotaryEmbedding, export
from rope_cpu.array_types import Array

# Opsets of the attention of each target; the other operators are the same from 13 on.
OPSETS = {"onnx": 24, "primitive": 17, "ort": 17}
COPIED = ("*config.json", "token*", "*tokens*.json", "vocab*", "merges*", "*.jinja")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Family:
    """Facts of a model type, outside the attention.

    norm_offset: added to the weights of norms. scaled: embeddings are multiplied by √hidden_size.
    mlp_norm: norm before the MLP. attention_post_norm, mlp_post_norm: norms of the results.
    """

    norm_offset: float = 0.0
    scaled: bool = False
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = ""
    mlp_post_norm: str = ""


GEMMA = Family(
    norm_offset=1.0,
    scaled=True,
    mlp_norm="pre_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
FAMILIES = {"llama": Family(), "qwen3": Family(), "gemma3_text": GEMMA}


class Piece:
    """A graph before, between or behind the layers of attention."""

    def __init__(self, name: str, opset: int) -> None:
        self.model = onnx.ModelProto(ir_version=8)
        self.model.opset_import.append(helper.make_opsetid("", opset))
        self.graph = self.model.graph
        self.graph.name = name

    def op(self, kind: str, *inputs: str, output: str = "") -> str:
        """Add a node; return the name of its output."""
        name = output or f"{self.graph.name}/{len(self.graph.node)}_{kind}"
        self.graph.node.append(helper.make_node(kind, inputs, [name], name))
        return name

    def array(self, array: Any) -> str:
        """Add an initializer; return its name."""
        name = f"{self.graph.name}/array_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def number(self, value: float) -> str:
        """Add a scalar; return its name."""
        return self.array(np.float32(value))


def value_info(name: str, *sizes: int, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """Return a declaration of (batch, seq, *sizes)."""
    return helper.make_tensor_value_info(name, dtype, ["batch_size", "sequence_length", *sizes])


def silu(piece: Piece, x: str) -> str:
    """Return x · sigmoid(x)."""
    return piece.op("Mul", x, piece.op("Sigmoid", x))


def gelu(piece: Piece, x: str) -> str:
    """Return x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))."""
    cube = piece.op("Mul", x, piece.op("Mul", x, x))
    argument = piece.op("Add", x, piece.op("Mul", cube, piece.number(0.044715)))
    tanh = piece.op("Tanh", piece.op("Mul", argument, piece.number((2 / np.pi) ** 0.5)))
    half = piece.op("Mul", x, piece.number(0.5))
    return piece.op("Mul", half, piece.op("Add", tanh, piece.number(1)))


ACTIVATIONS = {"silu": silu, "gelu_pytorch_tanh": gelu}


class Decoder:
    """Writes the decoder of a folder; length: positions that it has at most."""

    def __init__(self, folder: Path, target: str, cache: str, length: int) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        model_type = self.config["model_type"]
        if model_type not in FAMILIES:
            raise ValueError(f"model type {model_type!r} is not one of {', '.join(FAMILIES)}")
        self.family = FAMILIES[model_type]
        activation = self.config.get("hidden_activation") or self.config["hidden_act"]
        self.activation = ACTIVATIONS[activation]
        self.layers: int = self.config["num_hidden_layers"]
        self.options: dict[str, Any] = {"target": target, "cache": cache, "max_positions": length}
        self.opset = OPSETS[target]
        files = [safe_open(path, "numpy") for path in sorted(folder.glob("*.safetensors"))]
        self.files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> Array:
        """Read a tensor of the checkpoint."""
        tensor: Array = self.files[name].get_tensor(name)
        return tensor.astype(np.float32)

    def parts(self) -> Iterator[onnx.ModelProto]:
        """Yield the graphs and the layers of attention, one by one, in their order."""
        yield self.embedding()
        for layer in range(self.layers):
            yield self.attention(layer)
            yield self.mlp(layer)

    def embedding(self) -> onnx.ModelProto:
        """Return the embedding and the first norm."""
        piece = Piece("embedding", self.opset)
        piece.graph.input.append(value_info("input_ids", dtype=TensorProto.INT64))
        table = piece.array(self.tensor("model.embed_tokens.weight"))
        factor = self.config["hidden_size"] ** 0.5 if self.family.scaled else 1.0
        x = piece.op("Gather", table, "input_ids")
        piece.op("Mul", x, piece.number(factor), output="residual_0")
        self.finish(piece, 0)
        return piece.model

    def attention(self, layer: int) -> onnx.ModelProto:
        """Return the attention of a layer."""
        names = [name for name in self.files if f".layers.{layer}.self_attn." in name]
        tensors = {name: self.tensor(name) for name in names}
        options = export.attention_options(self.config, layer=layer)
        options |= export.attention_weights(tensors, self.config, layer)
        options |= {"names": "optimum", "layer": layer, "name_prefix": f"layers.{layer}."}
        rope = RotaryEmbedding.from_config(self.config, layer=layer)
        return export.export_attention(rope, opset=self.opset, **self.options, **options)

    def mlp(self, layer: int) -> onnx.ModelProto:
        """Return all behind the attention of a layer: residual connections, norms and the MLP."""
        piece = Piece(f"mlp_{layer}", self.opset)
        residual = f"residual_{layer}"
        attention = f"layers.{layer}.attention"
        width = self.config["hidden_size"]
        piece.graph.input.extend(value_info(name, width) for name in (residual, attention))
        module = f"model.layers.{layer}"
        y = self.norm(piece, attention, module, self.family.attention_post_norm)
        x = piece.op("Add", residual, y)
        normed = self.norm(piece, x, module, self.family.mlp_norm)
        gate = self.linear(piece, normed, f"{module}.mlp.gate_proj")
        up = self.linear(piece, normed, f"{module}.mlp.up_proj")
        product = piece.op("Mul", self.activation(piece, gate), up)
        y = self.linear(piece, product, f"{module}.mlp.down_proj")
        y = self.norm(piece, y, module, self.family.mlp_post_norm)
        piece.op("Add", x, y, output=f"residual_{layer + 1}")
        self.finish(piece, layer + 1)
        return piece.model

    def finish(self, piece: Piece, layer: int) -> None:
        """Add the norm before a layer, or the last norm and the logits."""
        residual = f"residual_{layer}"
        if layer < self.layers:
            hidden = f"layers.{layer}.hidden"
            self.norm(piece, residual, f"model.layers.{layer}", "input_layernorm", hidden)
            width = self.config["hidden_size"]
            piece.graph.output.extend(value_info(name, width) for name in (residual, hidden))
            return
        normed = self.norm(piece, residual, "model", "norm")
        is_tied = "lm_head.weight" not in self.files
        head = self.tensor("model.embed_tokens.weight" if is_tied else "lm_head.weight")
        piece.op("MatMul", normed, piece.op("Transpose", piece.array(head)), output="logits")
        piece.graph.output.append(value_info("logits", len(head)))

    def linear(self, piece: Piece, x: str, name: str) -> str:
        """Apply a projection."""
        y = piece.op("MatMul", x, piece.array(self.tensor(f"{name}.weight").T))
        bias = f"{name}.bias"
        return piece.op("Add", y, piece.array(self.tensor(bias))) if bias in self.files else y

    def norm(self, piece: Piece, x: str, module: str, name: str, output: str = "") -> str:
        """Apply an RMS norm; without a name return x."""
        if not name:
            return x
        weight = self.tensor(f"{module}.{name}.weight")
        total = piece.op("ReduceSum", piece.op("Mul", x, x), piece.array([-1]))
        mean = piece.op("Div", total, piece.number(len(weight)))
        epsilon = piece.number(self.config["rms_norm_eps"])
        rms = piece.op("Sqrt", piece.op("Add", mean, epsilon))
        scale = piece.array(weight + np.float32(self.family.norm_offset))
        return piece.op("Mul", piece.op("Div", x, rms), scale, output=output)


def genai_config(config: dict[str, Any], cache: str, length: int) -> dict[str, Any]:
    """Return the config of onnxruntime-genai."""
    heads = config["num_attention_heads"]
    past = {f"past_{part}_names": f"past_key_values.%d.{part}" for part in ("key", "value")}
    present = {f"present_{part}_names": f"present.%d.{part}" for part in ("key", "value")}
    decoder = {
        "filename": "onnx/model.onnx",
        "hidden_size": config["hidden_size"],
        "head_size": config.get("head_dim") or config["hidden_size"] // heads,
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "num_hidden_layers": config["num_hidden_layers"],
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **past},
        "outputs": {"logits": "logits", **present},
    }
    model = {
        "type": config["model_type"],
        "vocab_size": config["vocab_size"],
        "context_length": length,
        "decoder": decoder,
    }
    model |= {key: config[key] for key in TOKEN_KEYS if config.get(key) is not None}
    search = {"max_length": length, "past_present_share_buffer": cache == "shared"}
    return {"model": model, "search": search}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--target", default="ort", choices=OPSETS)
    parser.add_argument("--cache", default="shared", choices=("growing", "shared"))
    parser.add_argument("--length", type=int, default=4096, help="most tokens, prompt included")
    options = parser.parse_args(arguments)
    decoder = Decoder(options.folder, options.target, options.cache, options.length)
    (options.out / "onnx").mkdir(parents=True, exist_ok=True)
    export.save(export.merge(decoder.parts()), options.out / "onnx" / "model.onnx")
    for pattern in COPIED:
        for file in options.folder.glob(pattern):
            shutil.copy(file, options.out)
    genai = genai_config(decoder.config, options.cache, options.length)
    (options.out / "genai_config.json").write_text(json.dumps(genai, indent=2))


if __name__ == "__main__":
    main()
