"""Adapter for GGUF files, the format of llama.cpp: the rotations that it computes from a file.

Metadata become rope parameters in Hugging Face form, from which `frequencies` computes.

References
----------
`load_hparams` and the graphs of llama.cpp; the constructor of `llama_context`; `rope_yarn` and
`ggml_mrope_cache_init` in ggml's ops.cpp.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.axes import base_frequencies, mrope_pair_axis, with_pair_axis
from rope_cpu.frequencies.scaling import DEFAULT_THETA, scaled, without_nulls
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.models.gguf_header import read_header
from rope_cpu.models.keys import is_rotation_key
from rope_cpu.models.layer import FULL, SLIDING
from rope_cpu.models.model import Asked, Model
from rope_cpu.models.model_types import Config, data

# `architectures`: what the code of llama.cpp decides for each one, beside the metadata.
#
# pairing: its name in llama.cpp. "norm" pairs (2i, 2i+1), the others (i, i+n). Those with "mrope"
#     have several axes, "…_or_mrope" if the file has sections.
# permuted: the converter reorders the rows of q and k, so that the pairing differs from that of the
#     model's config.json.
# latent: latent attention (MLA) or its like, in which a slice of each head is rotated.
# factors: the tensors of factors are used, in layers without a window.
# alpha: the NTK-aware alpha is used.
# windowed: the layers with a sliding window, if they may differ. own: keys to which "_swa" is
#     appended. values: the defaults of these. without: beginnings of the keys that do not apply,
#     those of scaling. always: the window needs no key.
# yarn: reads: names in "rope.scaling.yarn_…" that are read. beta_fast: the default. log_unit: the
#     log multiplier of mscale_all_dim 1. equal_mscales: mscale equals mscale_all_dim.
# refused: the reason why its files are refused. condition: a key, some of its values, and whether
#     files with these values are the refused ones, or all others.
#
# `yarn`: that of architectures without their own. `tensors`: the tensors of factors, divisors of
# the frequencies, and their names as rope parameters. `inert`: keys that files have beside a
# scaling type that does not use them, and the width of a head with latent attention, of which
# `rope.dimension_count` elements are rotated. `neutral`: the values of unread keys that change
# nothing, if they are not 0 and 1. `permuted`: the note on files whose pairing differs;
# `left_over`: that on pairs which no axis takes in turn.
TABLE: Config = data("gguf.json")
ARCHITECTURES: Mapping[str, Config] = TABLE["architectures"]
FACTORS: Mapping[str, str] = TABLE["tensors"]

# Factors from here on stop a pair: llama.cpp's converter writes 1e30 for the pairs of Gemma 4 that
# do not rotate. No position below 2^53 rotates such a pair by more than 2^-46.
_STOPPED = 2.0**99

_ALPHA = "rope.scaling.alpha"
_FACTOR = "rope.scaling.factor"
_SECTIONS = "rope.dimension_sections"
_YARN = "rope.scaling.yarn_"

# Metadata are float32: numbers that agree to this relative difference are equal.
_EQUAL = 2.0**-20

# The largest number of files of a split model.
_PARTS = 1000

_length = partial(scalars.whole_number, least=0)
_width = partial(scalars.whole_number, least=2, most=limits.HEAD_DIM)
_number = partial(scalars.real_number, zero=True)


@dataclass(frozen=True, eq=False)
class Metadata:
    """The metadata and the factors of a file, by key without the name of the architecture.

    Parameters
    ----------
    architecture : str
        The value of general.architecture.
    facts : mapping
        The row of the architecture in gguf.json.
    values : mapping
        The values of the architecture.
    tensors : {name: ndarray of float64, shape (elements,)}
        The tensors of factors that the file has.
    overrides : mapping
        Values that take precedence, as flags of llama.cpp do.
    read : set of str
        The keys that were looked up.
    """

    architecture: str
    facts: Config
    values: Config
    tensors: Mapping[str, Float64]
    overrides: Config
    read: set[str] = field(default_factory=set)

    def get(self, key: str) -> Any:
        """Return the value of a key, None if it is missing."""
        self.read.add(key)
        return self.overrides.get(key, self.values.get(key))

    def checked(self, key: str, default: Any, check: Callable[[str, Any], Any]) -> Any:
        """Return the checked value of a key, or the default for a missing one."""
        value = self.get(key)
        return default if value is None else check(f"{self.architecture}.{key}", value)

    def yarn_number(self, name: str, default: float) -> Any:
        """Return a number of YaRN; the default for -1, and if llama.cpp does not read it.

        Few architectures read these keys, but the flags of llama.cpp apply to all.
        """
        key = f"{_YARN}{name}"
        is_read = name in self.facts["yarn"]["reads"] or key in self.overrides
        return self.checked(key, default, _number) if is_read and self.get(key) != -1 else default

    def error(self, key: str, rule: str) -> ArgumentError:
        """Return the error for the value of a key."""
        return ArgumentError(cut(f"{self.architecture}.{key}"), self.get(key), rule)


# The rotation of layers of one type, and its rope parameters in Hugging Face form.
Rotation = tuple[RopeSpec, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GgufModel(Model):
    """A GGUF file: its metadata, and the rotation of each layer type that differs."""

    unknown_attention = "a GGUF file has not all of the attention; use config.json"

    specs: Mapping[str | None, RopeSpec]

    def _build_spec(self, asked: Asked, interleaved: bool | None, angle_dtype: str) -> RopeSpec:
        layer_type, layer = asked
        scalars.choice("angle_dtype", angle_dtype, ("float64",))
        if layer is not None:
            raise ArgumentError("layer", layer, "be left out", "give `layer_type`")
        if layer_type not in self.specs:
            rule = f"be one of {', '.join(map(repr, self.specs))}"
            raise ArgumentError("layer_type", layer_type, rule)
        return self.specs[layer_type]


def parse(path: str | PathLike[str], overrides: Config | None = None) -> GgufModel:
    """Parse a GGUF file, or the first one of a split model.

    overrides: values that replace those of the file; see `RotaryEmbedding.from_gguf`.

    Raises ValueError, which names the file, if it is damaged or if llama.cpp's code rather than the
    file determines the rotation. Raises OSError if it cannot be read.
    """
    name = os.fsdecode(path)
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ArgumentTypeError("overrides", Finding.type_of(overrides), "be a dict or None")
    try:
        return _model(_metadata(name, without_nulls(overrides or {})))
    except (TypeError, ValueError, FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"`path` {shown(name)}: {error}") from None


def _metadata(path: str, overrides: Config) -> Metadata:
    """Read a file, and the factors in the other files of a split model."""
    header, tensors = read_header(path, FACTORS)
    for part in _further_parts(path, header.get("split.count", 1)):
        tensors |= read_header(part, FACTORS)[1]
    name = header.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        rule = f"be in {TABLE['version']}; otherwise build a RotaryEmbedding from numbers"
        raise ArgumentError("general.architecture", name, rule)
    prefix = f"{name}."
    values = {key.removeprefix(prefix): header[key] for key in header if key.startswith(prefix)}
    facts = {"yarn": TABLE["yarn"], **ARCHITECTURES[name]}
    return Metadata(name, facts, values, tensors, overrides)


def _further_parts(path: str, count: object) -> list[str]:
    """Return the paths of the other files of a split model with so many."""
    count = scalars.whole_number("split.count", count, 0, _PARTS)
    end = f"-00001-of-{count:05}.gguf"
    if count > 1 and not path.endswith(end):
        raise ArgumentError("split.count", count, f"be 1 unless `path` ends in {end}")
    stem = path.removesuffix(end)
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(2, count + 1)]


def _model(metadata: Metadata) -> GgufModel:
    """Return the model that a file's metadata describe."""
    facts = metadata.facts
    name = metadata.architecture
    key, refused_values, refuses = facts.get("condition", ("", (None,), True))
    if "refused" in facts and (metadata.get(key) in refused_values) == refuses:
        remedy = "read the model's config.json with `from_config`, or build it from numbers"
        raise ValueError(f"`general.architecture` is {name!r}: {facts['refused']}; {remedy}")
    rotations = _rotations(metadata)
    specs = {label: spec for label, (spec, _) in rotations.items()}
    if None in specs:
        specs |= dict.fromkeys((FULL, SLIDING), specs[None])
    windowed = metadata.get("attention.sliding_window_pattern")
    flags = windowed if isinstance(windowed, list) else ()
    kv_heads = 1 if facts.get("latent") else metadata.get("attention.head_count_kv")
    values = {
        "max_position_embeddings": metadata.checked("context_length", None, _length),
        "layer_types": [SLIDING if flag else FULL for flag in flags],
        "attention.head_count": metadata.get("attention.head_count"),
        "attention.head_count_kv": kv_heads,
    }
    own_values = {f"{name}.{key}": value for key, value in metadata.values.items()}
    return GgufModel(
        source={"general.architecture": name, **own_values},
        model_type=name,
        values=without_nulls(values),
        rope_parameters={label: parameters for label, (_, parameters) in rotations.items()},
        pairing_note=_pairing_note(facts, next(iter(specs.values()))),
        specs=specs,
    )


