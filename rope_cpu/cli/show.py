"""`rope-cpu show CONFIG`: describe the rotation of a config in text, and draw it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rope_cpu.arguments.texts import cut, shown
from rope_cpu.cli.show_bands import band_lines
from rope_cpu.cli.show_summary import (
    LayerRotation,
    pair_axes,
    pair_frequencies,
    rotations_from_arguments,
)
from rope_cpu.command_line import (
    UsageError,
    add_config_arguments,
    add_pairing_arguments,
    check_picture,
    config_from_arguments,
    print_lines,
    write_errors,
)
from rope_cpu.rotation.embedding import RotaryEmbedding

# Longer lists are shown as their length and ends.
_LONGEST_LIST = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu show`."""
    add_config_arguments(parser)
    add_pairing_arguments(parser)
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="also plot wavelengths and the decay of scores with distance (.png or .svg)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the description; return 0. Raises UsageError if the config describes no rotation."""
    if args.plot is not None:
        check_picture(args.plot)
    config = config_from_arguments(args)
    rotations = rotations_from_arguments(config, args)
    if args.plot is not None and not any(rotation.by_length for rotation in rotations):
        raise UsageError(f"`--plot` is {shown(str(args.plot))}, but these layers are not rotated")
    lines = [line for rotation in rotations for line in (*describe(rotation), "")]
    print_lines(lines[:-1])
    if args.plot is not None:
        from rope_cpu.cli.show_picture.figure import plot

        with write_errors(args.plot):
            plot(rotations, args.plot)
        print_lines(["", f"written: {args.plot}"])
    return 0


def describe(rotation: LayerRotation) -> Iterator[str]:
    """Yield the lines that describe a rotation."""
    yield rotation.name
    if not rotation.by_length:
        return
    yield from _pairing_lines(rotation)
    for key in sorted(set(rotation.parameters) - {"rope_type", "type"}):
        yield _line(key, _short_text(rotation.parameters[key]))
    yield from _axes_lines(rotation.rope)
    yield from _serving_lines(rotation)
    for length, rope in rotation.by_length.items():
        if length:
            yield f"  {length}"
        yield from _factor_lines(rope, rotation)
        table = band_lines(
            pair_frequencies(rope), rotation.unscaled, pair_axes(rope), rotation.axes
        )
        yield from (f"    {line}" for line in table)


def _pairing_lines(rotation: LayerRotation) -> Iterator[str]:
    rope = rotation.rope
    pairs = rope.rotary_dim // 2
    if len(rope.blocks) > 1:
        widths = ", ".join(map(str, rope.blocks))
        pairing = f"half-split in blocks of {widths} elements"
    elif rope.interleaved:
        pairing = "(2i, 2i+1), interleaved"
    else:
        pairing = f"(i, i+{pairs}), half-split"
    yield _line("pairs", f"{pairs}: {pairing}")
    if rotation.pairing_note is not None:
        yield _line("", rotation.pairing_note)
    width = rotation.head_width
    rotated = 2 * np.count_nonzero(pair_frequencies(rope))
    yield _line("widths", f"{rotated} of the {width} elements of a head are rotated")
    if width != rope.head_dim:
        yield _line("", f"head_dim {rope.head_dim}: pass the rotated slice alone")
    yield _line("rope type", rope.rope_type)


def _axes_lines(rope: RotaryEmbedding) -> Iterator[str]:
    if rope.spec.direction < 0:
        yield _line("direction", "backwards: the angle is minus position times frequency")
    if rope.axes > 1:
        counts = (rope.spec.inv_freq[0, :, 0] != 0).sum(axis=-1)
        yield _line("axes", f"{rope.axes}, which rotate {', '.join(map(str, counts))} pairs")
    heads = rope.spec.inv_freq.shape[2]
    if heads > 1:
        yield _line("heads", f"{heads} with own frequencies; below: the first")


def _serving_lines(rotation: LayerRotation) -> Iterator[str]:
    """Yield the calls of a server that this rotation needs."""
    if rotation.serving:
        yield "  serving"
    yield from (f"    {text}" for text in rotation.serving)


def _factor_lines(rope: RotaryEmbedding, rotation: LayerRotation) -> Iterator[str]:
    """Yield the attention factor, and the factor on scores of DeepSeek and its relatives.

    Both are defined by the same function m if a config of YaRN has the keys mscale.
    """
    factor = f"{rope.attention_factor:.6g}"
    has_ratio = _is_ratio_of_mscales(rope, rotation.parameters)
    on_scores = rotation.mscale_of_scores
    ratio = " = m(mscale) / m(mscale_all_dim)" if has_ratio else ""
    yield _line("attention factor", factor + ratio)
    if on_scores is not None:
        yield _line("factor of scores", f"{on_scores**2:.6g} = m(mscale_all_dim)²")
        yield _line("", "applied by the model, not by the rotation")
    if has_ratio or on_scores is not None:
        yield _line("", "m(x) = 0.1·x·ln(factor) + 1")


def _is_ratio_of_mscales(rope: RotaryEmbedding, parameters: Mapping[str, Any]) -> bool:
    """Return True if the attention factor follows from mscale and mscale_all_dim."""
    has_both = parameters.get("mscale") and parameters.get("mscale_all_dim")
    return rope.rope_type == "yarn" and bool(has_both) and "attention_factor" not in parameters


def _line(name: str, value: object) -> str:
    return f"  {name:<32} {value}"


def _short_text(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
        return f"{len(value)} values, {_number_text(value[0])} … {_number_text(value[-1])}"
    return cut(str(value))


def _number_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
