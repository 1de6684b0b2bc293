"""The configuration classes of transformers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any


@cache
def configurations() -> list[Any]:
    """Return the configuration classes of transformers that have a model type."""
    models = importlib.import_module("transformers.models")
    base = importlib.import_module("transformers").PreTrainedConfig
    found = []
    for module in pkgutil.iter_modules(models.__path__):
        name = f"transformers.models.{module.name}.configuration_{module.name}"
        try:
            members = vars(importlib.import_module(name)).values()
        except ModuleNotFoundError:
            continue
        own = [cls for cls in members if inspect.isclass(cls) and cls.__module__ == name]
        found += [cls for cls in own if issubclass(cls, base) and cls.model_type]
    return found
