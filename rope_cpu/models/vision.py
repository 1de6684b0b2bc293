"""Adapter for configs of vision towers in transformers, and of the transformers of diffusers.

Two tables: from a model type (vision.json) or the name of a class (diffusers.json) to its row, see
`Row`.

Positions of towers are (row, column), or (time, row, column) for video, from 0 unless their row
says otherwise (`Row.positions`). docs/configs.md describes the positions of diffusers' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import scaled, without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, spread_over_axes
from rope_cpu.models import keys
from rope_cpu.models.keys import SECTIONS, check_containers, own_section
from rope_cpu.models.model import Asked, Model
from rope_cpu.models.model_types import REFUSED as NO_ROTATION
from rope_cpu.models.model_types import Config, data, reasons_by_type


@dataclass(frozen=True, kw_only=True)
class Row:
    """The rotation of one class of models: facts of its code, in the words of its config.

    Parameters
    ----------
    axes : sequence of str
        Its position axes, keys of axes.json; a file with fewer has the last of them.
    form : str
        The function that makes its rotation, a key of `_FORMS`.
    head_dim : sequence of str
        The key of the width of a head, and keys of numbers that divide it.
    takes_head_dim : bool
        The key head_dim goes before these, and they must divide the width without a remainder.
    widths : str
        The elements that each axis rotates: a rule in `_WIDTHS`, or the key that has them.
    sections : sequence of str
        Of an M-RoPE, the key of the pairs of each axis; of several the first that is present.
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
    head_dim: Sequence[str] = ("attention_head_dim",)
    takes_head_dim: bool = False
    widths: str = "equal"
    sections: Sequence[str] = ()
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
        named = {self.widths, str(self.theta), self.ntk, *self.divisors, *self.head_dim}
        named |= {*self.sections, *self.objects, *self.only, *self.defaults, *self.ignored}
        return named | ({"head_dim"} if self.takes_head_dim else set())


@dataclass(frozen=True, kw_only=True)
class MultiAxisModel(Model):
    """The config of a vision tower or of a diffusers transformer: one rotation for all layers."""

    unknown_attention = "images and video attend in ways that their configs do not hold"

    row: Row

    def _build_spec(self, asked: Asked, interleaved: bool | None, angle_dtype: str) -> RopeSpec:
        for key, (known_values, reason) in self.row.only.items():
            if key in self.values and self.values[key] not in known_values:
                raise ValueError(f"`{key}` is {shown(self.values[key])}: {reason}")
        spec = _FORMS[self.row.form](self.row, self.values, angle_dtype)
        for name, value in zip(("layer_type", "layer"), asked, strict=True):
            if value is not None:
                rule = "be left out, as this config has one rotation for all layers"
                raise ArgumentError(name, value, rule)
        return spec


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


