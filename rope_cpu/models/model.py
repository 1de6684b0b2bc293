"""`Model`: a parsed config, for `from_config`, the commands, the export and the benchmarks.

Each kind of file has an adapter, a module with a subclass of `Model` and a function `parse`: from
the keys of a config in `text` and `vision`, of which the latter returns None for what it does not
know, and from a path in `gguf`. `reader` chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.frequencies.rope_types import MISSING
from rope_cpu.frequencies.spec import RopeSpec, placed
from rope_cpu.models.layer import (
    FULL_LAYERS,
    WINDOW_LAYERS,
    Layer,
    layer_of,
    layers_of,
    query_factors,
)
from rope_cpu.models.model_types import PAIRING_KEY, Config, ModelFacts

# The keys of the numbers of query heads and of key/value heads, the last ones of GGUF files.
HEADS_KEYS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "dit_heads"),
    "attention.head_count",
)
KV_HEADS_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "attention.head_count_kv")

RopeParameters = dict[str, Any]

# A layer type, or the index of a layer, or neither.
Asked = tuple[str | None, int | None]


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """One model, as its config file describes it.

    Parameters
    ----------
    source : mapping
        The content of the file.
    model_type : str, optional
        The model type of the rotated part, such as the language model of a multimodal file. None
        if the file names none.
    values : mapping
        The keys of that part under standard names, with the defaults of its model type.
    own_values : {layer type: mapping}
        The values in which layers of a type differ.
    rope_parameters : {layer type: section}
        The rope parameters by layer type, or under None for all layers. A section None: layers of
        this type are not rotated. Empty for models with several position axes, which have one
        rotation.
    facts : ModelFacts
        The row of the model type in the model table.
    unknown_type : str, optional
        The model type whose attention is not known, in quotes: that of the part, or of the file
        around it.
    pairing_note : str, optional
        What to know about the pairing, for `rope-cpu show`.
    position_note : str, optional
        What to know about the positions, likewise.
    axes : sequence of str
        The position axes, keys of axes.json. A text model with three has those of M-RoPE instead.

    Examples
    --------
    >>> from rope_cpu.models.reader import read
    >>> config = read({"model_type": "llama", "head_dim": 64, "num_attention_heads": 32})
    >>> config.model_type, config.heads(), config.spec().rotary_dim
    ('llama', (32, 32), 64)
    """

    # Why the attention of a kind of files is not known.
    unknown_attention: ClassVar[str | None] = None

    source: Config
    model_type: str | None
    values: Config
    own_values: Mapping[str | None, Config] = field(default_factory=dict)
    rope_parameters: Mapping[str | None, RopeParameters | None] = field(default_factory=dict)
    facts: ModelFacts = field(default_factory=ModelFacts, repr=False)
    unknown_type: str | None = None
    pairing_note: str | None = None
    position_note: str | None = None
    axes: Sequence[str] = ("token",)

    def spec(
        self,
        layer_type: str | None = None,
        layer: int | None = None,
        interleaved: bool | None = None,
        angle_dtype: str = "float64",
        part: str | None = None,
    ) -> RopeSpec:
        """Return the rotation of the layers of one type, of one layer, or of all rotated layers.

        Parameters
        ----------
        layer_type : str, optional
            The layer type, for models whose layers differ ("full_attention", …).
        layer : int, optional
            The index of a layer, from 0, instead of its type.
        interleaved : bool, optional
            True for pairs (2i, 2i+1), False for half-split pairs; the model type's by default.
        angle_dtype : str
            "float64", or "float32" to repeat the float32 angle arithmetic of transformers.
        part : str, optional
            "indexer" for the indexer of sparse attention, instead of the attention itself.

        Returns
        -------
        RopeSpec

        Raises
        ------
        TypeError, ValueError
            If the config does not determine one rotation for these layers.

        Examples
        --------
        >>> from rope_cpu.models.reader import read
        >>> read({"model_type": "gemma3_text"}).spec("sliding_attention").head_dim
        256
        """
        if interleaved is not None:
            interleaved = scalars.boolean("interleaved", interleaved)
        if layer_type is not None and not isinstance(layer_type, str):
            raise ArgumentTypeError("layer_type", layer_type, "be a string")
        if part is None:
            spec = self._build_spec((layer_type, layer), interleaved, angle_dtype)
            rotates = self.facts.rotates
        else:
            scalars.choice("part", part, ("indexer",))
            spec = self._indexer_spec((layer_type, layer), interleaved, angle_dtype)
            rotates = self.facts.indexer.get("rotates", "")
        spec = placed(spec, rotates)
        if interleaved not in (None, spec.interleaved):
            rule = f"be left out, as `interleaved` of this model is {spec.interleaved}"
            raise ArgumentError("interleaved", interleaved, rule)
        return spec

    def _indexer_spec(self, asked: Asked, interleaved: bool | None, angle_dtype: str) -> RopeSpec:
        """Return the rotation of the indexers, by which sparse attention chooses its keys.

        They have the frequencies of the attention of their layers, in wider heads of their own, of
        which they may rotate another part in other pairs.
        """
        facts = self.facts.indexer
        if not facts:
            rule = f"be left out, as no indexer of `model_type` {shown(self.model_type)} is known"
            raise ArgumentError("part", "indexer", rule)
        own_type = facts.get("layer_type")
        layer_type, layer = asked
        if layer is None:
            layer_type = layer_type or own_type
        spec = self._build_spec((layer_type, layer), None, angle_dtype)
        types = {kind.layer_type for kind in self.select(layer_type, layer)}
        if own_type is not None and types != {own_type}:
            rule = f"be that of layers with an indexer, {shown(own_type)}"
            raise ArgumentError("layer_type", layer_type, rule)
        if interleaved is None:
            paired = self.values.get(PAIRING_KEY, facts["interleaved"])
            interleaved = scalars.boolean(PAIRING_KEY, paired)
        key = "index_head_dim"
        if self.values.get(key) is None:
            rule = "be in the config: without it, the model has no indexer"
            raise ArgumentError(key, MISSING, rule)
        width = scalars.whole_number(key, self.values[key], 2, limits.HEAD_DIM)
        if width < spec.rotary_dim or width % 2:
            raise ArgumentError(key, width, f"be even, and at least {spec.rotary_dim}")
        return replace(spec, head_dim=width, interleaved=interleaved, blocks=(spec.rotary_dim,))

    @abstractmethod
    def _build_spec(self, asked: Asked, interleaved: bool | None, angle_dtype: str) -> RopeSpec:
        """Return the rotation of the layers that were asked for, or of all rotated ones."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, with what it says of its rotation; empty if their number is not known."""
        return layers_of(self.values, self.rope_parameters)

    @cached_property
    def types(self) -> Mapping[str | None, Sequence[Layer]]:
        """The layers that differ: of each type, and under None all of them.

        They stand for those of a section if no layer has its type, or if their number is not known.
        """
        sections = self.rope_parameters or {None: {}}
        kinds = [*{id(layer): layer for layer in self.layers}.values()]
        found: dict[str | None, list[Layer]]
        found = {None: kinds or [layer_of(name, sections) for name in sections]}
        for kind in kinds:
            if kind.layer_type is not None:
                found.setdefault(kind.layer_type, []).append(kind)
        for name in {*sections, *(self.values.get("layer_types") or ())} - found.keys():
            found[name] = [layer_of(name, sections)]
        return found

    def at(self, name: str, index: int, own_keys: bool = False) -> Layer:
        """Return the layer of an index, the argument `name` of a caller.

        own_keys: refuse layers that reuse keys and values of an earlier layer.
        """
        number = scalars.whole_number(name, index, 0)
        count = len(self.layers) - (self.attention.shared_layers if own_keys else 0)
        if number >= count:
            known = count if self.layers else "`num_hidden_layers` (not known)"
            own = " with keys of their own" if own_keys else ""
            raise ArgumentError(name, number, f"be below {known}, the number of layers{own}")
        return self.layers[number]

    def select(self, layer_type: str | None, layer: int | None) -> Sequence[Layer]:
        """Return the layer of an index, or the layers of a type, or of all types, that differ.

        layer_type, layer: at most one may be given. Layers without rotation are left out,
        unless all of them are.
        """
        if layer is not None:
            found: Sequence[Layer] = [self.at("layer", layer)]
            is_unknown = found[0].layer_type is None and self.rope_parameters.keys() != {None}
            if layer_type is not None or is_unknown:
                rule = "be left out if `layer_type` is given, or if the config has no `layer_types`"
                raise ArgumentError("layer", layer, rule)
        elif layer_type in self.types:
            found = self.types[layer_type]
        else:
            raise self._selection_error("layer_type", layer_type)
        return [kind for kind in found if kind.rope_parameters is not None] or found

    def section(self, layer_type: str | None, layer: int | None) -> Config:
        """Return the rope parameters that the selected layers share, those that have any."""
        name, asked = ("layer_type", layer_type) if layer is None else ("layer", layer)
        parts = [kind.rope_parameters for kind in self.select(layer_type, layer)]
        if asked is None and parts == [{}] * len(parts):  # the types of the layers are not known
            parts += self.rope_parameters.values()
        sections = [part for part in parts if part]
        if not sections:
            raise self._selection_error(name, asked)
        section: Config = self._shared("rope parameters", sections)
        return section

    def _shared(self, name: str, values: Sequence[Any]) -> Any:
        """Return the value that layers share; raise ValueError, which names values that differ."""
        distinct = [*values[:1], *(value for value in values if value != values[0])]
        if len(distinct) != 1:
            finding = Finding(f"selects layers whose {name} are {shown(distinct[:2])}")
            raise self._selection_error("layer_type", finding)
        return distinct[0]

    def _selection_error(self, name: str, value: object) -> ArgumentError:
        """Return the error for layers that are not rotated, or not alike."""
        kinds = chain(*self.types.values())
        types = {kind.layer_type for kind in kinds if kind.rope_parameters and kind.layer_type}
        listed = cut(", ".join(map(repr, sorted(types)))) or "none"
        rule = f"select a layer that is rotated, or several alike (types: {listed})"
        return ArgumentError(name, value, rule, "or give `layer`")

    def heads(self, layer_type: str | None = None, layer: int | None = None) -> tuple[int, int]:
        """Return the numbers of query heads and of key/value heads.

        Latent attention rotates one key, which all heads share.

        Parameters
        ----------
        layer_type : str, optional
            The layer type, for models whose layers differ.
        layer : int, optional
            The index of a layer, for models whose layers of one type differ.

        Returns
        -------
        num_heads, num_kv_heads : int

        Raises
        ------
        ValueError
            If a number is out of range or differs between the selected layers, if neither the file
            nor its model type has it, or if that of key/value heads is neither the default of the
            model type nor divides the other.

        Examples
        --------
        >>> from rope_cpu.models.reader import read
        >>> read({"model_type": "mistral"}).heads()
        (32, 8)
        """
        asked = (layer_type, layer)
        heads = self._head_count(HEADS_KEYS, asked)
        if self.is_latent:
            return heads, 1
        kv_heads = self._head_count(KV_HEADS_KEYS, asked, heads)
        # The default of a model type need not suit a file that lacks the number.
        is_default = kv_heads in map(self.facts.defaults.get, KV_HEADS_KEYS)
        if heads % kv_heads and not is_default:
            rule = f"divide the number of query heads, {heads}"
            remedy = "take both numbers from the config of the model"
            raise ArgumentError(KV_HEADS_KEYS[0], kv_heads, rule, remedy)
        return heads, kv_heads

    def _head_count(self, keys: Sequence[str], asked: Asked, default: Any = MISSING) -> int:
        """Return the number under the first key that is present.

        In a list by layer, 0 stands for a layer without heads.
        """
        layers = self.select(*asked)
        values = self._values_of(layers)
        key = next((key for key in keys if key in values), keys[0])
        number = values.get(key, default)
        if isinstance(number, list | tuple):
            entries = scalars.whole_numbers(key, number, 0, most=limits.HEADS)
            owners = self.layers or [layers[0]] * len(entries)
            ids = {id(kind) for kind in layers}
            own = [n for n, owner in zip(entries, owners, strict=False) if n and id(owner) in ids]
            _, index = asked
            number = self._shared(key, own if index is None else entries[index : index + 1])
        return scalars.whole_number(key, number, 1, limits.HEADS)

    @property
    def is_latent(self) -> bool:
        """Whether attention is latent (MLA); with `use_mla` false it is that of Llama."""
        return "qk_rope_head_dim" in self.values and bool(self.values.get("use_mla", True))

    @property
    def maximum_length(self) -> int:
        """The max_position_embeddings, 0 if there is none."""
        key = "max_position_embeddings"
        return scalars.whole_number(key, self.values.get(key, 0), 0)

    def _values_of(self, layers: Sequence[Layer]) -> Config:
        """Return the values that layers share."""
        own = [self.own_values.get(kind.layer_type, {}) for kind in layers]
        return {**self.values, **self._shared("values", own)} if self.own_values else self.values

    def head_dim(self, layer_type: str | None, layer: int | None) -> int:
        """Return the width of a head vector, or of its rotated part with latent attention (MLA)."""
        values = self._values_of(self.select(layer_type, layer))
        key = "qk_rope_head_dim" if self.is_latent else "head_dim"
        width = values.get(key)
        if width is None:  # it follows from the hidden size and the number of heads
            for part in ("hidden_size", "num_attention_heads"):
                if part not in values:
                    rule = "be given, or `head_dim`, which follows from it"
                    raise ArgumentError(part, MISSING, rule)
            heads = scalars.whole_number(part, values[part], 1, limits.HEADS)
            hidden = scalars.whole_number(
                "hidden_size", values["hidden_size"], 1, limits.HIDDEN_SIZE
            )
            width = hidden // heads
        return scalars.whole_number(key, width, 2, limits.HEAD_DIM)

    @cached_property
    def attention(self) -> Layer:
        """The facts that all layers share."""
        return Layer(model_type=self.model_type, other=self.unknown_attention)

    def layer(
        self,
        facts: Layer,
        known: Collection[str],
        index: int | None = None,
        layer_type: str | None = None,
        stated: Container[str] = (),
    ) -> Layer:
        """Return one layer, the layers of one type, or all rotated layers, which must be alike.

        facts: those of `attention`, perhaps changed. known: see `Layer.refuse_unknown`. index,
        layer_type: at most one may be given. stated: the names of facts that the caller states; of
        an unknown model type all must be. Raises ValueError or TypeError for other facts, and if
        the config does not determine the layer.
        """
        unstated = [f"--set {name}={value}" for name, value in _USUAL.items() if name not in stated]
        if self.unknown_type is not None and unstated:
            raise ValueError(
                f"`model_type` is {self.unknown_type}, whose attention is not known; give "
                "`AttentionLayer` or `export_attention` its arguments yourself, or state them to "
                f"the command: {' '.join(unstated)}"
            )
        layers = self.select(layer_type, index)
        section = layers[0].rope_parameters
        is_rotated = index is None or section is not None
        facts = facts if is_rotated else facts.without_rotation()
        facts.refuse_unknown(known)
        if facts.qk_norm is not None and facts.norm_epsilon is None:
            raise ValueError("the config lacks the epsilon of the norms; add rms_norm_eps")
        spec = None
        if is_rotated:
            # The pairing plays no part in the attention, and an unknown model type has none.
            interleaved = None if self.unknown_type is None else False
            spec = self.spec(layer_type, index, interleaved)
            factor = float(spec.attention_factor.max())
            if facts.qk_norm == "after" and factor != 1:  # the norms undo it
                rule = f"follow a rotation with an attention factor of {factor:.6g}"
                raise ValueError(f"norms of queries and keys {rule}")
        num_heads, num_kv_heads = self.heads(layer_type, index)
        width = self.head_dim(layer_type, index) if spec is None else spec.head_dim
        types = {kind.layer_type for kind in layers}
        return replace(
            facts,
            **(_WITHOUT_NORMS if facts.qk_norm is None else {}),
            index=None if index is None else int(index),
            layer_type=types.pop() if len(types) == 1 else None,
            rope_parameters=section,
            spec=spec,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=width,
            value_dim=width,
            scale=width**-0.5 if facts.scale is None else facts.scale,
            window=self._shared("windows", [_window(facts, kind.layer_type) for kind in layers]),
            softcap=facts.softcap or None,
            query_factors=query_factors(facts.query_scale, {**self.values, **(section or {})}),
        )


def _window(facts: Layer, layer_type: str | None) -> int | None:
    """Return the number of keys that a query attends to in layers of a type, None for all keys."""
    if layer_type not in (None, *FULL_LAYERS, *WINDOW_LAYERS):
        raise ValueError(f"the attention of layers of type {shown(layer_type)} is not known")
    if facts.window is None or facts.window_in_all_layers:
        return facts.window or None
    if layer_type is None:
        raise ValueError(
            f"it is not known which layers have the window of {facts.window} keys; add "
            "`layer_types` to the config, or give --set window=N, or none, to the command"
        )
    return None if layer_type in FULL_LAYERS else facts.window or None


# Parts of the attention that no key of an unknown model type's config decides, and usual values.
_USUAL = {"causal": "true"}
_USUAL |= dict.fromkeys(("qk_norm", "scale", "window", "softcap", "sinks"), "none")

# The facts of norms in a layer without.
_NORMS = ("v_norm", "norm_weighted", "norm_offset", "norm_epsilon")
_WITHOUT_NORMS: dict[str, Any] = {name: getattr(Layer, name) for name in _NORMS}
