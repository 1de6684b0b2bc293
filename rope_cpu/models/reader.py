"""From a config file or a GGUF file to a Model: load it, and let the adapter of its kind parse."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rope_cpu.arguments import limits
from rope_cpu.arguments.texts import shown
from rope_cpu.models import text, vision
from rope_cpu.models.gguf_header import is_gguf
from rope_cpu.models.keys import check_containers, plain
from rope_cpu.models.model import Model
from rope_cpu.models.model_types import data, value_at

# The name of a repository on the Hugging Face Hub, such as "meta-llama/Llama-3.1-8B".
_REPOSITORY = re.compile(r"(?!.*\.json)\w[\w.-]{0,95}/\w[\w.-]{0,95}")

# Files that hold no model's config, with the file to give instead.
_FOREIGN: dict[str, list[dict[str, Any]]] = data("foreign.json")


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
    _refuse_foreign_object(raw, path)
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
        others: list[str] = [end for row in _FOREIGN["objects"] for end in row["ends"]]
        paths = [os.path.join(name, end) for end in ("config.json", *others)]
        path = next(filter(os.path.isfile, paths), name)
    if not os.path.isfile(path):
        text = f"`config` is {shown(name)}, which is neither a file nor a folder with a config.json"
        if _REPOSITORY.fullmatch(name):
            remedy = f"give the path that `hf download {name} config.json` prints"
            text = f"{text}; nothing is downloaded: {remedy}"
        raise ValueError(text)
    return path


def _content(path: str) -> dict[str, Any]:
    """Return the object in a JSON file."""
    _refuse_foreign_file(path)
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


def _refuse_foreign_file(path: str) -> None:
    """Raise for a file with the ending or the first bytes of another format."""
    with open(path, "rb") as file:
        start = file.read(16)
    for row in _FOREIGN["files"]:
        pattern = row.get("starts", "(?!)").encode("latin-1")
        if path.endswith(tuple(row["ends"])) or re.match(pattern, start):
            raise ValueError(f"`config` {shown(path)} is {row['is']}; give {row['give']}")


def _refuse_foreign_object(raw: Mapping[str, Any], path: str) -> None:
    """Raise for an object with the file name or the keys of another kind of file."""
    # A name such as params.json decides nothing about a file with a model type.
    ending = "" if "model_type" in raw else path
    for row in _FOREIGN["objects"]:
        has_keys = any(keys[0] in raw and raw.keys() >= {*keys} for keys in row["keys"])
        if has_keys or ending.endswith(tuple(row["ends"])):
            name = value_at(raw, row.get("named", ""))
            named = "" if name is None else f"; it names {shown(name)}"
            file = f" {shown(path)}" if path else ""
            raise ValueError(f"`config`{file} is {row['is']}; give {row['give']}{named}")
