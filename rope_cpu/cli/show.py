"""`rope-cpu show CONFIG`: describe the rotation of a config in text, and draw it."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Float64
from rope_cpu.cli import command_line, groups
from rope_cpu.cli.groups import Group
from rope_cpu.cli.pairs import SAME, Axis, Pairs, axes_of, pairs_of
from rope_cpu.frequencies.rope_types import ROPE_TYPES
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.models.attention import FACTS
from rope_cpu.models.layer import FULL_LAYERS, PARTS, WINDOW_LAYERS, Layer
from rope_cpu.models.model import Model
from rope_cpu.rotation.embedding import RotaryEmbedding

# Longer lists are shown as their length and ends.
_LONGEST_LIST = 6

# The columns of facts, of which names take 35.
_WIDTH = 80

# The attributes of a rotary embedding that JSON has.
_ATTRIBUTES = ("rope_type", "head_dim", "rotary_dim", "interleaved", "attention_factor")

# Stands for the axis of pairs without rotation, if there are several axes.
_NO_AXIS = Axis("none", "")

_UNROTATED = "not rotated"
_UNSCALED = "unscaled"

# Parts of attention that no argument of `attention` expresses, in words.
_WITHOUT_ARGUMENT = {
    **{name: PARTS[name] for name in ("other", "chunk")},
    "query_weights": "queries times {}, after their norm",
    "query_scale": PARTS["query_scale"],
    "bidirectional": "attention in both directions",
    "bidirectional_tokens": "attention in both directions among tokens of {}",
    "unrotated_query_scale": "queries of layers without rotation, scaled by their position, by {}",
}

# A name and its value; "" continues the fact above.
Fact = tuple[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu show`."""
    command_line.add_config_arguments(parser)
    command_line.add_pairing_arguments(parser)
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="also plot the wavelengths of all pairs (.png or .svg)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the description; return 0. Raises UsageError if the config describes no rotation."""
    if args.plot is not None:
        command_line.check_picture(args.plot)
    config = command_line.config_from_arguments(args)
    found = groups.from_arguments(config, args)
    if args.plot is not None and not any(group.spec for group in found):
        text = f"`--plot` is {shown(str(args.plot))}, but these layers are not rotated"
        raise command_line.UsageError(text)
    with command_line.usage_errors():
        described = [description(group) for group in found]
    if args.plot is not None:
        from rope_cpu.cli.show_plot import draw

        with command_line.write_errors(args.plot):
            draw([group for group in found if group.spec]).savefig(args.plot)
    if args.json:
        lines = json.dumps(described, indent=2).split("\n")
    else:
        written = [] if args.plot is None else [f"written: {args.plot}", ""]
        lines = [*(line for each in described for line in (*text_lines(each), "")), *written][:-1]
    command_line.print_lines(lines)
    return 0


def description(group: Group) -> dict[str, Any]:
    """Return what is shown of a group of layers, as JSON has it."""
    axes = axes_of(group)
    pairs = pairs_of(group)
    by_length = {
        length: {
            **{name: getattr(rope, name) for name in _ATTRIBUTES},
            "facts": _by_name(_factor_facts(group, rope)),
            "bands": list(bands_by_axis(pairs[length], axes)),
        }
        for length, rope in group.ropes.items()
    }
    return {
        "model": group.model,
        "layers": group.name,
        "layer_type": group.layer_type,
        "facts": {} if group.spec is None else _by_name(_facts(group, group.spec)),
        "by_length": by_length,
    }


def _by_name(facts: Iterable[Fact]) -> dict[str, list[object]]:
    """Return the values of each name."""
    values: dict[str, list[object]] = {}
    last = ""
    for name, value in facts:
        last = name or last
        values.setdefault(last, []).append(value)
    return values


