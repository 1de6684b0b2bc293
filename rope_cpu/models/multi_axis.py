"""Rotations of several position axes: a row of facts of a class, its config, their RopeSpec.

The rows are those of vision.json and diffusers.json; `vision` finds the row of a file, and a
function of `_FORMS` interprets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import scaled, without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, spread_over_axes
from rope_cpu.models import keys
from rope_cpu.models.layer import Layer
from rope_cpu.models.model import ModelConfig, Selection
from rope_cpu.models.rope_parameters import Config, own_section


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
        The elements that each axis rotates: a rule in `_WIDTHS`, or the key that has them; of an
        M-RoPE, the key of the pairs of each axis, "a or b": the first that is present.
    each : int
        The elements of an axis for each unit of the number that `widths` has; 0: it has a list.
    counts : sequence of int
        The allowed numbers of axes; empty: all of `axes`.
    fills_head : bool
        Whether the axes must rotate the whole head.
    shares_frequencies : bool
        Axis a of n has every nth frequency of the whole head, from the a-th (Pixtral). False: each
        axis has the frequencies of its own width.
    unit : float
        The radians of a unit of the positions: 2π where they count revolutions (DINOv3).
    pairs : str
        "runs": each axis has a run of pairs across the rotated part. "blocks": pairs are formed
        within the elements of an axis. "turns": the axes have every nth pair.
    order : sequence of int
        The axis of each run, block or turn; empty: as they come.
    positions : str, optional
        What else to know about the positions than the axes, for `rope-cpu show`.
    interleaved : bool
        True for pairs (2i, 2i+1).
    theta : str or float
        The key of the base, or the base that no key changes.
    ntk : str
        The key of the scales s of all axes: the base of an axis is theta·s^(w/(w-2)), w its width.
    divisors : sequence of str
        The key of the divisors of all axes' frequencies, or one key for each axis. Of longrope, the
        keys of those of short and of long sequences.
    objects : sequence of str
        The objects with keys of the rotation. Here such a key is "object.key".
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
    shares_frequencies: bool = False
    unit: float = 1.0
    pairs: str = "runs"
    order: Sequence[int] = ()
    positions: str | None = None
    interleaved: bool = False
    theta: str | float = "rope_theta"
    ntk: str = ""
    divisors: Sequence[str] = ()
    objects: Sequence[str] = ()
    only: Mapping[str, tuple[Sequence[Any], str]] = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)
    ignored: Sequence[str] = ()

    @cached_property
    def known_keys(self) -> set[str]:
        """The keys of a config that its rotation may depend on, and those that it ignores."""
        named = [self.head_dim, self.widths, str(self.theta), self.ntk, *self.divisors]
        named += [*self.objects, *self.only, *self.defaults, *self.ignored]
        return set(re.findall(r"[\w.]+", " ".join(named)))


@dataclass(frozen=True, kw_only=True)
class MultiAxisConfig(ModelConfig):
    """The config of a vision tower or of a diffusers transformer: one rotation for all layers."""

    row: Row

    def _build_spec(self, selection: Selection) -> RopeSpec:
        for key, (known_values, reason) in self.row.only.items():
            if key in self.values and self.values[key] not in known_values:
                raise ValueError(f"`{key}` is {shown(self.values[key])}: {reason}")
        spec = _FORMS[self.row.form](self.row, self.values, selection.angle_dtype)
        for name, value in (("layer_type", selection.layer_type), ("layer", selection.layer)):
            if value is not None:
                rule = "be left out, as this config has one rotation for all layers"
                raise ArgumentError(name, value, rule)
        return spec

    @property
    def attention(self) -> Layer:
        """The facts that all layers share."""
        other = "images and video attend in ways that their configs do not hold"
        return Layer(model_type=self.model_type, other=other)


def rows_by_name(rows: Sequence[Config], defaults: Mapping[str, Config]) -> dict[str, Row]:
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
    section_key, section = own_section(values)
    inner = {f"{section_key}.{key}": section[key] for key in without_nulls(section)}
    values = {**row.defaults, **values, **inner}
    for key, value in values.items():
        is_known = key in row.known_keys or value == row.theta or keys.is_neutral(key, value)
        if not is_known and ("." in str(key) or key == "head_dim" or keys.is_rotation_key(key)):
            rule = f"be left out, as {shown(name)} does not read it"
            raise ArgumentError(key, value, rule, "or use RotaryEmbedding.axial")
    return MultiAxisConfig(
        source=source,
        model_type=name,
        values=values,
        axes=row.axes,
        position_note=row.positions,
        row=row,
    )


def _axes_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation in which each axis has frequencies of its own width."""
    widths, head_dim = _widths_and_head_dim(row, values)
    divisors = _divisors(row, values, len(widths))
    frequencies = _inv_freqs(row, values, widths, angle_dtype)
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
        spread_over_axes(row.unit * inv_freq, pair_axis, len(widths)),
        head_dim=head_dim,
        interleaved=row.interleaved,
        blocks=widths if row.pairs == "blocks" else 1,
        pair_axis=tuple(pair_axis),
        rope_type="axial" if len(widths) > 1 else "default",
        angle_dtype=angle_dtype,
    )


