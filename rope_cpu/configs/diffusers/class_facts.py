"""Rows of diffusers.json: the facts of classes of diffusers, and how their keys are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import real_number, whole_number

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the rows of all forms have in common.

    Parameters
    ----------
    axes : sequence of str
        Its position axes, keys of axes.json; a file with fewer has the last of them.
    head_dim : str
        The key of the width of a head, or "a / b": the quotient of the values of two keys.
    theta : float or str
        The base, or the key that holds it.
    defaults : {key: value}
        The class's own values for keys that a file does not have.
    """

    axes: Sequence[str]
    head_dim: str = "attention_head_dim"
    theta: float | str = 10000.0
    defaults: Config = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AxesRow(Row):
    """A class in which each axis has frequencies of its own.

    Parameters
    ----------
    widths : str
        The key of the widths of the axes, in elements, or a rule in `forms`.
    counts : collection of int
        The allowed numbers of axes.
    pairs : str
        Where pairs are formed, a name in `forms`.
    divisors : str
        The key of the divisors of the frequencies of all axes, or a key for each axis, with
        commas; "": none.
    ntk : str
        The key of the scales s of all axes: the base of an axis is theta·s^(w/(w-2)), w its width;
        "": none.
    requires : str
        The key that must be true, or the class rotates nothing; "": none.
    """

    widths: str
    counts: Collection[int] = (3,)
    pairs: str = "adjacent"
    divisors: str = ""
    ntk: str = ""
    requires: str = ""


@dataclass(frozen=True, kw_only=True)
class OneAxisRow(Row):
    """A class with one axis and half-split pairs.

    Parameters
    ----------
    rotary_dim : str
        The key of the number of rotated elements, "half" of the head, or "all" of it.
    longrope : str
        The key of the section with the short and the long factors; "": none.
    """

    rotary_dim: str = "all"
    longrope: str = ""


@dataclass(frozen=True, kw_only=True)
class MropeRow(Row):
    """A class with interleaved sections, in which the first axis takes what the others leave.

    Parameters
    ----------
    section : str
        The key of the pairs of each axis; that of the first axis has no effect.
    nested : str
        The key of an object that has `mrope_section` if the file has no `section`; "": none.
    """

    section: str
    nested: str = ""
    theta: float | str = "rope_theta"


def head_dim_of(row: Row, values: Config, least: int = 1) -> tuple[str, int]:
    """Return the width of a head, and its key for error texts."""
    key, *divisor = row.head_dim.split(" / ")
    if not divisor:
        return key, required_number(key, values, limits.HEAD_DIM, least)
    width = required_number(key, values, limits.HIDDEN_SIZE)
    return key, width // required_number(divisor[0], values, limits.HEADS)


def theta_of(row: Row, values: Config) -> float:
    """Return the base: that of the class, or the value of its key."""
    key = row.theta if isinstance(row.theta, str) else ""
    theta = real_number(key or "rope_theta", values[key] if key else row.theta)
    if key != "rope_theta" and "rope_theta" in values:
        given = real_number("rope_theta", values["rope_theta"])
        if given != theta:
            raise ValueError(f"`rope_theta` is {given}, but this class has the base {theta}")
    return theta


def required_number(key: str, config: Config, most: int, least: int = 1) -> int:
    """Return the whole number of a key, from least to most; raise for a missing key."""
    if config.get(key) is None:
        raise ValueError(f"`config` has no `{key}`")
    return whole_number(key, config[key], least, most)
