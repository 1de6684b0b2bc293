"""The rules of the options, of their values and of targets: the first broken one raises."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import DTypeLike

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.arrays import to_dtype
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import DTYPES

from .options import NORM_EPSILON, AttentionOptions, RopeOptions, TargetName
from .targets import TARGETS

NORM_DEFAULTS = {"norm_epsilon": NORM_EPSILON, "norm_offset": 0.0}
PREFIX_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_./:-")

_ONE_LENGTH = "give `rope.at_length(seq_len)`"

FLOAT32_RULE = "be at least 2^-126 and below 2^62"

Options = TypeVar("Options", RopeOptions, AttentionOptions)
# From the name and the value of an option to the value in plain types.
ValueCheck = Callable[[str, Any], Any]


def check_rope(rope: object) -> None:
    """Raise TypeError or ValueError unless `rope` is a RotaryEmbedding of one sequence length."""
    if not isinstance(rope, RotaryEmbedding):
        raise ArgumentTypeError("rope", Finding.type_of(rope), "be a RotaryEmbedding")
    spec = rope.spec
    if spec.needs_length:
        finding = Finding(
            f"has rope type {spec.rope_type!r}, which depends on the sequence length "
            f"({spec.length_ranges})"
        )
        raise ArgumentError("rope", finding, "be for one length", _ONE_LENGTH)
    if len(spec.inv_freq) > 1:
        finding = Finding(f"holds frequencies for {len(spec.inv_freq)} batch rows")
        raise ArgumentError("rope", finding, "be for one length", _ONE_LENGTH)


def checked_options(options: Options, rope: RotaryEmbedding) -> Options:
    """Return options in plain types.

    Raises TypeError or ValueError at the first that is wrong, or that the target cannot express;
    the text names the targets that can.
    """
    try:
        return _checked_options(options, rope)
    except ArgumentError as error:
        if error.remedy or error.argument == "target":
            raise
        able = []
        for name in get_args(TargetName):
            with suppress(ArgumentError):
                _checked_options(replace(options, target=name), rope)
                able.append(repr(name))
        if not able:
            raise
        noun = "target" if len(able) == 1 else "targets"
        remedy = f"{noun} {' and '.join(able)} can express it"
        raise ArgumentError(error.argument, error.finding, error.rule, remedy) from None


def _checked_options(options: Options, rope: RotaryEmbedding) -> Options:
    """Return options in plain types; raise where they or their target cannot express a rotation."""
    options = plain_options(options)
    if rope.axes > 1 and not rope.spec.shared_id and options.positions != "position_ids":
        rule = f"be 'position_ids': with {rope.axes} axes each token needs its coordinates"
        raise ArgumentError("positions", options.positions, rule)
    _check_rotation(options.rotation, rope)
    if isinstance(options, AttentionOptions):
        TARGETS[options.target].attention.check(rope, options)
    return options


def plain_options(options: Options) -> Options:
    """Return the options in plain types; raise TypeError or ValueError at the first wrong one."""
    types = get_type_hints(type(options))
    values = {
        field.name: _plain_value(field.name, getattr(options, field.name), types[field.name])
        for field in fields(options)
        if field.name != "opset"
    }
    target = TARGETS[values["target"]]
    if np.dtype(values["dtype"]) not in target.dtypes:
        rule = f"be one of {', '.join(map(str, target.dtypes))} for {target.op}"
        raise ArgumentError("dtype", values["dtype"], rule)
    first, last = target.opsets
    if values.get("cache") == "shared":
        first = target.shared_cache_opset or first
    opset = options.opset
    values["opset"] = first if opset is None else scalars.whole_number("opset", opset, first, last)
    options = replace(options, **values)
    if isinstance(options, RopeOptions):
        _check_rope_options(options)
    else:
        _check_attention_options(options)
    return options


def _check_rope_options(options: RopeOptions) -> None:
    """Raise ValueError where options of a rotation contradict each other."""
    kv_heads = options.num_kv_heads
    if options.layout == "thd" and options.positions != "position_ids":
        rule = "be 'position_ids' for packed tokens (thd)"
        raise ArgumentError("positions", options.positions, rule)
    if kv_heads is not None and options.num_heads is None:
        raise ArgumentError("num_kv_heads", kv_heads, "be left out, as `num_heads` is None")
    if kv_heads is not None and len(options.inputs) == 1:
        rule = f"be left out, as `inputs` is {shown(options.inputs)}"
        raise ArgumentError("num_kv_heads", kv_heads, rule, "or give a second input")
    if options.layout == "bsd" and options.num_heads is None:
        rule = "be given with layout bsd (batch, seq, heads·head_dim)"
        raise ArgumentError("num_heads", None, rule)


def _check_rotation(options: RopeOptions, rope: RotaryEmbedding) -> None:
    """Raise ValueError where the target or a table cannot express the rotation."""
    spec = rope.spec
    target = TARGETS[options.target]
    if options.max_positions is not None:
        rows = options.max_positions
        scalars.check_table_size("max_positions", rows, rows, spec.pairs)
    pair_axes = np.count_nonzero(spec.inv_freq[0], axis=0)
    frequency_heads = spec.inv_freq.shape[2]
    if spec.angle_dtype == "float32" and (pair_axes > 1).any():
        finding = Finding("has `angle_dtype` 'float32' and pairs that rotate by several axes")
        rule = "have 'float64': a sum over axes depends on the order in which a runtime adds"
        raise ArgumentError("rope", finding, rule)
    if frequency_heads > 1 and not target.per_head:
        finding = Finding(f"has frequencies for {frequency_heads} heads")
        rule = f"have the same for all heads, as {target.op} takes one cos and sin"
        raise ArgumentError("rope", finding, rule, "or give `target`='primitive' and `num_heads`")
    for name, count in zip(("num_heads", "num_kv_heads"), options.heads.values(), strict=False):
        if frequency_heads > 1 and (count is None or count % frequency_heads):
            raise ArgumentError(name, count, f"be a multiple of {frequency_heads}, as in `rope`")
    if options.max_positions is not None and (spec.pair_axis is None or frequency_heads > 1):
        rule = (
            "be left out: `rope` has pairs that rotate by several axes, or frequencies per head, "
            "and tables cannot hold such a rotation"
        )
        raise ArgumentError("max_positions", options.max_positions, rule)


def _check_attention_options(options: AttentionOptions) -> None:
    """Raise ValueError where options of an attention contradict each other."""
    if options.num_heads % options.num_kv_heads:
        rule = f"be a multiple of `num_kv_heads`, {options.num_kv_heads}"
        raise ArgumentError("num_heads", options.num_heads, rule)
    # "bhsd" given explicitly cannot be told from the default, so "bshd" alone is refused.
    if options.hidden is not None and options.layout == "bshd":
        rule = "be left out, as `weights` are given: hidden states are bsd"
        raise ArgumentError("layout", options.layout, rule)
    if options.window is not None and not options.causal:
        rule = "be None, as `causal` is False: it counts keys up to a query"
        raise ArgumentError("window", options.window, rule)
    if options.softcap is not None and not _fits_float32(options.scale / options.softcap):
        raise ArgumentError("scale / softcap", options.scale / options.softcap, FLOAT32_RULE)
    for name, default in NORM_DEFAULTS.items():
        value = getattr(options, name)
        if options.qk_norm == "none" and value != default:
            raise ArgumentError(name, value, "be left out, as there is no `qk_norm` that uses it")
    _check_cache(options)
    _check_names(options)


def _check_names(options: AttentionOptions) -> None:
    """Raise ValueError where options contradict the names of a whole decoder."""
    if options.names == "rope_cpu":
        if options.layer is not None:
            rule = "be left out, as `names` is 'rope_cpu'"
            raise ArgumentError("layer", options.layer, rule, "or give `names`='optimum'")
        return
    if options.layer is None:
        raise ArgumentError("layer", None, "be the index in the names, as `names` is 'optimum'")
    if not options.past:
        raise ArgumentError("past", False, "be left out, as `names` is 'optimum'")
    if options.mask != "none":
        rule = "be left out, as `names` is 'optimum': attention_mask says which tokens are padding"
        raise ArgumentError("mask", options.mask, rule)


def _check_cache(options: AttentionOptions) -> None:
    """Raise ValueError where options contradict the cache, or the target has no such cache."""
    given = f"as `cache` is {options.cache!r}"
    if options.is_shared and not options.past:
        raise ArgumentError("past", False, f"be left out, {given}: it is the past")
    if options.is_shared and not options.causal:
        rule = "be True for attention over a shared cache"
        raise ArgumentError("causal", False, rule, "or give `cache`='growing'")
    if options.is_shared and options.mask != "none":
        raise ArgumentError("mask", options.mask, f"be left out, {given}: rows have lengths")
    if options.keeps_window and options.window is None:
        raise ArgumentError("window", None, f"be given, {given}")
    if options.cache_dtype is not None and not options.is_shared:
        rule = f"be left out, {given}"
        raise ArgumentError("cache_dtype", options.cache_dtype, rule, "or give `cache`='shared'")


def _plain_value(name: str, value: Any, type_: Any) -> Any:
    """Return the value of an option in a plain type; raise unless it has the type and its rule."""
    if get_origin(type_) is Literal:
        return scalars.choice(name, value, get_args(type_))
    if type_ is bool:
        return scalars.boolean(name, value)
    if value is None and type(None) in get_args(type_):
        return None
    return _CHECKS[name](name, value)


def _dtype_name(name: str, value: DTypeLike, known: Iterable[np.dtype[Any]]) -> str:
    """Return the name of a dtype; raise TypeError unless it is one of the known ones."""
    dtype = to_dtype(value)
    if dtype is None or dtype not in known:
        given = value if dtype is None else Finding(f"is {cut(str(dtype))}")
        raise ArgumentTypeError(name, given, f"be one of {', '.join(map(str, known))}")
    return str(dtype)


def _float32(name: str, value: object) -> float:
    """Return a positive number; raise if it is close to the limits of float32 or beyond them."""
    number = scalars.real_number(name, value)
    if not _fits_float32(number):
        raise ArgumentError(name, number, FLOAT32_RULE)
    return number


def _fits_float32(number: float) -> bool:
    return 2.0**-126 <= number < 2.0**62


def _input_names(name: str, value: object) -> tuple[str, ...]:
    """Return the names of inputs; raise unless they are different identifiers."""
    if not isinstance(value, list | tuple):
        raise ArgumentTypeError(name, value, "be a sequence of names")
    scalars.check_length(name, value, limits.INPUTS)
    identifiers = all(isinstance(entry, str) and entry.isidentifier() for entry in value)
    if not value or not identifiers or len(set(value)) < len(value):
        rule = "be a non-empty list of different identifiers (letters, digits, _)"
        raise ArgumentError(name, value, rule)
    return tuple(value)


def _prefix(name: str, value: object) -> str:
    """Return a prefix of names; raise unless it is a short text of ordinary characters."""
    if not isinstance(value, str):
        raise ArgumentTypeError(name, value, "be a string")
    if len(value) > limits.INPUTS or not set(value) <= PREFIX_CHARACTERS:
        rule = f"be at most {limits.INPUTS} letters, digits and characters of _./:-"
        raise ArgumentError(name, value, rule)
    return value


# The checks of options that are neither truth values nor one of a few names.
_CHECKS: dict[str, ValueCheck] = {
    "dtype": partial(_dtype_name, known=DTYPES.values()),
    "max_positions": partial(scalars.whole_number, most=limits.TABLE),
    "inputs": _input_names,
    "num_heads": partial(scalars.whole_number, most=limits.HEADS),
    "num_kv_heads": partial(scalars.whole_number, most=limits.HEADS),
    "v_head_dim": partial(scalars.whole_number, most=limits.HEAD_DIM),
    "norm_epsilon": _float32,
    "norm_offset": partial(scalars.real_number, zero=True),
    "hidden": partial(scalars.whole_number, most=limits.HIDDEN_SIZE),
    "output": partial(scalars.whole_number, most=limits.HIDDEN_SIZE),
    "window": scalars.whole_number,
    "softcap": _float32,
    "scale": _float32,
    "cache_dtype": partial(_dtype_name, known=[np.dtype(np.int8)]),
    "name_prefix": _prefix,
    "layer": partial(scalars.whole_number, least=0, most=limits.LAYERS),
}
