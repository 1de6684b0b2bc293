"""Facts of llama.cpp's architectures: the rotation in the code of each, beside its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rope_cpu.arguments.texts import did_you_mean, shown
from rope_cpu.configs.model_types import data

# From a property to the architectures that have it, with the source.
FACTS: Mapping[str, Any] = data("gguf.json")

# Pairings by their name in llama.cpp.
PAIRINGS = ("norm", "neox", "mrope", "imrope", "norm_or_mrope", "neox_or_mrope")


@dataclass(frozen=True, kw_only=True)
class Windowed:
    """The rotation of layers with a sliding window, if it may differ from that of the others.

    Parameters
    ----------
    rope_theta : float, optional
        The base without a key of its own; by default that of the other layers.
    own_theta : bool
        Whether the base has a key of its own.
    own_width : bool
        Whether the rotated width has a key of its own.
    scaled : bool
        Whether frequencies are scaled like those of the other layers, rather than unscaled.
    always : bool
        Whether the model has such layers without a key for the window.
    """

    rope_theta: float | None = None
    own_theta: bool = True
    own_width: bool = False
    scaled: bool = True
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """The keys of YaRN that an architecture reads.

    Parameters
    ----------
    reads : tuple of str
        Names in "rope.scaling.yarn_…". Other keys have no effect.
    beta_fast : float
        The default.
    log_unit : float
        Divisor of the log multiplier, which results in mscale_all_dim.
    equal_mscales : bool
        Whether mscale equals mscale_all_dim, rather than 1.
    """

    reads: tuple[str, ...] = ()
    beta_fast: float = 32.0
    log_unit: float = 1.0
    equal_mscales: bool = False


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of llama.cpp that rotates.

    Parameters
    ----------
    name : str
        The value of general.architecture.
    pairing : str
        A name in `PAIRINGS`. "norm" pairs (2i, 2i+1), the others (i, i+n). Those with "mrope" have
        several axes, "…_or_mrope" if the file has sections.
    permuted : bool
        Whether the converter reorders the rows of q and k, so that the pairing is not that of the
        model's config.json.
    latent : bool
        Latent attention (MLA) or its like, in which a slice of each head is rotated.
    factors : bool
        Whether the tensors of factors on wavelengths are used.
    factors_of_full_attention : bool
        The same, in full-attention layers alone.
    alpha : bool
        Whether the key of the NTK-aware alpha is used.
    windowed : Windowed, optional
        The rotation of layers with a sliding window; None: that of all layers.
    yarn : Yarn
        The keys of YaRN.
    """

    name: str
    pairing: str
    permuted: bool = False
    latent: bool = False
    factors: bool = False
    factors_of_full_attention: bool = False
    alpha: bool = False
    windowed: Windowed | None = None
    yarn: Yarn = field(default_factory=Yarn)


def architecture(name: object, value_of: Callable[[str], Any]) -> Architecture:
    """Return the facts of an architecture.

    Parameters
    ----------
    name : object
        The value of general.architecture.
    value_of : callable
        From a key of the metadata, without the name of the architecture, to its value or None.

    Raises
    ------
    ValueError
        If the architecture is unknown, does not rotate, or if its code decides about frequencies or
        unrotated layers and the file does not say so.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"`general.architecture` is {shown(name)}; it must be a string of at most 1,024 bytes"
        )
    if name in FACTS["unrotated"]:
        raise ValueError(f"`general.architecture` is {name!r}, which does not rotate")
    _refuse_decisions_of_code(name, value_of)
    pairing = next((pairing for pairing in PAIRINGS if name in FACTS[pairing]), None)
    if pairing is None:
        known = [known for pairing in PAIRINGS for known in FACTS[pairing]]
        raise ValueError(
            f"`general.architecture` is {shown(name)}{did_you_mean(name, known)}, which is not an "
            f"architecture of {FACTS['version']}, so its pairing is not known; build a "
            "RotaryEmbedding from numbers"
        )
    flags = ("permuted", "latent", "factors", "factors_of_full_attention", "alpha")
    windowed = FACTS["windowed"].get(name)
    yarn = dict(FACTS["yarn"].get(name, {}))
    yarn["reads"] = tuple(yarn.get("reads", ()))
    return Architecture(
        name=name,
        pairing=pairing,
        windowed=None if windowed is None else Windowed(**windowed),
        yarn=Yarn(**yarn),
        **{flag: name in FACTS[flag] for flag in flags},
    )


def _refuse_decisions_of_code(name: str, value_of: Callable[[str], Any]) -> None:
    """Raise if the code of llama.cpp decides what the file does not say."""
    remedy = "read the model's config.json with `from_config`, or build it from numbers"
    for reason, names in FACTS["refused"].items():
        if name in names:
            raise ValueError(f"`general.architecture` is {name!r}: {reason}; {remedy}")
    for row in FACTS["refused_values"]:
        if name not in row["architectures"]:
            continue
        value = value_of(row["key"])
        if value in row.get("unrotated", ()) or value not in row.get("rotated", (value,)):
            raise ValueError(f"`{name}.{row['key']}` is {shown(value)}: {row['reason']}; {remedy}")