def _longrope_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of one axis with the factors of longrope, and the lengths beside them."""
    names = (*row.divisors, "max_position_embeddings", "original_max_position_embeddings")
    section = {name.rpartition(".")[2]: values.get(name) for name in names}
    return scaled(
        _head_dim(row, values),
        rope_theta=_theta(row, values),
        scaling={"rope_type": "longrope", **section},
        angle_dtype=angle_dtype,
    )


def _mrope_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of Qwen3-VL's interleaved sections."""
    key = _first_present(row.widths, values)
    section = axes.checked_mrope_section(key, _present(key, values))
    theta = _theta(row, values)
    one_axis = scaled(_head_dim(row, values), rope_theta=theta, angle_dtype=angle_dtype)
    first = one_axis.pairs - sum(section[1:])
    if len(section) != 3 or first < 0:
        rule = f"be 3 numbers, the last two of at most {one_axis.pairs} pairs together"
        raise ArgumentError(key, section, rule)
    return axes.to_mrope(one_axis, (first, *section[1:]), True)


def _all_heads_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of LTX, which rotates the pairs of all heads as one vector.

    The n frequencies π/2·theta^(k/(n-1)) go to three axes by turns, after the pairs that three axes
    cannot share, which are not rotated.
    """
    head_dim = _number("attention_head_dim", values, limits.HEAD_DIM)
    heads = _number("num_attention_heads", values, limits.HEADS)
    if head_dim % 2:
        raise ArgumentError("attention_head_dim", head_dim, "be even")
    pairing = scalars.choice("rope_type", values["rope_type"], ("interleaved", "split"))
    pairs = heads * head_dim // 2
    count = pairs // 3
    name = "(attention_head_dim, num_attention_heads)"
    scalars.check_table_size(name, (head_dim, heads), 3, pairs, most=limits.FREQUENCIES)
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


def _inv_freqs(row: Row, values: Config, widths: Sequence[int], angle_dtype: str) -> list[Float64]:
    """Return the frequencies of each axis, before the unit and the divisors."""
    thetas = _thetas(row, values, widths)
    if row.shares_frequencies:
        frequencies = axes.base_frequencies(thetas[0], sum(widths), angle_dtype)
        return [frequencies[axis :: len(widths)] for axis in range(len(widths))]
    return [
        axes.base_frequencies(theta, width, angle_dtype)
        for theta, width in zip(thetas, widths, strict=True)
    ]


# Rules for the widths of the axes, from head_dim and the number of axes.
_WIDTHS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "equal": lambda head_dim, count: (head_dim // count // 2 * 2,) * count,
    "half": lambda head_dim, count: (head_dim // 2,),
    # Wan: two equal axes, and a first one that takes the remainder.
    "thirds": lambda head_dim, count: (head_dim - head_dim // 6 * 4, *(head_dim // 6 * 2,) * 2),
    "quarter first": lambda head_dim, count: (head_dim // 4, *(head_dim // 8 * 3,) * 2),
}


def _widths_and_head_dim(row: Row, values: Config) -> tuple[Sequence[int], int]:
    """Return the elements that each axis rotates, and the width of a head."""
    head_keys = set(re.findall(r"\w+", row.head_dim))
    has_head_dim = row.widths in _WIDTHS or head_keys <= values.keys()
    head_dim = _head_dim(row, values) if has_head_dim else 0
    widths = _widths(row, values, head_dim)
    total = sum(widths)
    if has_head_dim and (total > head_dim or (row.fills_head and total < head_dim)):
        rule = f"fit the widths of the axes, {shown(widths)}, which add up to {total}"
        raise ArgumentError(row.head_dim, head_dim, rule)
    return widths, head_dim or total


def _widths(row: Row, values: Config, head_dim: int) -> Sequence[int]:
    """Return the elements that each axis rotates; raise unless the axes can have them."""
    key = row.widths
    count = len(row.axes)
    if key in _WIDTHS:
        widths = _WIDTHS[key](head_dim, count)
        key = row.head_dim
    elif row.each:
        widths = (row.each * _number(key, values, limits.HEAD_DIM),) * count
    else:
        widths = scalars.whole_numbers(key, _present(key, values), most=limits.HEAD_DIM)
    counts = row.counts or (count,)
    if len(widths) not in counts or any(width < 2 or width % 2 for width in widths):
        finding = Finding(f"gives the axes the widths {shown(widths)}")
        number = " or ".join(map(str, counts))
        raise ArgumentError(key, finding, f"give {number} axes even numbers above 0")
    return widths


def _head_dim(row: Row, values: Config) -> int:
    """Return the width of a head from the first keys of `Row.head_dim` that are present."""
    quotient = _first_present(row.head_dim, values)
    key, *divisors = re.findall(r"\w+", quotient)
    width = _number(key, values, limits.HIDDEN_SIZE if divisors else limits.HEAD_DIM)
    for divisor in divisors:
        shares = _number(divisor, values, limits.HIDDEN_SIZE)
        if "//" not in quotient and width % shares:
            raise ValueError(f"`{key}` is {width}, which {shares} heads cannot share equally")
        width //= shares
    return width


def _first_present(alternatives: str, values: Config) -> str:
    """Return the first of "a or b / c or d" that is a key of values, or the last."""
    *preferred, last = alternatives.split(" or ")
    return next((key for key in preferred if key in values), last)


def _theta(row: Row, values: Config) -> float:
    """Return the base: that of the class, or the value of its key."""
    if isinstance(row.theta, str):
        return scalars.real_number(row.theta, _present(row.theta, values))
    return row.theta


def _thetas(row: Row, values: Config, widths: Sequence[int]) -> list[float]:
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
    if len(row.divisors) == 1:
        return _numbers(row.divisors[0], values, count)
    return [scalars.real_number(key, values[key]) for key in row.divisors] or [1.0] * count


def _numbers(key: str, values: Config, count: int) -> list[float]:
    """Return a list of numbers above 0, one for each axis."""
    value = values[key]
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ArgumentError(key, value, f"be {count} numbers, one for each axis")
    return [scalars.real_number(key, entry) for entry in value]


def _present(key: str, values: Config) -> Any:
    """Return the value of a key; raise if it is missing."""
    if values.get(key) is None:
        raise ValueError(f"`config` has no `{key}`")
    return values[key]


def _number(key: str, values: Config, most: int) -> int:
    """Return the whole number of a key, from 1 to `most`; raise if it is missing."""
    return scalars.whole_number(key, _present(key, values), 1, most)
