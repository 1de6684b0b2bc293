"""Write tests/data/published_configs.json: the rope facts of published config files.

    python tools/make_published_facts.py FOLDER

FOLDER holds config files. The output keeps only the keys that a rotation depends on, and the
frequencies that transformers computes from the whole file. For files that transformers cannot read,
this computes the closed form of the model's own code (OWN_CODE) or gives the reason of the refusal
(REFUSED). Nothing here imports rope_cpu.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
from rotary_modules import frequencies, modules  # noqa: E402

TARGET = TESTS / "data" / "published_configs.json"

KEPT = re.compile(
    r"rope|rotary|rotate|head_dim|kv_channels|"
    r"^(hidden_size|d_model|n_embd|dim|num_attention_heads|num_heads|n_heads?)$|"
    r"partial_rotary|max_position_embeddings|n_positions|model_max_length|seq_length|"
    r"^model_type$|layer_types|alibi|per_layer_config|use_dynamic_ntk|use_mla|"
    r"position_embedding_type|mrope|_class_name|_diffusers_version|attn_config"
)

# Base, width and pairing of files that transformers cannot read, by the model's own code.
OWN_CODE: dict[str, tuple[float, int, bool]] = {
    **dict.fromkeys(
        ("baichuan2-7b", "baichuan2-7b-chat", "xverse-7b", "sparsellama-7b-prosparse"),
        (1e4, 128, False),
    ),
    "dbrx-132b-short": (1e4, 128, False),
    "glm4v-9b": (1e4, 64, True),
    **dict.fromkeys(("chatglm2-6b", "chatglm3-6b"), (1e4, 64, True)),
    "chatglm3-6b-32k": (1e4 * 50, 64, True),
    "fla_transformer-340m": (1e4, 64, False),
    "qwen-72b-chat": (1e6, 128, False),
    **dict.fromkeys(("qwen-7b", "qwen_vl-7b-chat"), (1e4, 128, False)),
    "emu3.5-14b": (1e6, 128, False),
    "mimo-7b": (640000.0, 128, False),
    "internlm2-reward-7b": (1e6, 128, False),
    "stablelm_epoch-2-1layer": (1e4, 32, False),
    "minimax_m3": (5e6, 64, False),
    "vila-3b": (1e4, 128, False),
    "eagle_3_vl-2b": (1e6, 128, False),
    "qwen3_tts-base": (1e6, 128, False),
    **dict.fromkeys(("codegen-350m-mono", "codegen-350m-multi"), (1e4, 32, True)),
    "deepseek_vl_v2-tiny": (1e4, 128, False),
    "gptj-6b-1layer": (1e4, 64, True),
    **dict.fromkeys(
        ("roformer-base", "roformer-base-nomaxpos", "roformer-base-userotary"), (1e4, 64, True)
    ),
}

# Files that transformers reads as another model type: the model's own code computes the same.
READ_AS = {
    "exaone-7.8b": "llama",
    "internlm2-tiny-xcomposer": "llama",
    "internvl_chat-2b": "llama",
    "kimi_k2-1t": "deepseek_v3",
    "minicpm4-8b": "llama",
    "minicpmv-4": "llama",
    "phi3_v-4b": "phi3",
    "phi4mm-1layer": "phi3",
    "vibevoice-1.5b": "qwen2",
    "gemma3-1b-executorch": "gemma3_text",
    "llava-1.5-7b": "llama",
}
PARTS = ("text_config", "llm_config", "llm_cfg", "decoder_config", "language_config")

REFUSED = {
    "gpt_neox-2.7b-2021": "its model type `gpt-neox` was never that of a released model",
    "hf_olmo-tiny": "its `rope` key is false: it is not rotated",
    "minicpm3-4b-nomodeltype": "it has no model type, so its pairing is not known",
    "nemotron_h-30b-a3b": "its attention layers are not rotated",
    "diffusers/ace_step-3.5b": "its class name `Transformer2DModel` does not determine a rotation",
    "diffusers/longcat_video": "its class is not one of diffusers'",
}


def kept(value: Any) -> Any:
    """Return the rope-relevant keys of a config, parts with any of them included."""
    found = {}
    for key, inner in value.items():
        if isinstance(inner, dict) and not re.search(r"quantization|vision|visual|audio", key):
            part = inner if "rope" in key else kept(inner)
            if part:
                found[key] = part
        elif KEPT.search(key) and not isinstance(inner, dict):
            found[key] = inner
    return found


def language_config(raw: dict[str, Any], name: str) -> Any:
    """Return transformers' config object of the language model of a file."""
    if name in READ_AS:
        raw = {
            **next((raw[key] for key in PARTS if isinstance(raw.get(key), dict)), raw),
            "model_type": READ_AS[name],
        }
        if (raw.get("rope_scaling") or {}).get("type") == "su":
            raw["rope_scaling"] = {**raw["rope_scaling"], "type": "longrope"}
    cfg = CONFIG_MAPPING[raw["model_type"]].from_dict(
        {k: v for k, v in raw.items() if k != "quantization_config"}
    )
    while getattr(cfg, "rope_parameters", None) is None and hasattr(cfg, "text_config"):
        cfg = cfg.text_config
    return cfg


