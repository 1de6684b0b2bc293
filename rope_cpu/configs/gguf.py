"""Adapter for GGUF files: from metadata and factors to a ModelConfig."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.arguments.texts import shown
from rope_cpu.configs.attention_facts import Attention
from rope_cpu.configs.gguf.architectures import Architecture, architecture
from rope_cpu.configs.gguf.frequencies import Rotation, same_rotation
from rope_cpu.configs.gguf.header import read_header
from rope_cpu.configs.gguf.layer_rotations import full_rotation, windowed_rotation
from rope_cpu.configs.gguf.values import FACTOR_TENSORS, Metadata
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.model_types import ALL_LAYERS
from rope_cpu.frequencies.spec import RopeSpec

FULL = "full_attention"
WINDOWED = "sliding_attention"

# The name of one file of a model that is split into several.
_PART = re.compile(r"(.*-)(\d{5})(-of-\d{5}\.gguf)", re.DOTALL)
_LARGEST_SPLIT = 1000


@dataclass(frozen=True, kw_only=True)
class GgufConfig(ModelConfig):
    """A GGUF file: its metadata, and the rotation of each layer type that differs."""

    architecture: Architecture
    metadata: Metadata
    rotations: Mapping[str, Rotation]

    def _build_spec(
        self,
        layer_type: str | None,
        layer: int | None,
        interleaved: bool | None,
        angle_dtype: str,
    ) -> RopeSpec:
        scalars.choice("angle_dtype", angle_dtype, ("float64",))
        if layer is not None:
            rule = "be left out, as a GGUF file is read by layer type"
            raise ArgumentError("layer", layer, rule, "give `layer_type`, or none of them")
        rotation = self._rotation(layer_type)
        if interleaved not in (None, rotation.interleaved):
            pairs = "interleaved" if rotation.interleaved else "half-split"
            rule = f"be left out, as the pairs of architecture {self.model_type!r} are {pairs}"
            raise ArgumentError("interleaved", interleaved, rule)
        return rotation.spec()

    def _rotation(self, layer_type: str | None) -> Rotation:
        """Return the rotation of a layer type; layer types with one rotation have one name, ""."""
        if ALL_LAYERS in self.rotations:
            if layer_type not in (None, FULL, WINDOWED):
                rule = "be left out, as this file has one rotation for all layers"
                raise ArgumentError("layer_type", layer_type, rule)
            return self.rotations[ALL_LAYERS]
        if layer_type is None or layer_type not in self.rotations:
            names = ", ".join(map(repr, self.rotations))
            raise ArgumentError("layer_type", layer_type, f"be one of {names}")
        return self.rotations[layer_type]

    def heads(self, layer_type: str | None = None) -> tuple[int | None, int | None]:
        """Return the numbers of query heads and of key/value heads; see `ModelConfig.heads`."""
        heads = self._count_of_heads("attention.head_count", layer_type)
        if self.architecture.latent:
            return heads, 1
        return heads, self._count_of_heads("attention.head_count_kv", layer_type) or heads

    def _count_of_heads(self, key: str, layer_type: str | None) -> int | None:
        """Return a number of heads; a list by layer has 0 for layers without attention."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            return None if value is None else self.metadata.whole(key, None, most=limits.HEADS)
        counts = scalars.whole_numbers(self.metadata.full_key(key), value, 0, most=limits.HEADS)
        is_windowed = self.metadata.get("attention.sliding_window_pattern")
        if layer_type is not None and isinstance(is_windowed, list):
            wanted = layer_type == WINDOWED
            flags = [bool(flag) == wanted for flag in is_windowed]
            counts = tuple(count for count, flag in zip(counts, flags, strict=False) if flag)
        distinct = sorted(set(counts) - {0})
        if len(distinct) != 1:
            raise ValueError(
                f"`{self.metadata.full_key(key)}` holds {shown(distinct)} for `layer_type` "
                f"{shown(layer_type)}; the selected layers must have the same number"
            )
        return distinct[0]

    @property
    def attention(self) -> Attention:
        """The parts of the model's attention besides the rotation."""
        return Attention(
            other="a GGUF file does not describe all of the attention; use config.json"
        )


