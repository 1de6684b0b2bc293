"""`rope-cpu show CONFIG`: describe the rotation of a config in text, and draw it."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Float64
from rope_cpu.cli.command_line import (
    UsageError,
    add_config_arguments,
    add_pairing_arguments,
    check_picture,
    config_from_arguments,
    print_lines,
    write_errors,
)
from rope_cpu.cli.layer_rotations import (
    SAME,
    Axis,
    LayerRotation,
    changed_pairs,
    pair_frequencies,
    rotations_from_arguments,
)
from rope_cpu.frequencies.rope_types import ROPE_TYPES
from rope_cpu.models.attention import FACTS
from rope_cpu.models.layer import FULL_LAYERS, PARTS, WINDOW_LAYERS, Layer
from rope_cpu.models.layers import is_latent
from rope_cpu.rotation.embedding import RotaryEmbedding

# Longer lists are shown as their length and ends.
_LONGEST_LIST = 6

# The most and the least columns of facts, of which names take 35.
_WIDTH = 80
_LEAST_WIDTH = 55

# The attributes of a rotary embedding that JSON has.
_ATTRIBUTES = ("rope_type", "head_dim", "rotary_dim", "interleaved", "attention_factor")

# Numbers of at least this size are written with an exponent.
_LARGE = 1e6

# Stands for the axis of pairs without rotation, if there are several axes.
_NO_AXIS = Axis("none", "")

_UNROTATED = "not rotated"
_UNSCALED = "unscaled"

# A name and its value; "" continues the fact above.
Fact = tuple[str, object]


class Band(NamedTuple):
    """Pairs of an axis that are scaled alike, as numbers for JSON.

    wavelengths: of each pair, empty without rotation. growth: the same as multiples of those before
    scaling, empty without scaling.
    """

    axis: str
    unit: str
    pairs: list[int]
    wavelengths: list[float]
    growth: list[float]
    effect: str


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
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the description; return 0. Raises UsageError if the config describes no rotation."""
    if args.plot is not None:
        check_picture(args.plot)
    config = config_from_arguments(args)
    rotations = rotations_from_arguments(config, args)
    if args.plot is not None and not any(rotation.by_length for rotation in rotations):
        raise UsageError(f"`--plot` is {shown(str(args.plot))}, but these layers are not rotated")
    if args.json:
        print_lines(json.dumps([as_dict(rotation) for rotation in rotations], indent=2).split("\n"))
    else:
        lines = [line for rotation in rotations for line in (*describe(rotation), "")]
        print_lines(lines[:-1])
    if args.plot is not None:
        from rope_cpu.cli.show_plot import draw

        with write_errors(args.plot):
            draw(rotations).savefig(args.plot, dpi=130)
        print_lines([] if args.json else ["", f"written: {args.plot}"])
    return 0


def describe(rotation: LayerRotation) -> Iterator[str]:
    """Yield the lines that describe a rotation."""
    yield f"{rotation.model}, {rotation.layers}"
    yield from _lines(_facts(rotation))
    for length, rope in rotation.by_length.items():
        if length:
            yield f"  {length}"
        yield from _lines(_factor_facts(rotation, rope))
        yield from (f"    {line}" for line in band_lines(rotation, rope))


def as_dict(rotation: LayerRotation) -> dict[str, Any]:
    """Return the content of `describe` for JSON."""
    by_length = {
        length: {
            **{name: getattr(rope, name) for name in _ATTRIBUTES},
            "facts": _values(_factor_facts(rotation, rope)),
            "bands": [band._asdict() for band in _bands(rotation, rope)],
        }
        for length, rope in rotation.by_length.items()
    }
    return {
        "model": rotation.model,
        "layers": rotation.layers,
        "layer_type": rotation.layer_type,
        "facts": _values(_facts(rotation)),
        "by_length": by_length,
    }


def _values(facts: Iterable[Fact]) -> dict[str, list[object]]:
    """Return the values of each name."""
    values: dict[str, list[object]] = {}
    last = ""
    for name, value in facts:
        last = name or last
        values.setdefault(last, []).append(value)
    return values