def rotary_of(cfg: Any) -> Any:
    """Return transformers' rotary module for a config object."""
    for _, rotary, config_class in modules():
        if config_class is type(cfg) and "Vision" not in rotary.__name__:
            return rotary(cfg)
    for folder, rotary, _ in modules():
        if f".{folder}." in type(cfg).__module__ and "Vision" not in rotary.__name__:
            return rotary(cfg)
    raise LookupError(f"no rotary module for {type(cfg).__name__}")


def sample(inv_freq: np.ndarray, factor: float) -> dict[str, Any]:
    """Return a few frequencies and their sum."""
    n = len(inv_freq)
    at = sorted({0, 1, n // 3, n // 2, 2 * n // 3, n - 1})
    return {
        "pairs": n,
        "at": at,
        "inv_freq": [float(f"{inv_freq[i]:.9g}") for i in at],
        "sum": float(f"{inv_freq.sum():.9g}"),
        "attention_factor": factor,
    }


def facts(path: Path, name: str) -> dict[str, Any]:
    """Return the entry of one file."""
    raw = json.loads(path.read_text())
    entry: dict[str, Any] = {"config": copy.deepcopy(kept(raw))}  # transformers modifies its input
    if name in REFUSED:
        return {**entry, "refused": REFUSED[name]}
    if name.startswith("diffusers/"):
        return {**entry, "by": "tests/models/test_published.py"}
    if name in OWN_CODE:
        base, width, interleaved = OWN_CODE[name]
        one = sample(base ** (-np.arange(0, width, 2) / width), 1.0)
        return {
            **entry,
            "by": "the model's own code",
            "interleaved": interleaved,
            "expected": {"": one},
        }
    cfg = language_config(raw, name)
    module = rotary_of(cfg)
    found = {label or "": sample(*values) for label, values in frequencies(module).items()}
    entry |= {"by": f"transformers {transformers.__version__}", "expected": found}
    if getattr(module, "rope_type", "") == "longrope":
        module(
            torch.zeros(1),
            torch.tensor([[module.config.rope_parameters["original_max_position_embeddings"]]]),
        )
        entry["long"] = sample(*frequencies(module)[None])
    return entry


def main(folder: str) -> None:
    """Write the facts of every file in a folder."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    root, table = Path(folder), {}
    for path in sorted(root.rglob("*.json")):
        name = str(path.relative_to(root))[: -len(".json")]
        try:
            table[name] = facts(path, name)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:150]}")
    TARGET.parent.mkdir(exist_ok=True)
    rows = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items()]
    TARGET.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{len(table)} files, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
