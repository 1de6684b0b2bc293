"""Write tests/data/rotated_by_transformers.json: a fixed input, rotated by a few models' own code.

python tools/make_rotated.py
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

TARGET = Path(__file__).parents[1] / "tests" / "data" / "rotated_by_transformers.json"
LONG = 131072


@dataclass(frozen=True)
class Case:
    """One model: its folder, the stem of its class names, its config's keys, and its call."""

    folder: str
    stem: str
    keys: dict[str, Any] = field(default_factory=dict)
    layer_type: str | None = None
    apply: str = "apply_rotary_pos_emb"
    module: str = "RotaryEmbedding"
    config: str = "Config"
    length: int = LONG


SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": LONG,
}
EXTENSIONS = {
    "short_factor": [1 + 0.01 * i for i in range(32)],
    "long_factor": [1 + 0.5 * i for i in range(32)],
}


def llama(rope_type: str, length: int = LONG, original: int | None = None, **keys: Any) -> Case:
    """Return Llama with a rope type; original: its original_max_position_embeddings."""
    section = {"rope_type": rope_type, "rope_theta": 123456.0, **keys}
    if original is not None:
        section["original_max_position_embeddings"] = original
    parameters = {"max_position_embeddings": 5000, "rope_parameters": section}
    return Case("llama", "Llama", {**SMALL, **parameters}, length=length)


MLA = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
WIDE = {**SMALL, "head_dim": 64}
PADDED = {"pad_token_id": 0}
GEMMA3 = {**WIDE, "num_hidden_layers": 6}
ESM = {"position_embedding_type": "rotary", "vocab_size": 33, "mask_token_id": 32}
PHI3 = {
    **SMALL,
    **PADDED,
    "original_max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **EXTENSIONS},
}
FULL, SLIDING = "full_attention", "sliding_attention"
CASES = {
    "llama": Case("llama", "Llama", SMALL),
    "llama dynamic long": llama("dynamic", 30000, factor=2.3),
    "llama yarn": llama("yarn", original=700, factor=7.3, beta_fast=20.0, beta_slow=3.0),
    "llama llama3": llama(
        "llama3", original=1300, factor=5.5, low_freq_factor=1.3, high_freq_factor=6.1
    ),
    "llama proportional": llama("proportional", partial_rotary_factor=0.37, factor=2.0),
    "gpt_neox": Case("gpt_neox", "GPTNeoX", SMALL),
    "glm4": Case("glm4", "Glm4", {**WIDE, **PADDED}),
    "llama yarn past the last pair": llama("yarn", original=131072, factor=4.0, rope_theta=1e4),
    "llama yarn cut off": llama("yarn", original=10**6, factor=4.0, rope_theta=50.0, beta_fast=1e4),
    "llama yarn from the first pair": llama("yarn", original=64, factor=4.0),
    "llama yarn mscale": llama(
        "yarn", original=900, factor=9.0, mscale=0.7, mscale_all_dim=0.4, truncate=False
    ),
    "cohere2": Case("cohere2", "Cohere2", SMALL),
    "phi3 short": Case("phi3", "Phi3", PHI3, length=4096),
    "phi3 long": Case("phi3", "Phi3", PHI3),
    "deepseek_v3": Case(
        "deepseek_v3", "DeepseekV3", {**SMALL, **MLA}, apply="apply_rotary_pos_emb_interleave"
    ),
    "gemma3 full": Case("gemma3", "Gemma3", GEMMA3, FULL, config="TextConfig"),
    "gemma3 sliding": Case("gemma3", "Gemma3", WIDE, SLIDING, config="TextConfig"),
    "gpt_oss": Case("gpt_oss", "GptOss", WIDE),
    "esm": Case("esm", "Esm", {**SMALL, **ESM}),
}


def theirs(
    case: Case, ids: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return the model's own rotation of x (bhsd), its frequencies, and its config as a dict."""
    module = importlib.import_module(f"transformers.models.{case.folder}.modeling_{case.folder}")
    configuration = importlib.import_module(
        f"transformers.models.{case.folder}.configuration_{case.folder}"
    )
    cfg = getattr(configuration, case.stem + case.config)(**case.keys)
    rotary = getattr(module, case.stem + case.module)(cfg)
    layer = {} if case.layer_type is None else {"layer_type": case.layer_type}
    tensor, positions = torch.from_numpy(x), torch.from_numpy(ids)[None]
    tables = rotary(tensor, positions, **layer)
    apply: Callable[..., Any] = getattr(module, case.apply)
    if case.apply == "apply_rotary_emb":  # Llama 4: complex, heads after tokens
        rotated = apply(tensor.transpose(1, 2), tensor.transpose(1, 2), tables)[0].transpose(1, 2)
    else:
        rotated = apply(tensor, tensor, *tables)[0]
    prefix = "" if case.layer_type is None else f"{case.layer_type}_"
    return rotated.numpy(), getattr(rotary, f"{prefix}inv_freq").double().numpy(), cfg.to_dict()


def fixed_input(tokens: int) -> np.ndarray:
    """Return (1, 1, tokens, 64) multiples of 1/16 from -1 to 1: exact in every format."""
    return (
        ((np.arange(tokens * 64) * 7 % 33 - 16) / 16).astype(np.float32).reshape(1, 1, tokens, 64)
    )


def main() -> None:
    """Write the file."""
    table = {}
    for name, case in CASES.items():
        ids = np.array([0, 1, 1000, case.length - 1])
        rotated, inv_freq, config = theirs(case, ids, fixed_input(len(ids)))
        table[name] = {
            "config": {"model_type": config["model_type"], **case.keys},
            "layer_type": case.layer_type,
            "length": case.length,
            "ids": ids.tolist(),
            "halves_out": case.apply.endswith("interleave"),
            "inv_freq": [float(f"{value:.9g}") for value in inv_freq],
            "rotated": [float(f"{value:.9g}") for value in rotated.reshape(-1)],
        }
    rows = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items()]
    TARGET.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{len(table)} cases, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
