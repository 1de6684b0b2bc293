"""The forms of rotations in diffusers: from a row of diffusers.json and a config to a RopeSpec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import check_table_size, real_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.configs.diffusers.class_facts import (
    AxesRow,
    Config,
    MropeRow,
    OneAxisRow,
    Row,
    head_dim_of,
    required_number,
    theta_of,
)
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import scaled
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq


def of_axes(row: AxesRow, config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation in which each axis rotates its own pairs."""
    if row.requires and not config.get(row.requires):
        raise ValueError(
            f"`{row.requires}` is {shown(config.get(row.requires))}: this CogVideoX adds "
            "sinusoidal embeddings, it rotates nothing"
        )
    values = {**row.defaults, **config}
    rule = _WIDTHS.get(row.widths, _widths_in_file)
    key, widths, head_dim = rule(row, values)
    if not _are_widths(widths, row.counts):
        number = " or ".join(map(str, sorted(row.counts)))
        raise ValueError(
            f"`{key}` gives the axes the widths {shown(widths)}; they must be {number} even "
            "numbers above 0"
        )
    _check_head_dim(row, config, widths)
    thetas = _thetas(row, values, widths)
    divisors = _divisors(row, values, len(widths))
    with np.errstate(over="ignore"):  # an infinite frequency is refused later
        frequencies = [
            axes.base_frequencies(theta, width, angle_dtype) / divisor
            for theta, width, divisor in zip(thetas, widths, divisors, strict=True)
        ]
    return axes.concatenated_axes(
        frequencies,
        head_dim=head_dim or sum(widths),
        interleaved=row.pairs == "adjacent",
        blocks=_PAIRS[row.pairs](widths),
        angle_dtype=angle_dtype,
    )


