"""Frequencies of rope types with the float32 arithmetic of transformers, almost bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy.tolerance import half_ulp

pytestmark = pytest.mark.peers

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

LONG = 131072
SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
EXTENSIONS = {
    "short_factor": [1 + 0.01 * i for i in range(32)],
    "long_factor": [1 + 0.5 * i for i in range(32)],
}


def llama(
    rope_type: str, length: int = LONG, original: int | None = None, **keys: Any
) -> tuple[dict[str, Any], int]:
    """Return a section and a length; original: its original_max_position_embeddings."""
    section = {"rope_type": rope_type, "rope_theta": 123456.0, **keys}
    if original is not None:
        section["original_max_position_embeddings"] = original
    return section, length


CASES = {
    "default": llama("default"),
    "linear": llama("linear", factor=3.7),
    "dynamic short": llama("dynamic", 4000, factor=2.3),
    "dynamic long": llama("dynamic", 30000, factor=2.3),
    "yarn": llama("yarn", original=700, factor=7.3, beta_fast=20.0, beta_slow=3.0),
    "yarn past the last pair": llama("yarn", original=131072, factor=4.0, rope_theta=1e4),
    "yarn cut off": llama("yarn", original=10**6, factor=4.0, rope_theta=50.0, beta_fast=1e4),
    "yarn from the first pair": llama("yarn", original=64, factor=4.0),
    "yarn mscale": llama(
        "yarn", original=900, factor=9.0, mscale=0.7, mscale_all_dim=0.4, truncate=False
    ),
    "yarn partial": llama(
        "yarn", original=900, factor=9.0, attention_factor=1.3, partial_rotary_factor=1.0
    ),
    "llama3": llama("llama3", original=1300, factor=5.5, low_freq_factor=1.3, high_freq_factor=6.1),
    "longrope short": llama("longrope", 3000, original=3000, factor=6.0, **EXTENSIONS),
    "longrope long": llama("longrope", original=3000, **EXTENSIONS),
    "proportional": llama("proportional", partial_rotary_factor=0.37, factor=2.0),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies(name: str) -> None:
    section, length = CASES[name]
    cfg = transformers.LlamaConfig(**SMALL, max_position_embeddings=5000, rope_parameters=section)
    rotary = LlamaRotaryEmbedding(cfg)
    cos, _ = rotary(torch.zeros(1), torch.tensor([[0, length - 1]]))
    theirs = rotary.inv_freq.double().numpy()
    rope = RotaryEmbedding.from_config(cfg.to_dict(), angle_dtype="float32").at_length(length)
    # On some processors torch's vectorised powers end in another bit.
    assert (np.abs(theirs - rope.inv_freq) <= 2 * half_ulp(theirs, np.float32)).all()
    assert np.mean(theirs == rope.inv_freq) > 0.9, "more than a few differ in the last bit"
    assert float(cos[0, 0, 0]) == np.float32(rope.attention_factor)
