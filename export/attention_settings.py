"""The arguments of export_attention, validated."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import boolean, choice, real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64

from .masks import MASK_SHAPES
from .options import (
    RopeOptions,
    check_coordinates,
    check_rotary_embedding,
    known_dtype,
    table_rows,
    target_dtype,
    target_opset,
)
from .targets import TARGETS, Target, capable_targets, find_target
from .targets.ort import runtime_takes_query_lengths
from .weights import INPUT, SOURCES

LAYOUTS = ("bhsd", "bshd", "bsd")
MASKS = ("none", *MASK_SHAPES)
POSITIONS = ("past", "position_ids")
CACHES = ("growing", "shared")
CACHE_DTYPES = (np.dtype(np.int8),)
PREFIX_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_./:-")
NORM_EPSILON = 1e-6
NORM_DEFAULTS = {"norm_epsilon": NORM_EPSILON, "norm_offset": 0.0}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The arguments of `export_attention`, validated and in plain types: dtypes are names.

    See `export_attention` for their meaning; `num_kv_heads`, `v_head_dim` and `scale` are never
    None here. qk_norm, sinks: where these arrays come from. hidden, output: widths of the hidden
    states at the input and at the output, None without projections.
    """

    kind: ClassVar[str] = "attention"

    # The order of the fields is that of the entries in a file's metadata.
    num_heads: int
    num_kv_heads: int
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    mask: str
    positions: str
    max_positions: int | None
    v_head_dim: int
    target: str
    dtype: Any
    layout: str
    norm_epsilon: float
    norm_offset: float
    past: bool
    cache: str
    cache_dtype: Any
    batch_chunks: bool | None
    opset: Any
    qk_norm: str
    sinks: str
    hidden: int | None
    output: int | None
    name_prefix: str

    # With a rotation, the options are checked against it, too.
    rope: InitVar[RotaryEmbedding | None] = None

    def __post_init__(self, rope: RotaryEmbedding | None) -> None:
        if rope is not None:
            check_rotary_embedding(rope)
        target = find_target(self.target)
        cache = choice("cache", self.cache, CACHES)
        self._set(
            {
                "num_heads": whole_number("num_heads", self.num_heads, 1, limits.HEADS),
                "num_kv_heads": whole_number("num_kv_heads", self.num_kv_heads, 1, limits.HEADS),
                "v_head_dim": whole_number("v_head_dim", self.v_head_dim, 1, limits.HEAD_DIM),
                "causal": boolean("causal", self.causal),
                "past": boolean("past", self.past),
                "norm_epsilon": _float32("norm_epsilon", self.norm_epsilon),
                "norm_offset": real_number("norm_offset", self.norm_offset, zero=True),
                "qk_norm": choice("qk_norm", self.qk_norm, SOURCES),
                "sinks": choice("sinks", self.sinks, SOURCES),
                "hidden": _width("hidden", self.hidden),
                "output": _width("output", self.output),
                "positions": choice("positions", self.positions, POSITIONS),
                "layout": choice("layout", self.layout, LAYOUTS),
                "dtype": target_dtype(target, self.dtype),
                "max_positions": table_rows(self.max_positions),
                "opset": target_opset(target, self.opset, cache),
                "window": None if self.window is None else whole_number("window", self.window),
                "softcap": None if self.softcap is None else _float32("softcap", self.softcap),
                "scale": _float32("scale", self.scale),
                "mask": choice("mask", self.mask, MASKS),
                "cache_dtype": _cache_dtype(self.cache_dtype),
                "batch_chunks": _batch_chunks(target, cache, self.batch_chunks),
                "name_prefix": _name_prefix(self.name_prefix),
            }
        )
        problem = next(self._wrong_combinations(), None)
        if problem is not None:
            raise ValueError(problem)
        if rope is not None:
            self._check_rope(rope)
        if self.hidden is not None:  # hidden states are (batch, seq, width)
            self._set({"layout": "bsd"})

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _wrong_combinations(self) -> Iterator[str]:
        if self.num_heads % self.num_kv_heads:
            yield (
                f"`num_heads` is {self.num_heads}, not a multiple of `num_kv_heads`, "
                f"{self.num_kv_heads}"
            )
        # "bhsd" given explicitly cannot be told from the default, so "bshd" alone is refused.
        if self.hidden is not None and self.layout == "bshd":
            yield (
                "`layout` is 'bshd', but `weights` are given: hidden states are (batch, seq, in); "
                "drop `layout`"
            )
        if self.window is not None and not self.causal:
            yield (
                f"`window` is {self.window}: it counts the keys up to a query, so it needs "
                "`causal`=True"
            )
        if self.softcap is not None:
            ratio = self.scale / self.softcap
            if not _fits_float32(ratio):
                yield _float32_problem("scale / softcap", ratio)
        yield from self._wrong_norms()
        if self.cache == "shared":
            yield from self._wrong_with_shared_cache()
        elif self.cache_dtype is not None:
            yield (
                f"`cache_dtype` is {self.cache_dtype}, but `cache` is 'growing', whose keys and "
                "values have the `dtype`; give `cache`='shared' or drop `cache_dtype`"
            )
        if self.cache_dtype is not None and not TARGETS[self.target].int8_cache:
            able = capable_targets(lambda other: other.int8_cache)
            yield (
                f"`cache_dtype` is {self.cache_dtype}, which target {self.target!r} cannot attend "
                f"to; {able} can express it"
            )

    def _wrong_with_shared_cache(self) -> Iterator[str]:
        if not self.past:
            yield "`past` is False, but `cache` is 'shared': it is the past; drop `past`"
        if not self.causal:
            yield (
                "`causal` is False; attention over a shared cache is causal; give `cache`='growing'"
            )
        if self.mask != "none":
            yield (
                f"`mask` is {shown(self.mask)}, but `cache` is 'shared': its rows have lengths, "
                "past_lengths, and no mask; drop `mask`, or give `cache`='growing'"
            )

    def _wrong_norms(self) -> Iterator[str]:
        for name, default in NORM_DEFAULTS.items():
            value = getattr(self, name)
            if self.qk_norm == "none" and value != default:
                yield (
                    f"`{name}` is {value}, but there is no `qk_norm` that would use it; give "
                    f"`qk_norm` or drop `{name}`"
                )

    @property
    def rotation(self) -> RopeOptions:
        """The options of the rotation inside.

        With positions "past" the graph has no input for positions: they continue from the length of
        the past.
        """
        return RopeOptions(
            target=self.target,
            dtype=self.dtype,
            layout=TARGETS[self.target].attention_layout,
            inputs=("q", "k"),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            positions="position_ids" if self.positions == "position_ids" else "none",
            max_positions=self.max_positions,
            opset=self.opset,
        )

    @property
    def is_shared(self) -> bool:
        """Whether the past and the present are one buffer, whose rows have lengths."""
        return self.cache == "shared"

    @property
    def cached_dtype(self) -> str:
        """The name of the dtype of past and present keys and values."""
        return str(self.dtype if self.cache_dtype is None else self.cache_dtype)

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the projections."""
        inputs = () if self.hidden is None else ("q", "k", "v")
        outputs = () if self.output is None else ("o",)
        return (*inputs, *outputs)

    def array_inputs(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of scales, norms' weights and sinks that are inputs."""
        inputs: dict[str, tuple[int, ...]] = {}
        if self.cache_dtype is not None:
            inputs["k_scale"] = (1, self.num_kv_heads, 1, head_dim)
            inputs["v_scale"] = (1, self.num_kv_heads, 1, self.v_head_dim)
        if self.qk_norm == INPUT:
            inputs |= {"q_norm_weight": (head_dim,), "k_norm_weight": (head_dim,)}
        if self.sinks == INPUT:
            inputs["sinks"] = (self.num_heads,)
        return inputs

    def sizes(self, head_dim: int) -> dict[str, tuple[int, int]]:
        """Return {name: (number of heads, width of a head)} of q, k and v."""
        return {
            "q": (self.num_heads, head_dim),
            "k": (self.num_kv_heads, head_dim),
            "v": (self.num_kv_heads, self.v_head_dim),
        }

    def _check_rope(self, rope: RotaryEmbedding) -> None:
        """Raise ValueError where these options or their target cannot express the attention."""
        # First, since the check of the rotation would name a `positions` that was not given.
        check_coordinates(rope, self.positions)
        self.rotation.check_rope(rope)
        target = TARGETS[self.target]
        problem = next(target.attention_problems(rope, self), None)
        if problem is not None:
            able = ""
            if any(self._fits(other, rope) for other in TARGETS.values()):
                able = f"; {capable_targets(lambda other: self._fits(other, rope))} can express it"
            raise ValueError(f"{problem}{able}")
        needs_query_lengths = self.batch_chunks and not target.takes_chunks
        if needs_query_lengths and not runtime_takes_query_lengths():
            raise ValueError(
                "`batch_chunks` is True, but the GroupQueryAttention of onnxruntime "
                f"{onnxruntime.__version__} takes several new tokens on a past for a batch of 1 "
                "only; it needs onnxruntime 1.32"
            )

    def _fits(self, target: Target, rope: RotaryEmbedding) -> bool:
        """Return True if a target can express this attention."""
        takes_cache = self.cache_dtype is None or target.int8_cache
        takes_dtype = np.dtype(self.dtype) in target.dtypes
        is_right = next(target.attention_problems(rope, self), None) is None
        return takes_cache and takes_dtype and is_right

    def check_arrays(self, head_dim: int, arrays: Mapping[str, Float64]) -> None:
        """Raise ValueError unless weights, norms and sinks have the shapes that these options need.

        arrays: projections, their "…_bias", "…_norm" of q and k, and "sinks", by name.
        """
        for name, array in arrays.items():
            shape = self._array_shape(name, head_dim)
            if array.shape != shape:
                argument = f"`weights[{shown(name)}]`"
                if name == "sinks":
                    argument = "`sinks`"
                elif name.endswith("_norm"):
                    argument = f"`qk_norm` of {name.removesuffix('_norm')}"
                raise ValueError(f"{argument} has shape {array.shape}; it must be {shape}")

    def _array_shape(self, name: str, head_dim: int) -> tuple[int, ...]:
        """Return the shape of an array of weights, biases, norms or sinks."""
        if name == "sinks":
            return (self.num_heads,)
        if name.endswith("_norm"):
            return (head_dim,)
        projection = name.removesuffix("_bias")
        if projection == "o":
            shape = (self.output or 0, self.num_heads * self.v_head_dim)
        else:
            heads, width = self.sizes(head_dim)[projection]
            shape = (heads * width, self.hidden or 0)
        return shape[:1] if name.endswith("_bias") else shape


