"""Models of diffusers without weights, and what their own code makes of positions, for tests."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import diffusers
import numpy as np
import torch
from diffusers.models import embeddings
from torch import nn

CPU = torch.device("cpu")
FRAMES, ROWS, COLUMNS = 3, 5, 7
GRID = (FRAMES, ROWS, COLUMNS)


class Own(NamedTuple):
    """The positions, (tokens, axes) or (tokens,), and what the class makes of them.

    cos, sin: tensors (tokens, pairs) or (tokens, heads, pairs). rotate: from a tensor
    (1, tokens, heads, head_dim) to one of this shape. epsilon: relative rounding of its result.
    """

    ids: np.ndarray
    cos: torch.Tensor
    sin: torch.Tensor
    rotate: Callable[[torch.Tensor], torch.Tensor]
    epsilon: float = 2.0**-24


@contextmanager
def without_weights() -> Iterator[None]:
    """Keep parameters on the device without memory; buffers stay."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def class_named(name: str) -> type:
    """Return a class by its name in a config file."""
    return getattr(diffusers, name)


def model(name: str, **values: Any) -> nn.Module:
    """Return a model of a class with its default config, except for some values."""
    with without_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that use deprecated ones
        return class_named(name)(**values)


def file_of(instance: nn.Module) -> dict[str, Any]:
    """Return the content of the config.json that diffusers writes for a model."""
    return json.loads(instance.to_json_string())


def module_of(instance: Any) -> Any:
    """Return the Python module that defines a model's class."""
    return importlib.import_module(type(instance).__module__)


def nested(owner: type, name: str) -> Callable[..., torch.Tensor]:
    """Return a function that is defined within a method of a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    found = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    scope = dict(vars(importlib.import_module(owner.__module__)))
    exec(compile(ast.Module([found], []), owner.__module__, "exec"), scope)
    return scope[name]


def adjacent(table: torch.Tensor) -> torch.Tensor:
    """Return a table for adjacent elements as one for pairs, whose elements share a value."""
    assert torch.equal(table[..., 0::2], table[..., 1::2])
    return table[..., 0::2]


def halves(table: torch.Tensor) -> torch.Tensor:
    """Return a table for two halves as one for pairs, whose elements share a value."""
    first, second = table.chunk(2, dim=-1)
    assert torch.equal(first, second)
    return first


def swapped(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply a function of (batch, heads, tokens, head_dim)."""
    return function(x.transpose(1, 2)).transpose(1, 2)


def shared(cos: torch.Tensor, sin: torch.Tensor, dim: int = -1) -> Callable[..., torch.Tensor]:
    """Return the rotation by the function that many classes share."""
    return partial(
        embeddings.apply_rotary_emb,
        freqs_cis=(cos, sin),
        sequence_dim=1,
        use_real_unbind_dim=dim,
    )


def video(instance: nn.Module) -> torch.Tensor:
    """Return latents of a video with FRAMES, ROWS and COLUMNS patches."""
    config = instance.config
    size = config.patch_size
    if isinstance(size, int):
        size = (getattr(config, "patch_size_t", 1), size, size)
    return torch.zeros(1, 1, *(n * p for n, p in zip(GRID, size, strict=True)))


def some_ids(axes: int, size: int = 60) -> np.ndarray:
    """Return positions (tokens, axes) below size, other ones on each axis."""
    return np.stack([np.arange(25) * (3 * axis + 1) % (size - axis) for axis in range(axes)], 1)
