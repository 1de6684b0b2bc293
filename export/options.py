"""What was asked of export_rope: validated, written into the file's metadata, read back by `validate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike

from rope_cpu import RotaryEmbedding
from rope_cpu.validation.scalars import boolean, one_of, whole_number

from .graph import FLOAT32, FLOAT64
from .layouts import LAYOUTS
from .targets import TARGETS

POSITIONS = ("position_ids", "offset", "none")
POSITION_DTYPES = (np.dtype(np.int64), FLOAT32, FLOAT64)
METADATA_KEY = "rope_cpu.export"


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """The arguments of `export_rope`, validated and in plain types (dtypes are names); see there.

    heads: of each input, see `heads_of`.
    """

    target: str
    dtype: Any
    layout: str
    inputs: tuple[str, ...]
    heads: tuple[int | None, ...]
    positions: str
    position_dtype: Any
    max_positions: int | None
    table_inputs: bool
    inverse: bool
    opset: Any

    def __post_init__(self) -> None:
        one_of("target", self.target, tuple(TARGETS))
        plain = {
            "dtype": self._dtype(),
            "layout": one_of("layout", self.layout, tuple(LAYOUTS)),
            "inputs": tuple(self.inputs),
            "positions": one_of("positions", self.positions, POSITIONS),
            "position_dtype": str(_known_dtype("position_dtype", self.position_dtype, POSITION_DTYPES)),
            "max_positions": None if self.max_positions is None else whole_number("max_positions", self.max_positions),
            "table_inputs": boolean("table_inputs", self.table_inputs),
            "inverse": boolean("inverse", self.inverse),
            "opset": self._opset(),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        self._fit_together()

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
            able = " or ".join(repr(name) for name, other in TARGETS.items() if wanted in other.dtypes)
            raise ValueError(f"`dtype` is {wanted}, which {target.op} has no kernel for; target {able} can express it")
        return str(wanted)

    def _opset(self) -> int:
        """Return the opset to write, the target's own where none is given."""
        target = TARGETS[self.target]
        if self.opset is None:
            return target.default_opset
        wanted, (first, last) = whole_number("opset", self.opset), target.opsets
        if not first <= wanted <= last:
            raise ValueError(f"`opset` is {wanted}; target {target.name!r} is written in opsets {first} to {last}")
        return wanted

    def _fit_together(self) -> None:
        if self.table_inputs and self.max_positions is not None:
            raise ValueError("`table_inputs` and `max_positions` are both given; tables are inputs or initializers")
        if self.table_inputs and self.inverse:
            raise ValueError("`inverse` and `table_inputs` are both given; feed tables with -sin instead")
        if self.tables and self.position_dtype != "int64":
            raise ValueError(
                f"`position_dtype` is {self.position_dtype}, but tables are looked up by int64 ids; without "
                "`max_positions` and `table_inputs` angles are computed in the graph, from any position"
            )
        if self.positions == "none" and self.position_dtype != "int64":
            raise ValueError(f"`position_dtype` is {self.position_dtype}, but `positions` is 'none': there is no input")
        if self.layout == "thd" and self.positions != "position_ids" and not self.token_tables:
            raise ValueError(f"`positions` is {self.positions!r}; packed tokens (layout thd) need position_ids")
        if self.layout == "bsd" and None in self.heads:
            raise ValueError("`num_heads` is None; layout bsd (batch, seq, heads·head_dim) needs it")

    def check_rope(self, rope: RotaryEmbedding) -> None:
        """Raise where these options or their target cannot express a rotation."""
        has_one_length(rope)
        spec, target = rope.spec, TARGETS[self.target]
        _, axes, heads, _ = spec.inv_freq.shape
        if axes > 1 and not spec.shared_id and self.positions != "position_ids" and not self.token_tables:
            raise ValueError(f"`positions` is {self.positions!r}; with {axes} axes each token needs its coordinates")
        if spec.angle_dtype == "float32" and (np.count_nonzero(spec.inv_freq[0], axis=0) > 1).any():
            raise ValueError(
                "the rotary has `angle_dtype` 'float32' and pairs that turn by several axes, whose float32 sum depends "
                "on how a runtime rounds it; export one with 'float64'"
            )
        if heads > 1 and not target.per_head:
            raise ValueError(
                f"{target.op} takes one cos and sin for all heads, and this rotary has frequencies for {heads} heads; "
                "target 'primitive' can express it"
            )
        for name, count in zip(("num_heads", "num_kv_heads"), self.heads, strict=False):
            if heads > 1 and (count is None or count % heads):
                raise ValueError(f"`{name}` is {count}; frequencies of {heads} heads need a multiple of them")
        if self.tables and (spec.pair_axis is None or heads > 1):
            raise ValueError(
                "tables cannot hold a rotation whose pairs turn by several axes or by head; without `max_positions` "
                "and `table_inputs` angles are computed in the graph"
            )

    def metadata(self) -> dict[str, str]:
        """Return the entry that `read` understands."""
        return {METADATA_KEY: json.dumps({"kind": "rope", **asdict(self)})}


def read(model: onnx.ModelProto) -> dict[str, Any]:
    """Return what a model says about its own export; raise where it says nothing."""
    for entry in model.metadata_props:
        if entry.key == METADATA_KEY:
            found: dict[str, Any] = json.loads(entry.value)
            return with_tuples(found)
    raise ValueError(f"`model` has no metadata {METADATA_KEY!r}; it must come from this package's export")


def with_tuples(found: dict[str, Any]) -> dict[str, Any]:
    """Return what JSON holds with tuples for its lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def has_one_length(rope: RotaryEmbedding) -> None:
    """Raise where a rotation is not the same for all that a graph will be given."""
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


def heads_of(inputs: object, num_heads: object, num_kv_heads: object) -> tuple[int | None, ...]:
    """Return the heads of each input, None where any will do; raise unless inputs are names."""
    if isinstance(inputs, str) or not isinstance(inputs, list | tuple):
        raise TypeError(f"`inputs` is {inputs!r}; it must be a sequence of names")
    if not inputs or len(set(inputs)) < len(inputs) or not all(isinstance(n, str) and n.isidentifier() for n in inputs):
        raise ValueError(f"`inputs` is {inputs!r}; it must hold different identifiers, at least one")
    many = None if num_heads is None else whole_number("num_heads", num_heads)
    if num_kv_heads is None:
        return (many,) * len(inputs)
    few = whole_number("num_kv_heads", num_kv_heads)
    if many is None:
        raise ValueError(f"`num_kv_heads` is {few}, but `num_heads` is None; give both or neither")
    if len(inputs) == 1:
        raise ValueError(f"`num_kv_heads` is {few}, but `inputs` is {inputs!r}: there is no second one")
    return many, *(few for _ in inputs[1:])


def _known_dtype(name: str, value: DTypeLike, known: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return `value` as a dtype; raise unless it is one of the known ones."""
    try:  # NumPy takes None for float64
        wanted = None if value is None else np.dtype(value)
    except TypeError:
        wanted = None
    if wanted is None or wanted not in known:
        raise TypeError(f"`{name}` is {wanted or repr(value)}; it must be one of {', '.join(map(str, known))}")
    return wanted
