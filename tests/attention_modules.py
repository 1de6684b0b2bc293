"""Attention modules of small models of transformers, and their results in float64."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from rope_cpu.models.tensors import attention_prefix


class Module(NamedTuple):
    """The attention module of a layer.

    config: of its model, as a dict. state: the model's state dict. hidden: input of the module.
    result: its output in float64. own_error: largest error of its output in float32.
    """

    config: dict[str, Any]
    state: dict[str, Any]
    hidden: np.ndarray
    result: np.ndarray
    own_error: float


def random_model(
    model_type: str, keys: Mapping[str, Any], tokens: int
) -> tuple[Any, dict[str, Any]]:
    """Return a small model with random weights, and the calls of its modules by name.

    It runs once, in float32, on random tokens.
    """
    config = transformers.AutoConfig.for_model(model_type, **keys)
    generator = seeded(model_type)
    model = random_weights(MODEL_MAPPING[type(config)], config, generator)
    ids = torch.randint(3, 16, (1, tokens), generator=generator)
    return model, module_calls(model, {"input_ids": ids, "use_cache": False})


def seeded(model_type: str) -> torch.Generator:
    """Return a generator of random numbers that depend on the model type alone."""
    return torch.Generator().manual_seed(zlib.crc32(model_type.encode()))


def random_weights(model_class: Any, config: Any, generator: torch.Generator) -> Any:
    """Return a model of a config, in float32, with random weights."""
    config._attn_implementation = "eager"
    with torch.no_grad():
        model = model_class(config).eval().float()
        for parameter in model.parameters():
            spread = 0.5 if parameter.ndim == 1 else 0.08
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.requires_grad:  # tables of sines do not
                parameter.copy_(noise * spread + is_norm)
    return model


def module_calls(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a model once and return the arguments of its attention modules, by name."""
    calls: dict[str, Any] = {}
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__:
            module.register_forward_hook(_recorder(calls, name), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    return calls


def _recorder(calls: dict[str, Any], name: str) -> Any:
    def record(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        calls.setdefault(name, (args, kwargs))

    return record


def attention_module(
    model: Any,
    calls: Mapping[str, Any],
    model_type: str,
    layer: int,
    state: Mapping[str, Any] | None = None,
) -> Module:
    """Return the attention of a layer of a model that has run.

    state: its state dict, if names differ from those of the model.
    """
    state = dict(model.state_dict() if state is None else state)
    name = attention_prefix(state, layer)[:-1]
    args, kwargs = calls[name]
    module = model.get_submodule(name)
    results = {
        dtype: module_output(module, args, kwargs, dtype)
        for dtype in (torch.float32, torch.float64)
    }
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    exact = results[torch.float64]
    own_error = float(np.abs(results[torch.float32] - exact).max())
    config = model.config.to_dict() | {"model_type": model_type}
    return Module(config, state, hidden.numpy(), exact, own_error)


def module_output(module: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> np.ndarray:
    """Return the output of a copy of an attention module in a dtype, as float64."""
    same = copy.deepcopy(module).to(dtype)
    with torch.no_grad():
        output = same(*_in_dtype(args, dtype), **_in_dtype(kwargs, dtype))
    output = output[0] if isinstance(output, tuple) else output
    return output.double().numpy()


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments of a module with all real tensors in another dtype, and without a cache."""
    if isinstance(value, transformers.Cache):
        return None
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_in_dtype(part, dtype) for part in value)
    if isinstance(value, dict):
        return {name: _in_dtype(part, dtype) for name, part in value.items()}
    return value
