"""Small whole models of transformers, layer by layer: their queries show each layer's rotation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.models import reader
from rope_cpu.models.model_types import UNROTATED, data

pytestmark = pytest.mark.peers

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
from small_models import EXPERTS, SMALL  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

CAPTURED: dict[int, np.ndarray] = {}
POSITION = 7
# The share of the largest query that float32's 2^-24 grows to in the layers below. A different base
# or none differs by over a tenth.
TOLERANCE = 2.0**-14

SIZES = SMALL | {"num_hidden_layers": 8, "num_key_value_heads": 2}
FULL, LOCAL = "full_attention", "sliding_attention"
MIXED = [LOCAL, FULL, FULL, LOCAL, LOCAL, LOCAL, LOCAL, FULL]
THETAS = [1e4, 5e6, 0, 1e4, 0, 1e4, 5e6, 0]
MASK = [1, 0, 1, 1, 0, 0, 1, 1]
MLA = {
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
}
QWEN = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DENSE = {"first_k_dense_replace": 2}
LLAMA4 = {"use_qk_norm": False, "intermediate_size_mlp": 64}
LOOP = {"loop_layer_index_start": 2, "loop_layer_index_end": 4}

# Model type, its keys beside SIZES, and the number of layers that are rotated.
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("granite_swa", {"layer_types": MIXED, "layer_rope_theta": THETAS}, 5),
    ("granite_swa", {}, 8),
    ("granitemoe_swa", {"layer_types": MIXED, "layer_rope_theta": THETAS}, 5),
    ("muse_glimmer_text", {"layer_types": MIXED, "layer_rope_theta": THETAS}, 5),
    ("muse_glimmer_text", {}, 6),
    ("muse_glimmer_text", {"num_hidden_layers": 6}, 4),
    ("muse_spark_text", {"moe_hidden_size": 64, **EXPERTS}, 6),
    ("flint", EXPERTS, 4),
    ("kolibri1", EXPERTS, 7),
    ("lara_mini", {"shared_expert_intermediate_size": 32, **QWEN, **EXPERTS}, 3),
    ("dory", {"n_input_layers": 2, "n_output_layers": 2}, 8),
    ("cohere2", {}, 6),
    ("cohere2_moe", {**DENSE, **EXPERTS}, 7),
    ("cohere2_moe", {**DENSE, "prefix_dense_sliding_window_pattern": 2, **EXPERTS}, 6),
    ("exaone4", {}, 6),
    ("exaone4", {"sliding_window": None, "layer_types": [FULL] * 8}, 8),
    ("afmoe", EXPERTS, 6),
    ("smollm3", {}, 6),
    ("smollm3", {"no_rope_layers": MASK}, 5),
    ("smollm3", {"no_rope_layer_interval": 3}, 6),
    ("llama4_text", {**LLAMA4, **EXPERTS}, 6),
    ("llama4_text", {**LLAMA4, "no_rope_layers": MASK, **EXPERTS}, 5),
    ("qwen3_next", {"rope_theta": 1e5, **QWEN, **EXPERTS}, 2),
    ("olmo_hybrid", {}, 2),
    ("gemma3_text", {"sliding_window_pattern": 3}, 8),
]


# The same, for models that rotate nothing.
NONE: list[tuple[str, dict[str, Any]]] = [
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
    ("kimi_linear", {**MLA, **EXPERTS}),
    ("nemotron_h", {"hybrid_override_pattern": "*-*-*-*-"}),
    ("jamba", EXPERTS),
    ("inkling2_text", EXPERTS),
    ("inkling2_loop_text", {"n_layers_per_attn_res_block": 2, **LOOP, **EXPERTS}),
]


def config_of(model_type: str, **keys: Any) -> Any:
    """Return a config of transformers; skip model types of other releases."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return transformers.AutoConfig.for_model(model_type, **keys)


def capture(
    module: Any, query: Any, key: Any, value: Any, *_: Any, **options: Any
) -> tuple[Any, None]:
    """Keep the queries; with one token in each row, what attention returns is its value."""
    if not hasattr(module, "layer_idx"):  # attention over the layers' states, not over tokens
        scale = options["scaling"]
        return sdpa(query, key, value, scale=scale).transpose(1, 2).contiguous(), None
    CAPTURED[module.layer_idx] = query.numpy()
    repeated = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return repeated.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("capture", capture)
