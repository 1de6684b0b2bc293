"""Attention modules of small models of transformers, and their results in float64."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from rope_cpu.export.checkpoints.layer_weights import attention_prefix


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
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(zlib.crc32(model_type.encode()))
    calls: dict[str, Any] = {}
    with torch.no_grad():
        model = transformers.AutoModel.from_config(config).eval().float()
        for parameter in model.parameters():
            spread = 0.5 if parameter.ndim == 1 else 0.08
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.requires_grad:  # tables of sines do not
                parameter.copy_(noise * spread + is_norm)
        for name, module in model.named_modules():
            if "Attention" in type(module).__name__:
                module.register_forward_hook(_recorder(calls, name), with_kwargs=True)
        ids = torch.randint(3, 16, (1, tokens), generator=generator)
        model(ids, use_cache=False)
    return model, calls


def _recorder(calls: dict[str, Any], name: str) -> Any:
    def record(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        calls.setdefault(name, (args, kwargs))

    return record


def attention_module(model: Any, calls: Mapping[str, Any], model_type: str, layer: int) -> Module:
    """Return the attention of a layer of a model that has run."""
    state = model.state_dict()
    name = attention_prefix(state, layer)[:-1]
    args, kwargs = calls[name]
    results = {}
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            same = copy.deepcopy(model.get_submodule(name)).to(dtype)
            output = same(*_in_dtype(args, dtype), **_in_dtype(kwargs, dtype))
            output = output[0] if isinstance(output, tuple) else output
            results[dtype] = output.double().numpy()
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    exact = results[torch.float64]
    own_error = float(np.abs(results[torch.float32] - exact).max())
    config = model.config.to_dict() | {"model_type": model_type}
    return Module(config, state, hidden.numpy(), exact, own_error)


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments of a module with all real tensors in another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_in_dtype(part, dtype) for part in value)
    if isinstance(value, dict):
        return {name: _in_dtype(part, dtype) for name, part in value.items()}
    return value
