"""Rotations of several position axes: a row of facts of a class, its config, their RopeSpec.

The rows are those of vision.json and diffusers.json; `vision` and `diffusers` find the row of a
file. `spec_of` interprets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import check_table_size, real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.configs.model_config import OneRotationConfig
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import scaled
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, spread_over_axes

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The rotation of one class of models: facts of its code, in the words of its config.

    Parameters
    ----------
    axes : sequence of str
        Its position axes, keys of axes.json; a file with fewer has the last of them.
    form : str
        The function that makes its rotation, a key of `_FORMS`.
    head_dim : str
        The keys of the width of a head: "a", the exact quotient "a / b" or the rounded one
        "a // b"; "a or b / c": the first whose keys are present.
    widths : str
        The elements that each axis rotates: a rule in `_WIDTHS`, or the key that has them.
    each : int
        The elements of an axis for each unit of the number that `widths` has; 0: it has a list.
    counts : sequence of int
        The allowed numbers of axes; empty: all of `axes`.
    fills_head : bool
        Whether the axes must rotate the whole head.
    frequencies : str
        The frequencies of each axis, a key of `_FREQUENCIES`.
    pairs : str
        "runs": each axis has a run of pairs across the rotated part. "blocks": pairs are formed
        within the elements of an axis. "turns": the axes have every nth pair.
    order : sequence of int
        The axis of each run or turn; empty: as they come.
    interleaved : bool
        True for pairs (2i, 2i+1).
    theta : str or float
        The key of the base, or the base that no key changes.
    ntk : str
        The key of the scales s of all axes: the base of an axis is theta·s^(w/(w-2)), w its width.
    divisors : sequence of str
        The key of the divisors of all axes' frequencies, or one key for each axis.
    section : str
        The key of the pairs of each axis in an M-RoPE.
    nested : str
        The key of an object that has `mrope_section` if the file has no `section`.
    longrope : str
        The key of the object with the factors of longrope.
    partial_rotary_factor : float, optional
        The only value that the class accepts in its rope parameters; None: it has none.
    only : {key: (values, reason)}
        The values of a key with which the class rotates like this.
    defaults : {key: value}
        The class's own values of missing keys.
    """

    axes: Sequence[str] = ("row", "column")
    form: str = "axes"
    head_dim: str = "attention_head_dim"
    widths: str = "equal"
    each: int = 0
    counts: Sequence[int] = ()
    fills_head: bool = True
    frequencies: str = "own"
    pairs: str = "runs"
    order: Sequence[int] = ()
    interleaved: bool = False
    theta: str | float = "rope_theta"
    ntk: str = ""
    divisors: Sequence[str] = ()
    section: str = ""
    nested: str = ""
    longrope: str = ""
    partial_rotary_factor: float | None = None
    only: Mapping[str, tuple[Sequence[Any], str]] = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MultiAxisConfig(OneRotationConfig):
    """The config of a vision tower or of a diffusers transformer."""

    row: Row

    def _only_spec(self, angle_dtype: str) -> RopeSpec:
        return spec_of(self.row, self.values, angle_dtype)


def rows_by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """Return the rows of a data file by the names of their classes or model types."""
    return {
        name: Row(**{key: value for key, value in row.items() if key != "names"})
        for row in rows
        for name in row["names"]
    }


