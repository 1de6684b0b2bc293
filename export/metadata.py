"""Metadata of exported models: the rotation, and the options that `validate` reads back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain

import onnx

from rope_cpu import RotaryEmbedding, __version__
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import choice
from rope_cpu.arguments.texts import cut, shown

from .checks import plain_options
from .nodes import MASK_INPUT
from .options import AttentionOptions, RopeOptions

OPTIONS_KEY = "rope_cpu.export"

_MODEL_RULE = "come from this package's export"

# Doc strings of inputs and outputs.
POSITION_DESCRIPTIONS = {
    "position_ids": "Positions of the tokens, with several axes their coordinates.",
    "offset": "Position of the first token of each row.",
}
ATTENTION_DESCRIPTIONS = POSITION_DESCRIPTIONS | {
    "q": "Queries, not rotated.",
    "k": "Keys, not rotated.",
    "v": "Values.",
    "hidden": "Hidden states that enter the attention: after the norm, before the projections.",
    "past_key": "Rotated keys of earlier tokens.",
    "past_value": "Values of earlier tokens.",
    "attention": "Weighted values; after the output projection, if it is in the graph.",
    "present_key": "Rotated keys of earlier tokens and of the new ones.",
    "present_value": "Values of earlier tokens and of the new ones.",
    "past_lengths": "Earlier tokens of each row. New keys and values are written behind them.",
    "attention_mask": "True: attend to the key. Of floats: numbers to add to the scores.",
    "k_scale": "Size of a unit of the int8 keys, by head and element.",
    "v_scale": "Size of a unit of the int8 values, by head and element.",
    "q_norm_weight": "Weights of the RMS norm of queries, as the checkpoint has them.",
    "k_norm_weight": "Weights of the RMS norm of keys, as the checkpoint has them.",
    "sinks": "Attention sinks: for each head a score without a value.",
}


def attention_descriptions(options: AttentionOptions) -> dict[str, str]:
    """Return the doc strings of inputs and outputs."""
    if not options.has_token_mask:
        return ATTENTION_DESCRIPTIONS
    text = "1 for each token of the past and of this step, 0 for padding."
    return ATTENTION_DESCRIPTIONS | {MASK_INPUT: text}


def attention_text(options: AttentionOptions) -> str:
    """Return a description of an attention."""
    return (
        f"Attention of {options.num_heads} query heads to {options.num_kv_heads} key heads; its "
        f"options are in the metadata {OPTIONS_KEY}."
    )


def rotation_text(rope: RotaryEmbedding) -> str:
    """Return a description of a rotation."""
    return (
        f"Rotary position embedding, rope type {rope.rope_type}: pair i rotates by position · "
        f"inv_freq[i], its length times {rope.attention_factor:.6g}. Pairs: {_pairing_text(rope)}."
    )


def _pairing_text(rope: RotaryEmbedding) -> str:
    """Return a description of which elements form a pair."""
    pairs = "(2i, 2i+1), interleaved" if rope.interleaved else "(i, i+n), half-split"
    within = f" within each of the blocks {list(rope.blocks)}" if len(rope.blocks) > 1 else ""
    return f"{pairs}{within}, over the first {rope.rotary_dim} of {rope.head_dim} elements"


def model_metadata(
    rope: RotaryEmbedding,
    options: RopeOptions | AttentionOptions,
    user_entries: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return all metadata entries of a model; raise where the user's entries reuse a key."""
    prefix = options.name_prefix if isinstance(options, AttentionOptions) else ""
    entries = _rotation_entries(rope) | {
        OPTIONS_KEY: json.dumps({"kind": options.kind, **asdict(options)})
    }
    # The entries of several layers stand side by side in a merged model.
    entries = {f"{prefix}{key}": text for key, text in entries.items()}
    if user_entries is None:
        return entries
    is_mapping = isinstance(user_entries, Mapping)
    texts = chain(*user_entries.items()) if is_mapping else ()
    if not is_mapping or not all(isinstance(text, str) for text in texts):
        raise ArgumentTypeError("metadata", user_entries, "be a mapping of strings to strings")
    taken = sorted(key for key in user_entries if key in entries or key.endswith(OPTIONS_KEY))
    if taken:
        finding = Finding(f"holds {', '.join(taken)}, keys of the export itself")
        raise ArgumentError("metadata", finding, "hold other keys")
    return entries | dict(user_entries)


def _rotation_entries(rope: RotaryEmbedding) -> dict[str, str]:
    """Return the metadata entries for a rotation and for the version that wrote them."""
    spec = rope.spec
    names = ("rope_type", "head_dim", "rotary_dim", "interleaved", "blocks", "axes")
    rotation = {name: getattr(rope, name) for name in (*names, "attention_factor")}
    rotation |= {"angle_dtype": spec.angle_dtype, "lengths": spec.lengths}
    rotation["inv_freq"] = rope.inv_freq.tolist()
    return {"rope_cpu.version": __version__, "rope_cpu.rotation": json.dumps(rotation)}


def read_options(model: onnx.ModelProto) -> RopeOptions | AttentionOptions:
    """Return the options in a model's metadata; raise ValueError unless they are complete."""
    texts = {}
    for entry in model.metadata_props:
        key = _decoded(entry.key)
        if key.endswith(OPTIONS_KEY):
            texts[key.removesuffix(OPTIONS_KEY)] = _decoded(entry.value)
    if not texts:
        raise ArgumentError("model", Finding(f"has no metadata {OPTIONS_KEY!r}"), _MODEL_RULE)
    if len(texts) > 1:
        finding = Finding(f"has metadata {OPTIONS_KEY!r} with the prefixes {shown(list(texts))}")
        rule = "be one model, not merged from several"
        raise ArgumentError("model", finding, rule, "validate them before they are merged")
    ((prefix, text),) = texts.items()
    try:
        fields = {**json.loads(text)}
        kind = choice("kind", fields.pop("kind", None), (RopeOptions.kind, AttentionOptions.kind))
        written = fields.get("name_prefix", "")
        if written != prefix:
            raise ArgumentError("name_prefix", written, f"be that of the key, {shown(prefix)}")
        if kind == RopeOptions.kind:
            return plain_options(RopeOptions(**fields))
        return plain_options(AttentionOptions(**fields))
    except (RecursionError, TypeError, ValueError) as error:
        finding = Finding(
            f"has metadata {OPTIONS_KEY!r} of {cut(text)}, which no export of this version writes: "
            f"{cut(str(error))}"
        )
        raise ArgumentError("model", finding, _MODEL_RULE) from None


def _decoded(text: str | bytes) -> str:
    """Return a string of a model; protobuf gives the bytes of one that is not UTF-8."""
    return text if isinstance(text, str) else text.decode(errors="replace")