AttentionMaskInterface.register("capture", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def queries(cfg: Any) -> dict[int, np.ndarray]:
    """Return, by layer, the queries (heads, head_dim) of a token at position 0 and at POSITION."""
    CAPTURED.clear()
    cfg._attn_implementation = "capture"
    torch.manual_seed(0)
    with torch.no_grad():
        model = transformers.AutoModel.from_config(cfg).eval().float()
        model(torch.full((2, 1), 9), position_ids=torch.tensor([[0], [POSITION]]), use_cache=False)
    return {layer: both[:, :, 0] for layer, both in CAPTURED.items()}


def rotary(given: dict[str, Any], layer: int) -> RotaryEmbedding | None:
    """Return the rotary embedding of a layer, None where it is read as not rotated."""
    try:
        return RotaryEmbedding.from_config(given, layer=layer, angle_dtype="float32")
    except ValueError as error:
        if "it must select a layer that is rotated" not in str(error):
            raise
        return None


@pytest.mark.parametrize(("model_type", "keys", "count"), CASES, ids=lambda value: str(value)[:40])
def test_every_layer_is_rotated_as_its_index_says(
    model_type: str, keys: dict[str, Any], count: int
) -> None:
    cfg = config_of(model_type, **{**SIZES, **keys})
    given = {**cfg.to_dict(), "model_type": model_type}
    found = queries(cfg)
    blocks = given["num_hidden_layers"] // cfg.num_hidden_layers  # of a layer; Dory has two
    ropes = {layer: rotary(given, blocks * layer) for layer in range(cfg.num_hidden_layers)}
    assert sum(rope is not None for rope in ropes.values()) == count
    for layer, (start, there) in found.items():
        rope = ropes[layer]
        expected = start if rope is None else rope.rotate(start[None, None], [POSITION])[0, 0]
        assert np.abs(expected - there).max() <= TOLERANCE * np.abs(there).max(), layer
    assert found.keys() >= {layer for layer, rope in ropes.items() if rope is not None}


@pytest.mark.parametrize(("model_type", "keys"), NONE, ids=lambda value: str(value)[:40])
def test_what_rotates_nothing_is_refused(model_type: str, keys: dict[str, Any]) -> None:
    cfg = config_of(model_type, **{**SIZES, **keys})
    found = queries(cfg)
    assert found
    for start, there in found.values():
        assert np.abs(start - there).max() <= TOLERANCE * np.abs(there).max()
    with pytest.raises(ValueError, match="not rotated"):
        RotaryEmbedding.from_config({**cfg.to_dict(), "model_type": model_type})


# Model types without rotation whose folder holds one all the same: of another part, or a leftover.
BESIDES = (
    *("nemotron_h", "jamba", "glm5_next_text", "inkling2_text", "clvp_encoder", "moshi_depth"),
    *("funnel", "xlnet"),  # the frequencies of their relative sinusoids
)


@pytest.mark.parametrize("model_type", sorted({*UNROTATED} & {*CONFIG_MAPPING} - {*BESIDES}))
def test_the_code_of_what_is_not_rotated_knows_no_rotation(model_type: str) -> None:
    module = inspect.getmodule(config_of(model_type))
    text = "".join(path.read_text() for path in Path(module.__file__).parent.glob("modeling_*.py"))
    assert not re.search("rotary|inv_freq|freqs_cis", text, re.IGNORECASE)


# Values of keys that list something of each layer; for the first two, indices of layers.
LISTS: dict[str, list[int]] = {
    "attn_layer_indices": [2, 5, 8],
    "full_attn_idxs": [2, 5, 8],
    "compress_ratios": [0, 4, 128, 0, 4] * 3,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],  # its class ignores the key
}

RULES = data("layer_types.json")
# The class of Mllama's text model has the indices of some layers alone, and no `layer_types`.
DERIVED = sorted({name for rows in RULES.values() for name in rows} - {"mllama_text_model"})


@pytest.mark.parametrize("count", [5, 12])
@pytest.mark.parametrize("model_type", DERIVED)
def test_layer_types_follow_from_other_keys_as_in_the_class(model_type: str, count: int) -> None:
    """Compare the layers of a file without `layer_types` with those of transformers' class."""
    key = next(rows[model_type][0] for rows in RULES.values() if model_type in rows)
    given = {"num_hidden_layers": count}
    if key in LISTS:
        given[key] = LISTS[key][:count]
    if key == "max_window_layers":
        given |= {key: 3, "sliding_window": 16, "use_sliding_window": True}
    theirs = config_of(model_type, **given).layer_types
    layers = reader.read({"model_type": model_type, **given}).layers
    if model_type.startswith("deepseek_v4"):
        theirs = ["main" if kind == LOCAL else "compress" for kind in theirs]
    assert [layer.layer_type for layer in layers] == theirs
