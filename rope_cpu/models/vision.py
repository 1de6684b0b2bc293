"""Adapter for configs of vision towers in transformers, and of the transformers of diffusers.

Two tables: from a model type (vision.json) or the name of a class (diffusers.json) to its row, see
`Row`.

Positions of towers are (row, column), or (time, row, column) for video, from 0 unless their row
says otherwise (`Row.positions`). docs/configs.md describes the positions of diffusers' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import scaled, without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq
from rope_cpu.models import keys, model_types
from rope_cpu.models.model import Asked, Model
from rope_cpu.models.model_types import Config, data, reasons_by_type


@dataclass(frozen=True, kw_only=True)
class Row:
    """The rotation of one class of models: facts of its code, in the words of its config.

    Parameters
    ----------
    names : {name: {key: value}}
        The classes or model types, each with its own values of missing keys; null for a key that it
        reads and has no value of. A key of a section is "section.key".
    axes : sequence of str
        Its position axes, keys of axes.json; a file with fewer has the last of them.
    form : str
        The function that makes its rotation, a key of `_FORMS`.
    head_dim : sequence of str
        The key of the width of a head, and keys of numbers that divide it. The key head_dim goes
        before these; a class that reads it divides without a remainder.
    widths : str
        The key of the elements that each axis rotates, or of a number that they are shares of.
        Empty: they are shares of the head.
    parts, shares : int, sequence of int
        Each axis rotates so many of so many equal parts of this number; 0: the rest. No shares: the
        key has a list.
    scaling : sequence of str
        Of a rotation of one axis, the keys of its rope parameters beside the base.
    sections : sequence of str
        Of an M-RoPE, the key of the pairs of each axis; of several the first that is present.
    counts : sequence of int
        The allowed numbers of axes; empty: all of `axes`.
    fills_head : bool
        Whether the axes must rotate the whole head.
    shares_frequencies : bool
        Axis a of n has every nth frequency of the whole head, from the a-th (Pixtral). False: each
        axis has the frequencies of its own width.
    unit : float
        The radians of a unit of the positions: 2π where they count revolutions (DINOv3).
    arrangement, order : str, sequence of int
        Which pairs an axis has, see `frequencies.axes.from_frequencies`.
    positions : str, optional
        What else to know about the positions than the axes, for `rope-cpu show`.
    interleaved : bool
        True for pairs (2i, 2i+1).
    theta : str
        The key of the base.
    scales : sequence of str
        The key of the scales of all axes, or one key for each axis.
    ntk : bool
        A scale s makes the base of an axis theta·s^(w/(w-2)), w its width. False: it divides the
        frequencies of the axis.
    only : {key: values}
        The values of a key, if it is present, with which the class rotates like this.
    ignored : sequence of str
        Keys with names of rotations that the frequencies do not depend on.
    """

    names: Mapping[str, Config]
    axes: Sequence[str] = ("row", "column")
    form: str = "axes"
    head_dim: Sequence[str] = ("attention_head_dim",)
    widths: str = ""
    parts: int = 1
    shares: Sequence[int] = ()
    scaling: Sequence[str] = ()
    sections: Sequence[str] = ()
    counts: Sequence[int] = ()
    fills_head: bool = True
    shares_frequencies: bool = False
    unit: float = 1.0
    arrangement: str = "runs"
    order: Sequence[int] = ()
    positions: str | None = None
    interleaved: bool = False
    theta: str = "rope_theta"
    scales: Sequence[str] = ()
    ntk: bool = False
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignored: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class MultiAxisModel(Model):
    """The config of a vision tower or of a diffusers transformer: one rotation for all layers."""

    unknown_attention = "images and video attend in ways that their configs do not hold"

    row: Row

    def _build_spec(self, asked: Asked, interleaved: bool | None, angle_dtype: str) -> RopeSpec:
        spec = _FORMS[self.row.form](self.row, self.values, angle_dtype)
        for name, value in zip(("layer_type", "layer"), asked, strict=True):
            if value is not None:
                rule = "be left out, as this config has one rotation for all layers"
                raise ArgumentError(name, value, rule)
        return spec


def _rows_by_name(file_rows: Sequence[Config]) -> dict[str, Row]:
    """Return the rows of a data file by the names of their classes or model types."""
    rows = [Row(**facts) for facts in file_rows]
    return {name: row for row in rows for name in row.names}


def _refuse_unread(name: str, row: Row, values: Config) -> None:
    """Raise for a key of a rotation that a class does not read, or with which it rotates otherwise.

    values: the keys of a config, with the defaults of the class.
    """
    known = {*row.only, *row.names[name], *row.ignored}
    rule = f"be left out, as {shown(name)} does not read it"
    keys.refuse_unread_keys(values, known, (), rule, "or use RotaryEmbedding.axial")
    if "head_dim" in values.keys() - known:
        raise ArgumentError("head_dim", values["head_dim"], rule)
    for key, allowed in row.only.items():
        if values.get(key, allowed[0]) not in allowed:
            rule = f"be {' or '.join(map(shown, allowed))}, as {shown(name)} rotates with no other"
            raise ArgumentError(key, values[key], rule)


def _axes_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation in which each axis has frequencies of its own width."""
    widths, head_dim = _widths_and_head_dim(row, values)
    with np.errstate(over="ignore"):  # an infinite base or frequency is refused later
        frequencies = _frequencies(row, values, widths, angle_dtype)
    return axes.from_frequencies(
        frequencies, head_dim, row.interleaved, row.arrangement, row.order, angle_dtype
    )