def _config(source: Config, name: str, row: Row, values: Config) -> MultiAxisModel:
    """Parse a config of the class or model type `name`, whose row is `row`.

    values: its keys under the names of the row. Raises ValueError for a key of a rotation that the
    row does not read.
    """
    section_key, section = own_section(values)
    inner = {f"{section_key}.{key}": section[key] for key in without_nulls(section)}
    values = {**row.defaults, **values, **inner}
    for key, value in values.items():
        is_known = key in row.known_keys or value == row.theta or keys.is_neutral(key, value)
        if not is_known and (key == "head_dim" or keys.is_rotation_key(key)):
            rule = f"be left out, as {shown(name)} does not read it"
            raise ArgumentError(key, value, rule, "or use RotaryEmbedding.axial")
    return MultiAxisModel(
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
    key = next((name for name in row.sections if name in values), row.sections[-1])
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
    has_head_dim = row.widths in _WIDTHS or values.keys() >= {*row.head_dim}
    head_dim = _head_dim(row, values) if has_head_dim else 0
    widths = _widths(row, values, head_dim)
    total = sum(widths)
    if has_head_dim and (total > head_dim or (row.fills_head and total < head_dim)):
        rule = f"fit the widths of the axes, {shown(widths)}, which add up to {total}"
        raise ArgumentError(" // ".join(row.head_dim), head_dim, rule)
    return widths, head_dim or total


def _widths(row: Row, values: Config, head_dim: int) -> Sequence[int]:
    """Return the elements that each axis rotates; raise unless the axes can have them."""
    key = row.widths
    count = len(row.axes)
    if key in _WIDTHS:
        widths = _WIDTHS[key](head_dim, count)
        key = " // ".join(row.head_dim)
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
    """Return the width of a head."""
    has_own = row.takes_head_dim and "head_dim" in values
    key, *divisors = ("head_dim",) if has_own else row.head_dim
    width = _number(key, values, limits.HIDDEN_SIZE if divisors else limits.HEAD_DIM)
    for divisor in divisors:
        shares = _number(divisor, values, limits.HIDDEN_SIZE)
        if row.takes_head_dim and width % shares:
            raise ValueError(f"`{key}` is {width}, which {shares} heads cannot share equally")
        width //= shares
    return width


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


_DATA = data("vision.json")

# The rows of vision towers by model type, and those of the classes of diffusers.
TOWERS = rows_by_name(_DATA["rows"], _DATA["defaults"])
CLASSES = rows_by_name(data("diffusers.json"), {})

# From a multimodal model type to that of its `vision_config`.
PARTS = _DATA["parts"]

# Keys that only configs around vision parts, or of text, have.
_WHOLE = frozenset({"vision_config", "text_config", "vocab_size"})

# Model types without a rotation that frequencies of pairs express, and encoders without any.
REFUSED = {**NO_ROTATION, **reasons_by_type("encoders.json")}

# Classes of diffusers whose config determines no rotation, with the reason.
REFUSED_CLASSES = reasons_by_type("refused_classes.json")


def parse(config: Config) -> MultiAxisModel | None:
    """Parse the config of a vision tower, see `tower`, or of a diffusers transformer.

    None for that of other models. Raises ValueError or TypeError if the model does not rotate
    pairs, or for a key of a rotation that is not read; missing keys are refused when the spec is
    built.
    Source: the classes of the same names in diffusers 0.42.1, and modules in transformers 5.24.
    """
    name = config.get("_class_name") or _unnamed_type(config)
    if name in REFUSED_CLASSES:
        raise ValueError(f"`_class_name` is {shown(name)}: {REFUSED_CLASSES[name]}")
    if name in CLASSES:
        return _config(config, name, CLASSES[name], without_nulls(config))
    if "_diffusers_version" in config:
        rule = f"be one of the {len(CLASSES)} classes that docs/configs.md lists"
        remedy = "use RotaryEmbedding.axial or RotaryEmbedding.from_inv_freq for others"
        raise ArgumentError("_class_name", config.get("_class_name"), rule, remedy)
    part = _backbone(config)
    name = model_type(part)
    if name in REFUSED:
        raise ValueError(f"`model_type` is {shown(name)}: {REFUSED[name]}")
    if name not in TOWERS:
        return None
    row = TOWERS[name]
    return _config(config, name, row, _standard_names(_flat(row, without_nulls(part))))


def tower(config: Config) -> dict[str, Any]:
    """Return the vision part of a multimodal config, with its model type.

    Parameters
    ----------
    config : mapping
        The config of the whole model; of Qwen's Omni models the thinker has the vision part.

    Returns
    -------
    dict
        A config for `RotaryEmbedding.from_config`.

    Raises
    ------
    ValueError
        If the config has no `vision_config`.

    Examples
    --------
    >>> part = tower({"model_type": "qwen2_vl", "vision_config": {"patch_size": 14}})
    >>> part["model_type"]
    'qwen2_vl_vision'
    """
    if not isinstance(config, Mapping):
        raise ArgumentTypeError("config", config, "be the content of a config file")
    check_containers(config)
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, Mapping) else config
    part = config.get("vision_config")
    if not isinstance(part, Mapping):
        raise ValueError("`config` has no `vision_config`; give the config of a multimodal model")
    own = part.get("model_type")
    whole = config.get("model_type")
    names = (own, PARTS.get(own), PARTS.get(whole))
    known = next((name for name in names if name in TOWERS or name in REFUSED), own)
    return {**part, "model_type": known or _unnamed_type(part) or PARTS.get(whole, whole) or ""}


def model_type(config: Config) -> str:
    """Return the model type of a config, of the tower for one that has the keys of a vision part.

    Older files of vision parts have the model type of the whole model, or none.
    """
    name = str(config.get("model_type") or "")
    is_part = not config.keys().isdisjoint(_DATA["marks"]) and _WHOLE.isdisjoint(config)
    if name in TOWERS or not is_part:
        return name
    return str(PARTS.get(name, name)) if name else _unnamed_type(config)


def _unnamed_type(config: Config) -> str:
    """Return the model type or class of a file without one; its keys tell, or "" if they do not."""
    found = (name for keys, name in _DATA["unnamed"] if config.keys() >= set(keys))
    return str(next(found, ""))


def _backbone(config: Config) -> Config:
    """Return the config of the backbone that the encoder of a config wraps, or the config."""
    part = config.get("backbone_config")
    return part if isinstance(part, Mapping) and _WHOLE.isdisjoint(config) else config


def _standard_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the numbers that are read under their usual keys."""
    for other, key in _DATA["names"].items():
        value = config.get(other)
        if value is not None and config.setdefault(key, value) != value:
            rule = f"equal `{key}`, {shown(config[key])}, or be left out"
            raise ArgumentError(other, value, rule)
    return config


def _flat(row: Row, values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the rope parameters at the top level, for a class that has them."""
    if "rope_type" not in row.only:
        return values
    key, own = own_section(values)
    known = {"rope_theta": "rope_theta", **{name: name for name in row.only}}
    section = {known.get(name, f"{key}.{name}"): own[name] for name in own}
    others = {name: values[name] for name in values if name not in SECTIONS}
    return others | without_nulls(section)
