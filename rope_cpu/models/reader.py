"""From a config file or a GGUF file to a Model: load it, and let the adapter of its kind parse."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from rope_cpu.arguments import limits
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.arguments.texts import shown
from rope_cpu.models import text, vision
from rope_cpu.models.gguf_header import is_gguf
from rope_cpu.models.keys import check_containers, plain
from rope_cpu.models.model import Model
from rope_cpu.models.model_types import Config, data

# Files that hold no model's config, with the file to give instead: those that are no JSON object,
# and objects.
_FOREIGN: Mapping[str, Sequence[Config]] = data("foreign.json")


def read(config: str | PathLike[str] | Mapping[str, Any] | Model) -> Model:
    """Parse a config.

    Parameters
    ----------
    config : path, mapping or Model
        A config file, a folder with a config.json, its content as a dict, a GGUF file, or a parsed
        config.

    Returns
    -------
    Model

    Raises
    ------
    TypeError
        If `config` is none of these.
    ValueError
        If there is no such file, or if it holds no JSON object or describes no rotation.
    OSError
        If the file cannot be read.

    Examples
    --------
    >>> read({"model_type": "gptj"}).spec().interleaved
    True
    """
    if isinstance(config, Model):
        return config
    path = ""
    if isinstance(config, Mapping):
        raw = dict(config)
    elif isinstance(config, str | PathLike):
        path = _file_of(os.fsdecode(config))
        if is_gguf(path):
            from rope_cpu.models.gguf import parse

            return parse(path)
        raw = _content(path)
    else:
        raise TypeError(f"`config` is a {type(config).__name__}; it must be a path or a dict")
    # A name such as params.json decides nothing about a file with a model type.
    _refuse_foreign(_FOREIGN["objects"], "" if "model_type" in raw else path, raw)
    try:
        raw = plain(raw)
        check_containers(raw)
        return vision.parse(raw) or text.parse(raw)
    except RecursionError:
        raise ValueError("`config` holds configs inside configs, too deep to follow") from None


def _file_of(name: str) -> str:
    """Return the path of a file, or of the config.json, or another known file, in a folder."""
    path = name
    if os.path.isdir(name):
        ends = ("config.json", *(end for row in _FOREIGN["objects"] for end in row["ends"]))
        paths = (os.path.join(name, end) for end in ends)
        path = next(filter(os.path.isfile, paths), name)
    if not os.path.isfile(path):
        rule = "be a file, or a folder with a config.json"
        remedy = "nothing is downloaded: give the path that `hf download` prints"
        raise ArgumentError("config", name, rule, remedy)
    return path


def _content(path: str) -> dict[str, Any]:
    """Return the object in a JSON file."""
    _refuse_foreign(_FOREIGN["files"], path, {})
    size = os.path.getsize(path)
    if size > limits.CONFIG_BYTES:
        rule = f"a config may have at most {limits.CONFIG_BYTES}"
        raise ValueError(f"`config` {shown(path)} has {size} bytes; {rule}")
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the latter for one that is nested too deep
        raise ValueError(f"`config` {shown(path)} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        finding = f"holds a {type(raw).__name__}; it must hold an object"
        raise ValueError(f"`config` {shown(path)} {finding}")
    return raw


def _refuse_foreign(rows: Sequence[Config], path: str, raw: Config) -> None:
    """Raise for a file of another kind, by the end of its name or by keys of its object."""
    for row in rows:
        has_keys = any(raw.keys() >= {*keys} for keys in row["keys"])
        if has_keys or path.endswith(tuple(row["ends"])):
            file = f" {shown(path)}" if path else ""
            raise ValueError(f"`config`{file} is {row['is']}; give {row['give']}")
