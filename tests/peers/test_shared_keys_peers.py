"""A layer that attends to the cache of a donor, against the layers of Gemma 3n in transformers."""

from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rope_cpu import RotaryEmbedding, export  # noqa: E402
from rope_cpu.export.targets import TARGETS  # noqa: E402
from rope_cpu.export.validation import session as runtime  # noqa: E402

pytestmark = pytest.mark.peers

STEPS = ((0, 14), (14, 15), (15, 16))
TOKENS = 16
FULL = "full_attention"
SLIDING = "sliding_attention"
# Layer 2 takes the keys and values of layer 0, and layer 3 those of layer 1.
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attn_implementation": "eager",
}


class Layer(NamedTuple):
    """The inputs of the layer that shares keys, and its result before the output projection.

    own_error: of the modules themselves in float32.
    """

    rope: RotaryEmbedding
    window: int | None
    tensors: dict[str, np.ndarray]
    norms: tuple[np.ndarray, np.ndarray]
    result: np.ndarray
    own_error: float


@pytest.fixture(scope="module", params=[2, 3])
def layer(request: pytest.FixtureRequest) -> Layer:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention

    torch.manual_seed(5)
    config = transformers.Gemma3nTextConfig(**CONFIG)
    rope = RotaryEmbedding.from_config(config.to_dict(), layer=request.param)
    donor, sharing = (
        Gemma3nTextAttention(config, index).double().eval()
        for index in (request.param - 2, request.param)
    )
    hidden = torch.randn(2, 2, TOKENS, 64, dtype=torch.float64)
    with torch.no_grad():
        for module in (donor, sharing):
            module.o_proj = torch.nn.Identity()
            for name, parameter in module.named_parameters():
                norm = 1 + 0.2 * torch.randn_like(parameter)
                weight = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
                parameter.copy_(norm if "norm" in name else weight)
        result = attended(donor, sharing, hidden, rope)
        q = sharing.q_proj(hidden[1]).reshape(2, TOKENS, 4, 32)
        k = donor.k_proj(hidden[0]).reshape(2, TOKENS, 2, 32)
        v = donor.v_norm(donor.v_proj(hidden[0]).reshape(2, TOKENS, 2, 32))
        tensors = {name: x.numpy().astype(np.float32) for name, x in (("q", q), ("k", k), ("v", v))}
        norms = tuple(x.weight.numpy().copy() for x in (sharing.q_norm, donor.k_norm))
        single = attended(donor.float(), sharing.float(), hidden.float(), rope)
    own_error = (single.double() - result).abs().max().item()
    return Layer(rope, sharing.sliding_window, tensors, norms, result.numpy(), own_error)


def attended(donor: Any, sharing: Any, hidden: Any, rope: RotaryEmbedding) -> Any:
    """Run the donor, on the first hidden states, and the layer that shares its keys."""
    cos, sin = (
        torch.from_numpy(np.concatenate([x, x], axis=-1))[None].to(hidden.dtype)
        for x in rope.cos_sin(np.arange(TOKENS), np.float64)
    )
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    allowed = (distance >= 0) & (distance < (donor.sliding_window or TOKENS))
    mask = torch.where(allowed, 0.0, -torch.inf).to(hidden.dtype)[None, None]
    shared: dict[str, Any] = {}
    options = {"position_embeddings": (cos, sin), "attention_mask": mask}
    donor(hidden[0], **options, shared_kv_states=shared)
    result, _ = sharing(hidden[1], **options, shared_kv_states=shared)
    return result.reshape(2, TOKENS, 4, 32)


@pytest.mark.parametrize("target", TARGETS)
def test_gemma3n(layer: Layer, target: str) -> None:
    """The layer alone fills the cache: with the donor's keys, its numbers are the donor's."""
    model = export.export_attention(
        layer.rope,
        num_heads=4,
        num_kv_heads=2,
        target=target,
        layout="bshd",
        cache="shared",
        window=layer.window,
        scale=1.0,
        qk_norm=layer.norms,
        max_positions=TOKENS,
    )
    session = runtime.open_session(model)
    feeds = {f"past_{name}": np.zeros((2, 2, TOKENS, 32), np.float32) for name in ("key", "value")}
    for start, end in STEPS:
        for name, x in layer.tensors.items():
            feeds[name] = np.ascontiguousarray(x[:, start:end])
        feeds["past_lengths"] = np.full(2, start)
        result = np.zeros((2, end - start, 4, 32), np.float32)
        export.bind(session, feeds, {"attention": result})()
        error = np.abs(result - layer.result[:, start:end]).max()
        assert error <= 4 * layer.own_error
    print(f"{target}, window {layer.window}: {error:.1e}, the modules {layer.own_error:.1e}")