def _one_axis_form(row: Row, values: Config, angle_dtype: str) -> RopeSpec:
    """Return the rotation of one axis, or with its pairs in Qwen3-VL's interleaved sections."""
    scaling = {key.rpartition(".")[2]: values.get(key) for key in row.scaling}
    theta = _theta(row, values)
    spec = scaled(_head_dim(row, values), theta, scaling=scaling, angle_dtype=angle_dtype)
    if not row.sections:
        return spec
    key = next(name for name in row.sections if values.get(name) is not None)
    section = axes.checked_mrope_section(key, values[key])
    first = spec.pairs - sum(section[1:])
    if len(section) != 3 or first < 0:
        rule = f"be 3 numbers, the last two of at most {spec.pairs} pairs together"
        raise ArgumentError(key, section, rule)
    return axes.to_mrope(spec, (first, *section[1:]), True)


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
    scalars.check_table_size("num_attention_heads", heads, 3, pairs, most=limits.FREQUENCIES)
    with np.errstate(over="ignore"):  # an infinite frequency is refused later
        # float32 in the model, also where it computes them in float64.
        frequencies = np.float32(np.pi / 2 * _theta(row, values) ** np.linspace(0.0, 1.0, count))
    inv_freq = np.zeros((3, pairs))
    for axis in range(3):
        inv_freq[axis, pairs % 3 + axis :: 3] = frequencies
    return from_inv_freq(
        inv_freq.reshape(3, heads, head_dim // 2),
        head_dim=head_dim,
        interleaved=pairing == "interleaved",
        rope_type="axial",
        angle_dtype=angle_dtype,
    )


_FORMS: dict[str, Callable[[Row, Config, str], RopeSpec]] = {
    "axes": _axes_form,
    "one axis": _one_axis_form,
    "all heads": _all_heads_form,
}


def _frequencies(
    row: Row, values: Config, widths: Sequence[int], angle_dtype: str
) -> list[Float64]:
    """Return the frequencies of each axis, for positions in the unit of radians."""
    theta = _theta(row, values)
    if row.shares_frequencies:
        frequencies = axes.base_frequencies(theta, sum(widths), angle_dtype)
        return [frequencies[axis :: len(widths)] for axis in range(len(widths))]
    found = []
    for width, scale in zip(widths, _scales(row, values, len(widths)), strict=True):
        base = theta
        divisor = scale
        if row.ntk:
            base = float(theta * np.float64(scale) ** (width / (width - 2)))
            divisor = 1.0
        frequencies = axes.base_frequencies(base, width, angle_dtype) / divisor
        found.append(row.unit * frequencies)
    return found


def _widths_and_head_dim(row: Row, values: Config) -> tuple[Sequence[int], int]:
    """Return the elements that each axis rotates, and the width of a head."""
    head_dim = 0
    if not row.widths or values.keys() >= {*row.head_dim}:
        head_dim = _head_dim(row, values)
    if row.shares:
        whole = _number(row.widths, values, limits.HEAD_DIM) if row.widths else head_dim
        widths = [whole // row.parts * share for share in row.shares]
        widths[0] = widths[0] or head_dim - sum(widths)
    else:
        numbers = values.get(row.widths)
        widths = [*scalars.whole_numbers(row.widths, numbers, most=limits.HEAD_DIM)]
    total = sum(widths)
    head_dim = head_dim or total
    least = 4 if row.ntk else 2
    are_pairs = all(width >= least and width % 2 == 0 for width in widths)
    fits = total == head_dim or (total < head_dim and not row.fills_head)
    if not are_pairs or not fits or len(widths) not in (row.counts or (len(row.axes),)):
        finding = Finding(f"gives a head of {head_dim} elements the widths {shown(widths)}")
        rule = f"give each of {len(row.axes)} axes an even width from {least}, and fill the head"
        raise ArgumentError(row.widths or " // ".join(row.head_dim), finding, rule)
    return widths, head_dim


def _head_dim(row: Row, values: Config) -> int:
    """Return the width of a head."""
    key, *divisors = row.head_dim if values.get("head_dim") is None else ("head_dim",)
    width = _number(key, values, limits.HIDDEN_SIZE if divisors else limits.HEAD_DIM)
    for divisor in divisors:
        shares = _number(divisor, values, limits.HIDDEN_SIZE)
        if "head_dim" in values and width % shares:
            raise ValueError(f"`{key}` is {width}, which {shares} heads cannot share equally")
        width //= shares
    return width


def _theta(row: Row, values: Config) -> float:
    """Return the base."""
    return scalars.real_number(row.theta, values[row.theta])


def _scales(row: Row, values: Config, count: int) -> list[float]:
    """Return the scale of each axis, a number above 0; 1 for a class without scales."""
    if len(row.scales) != 1:
        return [scalars.real_number(key, values[key]) for key in row.scales] or [1.0] * count
    key = row.scales[0]
    scales = values[key]
    if not isinstance(scales, list | tuple) or len(scales) != count:
        raise ArgumentError(key, scales, f"be {count} numbers, one for each axis")
    return [scalars.real_number(key, scale) for scale in scales]


def _number(key: str, values: Config, most: int) -> int:
    """Return the whole number of a key, from 1 to `most`."""
    return scalars.whole_number(key, values.get(key), 1, most)


_DATA = data("vision.json")

# The rows of vision towers by model type, and those of the classes of diffusers.
TOWERS = _rows_by_name(_DATA["rows"])
CLASSES = _rows_by_name(data("diffusers.json"))

# From a multimodal model type to that of its `vision_config`.
PARTS = _DATA["parts"]

# Keys that only configs around vision parts, or of text, have.
_WHOLE = frozenset({"vision_config", "text_config", "vocab_size"})

# Classes of diffusers whose config determines no rotation, with the reason.
REFUSED_CLASSES = reasons_by_type("refused_classes.json")

# These, and model types without a rotation that frequencies of pairs express, or without any.
REFUSED = {**model_types.REFUSED, **reasons_by_type("encoders.json"), **REFUSED_CLASSES}


def parse(config: Config) -> MultiAxisModel | None:
    """Parse the config of a vision tower, see `tower`, or of a diffusers transformer.

    None for that of other models. Raises ValueError or TypeError if the model does not rotate
    pairs, or for a key of a rotation that is not read; missing keys are refused when the spec is
    built.
    Source: the classes of the same names in diffusers 0.42.1, and modules in transformers 5.24.
    """
    part = _backbone(config)
    class_name = config.get("_class_name")
    is_class = class_name in CLASSES or class_name in REFUSED_CLASSES
    name = str(class_name) if is_class else model_type(part)
    if name in REFUSED:
        key = "_class_name" if is_class else "model_type"
        raise ValueError(f"`{key}` is {shown(name)}: {REFUSED[name]}")
    if "_diffusers_version" in config and name not in CLASSES:
        rule = f"be one of the {len(CLASSES)} classes that docs/configs.md lists"
        remedy = "use RotaryEmbedding.axial or RotaryEmbedding.from_inv_freq for others"
        raise ArgumentError("_class_name", config.get("_class_name"), rule, remedy)
    row = TOWERS.get(name) or CLASSES.get(name)
    if row is None:
        return None
    own = _flat(row, without_nulls(part))
    if name in TOWERS:
        own = _standard_names(own)
    values = {**row.names[name], **own}
    _refuse_unread(name, row, values)
    return MultiAxisModel(
        source=config,
        model_type=name,
        values=values,
        axes=row.axes,
        position_note=row.positions,
        row=row,
    )


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
    keys.check_containers(config)
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, Mapping) else config
    part = config.get("vision_config")
    if not isinstance(part, Mapping):
        raise ValueError("`config` has no `vision_config`; give the config of a multimodal model")
    own = part.get("model_type")
    whole = config.get("model_type")
    names = (own, PARTS.get(own), PARTS.get(whole))
    known = next((name for name in names if name in TOWERS or name in REFUSED), own)
    return {**part, "model_type": known or model_type(part) or PARTS.get(whole, whole) or ""}


def model_type(config: Config) -> str:
    """Return the model type of a config, of the tower for one that has the keys of a vision part.

    Older files of vision parts have the model type of the whole model, or none: their keys tell.
    """
    name = str(config.get("model_type") or "")
    if name in TOWERS or not _WHOLE.isdisjoint(config):
        return name
    if not name:
        found = (known for own, known in _DATA["unnamed"] if config.keys() >= {*own})
        return str(next(found, ""))
    is_part = not config.keys().isdisjoint(_DATA["marks"])
    return str(PARTS.get(name, name)) if is_part else name


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
    """Return values with the keys of their section beside them, as "section.key".

    A class with rope parameters has them under their own names.
    """
    section_key, section = keys.own_section(values)
    own_names = {"rope_theta", *row.only} if "rope_type" in row.only else ()
    flat = {key: value for key, value in values.items() if key not in keys.SECTIONS}
    for key, value in without_nulls(section).items():
        flat[key if key in own_names else f"{section_key}.{key}"] = value
    return flat
