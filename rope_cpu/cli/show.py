"""`rope-cpu show CONFIG`: describe the rotation of a config in text, and draw it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rope_cpu.arguments.texts import cut
from rope_cpu.array_types import Float64
from rope_cpu.cli.show_summary import LayerRotation, layer_rotations, pair_frequencies
from rope_cpu.command_line import (
    add_config_arguments,
    add_pairing_arguments,
    check_picture,
    config_error,
    config_from_arguments,
    write_errors,
)
from rope_cpu.rotation.embedding import RotaryEmbedding

# Relative difference below which two wavelengths are the same: frequencies carry a few roundings.
SAME = 1e-9

# Effects of scaling on a pair.
_UNSCALED = "unscaled"
_UNROTATED = "not rotated"
_MOST = "scaled most"
_BETWEEN = "scaled in between"

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
        help="also draw wavelengths and the decay of scores (.png or .svg)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the description; return 0. Raises UsageError if the config describes no rotation."""
    if args.plot is not None:
        check_picture(args.plot)
    config = config_from_arguments(args)
    try:
        rotations = list(layer_rotations(config, args.layer_type, args.interleaved))
    except (TypeError, ValueError) as error:
        raise config_error(error, args.layer_type, args.interleaved) from error
    descriptions = ["\n".join(describe(rotation)) for rotation in rotations]
    print("\n\n".join(descriptions))
    if args.plot is not None:
        from rope_cpu.cli.show_plot import plot

        with write_errors(args.plot):
            plot(rotations, args.plot)
        print(f"\nwritten: {args.plot}")
    return 0


def describe(rotation: LayerRotation) -> Iterator[str]:
    """Yield the lines that describe a rotation."""
    yield rotation.name
    if not rotation.by_length:
        return
    yield from _pairing_lines(rotation.rope)
    for key in sorted(set(rotation.parameters) - {"rope_type", "type"}):
        yield _line(key, _short_text(rotation.parameters[key]))
    yield from _axes_lines(rotation.rope)
    for length, rope in rotation.by_length.items():
        if length:
            yield f"  {length}"
        yield from _frequency_lines(rope, rotation.unscaled)


def _pairing_lines(rope: RotaryEmbedding) -> Iterator[str]:
    pairs = rope.rotary_dim // 2
    if len(rope.blocks) > 1:
        widths = ", ".join(map(str, rope.blocks))
        pairing = f"half-split within blocks of {widths} elements"
    elif rope.interleaved:
        pairing = "(2i, 2i+1), interleaved"
    else:
        pairing = f"(i, i+{pairs}), half-split"
    yield _line("pairs", f"{pairs}: {pairing}")
    yield _line("widths", f"{rope.rotary_dim} of {rope.head_dim} elements of a head are rotated")
    yield _line("rope type", rope.rope_type)


def _axes_lines(rope: RotaryEmbedding) -> Iterator[str]:
    if rope.spec.direction < 0:
        yield _line("direction", "backwards: the angle is minus position times frequency")
    if rope.axes > 1:
        counts = (rope.spec.inv_freq[0, :, 0] != 0).sum(axis=-1)
        yield _line("axes", f"{rope.axes}, which rotate {', '.join(map(str, counts))} pairs")


def _frequency_lines(rope: RotaryEmbedding, unscaled: Float64 | None) -> Iterator[str]:
    yield _line("attention factor", f"{rope.attention_factor:.6g}")
    frequencies = pair_frequencies(rope)
    rotated = frequencies[frequencies > 0]
    shortest = 2 * np.pi / rotated.max()
    longest = 2 * np.pi / rotated.min()
    yield _line("wavelengths", f"{shortest:.6g} to {longest:.6g} tokens")
    if unscaled is not None:
        yield from _scaling_lines(frequencies, unscaled)


def _scaling_lines(frequencies: Float64, unscaled: Float64) -> Iterator[str]:
    """Yield a line for each run of pairs that are scaled alike, with the growth of wavelengths."""
    with np.errstate(divide="ignore"):
        growth = unscaled / frequencies
    labels = _scaling_labels(growth)
    for label, run in groupby(range(len(labels)), key=labels.__getitem__):
        pairs = list(run)
        first = pairs[0]
        last = pairs[-1]
        name = f"pairs {first}-{last}" if first < last else f"pair {first}"
        if label == _BETWEEN:
            text = f"{growth[first]:.6g} to {growth[last]:.6g} times as long"
        elif label == _MOST:
            text = f"{growth[first]:.6g} times as long"
        else:
            text = label
        yield f"    {name}: {text}"


def _scaling_labels(growth: Float64) -> list[str]:
    """Label each pair by the growth of its wavelength; infinite for pairs that are not rotated.

    A single pair of largest growth gets no label of its own: it is the end of a ramp.
    """
    largest = growth[np.isfinite(growth)].max(initial=1.0)
    scaled = np.isfinite(growth) & (np.abs(growth - 1) >= SAME)
    scaled_most = scaled & (np.abs(growth / largest - 1) < SAME)
    labels = np.full(growth.shape, _UNSCALED, dtype=object)
    labels[scaled] = _BETWEEN
    if scaled_most.sum() > 1:
        labels[scaled_most] = _MOST
    labels[np.isinf(growth)] = _UNROTATED
    return list(labels)


def _line(name: str, value: object) -> str:
    return f"  {name:<32} {value}"


def _short_text(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
        return f"{len(value)} values, {value[0]} … {value[-1]}"
    return cut(str(value))
