"""What was asked of an export: checked once, written into the file's metadata, read back by `validate`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from rope_cpu.export.layouts import layout_of
from rope_cpu.export.targets import TARGETS, dtype_of, opset_of, target_of
from rope_cpu.spec import boolean, whole_number

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding

POSITIONS = ("position_ids", "offset", "none")
POSITION_DTYPES = ("int64", "float32", "float64")
METADATA_KEY = "rope_cpu.export"


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """The arguments of `export_rope` in plain types; see there."""

    target: str
    dtype: str
    layout: str
    inputs: tuple[str, ...]
    heads: tuple[int | None, ...]
    positions: str
    position_dtype: str
    max_positions: int | None
    table_inputs: bool
    inverse: bool
    opset: int

    @classmethod
    def checked(cls, rope: RotaryEmbedding, **given: Any) -> RopeOptions:
        """Check the arguments of `export_rope`; raise what they and the rotary do not allow."""
        target = target_of(given["target"])
        dtype = dtype_of(given["dtype"], target)
        layout_of(given["layout"])
        inputs = _names(given["inputs"])
        many = given["max_positions"]
        options = cls(
            target=target.name,
            dtype=str(dtype),
            layout=given["layout"],
            inputs=inputs,
            heads=_heads(inputs, given["num_heads"], given["num_kv_heads"]),
            positions=_one_of("positions", given["positions"], POSITIONS),
            position_dtype=_one_of("position_dtype", str(np.dtype(given["position_dtype"])), POSITION_DTYPES),
            max_positions=None if many is None else whole_number("max_positions", many),
            table_inputs=boolean("table_inputs", given["table_inputs"]),
            inverse=boolean("inverse", given["inverse"]),
            opset=opset_of(given["opset"], target),
        )
        options._fit_together()
        options._fit(rope)
        return options

    @property
    def tables(self) -> bool:
        """Whether cos and sin are looked up."""
        return self.table_inputs or self.max_positions is not None

    @property
    def token_tables(self) -> bool:
        """Whether cos and sin of the tokens themselves are inputs."""
        return self.table_inputs and self.positions == "none"

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
        if self.layout == "thd" and self.positions != "position_ids" and not self.token_tables:
            raise ValueError(f"`positions` is {self.positions!r}; packed tokens (layout thd) need position_ids")
        if self.layout == "bsd" and None in self.heads:
            raise ValueError("`num_heads` is None; layout bsd (batch, seq, heads·head_dim) needs it")

    def _fit(self, rope: RotaryEmbedding) -> None:
        spec, target = rope.spec, TARGETS[self.target]
        rows, axes, heads, _ = spec.inv_freq.shape
        if spec.needs_length:
            raise ValueError(
                f"rope type {spec.rope_type!r} depends on the sequence length; export `rope.at_length(seq_len)`"
            )
        if rows > 1:
            raise ValueError(f"`rope` holds frequencies for {rows} batch rows; a graph is written for one length")
        if axes > 1 and not spec.shared_id and self.positions != "position_ids" and not self.token_tables:
            raise ValueError(f"`positions` is {self.positions!r}; with {axes} axes each token needs its coordinates")
        if heads > 1 and not target.per_head:
            raise ValueError(
                f"{target.op} takes one cos and sin for all heads, and this rotary has frequencies for {heads} heads; "
                "target 'primitive' can express it"
            )
        if heads > 1 and any(count is None or count % heads for count in self.heads):
            raise ValueError(f"`num_heads` is {self.heads[0]}; frequencies of {heads} heads need a multiple of them")
        if self.tables and (heads > 1 or (axes > 1 and _dense(rope))):
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
            found = json.loads(entry.value)
            return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    raise ValueError(f"`model` has no metadata {METADATA_KEY!r}; it must come from this package's export")


def _dense(rope: RotaryEmbedding) -> bool:
    return bool(((rope.spec.inv_freq[0, :, 0] != 0).sum(axis=0) > 1).any())


def _one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(known)}")
    return str(value)


def _names(inputs: object) -> tuple[str, ...]:
    if isinstance(inputs, str) or not isinstance(inputs, list | tuple):
        raise TypeError(f"`inputs` is {inputs!r}; it must be a sequence of names")
    if not inputs or len(set(inputs)) < len(inputs) or not all(isinstance(n, str) and n.isidentifier() for n in inputs):
        raise ValueError(f"`inputs` is {inputs!r}; it must hold different identifiers, at least one")
    return tuple(inputs)


def _heads(inputs: tuple[str, ...], first: object, others: object) -> tuple[int | None, ...]:
    if first is None:
        if others is not None:
            raise ValueError(f"`num_kv_heads` is {others!r}, but `num_heads` is None; give both or neither")
        return (None,) * len(inputs)
    many = whole_number("num_heads", first)
    return many, *(many if others is None else whole_number("num_kv_heads", others) for _ in inputs[1:])
