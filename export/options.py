"""The arguments of export_rope, validated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments import limits
from rope_cpu.arguments.arrays import to_dtype
from rope_cpu.arguments.scalars import boolean, check_length, check_table_size, choice, whole_number
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import DTYPES
from rope_cpu.frequencies.spec import RopeSpec

from .graph import FLOAT32, FLOAT64
from .layouts import LAYOUTS
from .targets import TARGETS, capable_targets, find_target
from .targets.base import Target

POSITIONS = ("position_ids", "offset", "none")


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """The arguments of `export_rope`, validated and in plain types: dtypes are names.

    See `export_rope` for their meaning.
    """

    kind: ClassVar[str] = "rope"

    target: str
    dtype: Any
    layout: str
    inputs: Sequence[str]
    num_heads: int | None
    num_kv_heads: int | None
    positions: str
    max_positions: int | None
    inverse: bool = False
    opset: Any

    def __post_init__(self) -> None:
        target = find_target(self.target)
        checked = {
            "dtype": target_dtype(target, self.dtype),
            "layout": choice("layout", self.layout, LAYOUTS),
            "inputs": _input_names(self.inputs),
            "num_heads": _optional_number("num_heads", self.num_heads, limits.HEADS),
            "num_kv_heads": _optional_number("num_kv_heads", self.num_kv_heads, limits.HEADS),
            "positions": choice("positions", self.positions, POSITIONS),
            "max_positions": table_rows(self.max_positions),
            "inverse": boolean("inverse", self.inverse),
            "opset": target_opset(target, self.opset),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.layout == "thd" and self.positions != "position_ids":
            raise ValueError(
                f"`positions` is {shown(self.positions)}; packed tokens (layout thd) need "
                "'position_ids'"
            )
        self._check_heads()

    @property
    def heads(self) -> dict[str, int | None]:
        """The number of heads of each input, None where the graph takes any number."""
        counts: dict[str, int | None] = dict.fromkeys(self.inputs, self.num_heads)
        if self.num_kv_heads is not None:
            counts.update(dict.fromkeys(self.inputs[1:], self.num_kv_heads))
        return counts

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of the arithmetic."""
        return FLOAT64 if self.dtype == "float64" else FLOAT32

    @property
    def tables(self) -> bool:
        """Whether cos and sin come from tables, rather than being computed in the graph."""
        return self.max_positions is not None

    def _check_heads(self) -> None:
        if self.num_kv_heads is not None and self.num_heads is None:
            raise ValueError(
                f"`num_kv_heads` is {self.num_kv_heads}, but `num_heads` is None; give both or "
                "neither"
            )
        if self.num_kv_heads is not None and len(self.inputs) == 1:
            raise ValueError(
                f"`num_kv_heads` is {self.num_kv_heads}; it needs a second input, but `inputs` is "
                f"{shown(self.inputs)}"
            )
        if self.layout == "bsd" and self.num_heads is None:
            raise ValueError(
                "`num_heads` is None; layout bsd (batch, seq, heads·head_dim) needs it"
            )

    def check_rope(self, rope: RotaryEmbedding) -> None:
        """Raise ValueError where these options or their target cannot express a rotation."""
        check_one_length(rope)
        spec = rope.spec
        if self.max_positions is not None:
            check_table_size("max_positions", self.max_positions, self.max_positions, spec.pairs)
        check_coordinates(rope, self.positions)
        pair_axes = np.count_nonzero(spec.inv_freq[0], axis=0)
        if spec.angle_dtype == "float32" and (pair_axes > 1).any():
            raise ValueError(
                "`rope` has `angle_dtype` 'float32' and pairs that rotate by several axes: the "
                "float32 sum of their angles depends on the order in which a runtime adds; export "
                "one with `angle_dtype` 'float64'"
            )
        self._check_frequency_heads(spec)
        if self.tables and (spec.pair_axis is None or spec.inv_freq.shape[2] > 1):
            raise ValueError(
                "`rope` has pairs that rotate by several axes, or frequencies per head, and tables "
                "cannot hold such a rotation; without `max_positions` cos and sin are computed in "
                "the graph"
            )

    def _check_frequency_heads(self, spec: RopeSpec) -> None:
        frequency_heads = spec.inv_freq.shape[2]
        if frequency_heads == 1:
            return
        target = TARGETS[self.target]
        if not target.per_head:
            able = capable_targets(lambda other: other.per_head)
            raise ValueError(
                f"{target.op} takes one cos and sin for all heads, and `rope` has frequencies for "
                f"{frequency_heads} heads; {able} can express it"
            )
        for name, count in zip(("num_heads", "num_kv_heads"), self.heads.values(), strict=False):
            if count is None or count % frequency_heads:
                raise ValueError(
                    f"`{name}` is {count}; `rope` has frequencies of {frequency_heads} heads, so "
                    "it must be a multiple of that"
                )