def _lines(facts: Iterable[Fact]) -> Iterator[str]:
    """Yield facts in lines that fit the screen."""
    columns = min(_WIDTH, max(_LEAST_WIDTH, get_terminal_size((_WIDTH, 0)).columns))
    for name, value in facts:
        start = f"  {name:<32} "
        wrapper = textwrap.TextWrapper(columns, start, " " * len(start), break_on_hyphens=False)
        yield from wrapper.wrap(_short_text(value))


def _facts(rotation: LayerRotation) -> Iterator[Fact]:
    """Yield the facts that hold at every length; none of layers without rotation."""
    if not rotation.by_length:
        return
    yield from _pairing_facts(rotation)
    yield from _axes_facts(rotation.rope)
    if rotation.config.position_note is not None:
        yield "positions", rotation.config.position_note
    yield from _indexer_facts(rotation)
    yield from _attention_facts(rotation)
    ranges = rotation.rope.spec.length_ranges
    if ranges:
        yield "frequencies by length", ranges


def _pairing_facts(rotation: LayerRotation) -> Iterator[Fact]:
    """Yield pairing and widths, and the rope type with its parameters."""
    rope = rotation.rope
    pairs = rope.rotary_dim // 2
    pairing = _pairing(rope, pairs)
    if len(rope.blocks) > 1:
        widths = ", ".join(map(str, rope.blocks))
        pairing = f"half-split in blocks of {widths} elements"
    yield "pairs", f"{pairs}: {pairing}"
    if rotation.config.pairing_note is not None:
        yield "", rotation.config.pairing_note
    interleaved_names = FACTS["interleaved_weights"].get(rotation.config.model_type)
    if interleaved_names is not None:
        published = f"published weights ({interleaved_names}) pair (2i, 2i+1)"
        yield "", f"of weights as transformers loads them; {published}"
    width = rotation.head_width
    rotated = 2 * np.count_nonzero(pair_frequencies(rope))
    yield "widths", f"{rotated} of the {width} elements of a head are rotated"
    if width != rope.head_dim:
        yield "", f"head_dim {rope.head_dim}: pass the rotated slice alone"
    yield from _head_counts(rotation)
    yield "rope type", rope.rope_type
    for key in sorted(set(rotation.parameters) - {"rope_type", "type"}):
        yield key, rotation.parameters[key]


def _pairing(rope: RotaryEmbedding, pairs: int) -> str:
    """Return the elements of a pair, of so many in a part of a head."""
    return "(2i, 2i+1), interleaved" if rope.interleaved else f"(i, i+{pairs}), half-split"


def _indexer_facts(rotation: LayerRotation) -> Iterator[Fact]:
    """Yield the rotation of the indexer of sparse attention, if the layers have one."""
    with contextlib.suppress(ValueError):
        rope = RotaryEmbedding.from_config(
            rotation.config, layer_type=rotation.layer_type, part="indexer"
        )
        turned = np.flatnonzero(pair_frequencies(rope))
        place = "first" if turned[0] == 0 else "last"
        width = f"the {place} {2 * len(turned)} of the {rope.head_dim} elements of a head"
        yield "indexer", f"{_pairing(rope, len(turned))}, {width}"


def _head_counts(rotation: LayerRotation) -> Iterator[Fact]:
    """Yield the numbers of heads, unless layers or files leave them open."""
    with contextlib.suppress(TypeError, ValueError):
        heads, kv_heads = rotation.config.heads(rotation.layer_type)
        if heads is not None:
            yield "heads of q, and of k and v", (heads, kv_heads)


def _axes_facts(rope: RotaryEmbedding) -> Iterator[Fact]:
    if rope.spec.direction < 0:
        yield "direction", "backwards: the angle is minus position times frequency"
    if rope.axes > 1:
        counts = (rope.spec.inv_freq[0, :, 0] != 0).sum(axis=-1)
        yield "axes", f"{rope.axes}, which rotate {', '.join(map(str, counts))} pairs"
    heads = rope.spec.inv_freq.shape[2]
    if heads > 1:
        yield "heads", f"{heads} with own frequencies; below: the first"


