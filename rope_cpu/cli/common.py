"""What the subcommands of `rope-cpu` share: bad usage, and the config that is named on the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from rope_cpu.configs.reader import language_model, load, with_defaults
from rope_cpu.configs.rope_parameters import latent
from rope_cpu.rotary import RotaryEmbedding
from rope_cpu.validation.scalars import whole_number

DEFAULT_CONFIG = "llama3.1-8b.json"
PICTURES = (".png", ".svg")

_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


class UsageError(Exception):
    """The command cannot do what it was asked to: one line for the user, exit code 2."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a command take a model config."""
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help="config.json of a Hugging Face model, or the folder it is in (default: Llama 3.1 8B)",
    )
    parser.add_argument(
        "--layer-type", metavar="NAME", help="which layers, where their rotations differ (such as full_attention)"
    )


def add_pairing_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a command be told which elements are pairs, where the model type does not say."""
    pairing = parser.add_mutually_exclusive_group()
    pairing.add_argument("--interleaved", action="store_true", default=None, help="pairs are (2i, 2i+1)")
    pairing.add_argument("--half", dest="interleaved", action="store_false", help="pairs are (i, i+n)")


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config that the arguments name, or the shipped one; raise UsageError as `config_at` does."""
    if args.config is not None:
        return config_at(args.config)
    shipped: dict[str, Any] = json.loads(
        resources.files("rope_cpu.configs.data").joinpath(DEFAULT_CONFIG).read_text("utf-8")
    )
    return shipped


def config_at(path: Path) -> dict[str, Any]:
    """Return the config of a file, or of a folder with a config.json; raise UsageError where there is none."""
    try:
        return load(path)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def check_file(path: Path) -> None:
    """Raise UsageError where no file can be written at `path`, as far as can be told before the work."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UsageError where what is done within cannot write to `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def check_picture(path: Path) -> None:
    """Raise UsageError unless `--plot` can write a picture at `path`, ImportError without matplotlib."""
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"`--plot` is {str(path)!r}; the name must end in {' or '.join(PICTURES)}")
    check_file(path)
    import_module("matplotlib")


def rotary_of(config: dict[str, Any], layer_type: str | None, interleaved: bool | None = None) -> RotaryEmbedding:
    """Return the rotary of a config; raise UsageError where the config describes none that is known."""
    try:
        return RotaryEmbedding.from_config(config, layer_type=layer_type, interleaved=interleaved)
    except (TypeError, ValueError) as error:
        raise unread(error, layer_type, interleaved) from error


def unread(error: Exception, layer_type: str | None, interleaved: bool | None) -> UsageError:
    """Return what to say where no rotary can be made of a config: which option of the command would help."""
    options = ("`layer_type`", layer_type, "--layer-type"), ("`interleaved`", interleaved, "--half or --interleaved")
    hints = [f"; choose with {option}" for name, value, option in options if value is None and name in str(error)]
    return UsageError("".join([str(error), *hints]))


def both_pairings(
    config: dict[str, Any], layer_type: str | None
) -> tuple[RotaryEmbedding, RotaryEmbedding, bool | None]:
    """Return the rotation of a config in half-split pairs, in interleaved pairs, and whether its own are interleaved.

    Only the model type tells the pairing; None where it is unknown. Raises UsageError as `rotary_of` does.
    """
    own: bool | None = None
    try:
        rope = RotaryEmbedding.from_config(config, layer_type=layer_type)
        own = rope.interleaved
    except (TypeError, ValueError):
        rope = rotary_of(config, layer_type, False)
    # Adjacent pairs know no blocks.
    interleaved = replace(rope.spec, interleaved=True, blocks=(rope.rotary_dim,))
    half = replace(rope.spec, interleaved=False)
    return RotaryEmbedding.from_spec(half), RotaryEmbedding.from_spec(interleaved), own


def heads_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the number of query heads and of key heads; raise UsageError where nothing says how many.

    Where the file is silent, the default of its model type counts.
    """
    values = with_defaults(*language_model(config))
    heads = _number(values, _HEADS)
    if heads is None:
        raise UsageError(f"the config says no number of heads; one of the keys {', '.join(_HEADS)} must")
    # Latent attention (MLA) rotates one key, which all heads share.
    return heads, 1 if latent(values) else _number(values, _KV_HEADS) or heads


def _number(values: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return what the first of these keys says that is there."""
    try:
        return next((whole_number(key, values[key]) for key in keys if key in values), None)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the config's {error}") from None