def parse(path: str | PathLike[str]) -> GgufConfig:
    """Parse a GGUF file, or the first one of a split model.

    Raises ValueError, which names the file, if it is damaged or if llama.cpp's code rather than the
    file determines the rotation. Raises OSError if it cannot be read.
    """
    name = os.fsdecode(path)
    if not os.path.isfile(name):
        raise ValueError(f"`path` is {shown(name)}, which is not a file")
    try:
        return _parse(name)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`path` {shown(name)}: {error}") from None


def _parse(path: str) -> GgufConfig:
    metadata = _read(path)
    facts = architecture(metadata.values.get("general.architecture"), metadata.get)
    rotations = _rotations(metadata, facts)
    for rotation in rotations.values():
        rotation.spec()  # refuses here, where the file is named
    return GgufConfig(
        source=metadata.own_values(),
        model_type=facts.name,
        values=_standard_names(metadata),
        rope_parameters={name: parameters(rotation) for name, rotation in rotations.items()},
        pairing_note=_pairing_note(facts),
        architecture=facts,
        metadata=metadata,
        rotations=rotations,
    )


def _read(path: str) -> Metadata:
    """Read a file, and the factors in the other files of a split model."""
    header = read_header(path, FACTOR_TENSORS)
    tensors = dict(header.tensors)
    for part in _further_parts(path, header.values):
        tensors |= read_header(part, FACTOR_TENSORS).tensors
    return Metadata(header.values, tensors)


def _further_parts(path: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of the other files of a split model."""
    count = scalars.whole_number("split.count", values.get("split.count", 1), 0, _LARGEST_SPLIT)
    if count <= 1:
        return
    if values.get("split.no") != 0:
        raise ValueError("the file is not the first one of a split model; give the first one")
    match = _PART.fullmatch(path)
    if match is None:
        raise ValueError(
            f"`split.count` is {count}, but the name does not end in -00001-of-{count:05}.gguf, so "
            "the other files are not found"
        )
    for number in range(2, count + 1):
        part = f"{match[1]}{number:05}{match[3]}"
        if not os.path.isfile(part):
            raise ValueError(f"{shown(part)} is missing, a file of the same split model")
        yield part


def _rotations(metadata: Metadata, facts: Architecture) -> dict[str, Rotation]:
    """Return the rotation of each layer type, under "" if all layers have the same."""
    full = full_rotation(metadata, facts)
    window = metadata.whole("attention.sliding_window", default=0, least=0)
    if facts.windowed is None or not (window or facts.windowed.always):
        return {ALL_LAYERS: full}
    windowed = windowed_rotation(metadata, facts, full)
    if same_rotation(full, windowed):
        return {ALL_LAYERS: full}
    return {FULL: full, WINDOWED: windowed}


def parameters(rotation: Rotation) -> dict[str, Any]:
    """Return the numbers of a rotation for `rope-cpu show`, under the keys of config files."""
    found: dict[str, Any] = {"rope_theta": rotation.rope_theta}
    if rotation.factor != 1:
        found["factor"] = rotation.factor
    if rotation.yarn is not None:
        found["beta_fast"] = rotation.yarn.beta_fast
        found["beta_slow"] = rotation.yarn.beta_slow
        found["original_max_position_embeddings"] = rotation.yarn.original_length
    tensors = {
        "rope_freqs": rotation.freqs,
        "short_factor": rotation.short_factors,
        "long_factor": rotation.long_factors,
    }
    return found | {name: factors for name, factors in tensors.items() if factors is not None}


def _standard_names(metadata: Metadata) -> dict[str, Any]:
    """Return the lengths of a model under the keys of config files."""
    context = metadata.whole("context_length", default=None)
    return {} if context is None else {"max_position_embeddings": context}


def _pairing_note(facts: Architecture) -> str | None:
    """Return a sentence on a pairing that differs from that of the same model's config.json."""
    if not facts.permuted:
        return None
    return "unlike config.json: the converter to GGUF reorders q and k"