def _attention_facts(rotation: LayerRotation) -> Iterator[Fact]:
    """Yield the norms, the content of a cache and the call of `attention` that a server needs."""
    attention = rotation.attention
    if attention is None:
        yield "attention", "not known for this model type"
        return
    yield from _norm_facts(attention)
    if attention.latent or attention.own_cache is not None:
        latent = "compressed keys and values (latent attention)"
        yield "cache", attention.own_cache or latent
    elif attention.causal and attention.other is None:
        yield from _calls(attention, _kinds_of_layers(rotation, attention))
    for part in _parts_without_argument(attention):
        yield "no argument for", part
    if attention.shared_layers:
        yield "shared keys and values", f"in the last {attention.shared_layers} layers"


def _norm_facts(attention: Layer) -> Iterator[Fact]:
    epsilon = attention.norm_epsilon
    rms_norm = "RMS norm of each head, eps " + ("not known" if epsilon is None else f"{epsilon:g}")
    if attention.qk_norm is not None:
        weights = f", weights + {attention.norm_offset:g}" if attention.norm_offset else ""
        norm = rms_norm + (weights if attention.norm_weighted else ", no weights")
        text = f"{attention.qk_norm} the rotation: {attention.norm_other or norm}"
        yield "norms of q and k", text
    if attention.v_norm:
        yield "norm of v", f"{rms_norm}, no weights"


def _kinds_of_layers(rotation: LayerRotation, attention: Layer) -> list[str]:
    """Return the layer types whose windows differ, [""] if there is one window or none."""
    if attention.window is None or attention.window_in_all_layers:
        return [""]
    own_type = rotation.layer_type
    types = rotation.config.layers.known_types if own_type is None else {own_type}
    return sorted(kind for kind in (*FULL_LAYERS, *WINDOW_LAYERS) if kind in types)


def _calls(attention: Layer, kinds: list[str]) -> Iterator[Fact]:
    """Yield the call of `attention` with the model's own arguments, for each kind of layers."""
    if not kinds:
        yield "window", f"{attention.window} keys, in layers that are not known"
    for kind in kinds:
        arguments = {
            "window": attention.window_of(kind),
            "softcap": attention.softcap,
            "scale": attention.scale,
            "sinks": "sinks" if attention.has_sinks else None,
        }
        given = [f"{name}={value}" for name, value in arguments.items() if value]
        call = f"attention({', '.join(['q', 'cache', 'batch', *given])})"
        yield f"call, {kind}" if len(kinds) > 1 else "call", call


def _parts_without_argument(attention: Layer) -> Iterator[str]:
    """Yield the parts of a model's attention that no argument of `attention` expresses."""
    for name in ("other", "chunk"):
        value = getattr(attention, name)
        if value:
            yield PARTS[name].format(value)
    if attention.query_weights is not None:
        yield f"queries times {attention.query_weights}, after their norm"
    if attention.query_scale is not None:
        yield f"queries scaled by their position, by {attention.query_scale}"
    if not attention.causal:
        yield "attention in both directions"
    if attention.bidirectional_tokens is not None:
        yield f"attention in both directions among tokens of {attention.bidirectional_tokens}"
    if attention.unrotated_query_scale is not None:
        scale = attention.unrotated_query_scale
        yield f"queries of layers without rotation, scaled by their position, by {scale}"


def _factor_facts(rotation: LayerRotation, rope: RotaryEmbedding) -> Iterator[Fact]:
    """Yield the attention factor, and the factor on scores of DeepSeek and its relatives.

    Both are defined by the same function m if a config of YaRN has the keys mscale.
    """
    parameters = rotation.parameters
    has_both = parameters.get("mscale") and parameters.get("mscale_all_dim")
    is_ratio = has_both and _reads_mscale(rope) and "attention_factor" not in parameters
    ratio = " = m(mscale) / m(mscale_all_dim)" if is_ratio else ""
    yield "attention factor", f"{rope.attention_factor:.6g}{ratio}"
    on_scores = _mscale_of_scores(rotation, rope)
    if on_scores is not None:
        yield "factor of scores", f"{on_scores**2:.6g} = m(mscale_all_dim)²"
        yield "", "applied by the model, not by the rotation"
    if is_ratio or on_scores is not None:
        yield "", "m(x) = 0.1·x·ln(factor) + 1"