def _float32(name: str, value: object) -> float:
    """Return a positive number; raise if it is close to the limits of float32 or beyond them."""
    number = real_number(name, value)
    if not _fits_float32(number):
        raise ValueError(_float32_problem(name, number))
    return number


def _fits_float32(number: float) -> bool:
    return 2.0**-126 <= number < 2.0**62


def _float32_problem(name: str, number: float) -> str:
    return f"`{name}` is {shown(number)}; it must be at least 2^-126 and below 2^62"


def _cache_dtype(value: DTypeLike | None) -> str | None:
    """Return the name of a cache's own dtype, None if it is that of queries and keys."""
    return None if value is None else str(known_dtype("cache_dtype", value, CACHE_DTYPES))


def _batch_chunks(target: Target, cache: str, value: bool | None) -> bool:
    """Return whether several new tokens on a past work for a batch above 1.

    None: as the target has it, in onnxruntime's operator as the installed release has it.
    """
    if value is None:
        return target.takes_chunks or (cache == "shared" and runtime_takes_query_lengths())
    wanted = boolean("batch_chunks", value)
    if wanted == target.takes_chunks or (cache == "shared" and not target.takes_chunks):
        return wanted
    remedy = "drop it" if target.takes_chunks else "it needs `cache`='shared'"
    raise ValueError(
        f"`batch_chunks` is {wanted}, but with target {target.name!r} and `cache` {cache!r} it is "
        f"{target.takes_chunks}; {remedy}"
    )


def _name_prefix(value: object) -> str:
    """Return a prefix of names; raise unless it is a short text of ordinary characters."""
    if not isinstance(value, str):
        raise TypeError(f"`name_prefix` is {shown(value)}; it must be a string")
    if len(value) > limits.INPUTS or not set(value) <= PREFIX_CHARACTERS:
        raise ValueError(
            f"`name_prefix` is {shown(value)}; it must be at most {limits.INPUTS} letters, digits "
            "and characters of _./:-"
        )
    return value


def _width(name: str, value: int | None) -> int | None:
    """Return the width of hidden states, or None if `value` is None."""
    if value is None:
        return None
    return whole_number(name, value, 1, limits.HIDDEN_SIZE)