def spec_of(row: Row, config: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of a config whose class has this row."""
    values = {**row.defaults, **config}
    for key, (known_values, reason) in row.only.items():
        if values.get(key) not in known_values:
            raise ValueError(f"`{key}` is {shown(values.get(key))}: {reason}")
    return _FORMS[row.form](row, values, angle_dtype)


def _axes_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation in which each axis has frequencies of its own width."""
    widths, head_dim = _widths_and_head_dim(row, values)
    thetas = _thetas(row, values, widths)
    with np.errstate(over="ignore"):  # an infinite frequency is refused later
        frequencies = [
            inv_freq / divisor
            for inv_freq, divisor in zip(
                _FREQUENCIES[row.frequencies](thetas, widths, angle_dtype),
                _divisors(row, values, len(widths)),
                strict=True,
            )
        ]
    order = row.order or range(len(widths))
    if row.pairs == "turns":
        pair_axis = np.tile(order, frequencies[0].size).tolist()
        inv_freq = np.stack(frequencies, axis=1).ravel()
    else:
        pair_axis = np.repeat(order, [axis.size for axis in frequencies]).tolist()
        inv_freq = np.concatenate(frequencies)
    return from_inv_freq(
        spread_over_axes(inv_freq, pair_axis, len(widths)),
        head_dim=head_dim,
        interleaved=row.interleaved,
        blocks=widths if row.pairs == "blocks" else 1,
        pair_axis=tuple(pair_axis),
        rope_type="axial" if len(widths) > 1 else "default",
        angle_dtype=angle_dtype,
    )


def _longrope_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of one axis with the factors of longrope, and the lengths beside them."""
    own = values.get(row.longrope)
    if not isinstance(own, Mapping):
        raise ValueError(f"`{row.longrope}` is {shown(own)}; it must be an object with the factors")
    rope_type = own.get("rope_type", own.get("type", "longrope"))
    if rope_type not in ("longrope", "su"):
        raise ValueError(
            f"`{row.longrope}` has the type {shown(rope_type)}; this class has longrope"
        )
    lengths = ("max_position_embeddings", "original_max_position_embeddings")
    section = {name: values[name] for name in lengths}
    section |= {name: own.get(name) for name in ("short_factor", "long_factor")}
    return scaled(
        _head_dim(row, values),
        rope_theta=_theta(row, values),
        scaling={"rope_type": "longrope", **section},
        angle_dtype=angle_dtype,
    )


def _mrope_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of Qwen3-VL's interleaved sections."""
    nested = values.get(row.nested)
    own = values.get(row.section)
    if own is None and isinstance(nested, Mapping):
        own = nested.get("mrope_section")
    section = axes.checked_mrope_section(row.section, own or _MROPE_SECTION)
    one_axis = scaled(
        _head_dim(row, values), rope_theta=_theta(row, values), angle_dtype=angle_dtype
    )
    first = one_axis.pairs - sum(section[1:])
    if len(section) != 3 or first < 0:
        raise ValueError(
            f"`{row.section}` is {shown(section)}; it must be 3 numbers, and the last two may add "
            f"up to {one_axis.pairs} pairs at most"
        )
    return axes.to_mrope(one_axis, (first, *section[1:]), True)


_MROPE_SECTION = (24, 20, 20)


def _all_heads_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of LTX, which rotates the pairs of all heads as one vector.

    The n frequencies π/2·theta^(k/(n-1)) go to three axes by turns, after the pairs that three axes
    cannot share, which are not rotated.
    """
    head_dim = _number("attention_head_dim", values, limits.HEAD_DIM)
    heads = _number("num_attention_heads", values, limits.HEADS)
    if head_dim % 2:
        raise ValueError(f"`attention_head_dim` is {head_dim}; it must be even")
    pairing = values.get("rope_type", "interleaved")
    if pairing not in ("interleaved", "split"):
        raise ValueError(f"`rope_type` is {shown(pairing)}; it must be interleaved or split")
    pairs = heads * head_dim // 2
    count = pairs // 3
    name = "(attention_head_dim, num_attention_heads)"
    check_table_size(name, (head_dim, heads), 3, pairs, most=limits.FREQUENCIES)
    with np.errstate(over="ignore"):  # an infinite frequency is refused later
        # float32 in the model, also where it computes them in float64.
        frequencies = np.float32(np.pi / 2 * _theta(row, values) ** np.linspace(0.0, 1.0, count))
    spare = pairs - 3 * count
    pair_axis = (0,) * spare + (0, 1, 2) * count
    inv_freq = np.concatenate([np.zeros(spare), np.repeat(frequencies, 3)])
    return from_inv_freq(
        spread_over_axes(inv_freq, pair_axis, 3).reshape(3, heads, head_dim // 2),
        head_dim=head_dim,
        interleaved=pairing == "interleaved",
        rope_type="axial",
        angle_dtype=angle_dtype,
    )


_FORMS: dict[str, Callable[[Row, Config, str], RopeSpec]] = {
    "axes": _axes_form,
    "longrope": _longrope_form,
    "mrope": _mrope_form,
    "all heads": _all_heads_form,
}


def _own_frequencies(
    thetas: Sequence[float], widths: Sequence[int], angle_dtype: str, factor: float = 1.0
) -> list[Float64]:
    """Return the frequencies of each axis, those of its width, times a factor."""
    return [
        factor * axes.base_frequencies(theta, width, angle_dtype)
        for theta, width in zip(thetas, widths, strict=True)
    ]


def _alternate_frequencies(
    thetas: Sequence[float], widths: Sequence[int], angle_dtype: str
) -> list[Float64]:
    """Return for axis a of n every nth frequency of the whole head, from the a-th (Pixtral)."""
    frequencies = axes.base_frequencies(thetas[0], sum(widths), angle_dtype)
    return [frequencies[axis :: len(widths)] for axis in range(len(widths))]


_FREQUENCIES: dict[str, Callable[[Sequence[float], Sequence[int], str], list[Float64]]] = {
    "own": _own_frequencies,
    "alternate": _alternate_frequencies,
    # Positions count revolutions (DINOv3).
    "revolutions": partial(_own_frequencies, factor=2 * np.pi),
}


def _thirds(head_dim: int, count: int) -> tuple[int, ...]:
    """Return the widths of Wan: two equal axes, and a first one that takes the remainder."""
    side = 2 * (head_dim // 6)
    return (head_dim - 2 * side, side, side)


# Rules for the widths of the axes, from head_dim and the number of axes.
_WIDTHS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "equal": lambda head_dim, count: (head_dim // count,) * count,
    "equal and even": lambda head_dim, count: (head_dim // count // 2 * 2,) * count,
    "half": lambda head_dim, count: (head_dim // 2,),
    "thirds": _thirds,
    "quarter first": lambda head_dim, count: (head_dim // 4, *(head_dim // 8 * 3,) * 2),
}


def _widths_and_head_dim(row: Row, values: Config) -> tuple[Sequence[int], int]:
    """Return the elements that each axis rotates, and the width of a head."""
    count = len(row.axes)
    head_dim = _head_dim(row, values) if _has_head_dim(row, values) else None
    if row.widths in _WIDTHS:
        head_dim = _head_dim(row, values)
        widths = _WIDTHS[row.widths](head_dim, count)
    elif row.each:
        widths = (row.each * _number(row.widths, values, limits.HEAD_DIM),) * count
    else:
        widths = _present(row.widths, values)
    _check_widths(row, widths)
    total = sum(widths)
    if head_dim is None:
        return widths, total
    if total > head_dim or (row.fills_head and total < head_dim):
        raise ValueError(
            f"`{row.head_dim}` is {head_dim}, but the widths of the axes, {shown(widths)}, add up "
            f"to {total}"
        )
    return widths, head_dim


def _check_widths(row: Row, widths: Any) -> None:
    """Raise unless the widths are even numbers above 0, as many as the class allows."""
    counts = row.counts or (len(row.axes),)
    is_list = isinstance(widths, Sequence) and not isinstance(widths, str)
    if is_list and len(widths) in counts and all(map(_is_width, widths)):
        return
    key = row.head_dim if row.widths in _WIDTHS else row.widths
    number = " or ".join(map(str, counts))
    raise ValueError(
        f"`{key}` gives the axes the widths {shown(widths)}; they must be {number} even numbers "
        "above 0"
    )


def _is_width(width: Any) -> bool:
    """Return True for an even number above 0."""
    is_whole = isinstance(width, int | np.integer)
    return is_whole and 0 < width <= limits.HEAD_DIM and width % 2 == 0


def _has_head_dim(row: Row, values: Config) -> bool:
    """Return True if all keys of the width of a head are present."""
    return all(key in values for key in re.findall(r"\w+", row.head_dim))


def _head_dim(row: Row, values: Config) -> int:
    """Return the width of a head from the first keys of `Row.head_dim` that are present."""
    choices = row.head_dim.split(" or ")
    for choice in choices:
        key, *divisors = re.findall(r"\w+", choice)
        if key in values or choice == choices[-1]:
            break
    width = _number(key, values, limits.HIDDEN_SIZE if divisors else limits.HEAD_DIM)
    for divisor in divisors:
        shares = _number(divisor, values, limits.HIDDEN_SIZE)
        if "//" not in choice and width % shares:
            raise ValueError(f"`{key}` is {width}, which {shares} heads cannot share equally")
        width //= shares
    return width


def _theta(row: Row, values: Config) -> float:
    """Return the base: that of the class, or the value of its key."""
    theta = row.theta
    if isinstance(theta, str):
        theta = real_number(theta, _present(theta, values))
    given = real_number("rope_theta", values.get("rope_theta", theta))
    if given != theta:
        raise ValueError(f"`rope_theta` is {given}, but this class has the base {theta}")
    return theta


def _thetas(row: Row, values: Config, widths: Sequence[int]) -> list[float]:
    """Return the base of each axis."""
    theta = _theta(row, values)
    if not row.ntk:
        return [theta] * len(widths)
    if min(widths) <= 2:
        raise ValueError(
            f"`{row.head_dim}` gives the axes the widths {shown(widths)}; `{row.ntk}` needs widths "
            "above 2"
        )
    scales = _numbers(row.ntk, values, len(widths))
    with np.errstate(over="ignore"):  # an infinite base is refused later
        return [
            float(theta * np.float64(scale) ** (width / (width - 2)))
            for scale, width in zip(scales, widths, strict=True)
        ]


def _divisors(row: Row, values: Config, count: int) -> list[float]:
    """Return the divisor of the frequencies of each axis."""
    if not row.divisors:
        return [1.0] * count
    if len(row.divisors) == 1:
        return _numbers(row.divisors[0], values, count)
    return [real_number(key, values[key]) for key in row.divisors]


def _numbers(key: str, values: Config, count: int) -> list[float]:
    """Return a list of numbers above 0, one for each axis."""
    value = values[key]
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ValueError(
            f"`{key}` is {shown(value)}; it must be {count} numbers, one for each axis"
        )
    return [real_number(key, entry) for entry in value]


def _present(key: str, values: Config) -> Any:
    """Return the value of a key; raise if it is missing."""
    if values.get(key) is None:
        raise ValueError(f"`config` has no `{key}`")
    return values[key]


def _number(key: str, values: Config, most: int) -> int:
    """Return the whole number of a key, from 1 to `most`; raise if it is missing."""
    return whole_number(key, _present(key, values), 1, most)