def _pairing_note(facts: Config, spec: RopeSpec) -> str | None:
    """Return in what the pairs differ from those of config.json, or of llama.cpp."""
    by_turns = (spec.pair_axis or ()) if facts["pairing"] == "imrope" else ()
    left_over = [str(pair) for pair, axis in enumerate(by_turns) if axis != pair % 3]
    if left_over:
        return f"pairs {cut(', '.join(left_over))}: {TABLE['left_over']}"
    return TABLE["permuted"] if facts.get("permuted") else None


def _rotations(metadata: Metadata) -> dict[str | None, Rotation]:
    """Return the rotation of each layer type, under None if all layers have the same.

    Overrides apply to layers without a window: flags of llama.cpp reach the others in part only.
    """
    full = _rotation(metadata)
    windowed_layers = _windowed_layers(metadata, full[0])
    _refuse_unread(metadata, full)
    if windowed_layers is None:
        return {None: full}
    if metadata.overrides:
        return {FULL: full}
    windowed = _rotation(windowed_layers)
    is_same = replace(windowed[0], rope_type=full[0].rope_type) == full[0]
    return {None: full} if is_same else {FULL: full, SLIDING: windowed}


def _windowed_layers(metadata: Metadata, full: RopeSpec) -> Metadata | None:
    """Return the metadata of layers with a sliding window, None if they are those of all layers."""
    facts = metadata.facts.get("windowed")
    window = metadata.checked("attention.sliding_window", 0, _length)
    if facts is None or not (window or facts.get("always")):
        return None
    without = tuple(facts.get("without", ()))
    values = {key: value for key, value in metadata.values.items() if not key.startswith(without)}
    values |= {"rope.dimension_count": full.rotary_dim, **facts.get("values", {})}
    for key in facts["own"]:
        check = scalars.real_number if key == "rope.freq_base" else _width
        values[key] = metadata.checked(f"{key}_swa", values.get(key), check)
    return replace(metadata, values=values, tensors={})


