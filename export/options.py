"""What was asked of export_rope, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments import limits
from rope_cpu.arguments.arrays import to_dtype
from rope_cpu.arguments.scalars import boolean, check_length, check_table_size, choice, whole_number
from rope_cpu.arguments.texts import cut, shown

from .graph import FLOAT32, FLOAT64
from .layouts import LAYOUTS
from .targets import TARGETS

POSITIONS = ("position_ids", "offset", "none")
POSITION_DTYPES = (np.dtype(np.int64), FLOAT32, FLOAT64)


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """The arguments of `export_rope`, validated and in plain types (dtypes are names); see there."""

    kind: ClassVar[str] = "rope"

    target: str
    dtype: Any
    layout: str
    inputs: tuple[str, ...]
    num_heads: int | None
    num_kv_heads: int | None
    positions: str
    position_dtype: Any = "int64"
    max_positions: int | None
    table_inputs: bool = False
    inverse: bool = False
    opset: Any

    def __post_init__(self) -> None:
        choice("target", self.target, tuple(TARGETS))
        plain = {
            "dtype": self._dtype(),
            "layout": choice("layout", self.layout, LAYOUTS),
            "inputs": _names(self.inputs),
            "num_heads": _number("num_heads", self.num_heads, limits.HEADS),
            "num_kv_heads": _number("num_kv_heads", self.num_kv_heads, limits.HEADS),
            "positions": choice("positions", self.positions, POSITIONS),
            "position_dtype": str(
                _known_dtype("position_dtype", self.position_dtype, POSITION_DTYPES)
            ),
            "max_positions": _number("max_positions", self.max_positions, limits.TABLE),
            "table_inputs": boolean("table_inputs", self.table_inputs),
            "inverse": boolean("inverse", self.inverse),
            "opset": self._opset(),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        self._fit_together()

    @property
    def heads(self) -> dict[str, int | None]:
        """The number of heads of each input, None where any will do."""
        later = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        return {name: later if index else self.num_heads for index, name in enumerate(self.inputs)}

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype that is computed in."""
        return FLOAT64 if self.dtype == "float64" else FLOAT32

    @property
    def tables(self) -> bool:
        """Whether cos and sin are looked up."""
        return self.table_inputs or self.max_positions is not None

    @property
    def token_tables(self) -> bool:
        """Whether cos and sin of the tokens themselves are inputs."""
        return self.table_inputs and self.positions == "none"

    def _dtype(self) -> str:
        target = TARGETS[self.target]
        wanted = _known_dtype("dtype", self.dtype, TARGETS["primitive"].dtypes)
        if wanted not in target.dtypes:
            able = " or ".join(
                repr(name) for name, other in TARGETS.items() if wanted in other.dtypes
            )
            raise ValueError(
                f"`dtype` is {wanted}, which {target.op} has no kernel for; target {able} can express it"
            )
        return str(wanted)

    def _opset(self) -> int:
        """Return the opset to write, the target's own where none is given."""
        target = TARGETS[self.target]
        if self.opset is None:
            return target.opsets[0]
        wanted, (first, last) = whole_number("opset", self.opset), target.opsets
        if not first <= wanted <= last:
            raise ValueError(
                f"`opset` is {wanted}; target {target.name!r} is written in opsets {first} to {last}"
            )
        return wanted

    def _fit_together(self) -> None:
        if self.table_inputs and self.max_positions is not None:
            raise ValueError(
                "`table_inputs` and `max_positions` are both given; tables are inputs or initializers"
            )
        if self.table_inputs and self.inverse:
            raise ValueError(
                "`inverse` and `table_inputs` are both given; feed tables with -sin instead"
            )
        if self.tables and self.position_dtype != "int64":
            raise ValueError(
                f"`position_dtype` is {self.position_dtype}, but tables are looked up by int64 ids; without "
                "`max_positions` and `table_inputs` angles are computed in the graph, from any position"
            )
        if self.positions == "none" and self.position_dtype != "int64":
            raise ValueError(
                f"`position_dtype` is {self.position_dtype}, but `positions` is 'none': there is no input"
            )
        if self.layout == "thd" and self.positions != "position_ids" and not self.token_tables:
            raise ValueError(
                f"`positions` is {shown(self.positions)}; packed tokens (layout thd) need position_ids"
            )
        if self.num_kv_heads is not None and self.num_heads is None:
            raise ValueError(
                f"`num_kv_heads` is {self.num_kv_heads}, but `num_heads` is None; give both or neither"
            )
        if self.num_kv_heads is not None and len(self.inputs) == 1:
            raise ValueError(
                f"`num_kv_heads` is {self.num_kv_heads}, but `inputs` is {shown(self.inputs)}: there is no second one"
            )
        if self.layout == "bsd" and self.num_heads is None:
            raise ValueError(
                "`num_heads` is None; layout bsd (batch, seq, heads·head_dim) needs it"
            )

    def check_rope(self, rope: RotaryEmbedding) -> None:
        """Raise where these options or their target cannot express a rotation."""
        has_one_length(rope)
        spec, target = rope.spec, TARGETS[self.target]
        if self.max_positions is not None:
            check_table_size("max_positions", self.max_positions, self.max_positions, spec.pairs)
        heads = spec.inv_freq.shape[2]
        if not self.token_tables:
            check_counted(rope, self.positions)
        if spec.angle_dtype == "float32" and (np.count_nonzero(spec.inv_freq[0], axis=0) > 1).any():
            raise ValueError(
                "`rope` has `angle_dtype` 'float32' and pairs that rotate by several axes, whose float32 sum depends "
                "on how a runtime rounds it; export one with 'float64'"
            )
        if heads > 1 and not target.per_head:
            raise ValueError(
                f"{target.op} takes one cos and sin for all heads, and `rope` has frequencies for {heads} heads; "
                "target 'primitive' can express it"
            )
        for name, count in zip(("num_heads", "num_kv_heads"), self.heads.values(), strict=False):
            if heads > 1 and (count is None or count % heads):
                raise ValueError(
                    f"`{name}` is {count}; frequencies of {heads} heads need a multiple of them"
                )
        if self.tables and (spec.pair_axis is None or heads > 1):
            raise ValueError(
                "tables cannot hold a rotation whose pairs rotate by several axes or by head; without `max_positions` "
                "and `table_inputs` angles are computed in the graph"
            )