def text_lines(described: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of text of a description."""
    yield f"{described['model']}, {described['layers']}"
    yield from _fact_lines(described["facts"])
    for length, part in described["by_length"].items():
        if length:
            yield f"  {length}"
        yield from _fact_lines(part["facts"])
        yield from (f"    {line}" for line in band_lines(part["bands"]))


def _fact_lines(facts: Mapping[str, list[object]]) -> Iterator[str]:
    """Yield facts in lines that fit a screen, a name once."""
    for name, values in facts.items():
        for number, value in enumerate(values):
            start = f"  {'' if number else name:<32} "
            wrapper = textwrap.TextWrapper(_WIDTH, start, " " * len(start), break_on_hyphens=False)
            yield from wrapper.wrap(_short_text(value))


def _facts(group: Group, spec: RopeSpec) -> Iterator[Fact]:
    """Yield the facts that hold at every length."""
    config = group.config
    yield from _pairing_facts(config, spec)
    yield from _width_facts(group, spec)
    yield from _axes_facts(spec)
    if config.position_note is not None:
        yield "positions", config.position_note
    with contextlib.suppress(ValueError):  # without an indexer
        yield "indexer", _indexer_text(config.spec(group.layer_type, part="indexer"))
    yield from _attention_facts(config, group.layer_type)
    if spec.length_ranges:
        yield "frequencies by length", spec.length_ranges


def _pairing_facts(config: Model, spec: RopeSpec) -> Iterator[Fact]:
    pairing = _pairing(spec, spec.pairs)
    if len(spec.blocks) > 1:
        widths = ", ".join(map(str, spec.blocks))
        pairing = f"half-split in blocks of {widths} elements"
    yield "pairs", f"{spec.pairs}: {pairing}"
    if config.pairing_note is not None:
        yield "", config.pairing_note
    interleaved_names = FACTS["interleaved_weights"].get(config.model_type)
    if interleaved_names is not None:
        published = f"published weights ({interleaved_names}) pair (2i, 2i+1)"
        yield "", f"of weights as transformers loads them; {published}"


def _width_facts(group: Group, spec: RopeSpec) -> Iterator[Fact]:
    """Yield widths and numbers of heads, and the rope type with its parameters."""
    width = spec.head_dim
    if group.config.is_latent:  # of whose heads a slice is rotated
        key = "qk_nope_head_dim"
        width += scalars.whole_number(key, group.config.values.get(key, 0), 0, limits.HEAD_DIM)
    rotated = 2 * np.count_nonzero(spec.inv_freq[0, :, 0].any(axis=0))
    yield "widths", f"{rotated} of the {width} elements of a head are rotated"
    if width != spec.head_dim:
        yield "", f"head_dim {spec.head_dim}: pass the rotated slice alone"
    with contextlib.suppress(TypeError, ValueError):  # unless layers or files leave them open
        yield "heads of q, and of k and v", group.config.heads(group.layer_type)
    yield "rope type", spec.rope_type
    for key in sorted(set(group.parameters) - {"rope_type", "type"}):
        yield key, group.parameters[key]


def _pairing(spec: RopeSpec, pairs: int) -> str:
    """Return the elements of a pair, of so many in a part of a head."""
    return "(2i, 2i+1), interleaved" if spec.interleaved else f"(i, i+{pairs}), half-split"


def _indexer_text(spec: RopeSpec) -> str:
    """Return the pairs of an indexer, and the elements of a head that it rotates."""
    turned = np.flatnonzero(spec.inv_freq[0, :, 0].any(axis=0))
    place = "first" if turned[0] == 0 else "last"
    width = f"the {place} {2 * len(turned)} of the {spec.head_dim} elements of a head"
    return f"{_pairing(spec, len(turned))}, {width}"


def _axes_facts(spec: RopeSpec) -> Iterator[Fact]:
    if spec.direction < 0:
        yield "direction", "backwards: the angle is minus position times frequency"
    if spec.axes > 1:
        counts = (spec.inv_freq[0, :, 0] != 0).sum(axis=-1)
        yield "axes", f"{spec.axes}, which rotate {', '.join(map(str, counts))} pairs"
    heads = spec.inv_freq.shape[2]
    if heads > 1:
        yield "heads", f"{heads} with own frequencies; below: the first"


def _attention_facts(config: Model, layer_type: str | None) -> Iterator[Fact]:
    """Yield the norms, the content of a cache and the call of `attention` that a server needs."""
    if config.unknown_type is not None:
        yield "attention", "not known for this model type"
        return
    attention = config.attention
    yield from _norm_facts(attention)
    if attention.latent or attention.own_cache is not None:
        latent = "compressed keys and values (latent attention)"
        yield "cache", attention.own_cache or latent
    elif attention.causal and attention.other is None:
        yield from _calls(attention, _kinds_of_layers(config, layer_type))
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


def _kinds_of_layers(config: Model, own_type: str | None) -> list[str]:
    """Return the layer types whose windows differ, [""] if there is one window or none."""
    if config.attention.window is None or config.attention.window_in_all_layers:
        return [""]
    types = {kind.layer_type for kind in config.types[None]} if own_type is None else {own_type}
    return sorted(kind for kind in (*FULL_LAYERS, *WINDOW_LAYERS) if kind in types)


def _calls(attention: Layer, kinds: list[str]) -> Iterator[Fact]:
    """Yield the call of `attention` with the model's own arguments, for each kind of layers."""
    if not kinds:
        yield "window", f"{attention.window} keys, in layers that are not known"
    for kind in kinds:
        arguments = {
            "window": None if kind in FULL_LAYERS else attention.window,
            "softcap": attention.softcap,
            "scale": attention.scale,
            "sinks": "sinks" if attention.has_sinks else None,
        }
        given = [f"{name}={value}" for name, value in arguments.items() if value]
        call = f"attention({', '.join(['q', 'cache', 'batch', *given])})"
        yield f"call, {kind}" if len(kinds) > 1 else "call", call


def _parts_without_argument(attention: Layer) -> Iterator[str]:
    """Yield the parts of a model's attention that no argument of `attention` expresses."""
    facts = vars(attention) | {"bidirectional": not attention.causal}
    return (text.format(facts[name]) for name, text in _WITHOUT_ARGUMENT.items() if facts[name])


def _factor_facts(group: Group, rope: RotaryEmbedding) -> Iterator[Fact]:
    """Yield the attention factor, and the factor on scores of DeepSeek and its relatives.

    Both are defined by the same function m if a config of YaRN has the keys mscale.
    """
    parameters = group.parameters
    has_both = parameters.get("mscale") and parameters.get("mscale_all_dim")
    is_ratio = has_both and _reads_mscale(rope) and "attention_factor" not in parameters
    ratio = " = m(mscale) / m(mscale_all_dim)" if is_ratio else ""
    yield "attention factor", f"{rope.attention_factor:.6g}{ratio}"
    on_scores = _mscale_of_scores(group, rope)
    if on_scores is not None:
        yield "factor of scores", f"{on_scores**2:.6g} = m(mscale_all_dim)²"
        yield "", "applied by the model, not by the rotation"
    if is_ratio or on_scores is not None:
        yield "", "m(x) = 0.1·x·ln(factor) + 1"


def _mscale_of_scores(group: Group, rope: RotaryEmbedding) -> float | None:
    """Return the m(mscale_all_dim) whose square multiplies the scores, None if there is none."""
    config = group.config
    scale = group.parameters.get("mscale_all_dim")
    factor = group.parameters.get("factor")
    if config.model_type not in FACTS["mscale_of_scores"] or not config.is_latent:
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


def band_lines(bands: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of bands: the pairs of an axis that are scaled alike."""
    has_axes = bands[0]["axis"] != ""
    unit = "" if has_axes else f" in {bands[0]['unit']}"
    rows = [("axis", "pairs", f"wavelengths{unit}", "scale")]
    for band in bands:
        waves = _range(band["wavelengths"]) if band["wavelengths"] else ""
        scale = f"{_range(band['growth'])} times as long" if band["growth"] else band["effect"]
        unit = f" {band['unit']}" if has_axes else ""
        rows.append((band["axis"], _pairs_text(band["pairs"]), waves + unit, scale))
    columns = list(zip(*rows, strict=True))[0 if has_axes else 1 :]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def bands_by_axis(found: Pairs, axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Yield bands, pairs that are scaled alike, axis by axis, as JSON has them.

    wavelengths: of each pair, empty without rotation; growth: the same as multiples of those before
    scaling, empty without scaling. Pairs without rotation are a band of the only axis.
    """
    frequencies = found.frequencies
    axis_of_pair = found.axis if len(axes) > 1 else np.zeros(frequencies.shape, int)
    infinite = np.full(frequencies.shape, np.inf)
    growth = np.divide(found.before, frequencies, out=infinite, where=frequencies > 0)
    effects = _effects_of_scaling(growth, found.changed)
    for number, axis in [*enumerate(axes), (-1, _NO_AXIS)]:
        own_pairs = np.flatnonzero(axis_of_pair == number)
        for effect, run in groupby(own_pairs, key=effects.__getitem__):
            pairs = list(run)
            waves = [] if effect == _UNROTATED else (2 * np.pi / frequencies[pairs]).tolist()
            scales = [] if effect in (_UNROTATED, _UNSCALED) else growth[pairs].tolist()
            band = {"axis": axis.name, "unit": axis.unit, "pairs": [*map(int, pairs)]}
            yield band | {"wavelengths": waves, "growth": scales, "effect": effect}


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
    """Return "6.283 to 1610", or one number for values that are equal in four digits."""
    return " to ".join(dict.fromkeys(f"{end:.4g}" for end in (min(values), max(values))))
