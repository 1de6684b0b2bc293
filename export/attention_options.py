"""What was asked of export_attention: checked once, written into the metadata, read back by `validate`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.export.options import METADATA_KEY, RopeOptions, _one_of
from rope_cpu.spec import boolean, whole_number

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding

LAYOUTS = ("bhsd", "bshd", "bsd")
MASKS = ("none", "padding", "bool", "float")
POSITIONS = ("past", "position_ids")
WEIGHTS = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias")

# Axis order that each target's attention works in.
CORE_LAYOUTS = {"primitive": "bshd", "onnx": "bhsd", "ort": "bshd"}

GROUP_QUERY = "com.microsoft GroupQueryAttention"


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The arguments of `export_attention` in plain types; see there. rope: of the rotation inside."""

    rope: RopeOptions
    layout: str
    v_head_dim: int
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    mask: str
    past: bool
    qk_norm: bool
    epsilon: float
    hidden: int | None
    output: int | None

    @classmethod
    def checked(cls, rope: RotaryEmbedding, rotation: Mapping[str, Any], **given: Any) -> AttentionOptions:
        """Check the arguments of `export_attention`; raise what they, the target and the rotary do not allow."""
        heads = whole_number("num_heads", given["num_heads"])
        kv_heads = heads if given["num_kv_heads"] is None else whole_number("num_kv_heads", given["num_kv_heads"])
        if heads % kv_heads:
            raise ValueError(f"`num_heads` is {heads}, not a multiple of `num_kv_heads`, {kv_heads}")
        positions = _one_of("positions", given["positions"], POSITIONS)
        counted = {"positions": "position_ids" if positions == "position_ids" else "none"}
        target = str(rotation["target"])
        inner = RopeOptions.checked(
            rope,
            **rotation,
            **counted,
            layout=CORE_LAYOUTS.get(target, "bhsd"),
            inputs=("q", "k"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            position_dtype=np.int64,
            table_inputs=False,
            inverse=False,
        )
        weights, scale, width = given["weights"], given["scale"], given["v_head_dim"]
        options = cls(
            rope=inner,
            layout=_one_of("layout", "bsd" if weights is not None else given["layout"], LAYOUTS),
            v_head_dim=rope.head_dim if width is None else whole_number("v_head_dim", width),
            causal=boolean("causal", given["causal"]),
            window=None if given["window"] is None else whole_number("window", given["window"]),
            softcap=None if given["softcap"] is None else _positive("softcap", given["softcap"]),
            scale=rope.head_dim**-0.5 if scale is None else _positive("scale", scale),
            mask=_one_of("mask", given["mask"], MASKS),
            past=boolean("past", given["past"]),
            qk_norm=given["qk_norm"] is not None,
            epsilon=_positive("norm_epsilon", given["norm_epsilon"]),
            hidden=None if weights is None else int(np.shape(weights["q"])[-1]),
            output=None if weights is None or "o" not in weights else int(np.shape(weights["o"])[0]),
        )
        options._fit(rope)
        return options

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.rope.heads[0] or 0

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.rope.heads[1] or 0

    def _fit(self, rope: RotaryEmbedding) -> None:
        if self.window is not None and not self.causal:
            raise ValueError(f"`window` is {self.window}, which counts the keys up to a query; it needs `causal`")
        if self.rope.target == "ort":
            self._fit_group_query(rope)

    def _fit_group_query(self, rope: RotaryEmbedding) -> None:
        """Refuse what GroupQueryAttention would do silently wrong, or not at all."""
        spec, pairs = rope.spec, rope.rotary_dim // 2
        refusals = {
            f"`positions` is 'position_ids', but {GROUP_QUERY} reads the first id of a prompt only and counts on from "
            "it": self.rope.positions == "position_ids",
            f"`causal` is False, but {GROUP_QUERY} is causal": not self.causal,
            f"`max_positions` is None, but {GROUP_QUERY} looks angles up in tables itself": not self.rope.tables,
            f"the rotary has blocks {list(rope.blocks)}, but {GROUP_QUERY} pairs over one": len(rope.blocks) > 1,
            f"the rotary has {rope.axes} axes, but {GROUP_QUERY} knows one position a token": rope.axes > 1
            and not spec.shared_id,
            f"`head_dim` is {rope.head_dim}, but {GROUP_QUERY} rotates multiples of 16 only": rope.head_dim % 16 != 0,
            f"`rotary_dim` is {2 * pairs}, but {GROUP_QUERY} wants tables of a multiple of 8 columns": pairs % 8 != 0,
            f"`v_head_dim` is {self.v_head_dim}, but {GROUP_QUERY} knows head_dim only": self.v_head_dim
            != rope.head_dim,
        }
        for why, refused in refusals.items():
            if refused:
                raise ValueError(f"{why}; targets 'onnx' and 'primitive' can express it")

    def metadata(self) -> dict[str, str]:
        """Return the entry that `read` understands."""
        said = asdict(self) | {"kind": "attention", "target": self.rope.target}
        return {METADATA_KEY: json.dumps(said | {"dtype": self.rope.dtype, "opset": self.rope.opset})}

    @classmethod
    def read(cls, **said: Any) -> AttentionOptions:
        """Return the options that metadata speaks of."""
        listed = said.pop("rope").items()
        inner: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in listed}
        for repeated in ("target", "dtype", "opset"):
            said.pop(repeated)
        return cls(rope=RopeOptions(**inner), **said)


def checked_weights(
    weights: Mapping[str, ArrayLike] | None, rope: RotaryEmbedding, heads: int, kv_heads: int, v_head_dim: int
) -> dict[str, NDArray[Any]]:
    """Return projection weights (out, in) and biases (out,) as float64 arrays; raise unless their shapes fit."""
    if weights is None:
        return {}
    unknown = sorted(set(weights) - set(WEIGHTS))
    missing = [name for name in ("q", "k", "v") if name not in weights]
    if unknown or missing:
        raise ValueError(f"`weights` holds {sorted(weights)}; it must hold q, k and v, and may hold {WEIGHTS[3:]}")
    arrays = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    hidden = arrays["q"].shape[-1]
    widths = {"q": heads * rope.head_dim, "k": kv_heads * rope.head_dim, "v": kv_heads * v_head_dim}
    shapes: dict[str, tuple[int, ...]] = {name: (width, hidden) for name, width in widths.items()}
    shapes["o"] = (arrays["o"].shape[0] if "o" in arrays else 0, heads * v_head_dim)
    shapes |= {f"{name}_bias": shape[:1] for name, shape in list(shapes.items())}
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise ValueError(f"`weights[{name!r}]` has shape {array.shape}; it must be {shapes[name]}")
    return arrays


def checked_norm(qk_norm: tuple[ArrayLike, ArrayLike] | None, head_dim: int) -> dict[str, NDArray[Any]]:
    """Return the weights of the norms of q and k as float64 arrays; raise unless they are (head_dim,)."""
    if qk_norm is None:
        return {}
    arrays = {name: np.asarray(value, np.float64) for name, value in zip("qk", qk_norm, strict=True)}
    for name, array in arrays.items():
        if array.shape != (head_dim,):
            raise ValueError(f"`qk_norm` of {name} has shape {array.shape}; it must be ({head_dim},)")
    return arrays


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"`{name}` is {value!r}; it must be a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`{name}` is {value!r}; it must be finite and positive")
    return float(value)
