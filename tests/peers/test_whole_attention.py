"""Queries and keys of the first attention of whole models, before and after their rotation.

An apply function alone shows neither which heads and elements it gets, nor at which positions and
by which frequencies. Scores are compared, as some functions write pairs in another order.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

from rotary_modules import unrotated  # noqa: E402
from small_models import OMITTED, TOKENS, small_model  # noqa: E402
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni  # noqa: E402

from rope_cpu import RotaryEmbedding  # noqa: E402
from rope_cpu.models.model_types import model_facts  # noqa: E402

# Model types that are not compared here, by the reason.
TOWER = "its first attention is that of another part; test_attention_sweep compares its layers"
OWN = "its attention has no interface to stop at; test_attention_sweep compares its layers"
MORE = "it runs with outputs of other models; its attention, read by hand, rotates whole heads"
REFUSED = "from_config refuses it"
NOT_RUN = {
    **dict.fromkeys(("idefics", "pe_audio_video_encoder", "pe_video_encoder"), TOWER),
    **dict.fromkeys(("blt_global_transformer", "blt_local_decoder", "blt_local_encoder"), TOWER),
    **dict.fromkeys(("falcon", "gpt_neox_japanese", "roformer"), OWN),
    **dict.fromkeys(("kyutai_speech_to_text", "moonshine", "moonshine_streaming"), MORE),
    **dict.fromkeys(("muse_glimmer_assistant", "t5gemma2_decoder", "timesfm2_5"), MORE),
    **dict.fromkeys(("wav2vec2-bert", "wav2vec2-conformer", "deepseek_ocr2_encoder"), MORE),
    "nemotron3_5_transcribe_asr_audio": MORE,
    "nemotron3_5_transcribe_word_timestamp": MORE,
    "qwen2_5_omni_dit": "see below",
    **dict.fromkeys(("blt", "hunyuan_vl_text", "neomme", "mistral_large4_text"), REFUSED),
    **dict.fromkeys(("neucodec", "xcodec2"), REFUSED),
}
LATENT = ("axk1", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "mistral4", "sarvam_mla")
KEYS: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": OMITTED} for name in (*LATENT, "youtu")},
    **{name: {"num_key_value_heads": 4} for name in ("axk2", "deepseek_v32", "glm_moe_dsa")},
}
# Weights that multiply elements after the rotation, in some models; 1 leaves the scores alone.
AFTER = ("query_layernorm", "key_layernorm", "q_norm", "k_norm", "q_layernorm", "k_layernorm")


class SeenError(Exception):
    """Ends a run: the queries and keys of the first rotated layer are known."""


def model_types() -> list[str]:
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    facts = {name: model_facts(name) for name in known}
    names = [name for name, row in facts.items() if row is not None and row.part is None]
    return [name for name in names if name not in NOT_RUN]


def queries_and_keys(run: Any, layer: int) -> list[np.ndarray]:
    """Return what the attention of a layer computes scores of, (heads, tokens, width)."""

    def stop(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        if getattr(module, "layer_idx", None) in (None, -1, layer):  # -1: Zamba 2 shares one
            raise SeenError(query[0].double().numpy(), key[0].double().numpy())
        heads, tokens = query.shape[1:3]
        return value.new_zeros(len(value), tokens, heads, value.shape[-1]), None

    transformers.AttentionInterface.register("stop", stop)
    transformers.AttentionMaskInterface.register("stop", transformers.masking_utils.eager_mask)
    with torch.no_grad(), pytest.raises(SeenError) as seen:
        run()
    return list(seen.value.args)


def scores(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    groups = len(queries) // len(keys)
    return queries @ np.repeat(keys, groups, axis=0).swapaxes(1, 2)


@pytest.fixture
def stop_rotation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that has the code of a model rotate nothing."""

    def stop(model: Any) -> None:
        for code in {sys.modules[type(module).__module__] for module in model.modules()}:
            for name in [name for name in vars(code) if name.startswith("apply_rotary")]:
                monkeypatch.setattr(code, name, unrotated(getattr(code, name)))

    return stop


def agree(rope: RotaryEmbedding, before: list[np.ndarray], after: list[np.ndarray]) -> None:
    """Assert that a rotary embedding turns vectors, or a slice of them at either end, alike."""
    ids = np.arange(before[0].shape[1])
    if rope.axes > 1:
        ids = np.repeat(ids[:, None], rope.axes, axis=1)
    expected = scores(*after)
    errors = []
    for place in (slice(rope.head_dim), slice(-rope.head_dim, None)):
        turned = [x.copy() for x in before]
        for x in turned:
            x[..., place] = rope.rotate(x[None, ..., place], ids, layout="bhsd")[0]
        errors.append(np.abs(scores(*turned) - expected).max())
    size = np.abs(expected).max()
    assert min(errors) <= 2e-6 * size
    assert np.abs(scores(*before) - expected).max() > 1e-3 * size, "nothing was rotated: no proof"


@pytest.mark.parametrize("model_type", model_types())
def test_first_rotated_layer(model_type: str, stop_rotation: Any) -> None:
    small = small_model(model_type, **KEYS.get(model_type, {}))
    with torch.no_grad():
        for name, weight in small.whole.named_parameters():
            if name.rpartition(".")[0].endswith(AFTER) or name.endswith("sqk"):
                weight.fill_(1)
    config = small.config(model_type)
    rope, layer = first_rotation(config)
    for module in small.whole.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "stop"
    run = lambda: small.whole(**small.inputs)  # noqa: E731
    after = queries_and_keys(run, layer)
    stop_rotation(small.whole)
    agree(rope.at_length(TOKENS), queries_and_keys(run, layer), after)


def first_rotation(config: dict[str, Any]) -> tuple[RotaryEmbedding, int]:
    """Return the rotary embedding of the first layer that is rotated, and the layer."""
    for layer in range(6):
        try:
            return RotaryEmbedding.from_config(config, layer=layer), layer
        except ValueError as error:
            if "has no `layer_types`" in str(error) or "does not say how many" in str(error):
                break
    return RotaryEmbedding.from_config(config), 0


def test_the_transformer_of_qwen_omni(stop_rotation: Any) -> None:
    """Its attention gives the apply function the first head alone, parted into halves."""
    config = transformers.AutoConfig.for_model(
        "qwen2_5_omni_dit", hidden_size=128, num_attention_heads=4, head_dim=32
    )
    config._attn_implementation = "stop"
    torch.manual_seed(0)
    attention = omni.DiTAttention(config).eval()
    rotary = omni.Qwen2_5OmniDiTRotaryEmbedding(config)
    hidden = torch.randn(1, TOKENS, 128)
    tables = rotary(hidden, torch.arange(TOKENS)[None])
    run = lambda: attention(hidden, tables)  # noqa: E731
    after = queries_and_keys(run, 0)
    stop_rotation(attention)
    before = queries_and_keys(run, 0)
    for x in before:  # written halves apart
        x[0] = x[0].reshape(-1, 2, 16).swapaxes(1, 2).reshape(-1, 32)
    rope = RotaryEmbedding.from_config(config.to_dict())
    agree(rope, before, after)
    assert np.array_equal(rope.rotate(before[0][None], layout="bhsd")[0, 1:], after[0][1:])
