"""Shared by the commands of `rope-cpu`: usage errors, configs as arguments, output files."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rope_cpu.arguments.texts import escaped, shown
from rope_cpu.models.model import Model
from rope_cpu.models.model_types import data
from rope_cpu.models.reader import read

DEFAULT_CONFIG = "llama3.1-8b.json"
PICTURE_SUFFIXES = (".png", ".svg")


class UsageError(Exception):
    """A request that a command cannot fulfil: one line for the user, exit code 2.

    The line ends with the command's --help, which lists its arguments.
    """


class OutputError(UsageError):
    """A file that cannot be written, with which --help is of no use."""


def print_lines(lines: Iterable[str]) -> None:
    """Print lines at once; the commands print nothing otherwise.

    Names and values of files are among them, so control characters and line breaks are escaped.
    """
    for line in lines:
        print(escaped(line), flush=True)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument CONFIG and the option --layer-type."""
    config = "config.json of a model, its folder, or a GGUF file (default: Llama 3.1 8B)"
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help=config)
    add_layer_type(parser)


def add_layer_type(parser: argparse.ArgumentParser) -> None:
    """Declare the option --layer-type."""
    text = "layer type, such as full_attention, if layer types differ in their rotation"
    parser.add_argument("--layer-type", metavar="NAME", help=text)


def add_pairing_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for the pairing, needed for model types that do not determine it."""
    add = parser.add_mutually_exclusive_group().add_argument
    interleaved = "rotate interleaved pairs (2i, 2i+1); default: the pairing of the model type"
    add("--interleaved", action="store_true", default=None, help=interleaved)
    half = "rotate half-split pairs (i, i+n)"
    add("--half", dest="interleaved", action="store_false", help=half)


def config_from_arguments(args: argparse.Namespace) -> Model:
    """Return the config named by CONFIG, or the one shipped with the package.

    Raises UsageError if it is invalid.
    """
    if args.config is None:
        return read(data(DEFAULT_CONFIG))
    return read_config(args.config)


def config_name(args: argparse.Namespace) -> str:
    """Return a name for the config of `config_from_arguments`."""
    return "Llama 3.1 8B" if args.config is None else str(args.config)


def read_config(path: Path) -> Model:
    """Read a config.json, or the one in a folder; raise UsageError if it is invalid."""
    try:
        return read(path)
    except (TypeError, ValueError) as error:
        text = re.sub("`(config|path)`", "`CONFIG`", str(error))  # the word of --help
        raise UsageError(text) from error


def check_file(path: Path) -> None:
    """Raise OutputError if `path` obviously cannot be written: checked before the work starts."""
    if path.is_dir() or not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: it must be a file in a folder that exists")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Convert an error of arguments in the enclosed block to a UsageError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError of the enclosed block, which writes `path`, to an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file. Infinity and NaN, which JSON has not, are written as text."""
    finite = json.loads(json.dumps(content), parse_constant=str)
    with write_errors(path):
        path.write_text(json.dumps(finite, indent=1) + "\n", "utf-8")


def check_picture(path: Path) -> None:
    """Raise UsageError if `--plot` cannot draw to `path`, ImportError without matplotlib."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        suffixes = " or ".join(PICTURE_SUFFIXES)
        raise UsageError(f"`--plot` is {shown(str(path))}; the name must end in {suffixes}")
    check_file(path)
    import_module("matplotlib")
