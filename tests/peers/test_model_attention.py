"""Attention over int8 caches, and of images, against transformers' modules.

A small model runs once in float32, with hooks that keep the arguments of each attention module. The
module, in float64, gives the expected result for the whole sequence; the exported layer computes it
in steps. `test_attention_sweep.py` compares the layers of all model types without rounding.

The module runs over a cache that rounds keys and values to the levels of the
scales. That rounding is no error then, so the tolerance stays that of float32. But within its
error of halfway between two levels, a key may be rounded either way, which shifts it by a whole
step. So the scales are chosen, channel by channel, such that all keys and values lie at least
`FROM_HALFWAY` of a step from there: float32 moves a level, at most 127, by far less.

Against the module without a cache the error is that of the rounding: half a step of each key and
value at most. A score of a query q is off by scale·Σ|q|·step/2 at most, the softmax by twice that,
relatively, and a value by step/2. The table has the errors as measured, and the expected ones: a
rounding error is spread evenly over its step, with the standard deviation step/√12. The module,
over caches with such random errors, gives the standard deviation of the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from attention_modules import attention_module, module_output  # noqa: E402
from peers.attention_cases import (  # noqa: E402
    CAPACITY,
    CASES,
    STEPS,
    TOKENS,
    WIDTH,
    expected,
    rotary,
    small_model,
)
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model  # noqa: E402

from rope_cpu import export  # noqa: E402
from rope_cpu.export.targets import TARGETS  # noqa: E402
from rope_cpu.export.validation.session import open_session  # noqa: E402
from rope_cpu.models.tensors import attention_prefix  # noqa: E402

pytestmark = pytest.mark.peers

# Least distance of keys and values from halfway between two levels of an int8 cache, in steps.
FROM_HALFWAY = 0.01
# Random roundings that the standard deviation of the result is taken from, and the number of
# standard deviations that no error may exceed.
DRAWS = 64
DEVIATIONS = 6


def in_steps(model: Any, hidden: np.ndarray, scales: Mapping[str, np.ndarray]) -> np.ndarray:
    """Run a model step by step, over a shared cache in int8."""
    session = open_session(model)
    shapes = {value.name: value.shape for value in session.get_inputs()}
    past = {
        name: np.zeros((1, shapes[name][1], CAPACITY, WIDTH), "int8")
        for name in ("past_key", "past_value")
    }
    results = []
    start = 0
    for count in STEPS:
        feeds = {"hidden": hidden[:, start : start + count].astype("float32"), **past, **scales}
        feeds["past_lengths"] = np.array([start])
        result = np.empty_like(feeds["hidden"])
        export.bind(session, feeds, {"attention": result})()
        results.append(result)
        start += count
    return np.concatenate(results, axis=1)


def exported(name: str, target: str, kind: str) -> Any:
    """The layer of a case with a cache in int8, exported from its config and state dict."""
    layer = CASES[name].layer
    peer = expected(name)
    arguments = export.attention_options(peer.config, layer=layer)
    arguments |= export.attention_weights(peer.state, peer.config, layer)
    arguments |= {"target": target, "cache": kind, "cache_dtype": "int8"}
    rope = rotary(peer.config, layer)
    return export.export_attention(rope, max_positions=CAPACITY, **arguments)


class ChangedCache:
    """A cache that keeps the keys and values of a whole sequence, and returns changed ones."""

    def __init__(self, change: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self.change = change
        self.stored: dict[str, np.ndarray] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.stored = {"k": keys.numpy(), "v": values.numpy()}
        return self.change(keys, "k"), self.change(values, "v")


def over_cache(name: str, changed: ChangedCache) -> np.ndarray:
    """Return the result of a case's module, in float64, over a cache."""
    model, calls = small_model(name)
    prefix = attention_prefix(model.state_dict(), CASES[name].layer)[:-1]
    args, kwargs = calls[prefix]
    module = model.get_submodule(prefix)
    names = inspect.signature(module.forward).parameters
    (parameter,) = {"cache", "layer_past", "past_key_values"} & set(names)
    return module_output(module, args, kwargs | {parameter: changed}, torch.float64)


def scales_off_halfway(x: np.ndarray) -> np.ndarray:
    """Return scales (1, heads, 1, width) of an int8 cache; x: its keys or values.

    Of several scales that are large enough, each channel has the one whose levels are the
    farthest from halfway between two whole numbers.
    """
    least = np.abs(x).max(axis=2, keepdims=True) / 127
    candidates = (least * np.linspace(1.0, 1.25, 51)[:, None, None, None]).astype(np.float32)
    levels = x / candidates.astype(np.float64)
    distance = np.abs(np.abs(levels - np.rint(levels)) - 0.5).min(axis=2, keepdims=True)
    assert distance.max(axis=0).min() > FROM_HALFWAY
    return np.take_along_axis(candidates, distance.argmax(axis=0)[None], axis=0)


