"""What the subcommands of `rope-cpu` share: bad usage, and the config that is named on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from rope_cpu.arguments.texts import shown
from rope_cpu.configs.model_config import HEADS_KEYS, ModelConfig
from rope_cpu.configs.model_types import data
from rope_cpu.configs.reader import read
from rope_cpu.rotation.embedding import RotaryEmbedding

DEFAULT_CONFIG = "llama3.1-8b.json"
PICTURES = (".png", ".svg")


class UsageError(Exception):
    """The command cannot do what it was asked to: one line for the user, exit code 2."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument for a model config, and the option for its layers."""
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help="config.json of a Hugging Face model, or the folder it is in (default: Llama 3.1 8B)",
    )
    parser.add_argument(
        "--layer-type",
        metavar="NAME",
        help="which layers, where their rotations differ (such as full_attention)",
    )


def add_pairing_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for the pairing, for model types that do not determine it."""
    pairing = parser.add_mutually_exclusive_group()
    pairing.add_argument(
        "--interleaved", action="store_true", default=None, help="pairs are (2i, 2i+1)"
    )
    pairing.add_argument(
        "--half", dest="interleaved", action="store_false", help="pairs are (i, i+n)"
    )


def whole(text: str) -> int:
    """Return the whole number that an argument is."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no whole number") from None


def config_of(args: argparse.Namespace) -> ModelConfig:
    """Return the config that the arguments name, or the shipped one; raise UsageError as `config_at` does."""
    return config_at(args.config) if args.config is not None else read(data(DEFAULT_CONFIG))


def config_at(path: Path) -> ModelConfig:
    """Return the config of a file, or of a folder's config.json; raise UsageError where it describes no rotation."""
    try:
        return read(path)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def check_file(path: Path) -> None:
    """Raise UsageError where no file can be written at `path`, as far as that is known before the work."""
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
        raise UsageError(
            f"`--plot` is {shown(str(path))}; the name must end in {' or '.join(PICTURES)}"
        )
    check_file(path)
    import_module("matplotlib")


def rope_of(
    config: ModelConfig, layer_type: str | None, interleaved: bool | None = None
) -> RotaryEmbedding:
    """Return the rotary embedding of a config; raise UsageError where the config describes none that is known."""
    try:
        return RotaryEmbedding.from_config(config, layer_type=layer_type, interleaved=interleaved)
    except (TypeError, ValueError) as error:
        raise refusal(error, layer_type, interleaved) from error


def refusal(error: Exception, layer_type: str | None, interleaved: bool | None) -> UsageError:
    """Return the error for a config that describes no known rotation, with the option that would help."""
    options = (
        ("`layer_type`", layer_type, "--layer-type"),
        ("`interleaved`", interleaved, "--half or --interleaved"),
    )
    hints = [
        f"; choose with {option}"
        for name, value, option in options
        if value is None and name in str(error)
    ]
    return UsageError("".join([str(error), *hints]))


def both_pairings(
    config: ModelConfig, layer_type: str | None
) -> tuple[RotaryEmbedding, RotaryEmbedding, bool | None]:
    """Return the rotation of a config in half-split pairs, in interleaved pairs, and whether its own are interleaved.

    The pairing follows from the model type; it is None where that is unknown. Raises UsageError as `rope_of` does.
    """
    own: bool | None = None
    try:
        spec = config.spec(layer_type)
        own = spec.interleaved
    except (TypeError, ValueError):
        spec = rope_of(config, layer_type, False).spec
    # Adjacent pairs know no blocks.
    interleaved = replace(spec, interleaved=True, blocks=(spec.rotary_dim,))
    half = replace(spec, interleaved=False)
    return RotaryEmbedding.from_spec(half), RotaryEmbedding.from_spec(interleaved), own


def heads_of(config: ModelConfig, layer_type: str | None) -> tuple[int, int]:
    """Return the number of query heads and of key heads; raise UsageError where nothing says how many."""
    try:
        heads, kv_heads = config.heads(layer_type)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the config's {error}") from None
    if heads is None or kv_heads is None:
        raise UsageError(
            f"the config lacks the number of heads; one of the keys {', '.join(HEADS_KEYS)} must be there"
        )
    return heads, kv_heads
