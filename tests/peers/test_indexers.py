"""The indexers of sparse attention: the scores of their classes, in small models that run whole.

Scores do not depend on the order in which a function writes the elements of a pair.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

from rotary_modules import MODELS, unrotated  # noqa: E402
from small_models import TOKENS, SmallModel, small_model  # noqa: E402

from rope_cpu import RotaryEmbedding  # noqa: E402

# Model types, with the classes of their indexers.
INDEXERS = {
    "axk2": "AXK2Indexer",
    "deepseek_v32": "DeepseekV32Indexer",
    "deepseek_v4": "DeepseekV4Indexer",
    "dots3_note_text": "Dots3NoteTextIndexer",
    "glm_moe_dsa": "GlmMoeDsaIndexer",
    "hy_v4": "HYV4Indexer",
    "hy_v4_vl_text": "HYV4VLIndexer",
    "minimax_m3_vl_text": "MiniMaxM3VLIndexer",
    "qwen4_exp_text": "Qwen4ExpTextQSAIndexer",
}
# Model types that are refused with these words: the class of their indexer.
REFUSED = {
    "are not rotated": ("glm5_next_text", "Glm5NextTextIndexer"),
    "alpha is a weight": ("mistral_large4_text", "MistralLarge4TextIndexer"),
}
LATENT = ("axk2", "deepseek_v32", "glm_moe_dsa")
KEYS: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in LATENT},
    "deepseek_v4": {"head_dim": 64},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse"] * 6},
}
# Indexers whose keys stand for four tokens each, at the position of the first one.
COMPRESSED = ("deepseek_v4", "qwen4_exp_text")


def test_every_indexer_of_transformers_is_here() -> None:
    sources = "".join(path.read_text() for path in MODELS.glob("*/modeling_*.py"))
    classes = re.findall(r"^class (\w+Indexer)\(", sources, re.M)
    refused = [name for _, name in REFUSED.values()]
    assert sorted(classes) == sorted([*INDEXERS.values(), *refused])


@pytest.mark.parametrize("words", REFUSED)
def test_refused_indexers(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RotaryEmbedding.from_config({"model_type": REFUSED[words][0]}, part="indexer")


def call_of_indexer(small: SmallModel, name: str) -> Callable[[], Any]:
    """Run a model; return the call of its last indexer, to be repeated."""
    calls: list[Callable[[], Any]] = []

    def record(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(partial(module.forward, *args, **kwargs))

    for module in small.model.modules():
        if type(module).__name__ == name:
            module.register_forward_pre_hook(record, with_kwargs=True)
    with torch.no_grad():
        small.whole(**small.inputs, use_cache=False)
    return calls[-1]


def scored(call: Callable[[], Any], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what the last product of an indexer scores: (tokens, heads, width), (keys, width)."""
    seen: list[tuple[Any, Any]] = []
    multiply = torch.matmul

    def recording(a: Any, b: Any) -> Any:
        if a.shape[-1] == b.shape[-2] == width:
            seen.append((a, b))
        return multiply(a, b)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "matmul", recording)
        call()
    queries, keys = seen[-1]
    return queries.reshape(-1, *queries.shape[-2:]).numpy(), keys.mT.reshape(-1, width).numpy()


@pytest.mark.parametrize("model_type", INDEXERS)
def test_scores_of_indexers(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_model(model_type, **KEYS.get(model_type, {}))
    rope = RotaryEmbedding.from_config(small.config(model_type), part="indexer")
    call = call_of_indexer(small, INDEXERS[model_type])
    q_theirs, k_theirs = scored(call, rope.head_dim)
    code = sys.modules[type(small.model).__module__]
    for function in [key for key in vars(code) if key.startswith("apply_rotary")]:
        monkeypatch.setattr(code, function, unrotated(getattr(code, function)))
    q, k = scored(call, rope.head_dim)
    if model_type == "minimax_m3_vl_text":  # it has heads before tokens
        q, q_theirs = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, q_theirs))
    at_q = np.arange(TOKENS)[-len(q) :]
    at_k = np.arange(len(k)) * (4 if model_type in COMPRESSED else 1)
    if rope.axes > 1:  # text has the same position on all of them
        at_q, at_k = (np.repeat(ids[:, None], rope.axes, axis=1) for ids in (at_q, at_k))
    q_rot = rope.rotate(q, at_q, layout="thd")
    k_rot = rope.rotate(k[:, None], at_k, layout="thd")
    ours, theirs, before = (
        np.einsum("qhd,kd->hqk", *pair)
        for pair in ((q_rot, k_rot[:, 0]), (q_theirs, k_theirs), (q, k))
    )
    size = np.einsum("qhd,kd->hqk", np.abs(q), np.abs(k)).max()
    assert np.abs(ours - theirs).max() <= 2**-20 * size
    assert np.abs(before - theirs).max() > 2**-8 * size, "nothing was rotated: no proof"
