"""What the subcommands of `rope-cpu` share: bad usage, and the config that is named on the command line."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from rope_cpu._models import Model
from rope_cpu.config import language_model, with_defaults
from rope_cpu.rotary import RotaryEmbedding

DEFAULT_CONFIG = "llama3.1-8b.json"

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


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config that the arguments name, or the shipped one.

    Raises UsageError where there is no such file or it holds no JSON object.
    """
    try:
        if args.config is None:
            text = resources.files("rope_cpu.data").joinpath(DEFAULT_CONFIG).read_text("utf-8")
        else:
            text = (args.config / "config.json" if args.config.is_dir() else args.config).read_text("utf-8")
        config = json.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{args.config} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{args.config} holds a {type(config).__name__}; a model config is an object")
    return config


def rotary_of(config: dict[str, Any], layer_type: str | None, interleaved: bool | None = None) -> RotaryEmbedding:
    """Return the rotary of a config; raise UsageError where the config describes none that is known."""
    try:
        return RotaryEmbedding.from_config(config, layer_type=layer_type, interleaved=interleaved)
    except (TypeError, ValueError) as error:
        hint = "; choose with --layer-type" if layer_type is None and "`layer_type`" in str(error) else ""
        raise UsageError(f"{error}{hint}") from error


def both_pairings(config: dict[str, Any], layer_type: str | None) -> tuple[dict[str, RotaryEmbedding], str]:
    """Return the rotation of a config in half-split and in interleaved pairs, and in words which of them is its own.

    Only the model type tells the pairing, and it may be unknown. Raises UsageError as `rotary_of` does.
    """
    try:
        rope = RotaryEmbedding.from_config(config, layer_type=layer_type)
        own = "interleaved pairs" if rope.interleaved else "half-split pairs"
    except (TypeError, ValueError):
        rope, own = rotary_of(config, layer_type, False), "pairs that its type does not tell"
    # Adjacent pairs know no blocks.
    interleaved = replace(rope.spec, interleaved=True, blocks=(rope.rotary_dim,))
    specs = {"half-split": replace(rope.spec, interleaved=False), "interleaved": interleaved}
    return {name: RotaryEmbedding.from_spec(spec) for name, spec in specs.items()}, own


def heads_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the number of query heads and of key heads; raise UsageError where nothing says how many.

    Where the file is silent, the default of its model type counts.
    """
    text, known = language_model(config)
    values = with_defaults(text, known or Model())
    heads = next((values[key] for key in _HEADS if key in values), None)
    if heads is None:
        raise UsageError(f"the config says no number of heads; one of the keys {', '.join(_HEADS)} must")
    kv_heads = next((values[key] for key in _KV_HEADS if key in values), heads)
    # Latent attention (MLA) rotates one key, which all heads share.
    return int(heads), 1 if "kv_lora_rank" in values else int(kv_heads)
