"""Rotations of several position axes: a row of facts of a class, its config, their RopeSpec.

The rows are those of vision.json and diffusers.json; `vision` and `diffusers` find the row of a
file. `spec_of` interprets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.arguments.scalars import check_table_size, choice, real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.configs import keys
from rope_cpu.configs.attention_facts import Attention
from rope_cpu.configs.model_config import ModelConfig, Selection
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
    only : {key: (values, reason)}
        The values of a key, if it is present, with which the class rotates like this.
    defaults : {key: value}
        The class's own values of missing keys.
    ignored : sequence of str
        Keys with names of rotations that the frequencies do not depend on.
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
    only: Mapping[str, tuple[Sequence[Any], str]] = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)
    ignored: Sequence[str] = ()

    @cached_property
    def known_keys(self) -> set[str]:
        """The keys of a config that its rotation may depend on, and those that it ignores."""
        named = [self.head_dim, self.widths, str(self.theta), self.ntk]
        named += [self.section, self.nested, self.longrope]
        named += [*self.divisors, *self.only, *self.defaults, *self.ignored]
        return set(re.findall(r"\w+", " ".join(named)))


@dataclass(frozen=True, kw_only=True)
class MultiAxisConfig(ModelConfig):
    """The config of a vision tower or of a diffusers transformer: one rotation for all layers."""

    row: Row

    def _build_spec(self, selection: Selection) -> RopeSpec:
        spec = spec_of(self.row, self.values, selection.angle_dtype)
        for name, value in (("layer_type", selection.layer_type), ("layer", selection.layer)):
            if value is not None:
                rule = "be left out, as this config has one rotation for all layers"
                raise ArgumentError(name, value, rule)
        return spec

    @property
    def attention(self) -> Attention:
        """The parts of the model's attention besides the rotation."""
        return Attention(
            other="images and video attend to each other in ways that their configs do not hold"
        )


def rows_by_name(
    rows: Sequence[Mapping[str, Any]], defaults: Mapping[str, Config]
) -> dict[str, Row]:
    """Return the rows of a data file by the names of their classes or model types.

    defaults: `Row.defaults` of the names that do not share those of their row.
    """
    found = {}
    for row in rows:
        facts = {key: value for key, value in row.items() if key != "names"}
        for name in row["names"]:
            found[name] = Row(**{"defaults": defaults.get(name, {}), **facts})
    return found


def parse(source: Config, name: str, row: Row, values: Config) -> MultiAxisConfig:
    """Parse a config of the class or model type `name`, whose row is `row`.

    values: its keys under the names of the row. Raises ValueError for a key of a rotation that the
    row does not read.
    """
    for key, value in values.items():
        is_known = key in row.known_keys or value == row.theta or keys.is_neutral(key, value)
        if not is_known and (key == "head_dim" or keys.is_rotation_key(key)):
            rule = f"be left out, as {shown(name)} does not read it"
            raise ArgumentError(key, value, rule, "or use RotaryEmbedding.axial")
    values = {**row.defaults, **values}
    return MultiAxisConfig(source=source, model_type=name, values=values, axes=row.axes, row=row)


def refuse_other_keys(key: str, section: Config, known: Collection[str]) -> None:
    """Raise for a key of the object `key` that is not one of those that are read."""
    others = [name for name in section if name not in known and section[name] is not None]
    if others:
        raise ValueError(f"`{key}` holds {shown(others)}, which this class does not read")