def target_dtype(target: Target, value: DTypeLike) -> str:
    """Return the name of the dtype of queries and keys; raise unless the target supports it."""
    dtype = known_dtype("dtype", value, DTYPES.values())
    if dtype not in target.dtypes:
        able = capable_targets(lambda other: dtype in other.dtypes)
        raise ValueError(
            f"`dtype` is {dtype}, which {target.op} has no kernel for; {able} can express it"
        )
    return str(dtype)


def target_opset(target: Target, value: int | None, cache: str = "growing") -> int:
    """Return the opset to write; None is the target's lowest, of attention with this cache."""
    first, last = target.opsets
    if cache == "shared" and target.shared_cache_opset is not None:
        first = target.shared_cache_opset
    if value is None:
        return first
    opset = whole_number("opset", value)
    if not first <= opset <= last:
        raise ValueError(
            f"`opset` is {opset}; target {target.name!r} is written in opsets {first} to {last}"
        )
    return opset


def table_rows(value: int | None) -> int | None:
    """Return `max_positions`, validated."""
    return _optional_number("max_positions", value, limits.TABLE)


def check_one_length(rope: RotaryEmbedding) -> None:
    """Raise ValueError unless `rope` has the frequencies of exactly one sequence length."""
    spec = rope.spec
    if spec.needs_length:
        raise ValueError(
            f"rope type {spec.rope_type!r} depends on the sequence length; give "
            "`rope.at_length(seq_len)` as `rope`"
        )
    if len(spec.inv_freq) > 1:
        raise ValueError(
            f"`rope` holds frequencies for {len(spec.inv_freq)} batch rows; a graph is written for "
            "one length, such as `rope.at_length(seq_len)`"
        )


def check_rotary_embedding(rope: object) -> None:
    """Raise TypeError unless `rope` is a RotaryEmbedding."""
    if not isinstance(rope, RotaryEmbedding):
        raise TypeError(f"`rope` is a {type(rope).__name__}; it must be a RotaryEmbedding")


def check_coordinates(rope: RotaryEmbedding, positions: str) -> None:
    """Raise ValueError where positions are consecutive, but tokens need coordinates."""
    if rope.axes > 1 and not rope.spec.shared_id and positions != "position_ids":
        raise ValueError(
            f"`positions` is {shown(positions)}; with {rope.axes} axes each token needs its "
            "coordinates: give 'position_ids'"
        )


def _optional_number(name: str, value: int | None, most: int) -> int | None:
    """Return a whole number from 1 to `most`, or None if `value` is None."""
    if value is None:
        return None
    return whole_number(name, value, 1, most)


def _input_names(inputs: object) -> tuple[str, ...]:
    """Return the names of inputs; raise unless they are different identifiers."""
    if not isinstance(inputs, list | tuple):
        raise TypeError(f"`inputs` is {shown(inputs)}; it must be a sequence of names")
    check_length("inputs", inputs, limits.INPUTS)
    identifiers = all(isinstance(name, str) and name.isidentifier() for name in inputs)
    if not inputs or not identifiers or len(set(inputs)) < len(inputs):
        raise ValueError(
            f"`inputs` is {shown(inputs)}; it must be a non-empty list of different identifiers "
            "(letters, digits, _)"
        )
    return tuple(inputs)


def known_dtype(name: str, value: DTypeLike, known: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return `value` as a dtype; raise TypeError unless it is one of the known ones."""
    choices = list(known)
    dtype: np.dtype[Any] | None = to_dtype(value)
    if dtype is None or dtype not in choices:
        text = shown(value) if dtype is None else cut(str(dtype))
        raise TypeError(f"`{name}` is {text}; it must be one of {', '.join(map(str, choices))}")
    return dtype