def _rotation(metadata: Metadata) -> Rotation:
    """Return the rotation that metadata describe."""
    head_dim = _head_dim(metadata)
    rotary_dim = metadata.checked("rope.dimension_count", head_dim, _width)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise metadata.error("rope.dimension_count", f"be even and at most head_dim {head_dim}")
    parameters = {"rope_theta": _theta(metadata, head_dim)} | _scaling(metadata)
    width = rotary_dim if metadata.facts.get("latent") else head_dim
    spec = scaled(width, rotary_dim=rotary_dim, scaling=parameters)
    multiplier = metadata.checked("rope.scaling.attn_factor", 1.0, scalars.real_number)
    if spec.rope_type != "yarn":
        multiplier *= metadata.yarn_number("attn_factor", 1.0)
    spec = replace(spec, attention_factor=spec.attention_factor * multiplier)
    spec, parameters = _with_factors(metadata, spec, parameters)
    return _paired(metadata, spec), parameters


def _head_dim(metadata: Metadata) -> int:
    """Return the width of a head: key_length, else embedding_length / head_count."""
    width: int = metadata.checked("attention.key_length", 0, _width)
    if width:
        return width
    heads = metadata.get("attention.head_count")
    if isinstance(heads, list) and heads:
        heads = heads[0]  # llama.cpp takes those of the first layer
    name = f"{metadata.architecture}.attention.key_length or embedding_length / head_count"
    embedding = metadata.checked("embedding_length", 0, _length)
    return _width(name, embedding // scalars.whole_number(name, heads, 1, limits.HEADS))


def _theta(metadata: Metadata, head_dim: int) -> float:
    """Return the base, raised by the NTK-aware alpha of HunYuan."""
    theta: float = metadata.checked("rope.freq_base", DEFAULT_THETA, scalars.real_number)
    alpha = metadata.checked(_ALPHA, 0.0, _number) if metadata.facts.get("alpha") else 0.0
    try:
        return theta * alpha ** (head_dim / (head_dim - 2)) if alpha else theta
    except ArithmeticError:
        raise metadata.error(_ALPHA, f"make a base for heads {head_dim} wide") from None


def _scaling(metadata: Metadata) -> dict[str, Any]:
    """Return rope type, factor and YaRN, in Hugging Face form."""
    check = partial(scalars.choice, names=("none", "linear", "yarn", "longrope"))
    scaling_type = metadata.checked("rope.scaling.type", "linear", check)
    factor = 1.0
    if scaling_type != "none":
        key = "rope.scale_linear" if metadata.get(_FACTOR) is None else _FACTOR  # in older files
        factor = metadata.checked(key, 1.0, _number) or 1.0  # 0 stands for none
    strength = metadata.yarn_number("ext_factor", 1.0 if scaling_type == "yarn" else 0.0)
    if strength > 0:
        return _yarn_scaling(metadata, factor, strength)
    return {} if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn_scaling(metadata: Metadata, factor: float, strength: float) -> dict[str, Any]:
    """Return the parameters of YaRN; no key has mscale, which is 1, or mscale_all_dim itself."""
    yarn = metadata.facts["yarn"]
    all_dim = metadata.yarn_number("log_multiplier", 0.0) / yarn["log_unit"]
    return {
        "rope_type": "yarn",
        "factor": factor,
        "ext_factor": strength,
        "beta_fast": metadata.yarn_number("beta_fast", yarn["beta_fast"]),
        "beta_slow": metadata.yarn_number("beta_slow", 1.0),
        "original_max_position_embeddings": _original_length(metadata),
        "mscale": all_dim if yarn["equal_mscales"] else 1.0,
        "mscale_all_dim": all_dim,
    }


def _original_length(metadata: Metadata) -> Any:
    """Return the original length in tokens, None if it is missing; 0 stands for a missing key."""
    length = metadata.checked("rope.scaling.original_context_length", 0, _length)
    return length or metadata.checked("context_length", None, _length)


def _with_factors(metadata: Metadata, spec: RopeSpec, parameters: dict[str, Any]) -> Rotation:
    """Return the rotation with the divisors in the file's tensors."""
    factors = {FACTORS[name]: _factors(metadata, name, spec.pairs) for name in metadata.tensors}
    if "rope_freqs" in factors:
        divisors = factors["rope_freqs"]
        inv_freq = np.where(divisors < _STOPPED, spec.inv_freq / divisors, 0.0)
        spec = replace(spec, inv_freq=inv_freq, rope_type="rope_freqs")
        return spec, {**parameters, "rope_freqs": divisors.tolist()}
    if not factors:
        return spec, parameters
    # Other scaling, which no known file has beside these factors, becomes a part of them.
    theta = parameters["rope_theta"]
    growth = base_frequencies(theta, spec.rotary_dim) / spec.inv_freq[0, 0, 0]
    length = _original_length(metadata)
    parameters = {
        "rope_theta": theta,
        "rope_type": "longrope",
        "original_max_position_embeddings": length,
        "attention_factor": spec.attention_factor.item(),
        **{name: (growth * divisors).tolist() for name, divisors in factors.items()},
    }
    spec = scaled(spec.head_dim, rotary_dim=spec.rotary_dim, scaling=parameters)
    spec.at_length([length + 1])  # refuses factors for long sequences here, not when one comes
    return spec, parameters


def _factors(metadata: Metadata, name: str, pairs: int) -> Float64:
    """Return a tensor of factors; raise unless llama.cpp uses it and it fits."""
    factors = metadata.tensors[name]
    if not metadata.facts.get("factors"):
        finding = Finding(f"is unused for {metadata.architecture!r}")
        raise ArgumentError(name, finding, "be left out")
    if factors.size != pairs:
        raise ArgumentError(name, Finding.shape_of(factors), f"have {pairs} elements")
    for factor in factors.tolist():
        scalars.real_number(name, factor)
    return factors


def _paired(metadata: Metadata, spec: RopeSpec) -> RopeSpec:
    """Return the rotation with the pairs of the architecture, divided among its axes.

    Sections that are too short repeat. Pairs that no axis takes in turn belong to the first one, as
    in Qwen3-VL; llama.cpp gives them the fourth position, which is 0 for text.
    """
    pairing = metadata.facts["pairing"]
    check = partial(scalars.whole_numbers, least=0, most=limits.HEAD_DIM, longest=4)
    sections = metadata.checked(_SECTIONS, (), check)
    if pairing not in ("mrope", "imrope") and not all((*sections, 0, 0)[:2]):
        return replace(spec, interleaved=pairing.startswith("norm"))
    axes = {"norm": 1, "neox": 1, "imrope": 3}.get(pairing, 4)
    if not any(sections) or any(sections[axes:]):
        raise metadata.error(_SECTIONS, f"have the pairs of at most {axes} axes")
    own_axes = mrope_pair_axis((*sections, 0, 0)[:axes], pairing == "imrope")
    pair_axis = tuple(np.resize(own_axes, spec.pairs).tolist())
    return with_pair_axis(spec, pair_axis, max(pair_axis) + 1)


def _refuse_unread(metadata: Metadata, full: Rotation) -> None:
    """Raise for an unread key of rotations or override, unless its value changes nothing."""
    spec, parameters = full
    neutral = {
        **TABLE["neutral"],
        "rope.freq_base_swa": (parameters["rope_theta"],),
        "rope.dimension_count_swa": (spec.rotary_dim,),
        "attention.key_length_swa": (spec.head_dim,),
        f"{_YARN}beta_fast": (metadata.facts["yarn"]["beta_fast"],),
        # Converters write a multiplier of 1, or the factor itself, which llama.cpp computes.
        f"{_YARN}attn_factor": (1, spec.attention_factor.item()),
    }
    inert = (*TABLE["inert"], *(f"{_YARN}{name}" for name in metadata.facts["yarn"]["reads"]))
    for key, value in {**metadata.values, **metadata.overrides}.items():
        names_rotation = is_rotation_key(key) or str(key).startswith("attention.key_length")
        is_wanted = key in metadata.overrides or (names_rotation and key not in inert)
        usual = () if key in metadata.overrides else (0, 1)
        is_close = any(_is_close(value, number) for number in neutral.get(key, usual))
        if is_wanted and key not in metadata.read and not is_close:
            raise metadata.error(key, "be left out, as llama.cpp does not use it here")


def _is_close(value: Any, number: float) -> bool:
    """Return whether two values are the same number, as float32; False is 0."""
    is_number = isinstance(value, int | float) and value is not True and abs(value) <= 2**64
    return is_number and math.isclose(value, number, rel_tol=_EQUAL)