def options_given(kind: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments that are fields of `kind`; arguments: `locals()` of the function that they are given to.

    So the signature and the dataclass are the only two lists of them.
    """
    return {field.name: arguments[field.name] for field in fields(kind) if field.name in arguments}


def has_one_length(rope: RotaryEmbedding) -> None:
    """Raise where the frequencies depend on a length that is not chosen, or differ by batch row."""
    spec = rope.spec
    if spec.needs_length:
        raise ValueError(
            f"rope type {spec.rope_type!r} depends on the sequence length; give `rope.at_length(seq_len)` as `rope`"
        )
    if len(spec.inv_freq) > 1:
        raise ValueError(
            f"`rope` holds frequencies for {len(spec.inv_freq)} batch rows; a graph is written for one length"
        )


def is_rotary_embedding(rope: object) -> None:
    """Raise unless `rope` is a rotary embedding."""
    if not isinstance(rope, RotaryEmbedding):
        raise TypeError(f"`rope` is a {type(rope).__name__}; it must be a RotaryEmbedding")


def check_counted(rope: RotaryEmbedding, positions: str) -> None:
    """Raise where tokens are counted, but need coordinates of their own."""
    if rope.axes > 1 and not rope.spec.shared_id and positions != "position_ids":
        raise ValueError(
            f"`positions` is {shown(positions)}; with {rope.axes} axes each token needs its coordinates"
        )


def _number(name: str, value: int | None, most: int) -> int | None:
    """Return a whole number, or None where none is given."""
    return None if value is None else whole_number(name, value, 1, most)


def _names(inputs: object) -> tuple[str, ...]:
    """Return the names of inputs; raise unless they are different identifiers."""
    if isinstance(inputs, str) or not isinstance(inputs, list | tuple):
        raise TypeError(f"`inputs` is {shown(inputs)}; it must be a sequence of names")
    check_length("inputs", inputs, limits.INPUTS)
    named = all(isinstance(name, str) and name.isidentifier() for name in inputs)
    if not inputs or not named or len(set(inputs)) < len(inputs):
        raise ValueError(
            f"`inputs` is {shown(inputs)}; it must hold different identifiers, at least one"
        )
    return tuple(inputs)


def _known_dtype(name: str, value: DTypeLike, known: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return `value` as a dtype; raise unless it is one of the known ones."""
    wanted: np.dtype[Any] | None = to_dtype(value)
    if wanted is None or wanted not in known:
        given = shown(value) if wanted is None else cut(str(wanted))
        raise TypeError(f"`{name}` is {given}; it must be one of {', '.join(map(str, known))}")
    return wanted