@pytest.mark.parametrize("name", CASES)
def test_int8_cache(name: str) -> None:
    peer = expected(name)
    original = ChangedCache(lambda x, _: x)
    np.testing.assert_array_equal(over_cache(name, original), peer.result)
    scales = {kind: scales_off_halfway(x) for kind, x in original.stored.items()}
    steps = {kind: torch.from_numpy(x.astype(np.float64)) for kind, x in scales.items()}
    rounded = over_cache(
        name, ChangedCache(lambda x, kind: torch.round(x / steps[kind]) * steps[kind])
    )
    model = exported(name, "ort", "shared")
    inputs = {f"{kind}_scale": x for kind, x in scales.items()}
    result = in_steps(model, peer.hidden, inputs)
    spread = rounding_spread(name, peer.result, steps)
    error = np.abs(result - rounded).max()
    lost = np.abs(result - peer.result)
    print(
        f"{name:<18} ort, int8 {error:.1e} from the module over rounded keys and values, "
        f"{lost.max():.1e} from the module, {(lost / spread).max():.1f} standard deviations"
    )
    assert error <= 4 * peer.own_error
    assert (lost <= DEVIATIONS * spread).all()


def rounding_spread(name: str, exact: np.ndarray, steps: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Return the standard deviation of the result over keys and values with random roundings."""
    generator = torch.Generator().manual_seed(0)

    def changed(x: torch.Tensor, kind: str) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=generator, dtype=x.dtype) - 0.5
        return x + noise * steps[kind]

    draws = [over_cache(name, ChangedCache(changed)) - exact for _ in range(DRAWS)]
    spread: np.ndarray = np.sqrt(np.mean(np.square(draws), axis=0))
    return spread


@pytest.mark.parametrize(
    ("target", "kind"),
    [("primitive", "shared"), ("onnx", "shared"), *((target, "growing") for target in TARGETS)],
)
def test_int8_is_refused_elsewhere(target: str, kind: str) -> None:
    reason = "target 'ort' can express it" if kind == "shared" else "`cache` is 'growing'"
    for name in CASES:
        with pytest.raises(ValueError, match=f"`cache_dtype` is 'int8'; .*{reason}"):
            exported(name, target, kind)


# Blocks of tokens that attend to each other: two images, and text around them (-1).
BLOCKS = [-1] * 3 + [0] * 7 + [-1] * 2 + [1] * 10 + [-1] * 2


@pytest.mark.parametrize("name", ["Gemma 3, sliding", "Gemma 3, full"])
def test_images_of_gemma3(name: str) -> None:
    """With a mask, against the module with the mask that transformers makes for images."""
    case = CASES[name]
    model, calls = small_model(name)
    mapping = create_masks_for_vision_model(
        model.config,
        torch.zeros(1, TOKENS, model.config.hidden_size),
        attention_mask=None,
        cache=None,
        position_ids=torch.arange(TOKENS)[None],
        block_sequence_ids=torch.tensor([BLOCKS]),
    )
    mask = mapping[case.keys["layer_types"][case.layer]]
    prefix = attention_prefix(model.state_dict(), case.layer)[:-1]
    args, kwargs = calls[prefix]
    masked = {**calls, prefix: (args, kwargs | {"attention_mask": mask})}
    peer = attention_module(model, masked, case.model_type, case.layer)
    multimodal = {"model_type": "gemma3", "text_config": peer.config, "vision_config": {}}
    with pytest.raises(ValueError, match="bidirectional attention among tokens of an image"):
        export.attention_options(multimodal, layer=case.layer)
    arguments = export.attention_options(peer.config, layer=case.layer)
    arguments |= export.attention_weights(peer.state, peer.config, case.layer)
    arguments |= {"causal": False, "window": None, "mask": "bool", "past": False}
    exported_model = export.export_attention(
        rotary(peer.config, case.layer), target="primitive", **arguments
    )
    feeds = {"hidden": peer.hidden, "attention_mask": (mask == 0).numpy()}
    (result,) = open_session(exported_model).run(None, feeds)
    causal = attention_module(model, calls, case.model_type, case.layer)
    assert np.abs(peer.result - causal.result).max() > 1000 * peer.own_error
    # A different order of sums may be 4 times as far off as the module in float32.
    assert np.abs(result - peer.result).max() <= 4 * peer.own_error
