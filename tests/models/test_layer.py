"""Facts of a layer that a caller does not know: refused, whatever they are."""

from dataclasses import dataclass, fields

import pytest

import rope_cpu
from rope_cpu import export
from rope_cpu.models.layer import Layer
from rope_cpu.models.text import TextModel

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
CONFIG = SIZES | {"model_type": "qwen3"}
SCALE = "1 + llama_4_scaling_beta·ln(1 + ⌊position / original_max_position_embeddings⌋)"

# What neither a server nor the export knows, and what the export alone does not, each with a text.
UNKNOWN = [
    ("latent", True, "latent attention"),
    ("norm_other", "LayerNorm", "LayerNorm"),
    ("query_weights", "w", "query_weights w"),
    ("own_cache", "one vector", "a cache of its own: one vector"),
    ("other", "a gate", "an attention of its own: a gate"),
    ("chunk", 8, "chunks of 8 tokens"),
    ("bidirectional_tokens", "images", "bidirectional attention among tokens of images"),
    ("gate", "sigmoid", "gate sigmoid"),
]
NOT_EXPORTED = [("v_norm", True, "norms of values"), ("query_scale", SCALE, "by their position")]
# What every caller takes, or refuses by rules of its own.
KNOWN = {
    *("causal", "has_sinks", "qk_norm", "norm_offset", "norm_weighted", "norm_epsilon", "window"),
    *("window_in_all_layers", "softcap", "scale", "unrotated_query_scale"),
    *("shared_layers", "model_type"),
}
# What a layer has of its own, and no facts of all layers.
OF_LAYER = {
    *("index", "layer_type", "rope_parameters", "spec", "query_factors"),
    *("num_heads", "num_kv_heads", "head_dim", "value_dim"),
}


@dataclass(frozen=True, kw_only=True)
class LayerWithGate(Layer):
    """A layer with a fact that none of its callers has heard of."""

    gate: str | None = None


def with_fact(monkeypatch, name, value):
    """Give each config a fact beside those of its model type."""
    own = TextModel.attention.func
    changed = property(lambda self: LayerWithGate(**vars(own(self)) | {name: value}))
    monkeypatch.setattr(TextModel, "attention", changed)


@pytest.mark.parametrize(("name", "value", "text"), [*UNKNOWN, *NOT_EXPORTED])
def test_the_export_refuses_a_fact_that_it_does_not_know(monkeypatch, name, value, text):
    with_fact(monkeypatch, name, value)
    with pytest.raises(ValueError, match=text):
        export.attention_options(CONFIG)


@pytest.mark.parametrize(("name", "value", "text"), UNKNOWN)
def test_a_server_is_refused_a_fact_that_it_does_not_know(monkeypatch, name, value, text):
    with_fact(monkeypatch, name, value)
    with pytest.raises(ValueError, match=text):
        rope_cpu.attention_layer(CONFIG, 0)


def test_every_fact_is_known_or_refused():
    refused = {name for name, _, _ in (*UNKNOWN, *NOT_EXPORTED)}
    assert {field.name for field in fields(LayerWithGate)} == refused | KNOWN | OF_LAYER
