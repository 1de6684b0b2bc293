"""The layers of every model type of transformers: written right, or refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attention_modules import attention_module, random_model  # noqa: E402

from rope_cpu import RotaryEmbedding, export  # noqa: E402
from rope_cpu.configs.model_types import model_facts  # noqa: E402
from rope_cpu.export.validation.session import open_session  # noqa: E402

pytestmark = pytest.mark.peers

TOKENS = 12
LAYERS = 6
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
# Keys that are set where a config class has them: they must be read from the config.
READ = {
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 0.03,
    "norm_eps": 0.03,
    "rotary_dim": 16,
}

# Model types of which at least one layer can be built so small, and must agree.
RIGHT = (
    *("apertus", "apertus1p5_text", "arcee", "aria_text", "cohere", "cohere2", "cohere2_moe"),
    *("cosmos3_edge_text", "cwm", "ernie4_5", "ernie4_5_moe", "eurobert", "exaone", "exaone4"),
    *("exaone_moe", "falcon", "falcon_h1", "flint", "gemma", "gemma2", "gemma3_text", "glm"),
    *("glm4", "glm4_moe", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite"),
    *("granite_docling_text", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoeshared", "gte", "helium", "higgs_audio_v2", "hy_v3", "hyperclovax"),
    *("internlm3", "iquestcoder", "jais2", "jina_embeddings_v3", "kolibri1", "lara_mini"),
    *("lfm2", "llama", "mellum", "minimax", "ministral", "mistral", "mixtral", "nanochat"),
    *("nemotron", "olmo", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("roformer", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2"),
    "vaultgemma",
)

# Model types that are refused, and words of the reason.
REFUSED = {
    "afmoe": "gate_proj.weight",
    "beam": "gate_bias, gate_proj.weight",
    "bitnet": "attn_sub_norm.weight",
    "codegen": "the order of queries, keys and values",
    "diffllama": "it subtracts one attention from another",
    "doge": "its mask is computed from the values",
    "flex_olmo": "over the whole projection",
    "gemma4_text": "norms of values",
    "hrm_text": "its prefix is bidirectional",
    "hunyuan_v1_dense": "norms of queries and keys after the rotation",
    "jetmoe": "its keys are tiled over the experts' queries",
    "laguna": "g_proj.weight",
    "llama4_text": "chunks of 8192 tokens",
    "mimo_v2_flash": "attention_value_scale",
    "minimax_m2": "over the whole projection",
    "ministral3": "queries scaled by their position",
    "modernbert": "a window of both sides",
    "molmo2_text": "over the whole projection, unless",
    "olmo2": "over the whole projection",
    "olmo3": "over the whole projection",
    "olmoe": "over the whole projection",
    "persimmon": "LayerNorm, which subtracts the mean",
    "qwen3_next": "there is more in it, such as a gate",
    "zaya": "division by the norm",
}


def model_types() -> list[str]:
    """The model types of transformers that this library knows."""
    known = []
    for name in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        facts = model_facts(name)
        # The embeddings of blt have half a billion elements whatever its config.
        if facts is not None and facts.part is None and not name.startswith("blt"):
            known.append(name)
    return known


def small_model(model_type: str) -> tuple[Any, dict[str, Any]]:
    """Return a small model and its calls; skip model types that need more than these keys."""
    default = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]()
    read = {name: value for name, value in READ.items() if name in vars(default)}
    problem = None
    derived = {name: value for name, value in SMALL.items() if name != "head_dim"}
    for keys in (SMALL | EXPERTS, SMALL, derived):
        try:
            return random_model(model_type, keys | read, TOKENS)
        except Exception as error:  # each class fails in its own way
            problem = error
    pytest.skip(f"it is not built from these keys: {problem}"[:200])


@pytest.mark.parametrize("model_type", model_types())
def test_layers_agree_or_are_refused(model_type: str) -> None:
    model, calls = small_model(model_type)
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    config["model_type"] = model_type
    reasons = []
    right = 0
    for layer in range(model.config.num_hidden_layers):
        try:
            arguments = export.attention_options(config, layer=layer)
            arguments |= export.attention_weights(model.state_dict(), config, layer)
        except ValueError as error:
            reasons.append(str(error))
            continue
        module = attention_module(model, calls, model_type, layer)
        rope = RotaryEmbedding.from_config(config, layer=layer, angle_dtype="float32")
        if rope.spec.needs_length:
            rope = rope.at_length(TOKENS)
        exported = export.export_attention(
            rope, target="primitive", dtype="float64", past=False, **arguments
        )
        (result,) = open_session(exported).run(None, {"hidden": module.hidden.astype(np.float64)})
        assert np.abs(result - module.result).max() <= module.own_error, layer
        right += 1
    assert bool(right) == (model_type in RIGHT) or model_type not in (*RIGHT, *REFUSED), reasons
    if model_type in REFUSED:
        assert any(REFUSED[model_type] in reason for reason in reasons), reasons