def _mscale_of_scores(rotation: LayerRotation, rope: RotaryEmbedding) -> float | None:
    """Return the m(mscale_all_dim) whose square multiplies the scores, None if there is none."""
    config = rotation.config
    scale = rotation.parameters.get("mscale_all_dim")
    factor = rotation.parameters.get("factor")
    if config.model_type not in FACTS["mscale_of_scores"] or not is_latent(config.values):
        return None
    if not _reads_mscale(rope) or not scale or factor is None:
        return None
    return 0.1 * float(scale) * math.log(max(factor, 1)) + 1


def _reads_mscale(rope: RotaryEmbedding) -> bool:
    rope_type = ROPE_TYPES.get(rope.rope_type)
    return rope_type is not None and rope_type.has_mscales


def _short_text(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
        return f"{len(value)} values, {_number_text(value[0])} … {_number_text(value[-1])}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else cut(str(value))


def _number_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else cut(str(value))


def band_lines(rotation: LayerRotation, rope: RotaryEmbedding) -> Iterator[str]:
    """Yield the lines of the table of bands: the pairs of an axis that are scaled alike."""
    has_axes = len(rotation.axes) > 1
    unit = "" if has_axes else f" in {rotation.axes[0].unit}"
    rows = [("axis", "pairs", f"wavelengths{unit}", "scale")]
    for band in _bands(rotation, rope):
        waves = _range(band.wavelengths) if band.wavelengths else ""
        scale = f"{_range(band.growth)} times as long" if band.growth else band.effect
        unit = f" {band.unit}" if has_axes else ""
        rows.append((band.axis, _pairs_text(band.pairs), waves + unit, scale))
    columns = list(zip(*rows, strict=True))[0 if has_axes else 1 :]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def _bands(rotation: LayerRotation, rope: RotaryEmbedding) -> Iterator[Band]:
    """Yield the bands, axis by axis; pairs without rotation are a band of the only axis."""
    frequencies = pair_frequencies(rope)
    has_axes = len(rotation.axes) > 1
    pair_axes = rotation.pair_axes if has_axes else np.zeros(frequencies.shape, int)
    growth = np.divide(
        rotation.unscaled,
        frequencies,
        out=np.full(frequencies.shape, np.inf),
        where=frequencies > 0,
    )
    effects = _effects_of_scaling(growth, changed_pairs(frequencies, rotation.unscaled))
    for number, axis in [*enumerate(rotation.axes), (-1, _NO_AXIS)]:
        own_pairs = np.flatnonzero(pair_axes == number)
        for effect, run in groupby(own_pairs, key=effects.__getitem__):
            pairs = list(run)
            waves = [] if effect == _UNROTATED else (2 * np.pi / frequencies[pairs]).tolist()
            scales = [] if effect in (_UNROTATED, _UNSCALED) else growth[pairs].tolist()
            yield Band(axis.name, axis.unit, [*map(int, pairs)], waves, scales, effect)


def _effects_of_scaling(growth: Float64, changed: NDArray[np.bool_]) -> list[str]:
    """Label each pair by the growth of its wavelength; infinite for pairs that are not rotated.

    A single pair of largest growth gets no label of its own: it is the end of a ramp.
    """
    largest = growth[np.isfinite(growth)].max(initial=1.0)
    most = changed & (np.abs(growth / largest - 1) < SAME)
    conditions = [np.isinf(growth), ~changed, most & (most.sum() > 1)]
    return list(np.select(conditions, [_UNROTATED, _UNSCALED, "scaled most"], "scaled in between"))


def _pairs_text(pairs: Sequence[int]) -> str:
    """Return "0-28", or "20 of 1-58" for pairs between which others lie."""
    first = pairs[0]
    last = pairs[-1]
    if len(pairs) == 1:
        return str(first)
    between = f"{first}-{last}"
    return between if last - first + 1 == len(pairs) else f"{len(pairs)} of {between}"


def _range(values: Sequence[float]) -> str:
    """Return "6.28 to 1610", or one number for values that are equal in three digits."""
    least = _number(min(values))
    most = _number(max(values))
    return least if least == most else f"{least} to {most}"


def _number(value: float) -> str:
    """Return a number in three digits: 6.28, 1610, 2.05e7."""
    rounded = float(f"{value:.3g}")
    if 1000 <= rounded < _LARGE:
        return f"{rounded:.0f}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