def spec_of(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of the values of a config, those of the class's defaults among them."""
    for key, (known_values, reason) in row.only.items():
        if key in values and values[key] not in known_values:
            raise ValueError(f"`{key}` is {shown(values[key])}: {reason}")
    return _FORMS[row.form](row, values, angle_dtype)


def _axes_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation in which each axis has frequencies of its own width."""
    widths, head_dim = _widths_and_head_dim(row, values)
    divisors = _divisors(row, values, len(widths))
    thetas = _thetas(row, values, widths)
    frequencies = _FREQUENCIES[row.frequencies](thetas, widths, angle_dtype)
    with np.errstate(over="ignore"):  # an infinite frequency is refused later
        frequencies = [axis / divisor for axis, divisor in zip(frequencies, divisors, strict=True)]
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
        raise ArgumentError(row.longrope, own, "be an object with the factors")
    rope_type = own.get("rope_type", own.get("type", "longrope"))
    choice(f"{row.longrope}.rope_type", rope_type, ("longrope", "su"))
    factors = ("short_factor", "long_factor")
    refuse_other_keys(row.longrope, own, ("rope_type", "type", *factors))
    lengths = ("max_position_embeddings", "original_max_position_embeddings")
    section = {name: values[name] for name in lengths}
    section |= {name: own.get(name) for name in factors}
    return scaled(
        _head_dim(row, values),
        rope_theta=_theta(row, values),
        scaling={"rope_type": "longrope", **section},
        angle_dtype=angle_dtype,
    )


def _mrope_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of Qwen3-VL's interleaved sections."""
    own = values.get(row.section)
    nested = values.get(row.nested)
    if isinstance(nested, Mapping):
        fixed = {"rope_type": "default", "type": "default", "mrope_interleaved": True}
        known = [key for key, value in fixed.items() if nested.get(key) == value]
        refuse_other_keys(row.nested, nested, ("mrope_section", *known))
        own = nested.get("mrope_section") if own is None else own
    section = axes.checked_mrope_section(row.section, own or _MROPE_SECTION)
    one_axis = scaled(
        _head_dim(row, values), rope_theta=_theta(row, values), angle_dtype=angle_dtype
    )
    first = one_axis.pairs - sum(section[1:])
    if len(section) != 3 or first < 0:
        rule = f"be 3 numbers, the last two of at most {one_axis.pairs} pairs together"
        raise ArgumentError(row.section, section, rule)
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
        raise ArgumentError("attention_head_dim", head_dim, "be even")
    pairing = choice("rope_type", values["rope_type"], ("interleaved", "split"))
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


def _own_frequencies(thetas: list[float], widths: list[int], angle_dtype: str) -> list[Float64]:
    """Return the frequencies of each axis, those of its width."""
    return [
        axes.base_frequencies(theta, width, angle_dtype)
        for theta, width in zip(thetas, widths, strict=True)
    ]


def _nth_frequencies(thetas: list[float], widths: list[int], angle_dtype: str) -> list[Float64]:
    """Return for axis a of n every nth frequency of the whole head, from the a-th (Pixtral)."""
    frequencies = axes.base_frequencies(thetas[0], sum(widths), angle_dtype)
    return [frequencies[axis :: len(widths)] for axis in range(len(widths))]


_FREQUENCIES: dict[str, Callable[[list[float], list[int], str], list[Float64]]] = {
    "own": _own_frequencies,
    "alternate": _nth_frequencies,
    # Positions count revolutions (DINOv3).
    "revolutions": lambda *given: [2 * np.pi * axis for axis in _own_frequencies(*given)],
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


def _widths_and_head_dim(row: Row, values: Config) -> tuple[list[int], int]:
    """Return the elements that each axis rotates, and the width of a head."""
    if row.widths in _WIDTHS or all(key in values for key in re.findall(r"\w+", row.head_dim)):
        head_dim = _head_dim(row, values)
        widths = _widths(row, values, head_dim)
        total = sum(widths)
        if total > head_dim or (row.fills_head and total < head_dim):
            rule = f"fit the widths of the axes, {shown(widths)}, which add up to {total}"
            raise ArgumentError(row.head_dim, head_dim, rule)
        return widths, head_dim
    widths = _widths(row, values, 0)
    return widths, sum(widths)


def _widths(row: Row, values: Config, head_dim: int) -> list[int]:
    """Return the elements that each axis rotates; raise unless the axes can have them."""
    key = row.widths
    count = len(row.axes)
    if key in _WIDTHS:
        widths = _WIDTHS[key](head_dim, count)
        key = row.head_dim
    elif row.each:
        widths = (row.each * _number(key, values, limits.HEAD_DIM),) * count
    else:
        widths = _present(key, values)
    counts = row.counts or (count,)
    if not _are_widths(widths, counts):
        number = " or ".join(map(str, counts))
        raise ValueError(
            f"`{key}` gives the axes the widths {shown(widths)}; they must be {number} even "
            "numbers above 0"
        )
    return list(widths)


def _are_widths(widths: Any, counts: Collection[int]) -> bool:
    """Return True for even numbers above 0, as many as one of counts."""
    if not isinstance(widths, list | tuple) or len(widths) not in counts:
        return False
    is_whole = all(isinstance(width, int | np.integer) for width in widths)
    return is_whole and all(0 < w <= limits.HEAD_DIM and w % 2 == 0 for w in widths)


def _head_dim(row: Row, values: Config) -> int:
    """Return the width of a head from the first keys of `Row.head_dim` that are present."""
    *preferred, last = row.head_dim.split(" or ")
    quotient = next((key for key in preferred if key in values), last)
    key, *divisors = re.findall(r"\w+", quotient)
    width = _number(key, values, limits.HIDDEN_SIZE if divisors else limits.HEAD_DIM)
    for divisor in divisors:
        shares = _number(divisor, values, limits.HIDDEN_SIZE)
        if "//" not in quotient and width % shares:
            raise ValueError(f"`{key}` is {width}, which {shares} heads cannot share equally")
        width //= shares
    return width


def _theta(row: Row, values: Config) -> float:
    """Return the base: that of the class, or the value of its key."""
    if isinstance(row.theta, str):
        return real_number(row.theta, _present(row.theta, values))
    return row.theta


def _thetas(row: Row, values: Config, widths: list[int]) -> list[float]:
    """Return the base of each axis."""
    theta = _theta(row, values)
    if not row.ntk:
        return [theta] * len(widths)
    if min(widths) <= 2:
        raise ValueError(f"`{row.ntk}` needs widths above 2, but the axes have {shown(widths)}")
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
        raise ArgumentError(key, value, f"be {count} numbers, one for each axis")
    return [real_number(key, entry) for entry in value]


def _present(key: str, values: Config) -> Any:
    """Return the value of a key; raise if it is missing."""
    if values.get(key) is None:
        raise ValueError(f"`config` has no `{key}`")
    return values[key]


def _number(key: str, values: Config, most: int) -> int:
    """Return the whole number of a key, from 1 to `most`; raise if it is missing."""
    return whole_number(key, _present(key, values), 1, most)
