"""`rope-cpu show CONFIG`: what a config file means for its rotation, in words, and as a drawing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rope_cpu.arguments.texts import cut
from rope_cpu.array_types import Float64
from rope_cpu.cli.common import (
    add_config_arguments,
    add_pairing_arguments,
    check_picture,
    config_of,
    refusal,
    writing,
)
from rope_cpu.cli.show_summary import Layers, one_axis, rotations

# Ratios closer than this are the same: frequencies carry a few float64 roundings.
SAME = 1e-9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu show`."""
    add_config_arguments(parser)
    add_pairing_arguments(parser)
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw wavelengths and decay of scores (.png, .svg)",
    )


def run(args: argparse.Namespace) -> int:
    """Print what the config means; return 0. Raises UsageError where it means nothing that is known."""
    if args.plot is not None:
        check_picture(args.plot)
    try:
        shown = list(rotations(config_of(args), args.layer_type, args.interleaved))
    except (TypeError, ValueError) as error:
        raise refusal(error, args.layer_type, args.interleaved) from error
    for number, layers in enumerate(shown):
        print("\n".join([""] * (number > 0) + list(describe(layers))))
    if args.plot is not None:
        from rope_cpu.cli.show_plot import plot

        with writing(args.plot):
            plot(shown, args.plot)
        print(f"\nwritten: {args.plot}")
    return 0


def describe(layers: Layers) -> Iterator[str]:
    """Yield the lines that describe a rotation."""
    yield layers.name
    if not layers.lengths:
        return
    rope = layers.rope
    n = rope.rotary_dim // 2
    pairing = "(2i, 2i+1), interleaved" if rope.interleaved else f"(i, i+{n}), half-split"
    if len(rope.blocks) > 1:
        pairing = f"half-split within blocks of {', '.join(map(str, rope.blocks))} elements"
    yield _line("pairs", f"{n}: {pairing}")
    yield _line("widths", f"{rope.rotary_dim} of {rope.head_dim} elements of a head are rotated")
    yield _line("rope type", f"{rope.rope_type}")
    for key in sorted(set(layers.section) - {"rope_type", "type"}):
        yield _line(key, _brief(layers.section[key]))
    if rope.spec.direction < 0:
        yield _line("direction", "backwards: by the opposite of position times frequency")
    if rope.axes > 1:
        pairs = (rope.spec.inv_freq[0, :, 0] != 0).sum(axis=-1)
        yield _line("axes", f"{rope.axes}, which rotate {', '.join(map(str, pairs))} pairs")
    for when, one in layers.lengths.items():
        if when:
            yield f"  {when}"
        yield _line("attention factor", f"{one.attention_factor:.6g}")
        frequencies = one_axis(one)
        moving = frequencies[frequencies > 0]
        yield _line(
            "wavelengths",
            f"{2 * np.pi / moving.max():.6g} to {2 * np.pi / moving.min():.6g} tokens",
        )
        if layers.plain is not None:
            yield from _scaled_pairs(frequencies, layers.plain)


def _scaled_pairs(frequencies: Float64, plain: Float64) -> Iterator[str]:
    """Yield, for each run of pairs treated alike, which they are and by how much their wavelengths grew."""
    with np.errstate(divide="ignore"):
        stretch = plain / frequencies
    kind = np.where(np.isinf(stretch), 3, np.where(np.abs(stretch - 1) < SAME, 0, 1))
    top = stretch[~np.isinf(stretch)].max(initial=1.0)
    most = (kind == 1) & (np.abs(stretch / top - 1) < SAME)
    kind[most if most.sum() > 1 else []] = 2
    starts = np.flatnonzero(np.r_[True, kind[1:] != kind[:-1]])
    for first, last in zip(starts, np.r_[starts[1:], len(kind)] - 1, strict=True):
        ratios = stretch[first], stretch[last]
        words = {0: "unscaled", 3: "not rotated", 2: f"{ratios[0]:.6g} times as long"}
        text = words.get(int(kind[first]), f"{ratios[0]:.6g} to {ratios[1]:.6g} times as long")
        yield f"    {f'pairs {first}-{last}' if first < last else f'pair {first}'}: {text}"


def _line(name: str, value: object) -> str:
    return f"  {name:<32} {value}"


def _brief(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 6:
        return f"{len(value)} values, {value[0]} … {value[-1]}"
    return cut(str(value))