def of_one_axis(row: OneAxisRow, config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of half-split pairs, of the first elements of a head or of all."""
    values = {**row.defaults, **config}
    _, head_dim = head_dim_of(row, values)
    rotary_dim = head_dim
    if row.rotary_dim == "half":
        rotary_dim = head_dim // 2
    elif row.rotary_dim != "all":
        rotary_dim = required_number(row.rotary_dim, values, limits.HEAD_DIM)
    return scaled(
        head_dim,
        rope_theta=theta_of(row, values),
        rotary_dim=rotary_dim,
        scaling=_longrope_section(row.longrope, values) if row.longrope else None,
        angle_dtype=angle_dtype,
    )


def of_mrope(row: MropeRow, config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of Qwen3-VL's interleaved sections."""
    values = {**row.defaults, **config}
    nested = values.get(row.nested)
    if row.section not in config and isinstance(nested, Mapping) and "mrope_section" in nested:
        values[row.section] = nested["mrope_section"]
    _, head_dim = head_dim_of(row, values)
    one_axis = scaled(head_dim, rope_theta=theta_of(row, values), angle_dtype=angle_dtype)
    section = axes.checked_mrope_section(row.section, values[row.section])
    first = one_axis.pairs - sum(section[1:])
    if len(section) != 3 or first < 0:
        raise ValueError(
            f"`{row.section}` is {shown(section)}; it must be 3 numbers, and the last two may add "
            f"up to {one_axis.pairs} pairs at most"
        )
    return axes.to_mrope(one_axis, (first, *section[1:]), True)


def of_ltx(row: Row, config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of LTX, which rotates the pairs of all heads as one vector.

    The n frequencies π/2·theta^(k/(n-1)) go to three axes by turns, after the pairs that three axes
    cannot share, which are not rotated.
    """
    head_dim = required_number("attention_head_dim", config, limits.HEAD_DIM)
    heads = required_number("num_attention_heads", config, limits.HEADS)
    if head_dim % 2:
        raise ValueError(f"`attention_head_dim` is {head_dim}; it must be even")
    pairing = config.get("rope_type", "interleaved")
    if pairing not in ("interleaved", "split"):
        raise ValueError(f"`rope_type` is {shown(pairing)}; it must be interleaved or split")
    check_table_size(
        "(attention_head_dim, num_attention_heads)",
        (head_dim, heads),
        3,
        heads,
        head_dim // 2,
        most=limits.FREQUENCIES,
    )
    theta = theta_of(row, {**row.defaults, **config})
    inv_freq = _ltx_frequencies(theta, head_dim * heads)
    return from_inv_freq(
        inv_freq.reshape(3, heads, head_dim // 2),
        head_dim=head_dim,
        interleaved=pairing == "interleaved",
        rope_type="axial",
        angle_dtype=angle_dtype,
    )


def _ltx_frequencies(theta: float, width: int) -> Float64:
    """Return the frequencies (3, width / 2) of LTX for all heads together, width elements."""
    count = width // 6
    pairs = width // 2
    with np.errstate(over="ignore"):  # an infinite frequency is refused later
        # float32 in the model, also where it computes them in float64.
        frequencies = np.float32(np.pi / 2 * theta ** np.linspace(0.0, 1.0, count))
    inv_freq = np.zeros((3, pairs))
    axis = np.tile(np.arange(3), count)
    pair = pairs - 3 * count + np.arange(3 * count)
    inv_freq[axis, pair] = np.repeat(frequencies, 3)
    return inv_freq


# Widths of the axes, as (key for error texts, widths, head_dim or None: their sum).
Widths = tuple[str, Any, int | None]


def _widths_in_file(row: AxesRow, values: Config) -> Widths:
    """Return the widths in the file."""
    if row.widths not in values:
        raise ValueError(f"`config` has no `{row.widths}`")
    return row.widths, values[row.widths], None


def _thirds(row: AxesRow, values: Config) -> Widths:
    """Return the widths of Wan: two equal axes, and a first one that takes the remainder."""
    key, head_dim = head_dim_of(row, values, least=0)
    side = 2 * (head_dim // 6)
    return key, (head_dim - 2 * side, side, side), None


def _quarter_first(row: AxesRow, values: Config) -> Widths:
    """Return the widths of CogVideoX: a quarter of the head, and two times three eighths."""
    key, head_dim = head_dim_of(row, values)
    return key, (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3), None


def _equal_shares(row: AxesRow, values: Config) -> Widths:
    """Return equal widths."""
    key, head_dim = head_dim_of(row, values)
    count = max(row.counts)
    return key, (head_dim // count,) * count, None


def _equal_pairs(row: AxesRow, values: Config) -> Widths:
    """Return the widths of MiniMax-H3: the file has the pairs of an axis; the rest is copied."""
    _, head_dim = head_dim_of(row, values)
    pairs = required_number("rope_freq_dim", values, limits.HEAD_DIM)
    return "rope_freq_dim", (2 * pairs,) * 3, head_dim


_WIDTHS: dict[str, Callable[[AxesRow, Config], Widths]] = {
    "thirds": _thirds,
    "quarter first": _quarter_first,
    "equal": _equal_shares,
    "rope_freq_dim": _equal_pairs,
}

# From where pairs are formed to the widths of the blocks in which `from_inv_freq` forms them.
_PAIRS: dict[str, Callable[[Sequence[int]], int | Sequence[int]]] = {
    "adjacent": lambda widths: 1,
    "across the head": lambda widths: 1,
    "within the axes": lambda widths: tuple(widths),
}


def _are_widths(widths: Any, counts: Collection[int]) -> bool:
    """Return True for a sequence of even numbers above 0, as many as in counts."""
    if not isinstance(widths, Sequence) or isinstance(widths, str) or len(widths) not in counts:
        return False
    return all(
        isinstance(width, int | np.integer) and 0 < width <= limits.HEAD_DIM and width % 2 == 0
        for width in widths
    )


def _check_head_dim(row: AxesRow, config: Config, widths: Sequence[int]) -> None:
    """Raise if the file has another width of a head than the widths of the axes add up to."""
    keys = row.head_dim.split(" / ")
    if row.widths == "rope_freq_dim" or any(key not in config for key in keys):
        return
    _, head_dim = head_dim_of(row, config)
    if head_dim != sum(widths):
        raise ValueError(
            f"`{'` / `'.join(keys)}` is {head_dim}, but the widths of the axes, {shown(widths)}, "
            f"add up to {sum(widths)}"
        )


def _thetas(row: AxesRow, values: Config, widths: Sequence[int]) -> list[float]:
    """Return the base of each axis."""
    theta = theta_of(row, values)
    if not row.ntk:
        return [theta] * len(widths)
    if min(widths) <= 2:
        raise ValueError(
            f"`{row.head_dim}` gives the axes the widths {shown(widths)}; `{row.ntk}` needs widths "
            "above 2"
        )
    scales = _numbers(row.ntk, values[row.ntk], len(widths))
    with np.errstate(over="ignore"):  # an infinite base is refused later
        return [
            float(theta * np.float64(scale) ** (width / (width - 2)))
            for scale, width in zip(scales, widths, strict=True)
        ]


def _divisors(row: AxesRow, values: Config, count: int) -> list[float]:
    """Return the divisor of the frequencies of each axis."""
    if not row.divisors:
        return [1.0] * count
    keys = row.divisors.split(", ")
    if len(keys) == 1:
        return _numbers(row.divisors, values[row.divisors], count)
    return [real_number(key, values[key]) for key in keys]


def _numbers(key: str, value: Any, count: int) -> list[float]:
    """Return a list of numbers above 0, one for each axis."""
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ValueError(
            f"`{key}` is {shown(value)}; it must be {count} numbers, one for each axis"
        )
    return [real_number(key, entry) for entry in value]


def _longrope_section(key: str, values: Config) -> dict[str, Any]:
    """Return the section of a class that reads the factors from it, and the lengths beside it."""
    own = values.get(key)
    if not isinstance(own, Mapping):
        raise ValueError(f"`{key}` is {shown(own)}; it must be an object with the factors")
    rope_type = own.get("rope_type", own.get("type", "longrope"))
    if rope_type not in ("longrope", "su"):
        raise ValueError(f"`{key}` has the type {shown(rope_type)}; this class has longrope")
    lengths = ("max_position_embeddings", "original_max_position_embeddings")
    section = {name: values[name] for name in lengths}
    section |= {name: own.get(name) for name in ("short_factor", "long_factor")}
    return {"rope_type": "longrope", **section}
