"""`Model`: a parsed config, for `from_config`, the commands, the export and the benchmarks.

Each kind of file has an adapter, a module with a subclass of `Model` and a function `parse`: from
the keys of a config in `text` and `vision`, of which the latter returns None for what it does not
know, and from a path in `gguf`. `reader` chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError
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
from rope_cpu.models.model_types import PAIRING_KEY, UNKNOWN, Config, ModelFacts

HEADS_KEYS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "dit_heads")
KV_HEADS_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")

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
    heads_keys, kv_heads_keys : sequence of str
        The keys of the numbers of query heads and of key/value heads; the first one present counts.

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
    heads_keys: Sequence[str] = HEADS_KEYS
    kv_heads_keys: Sequence[str] = KV_HEADS_KEYS

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
        layer_type = self.type_of(layer_type, layer)
        if own_type not in (None, layer_type):
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
    def kinds(self) -> Mapping[str | None, Sequence[Layer]]:
        """The layers of each type that differ; without a number of layers one for each section."""
        if not self.layers:
            sections = self.rope_parameters.items()
            return {name: [Layer(layer_type=name, rope_parameters=part)] for name, part in sections}
        found: dict[str | None, list[Layer]] = {}
        for layer in {id(layer): layer for layer in self.layers}.values():
            found.setdefault(layer.layer_type, []).append(layer)
        return found

    @cached_property
    def known_types(self) -> Set[str | None]:
        """The layer types of the config and of the model's code."""
        listed = self.values.get("layer_types") or ()
        return {*listed, *(layer.layer_type for layer in self.layers)}

    @cached_property
    def rotated_types(self) -> Set[str | None]:
        """The types of rotated layers; None among them stands for no type."""
        kinds = chain(*self.kinds.values())
        return {kind.layer_type for kind in kinds if kind.rope_parameters is not None}

    def type_of(self, layer_type: str | None, layer: int | None) -> str | None:
        """Return the type of a layer, or the type that was asked for, or that of rotated layers.

        None if they have none, or several.
        """
        if layer is not None and layer < len(self.layers):
            return self.layers[layer].layer_type
        if layer_type is None and len(self.rotated_types) == 1:
            return next(iter(self.rotated_types))
        return layer_type

    def select(
        self, layer_type: str | None = None, layer: int | None = None
    ) -> tuple[str | None, Config]:
        """Return the layer type and the rope parameters of a layer, or of the layers of a type.

        layer_type, layer: at most one may be given; without both, all rotated layers are selected,
        and must be alike. The returned layer type is None if the model has one section for all
        layers and none was asked for.
        """
        sections = self.rope_parameters
        if layer_type is None and layer is None and len(sections) == 1:
            layer_type = next(iter(sections))
        asked: tuple[str, Any] = ("layer_type", layer_type)
        if layer is not None:
            asked = ("layer", layer)
            found: Sequence[Layer] = [self._at(layer_type, layer)]
            layer_type = found[0].layer_type
        elif layer_type is None:
            found = [*chain(*self.kinds.values())]
        else:
            found = self.kinds.get(layer_type) or [self._without_layers(layer_type)]
        own = [kind.rope_parameters for kind in found if kind.rope_parameters is not None]
        if not own:
            remedy = f"those of type {shown(layer_type)} are not" if layer_type else ""
            raise ArgumentError(*asked, "select a layer that is rotated", remedy)
        names = {kind.layer_type for kind in found if kind.rope_parameters is not None}
        if not own[0] or (len(names) > 1 and None not in sections):
            raise self._type_error(layer_type)
        if any(section != own[0] for section in own):
            thetas = [section["rope_theta"] for section in own]
            rule = f"select layers of one rope_theta, not of {shown(thetas)}"
            raise ArgumentError(*asked, rule, "give `layer` or `layer_type`")
        return layer_type if None in sections else names.pop(), own[0]

    def _without_layers(self, layer_type: str) -> Layer:
        """Return a layer of a type that no layer has, or whose layers are unknown."""
        if layer_type not in {*self.rope_parameters, *self.known_types}:
            raise self._type_error(layer_type)
        return layer_of(layer_type, self.rope_parameters)

    def _at(self, layer_type: str | None, layer: int) -> Layer:
        """Return a layer by its index."""
        index = scalars.whole_number("layer", layer, 0)
        rule = ""
        if layer_type is not None:
            rule = f"be left out, as `layer_type` is {shown(layer_type)}"
        elif not self.layers:
            rule = "be left out: the config does not say how many there are (`num_hidden_layers`)"
        elif index >= len(self.layers):
            rule = f"be below {len(self.layers)}, the number of layers"
        elif self.layers[index].layer_type is None and self.rope_parameters.keys() != {None}:
            rule = "be left out, as the config has no `layer_types`; give `layer_type`"
        if rule:
            raise ArgumentError("layer", index, rule)
        return self.layers[index]

    def _type_error(self, layer_type: str | None) -> ArgumentError:
        """Return the error for a layer type without rope parameters, or for several types."""
        sections = self.rope_parameters
        remedy = ""
        if None in sections:
            listed = cut(", ".join(sorted(repr(name) for name in self.known_types if name)))
            rule = "be left out, as this config has one rotation for all rotated layers"
            remedy = f"or give one of {listed}" if listed else ""
            return ArgumentError("layer_type", layer_type, rule, remedy)
        listed = cut(", ".join(repr(name) for name in sections if sections[name]))
        rule = (
            f"be one of {listed}" if listed else "have rope parameters, which no rotated type has"
        )
        if layer_type is None and any(layer.rope_parameters for layer in self.layers):
            remedy = "or give `layer`"
        return ArgumentError("layer_type", layer_type, rule, remedy)

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
            nor its model type has it, or if that of key/value heads does not divide the other.

        Examples
        --------
        >>> from rope_cpu.models.reader import read
        >>> read({"model_type": "mistral"}).heads()
        (32, 8)
        """
        layer_type = self.type_of(layer_type, layer)
        heads = self._head_count(self.heads_keys, layer_type, layer)
        if heads is None:
            listed = ", ".join(self.heads_keys)
            raise ValueError(f"the config lacks the number of heads; add one of {listed}")
        if self.is_latent:
            return heads, 1
        kv_heads = self._head_count(self.kv_heads_keys, layer_type, layer) or heads
        # The default of a model type need not suit a file that lacks the number.
        is_default = kv_heads in map(self.facts.defaults.get, self.kv_heads_keys)
        if heads % kv_heads and not is_default:
            rule = f"divide the number of query heads, {heads}"
            remedy = "take both numbers from the config of the model"
            raise ArgumentError(self.kv_heads_keys[0], kv_heads, rule, remedy)
        return heads, kv_heads

    def _head_count(
        self, keys: Sequence[str], layer_type: str | None, layer: int | None
    ) -> int | None:
        """Return the number under the first key that is present; None if there is none.

        Of a list by layer, the entry of a layer, or the one of all layers of a type: those that are
        not rotated, or have none, do not count.
        """
        values = self.values_of(layer_type)
        key = next((key for key in keys if key in values), None)
        if key is None:
            return None
        number = values[key]
        if not isinstance(number, list | tuple):
            return scalars.whole_number(key, number, 1, limits.HEADS)
        entries = scalars.whole_numbers(key, number, 0, most=limits.HEADS, longest=limits.LAYERS)
        if layer is not None and layer < len(entries):
            return scalars.whole_number(key, entries[layer], 1, limits.HEADS)
        alike = [Layer(layer_type=layer_type)] * len(entries)
        distinct = {
            entry
            for entry, own in zip(entries, self.layers or alike, strict=False)
            if entry and own.rope_parameters is not None and layer_type in (None, own.layer_type)
        }
        if len(distinct) != 1:
            rule = f"be one number for the layers of `layer_type` {shown(layer_type)}"
            raise ArgumentError(key, sorted(distinct), rule, "give `layer`")
        return distinct.pop()

    @property
    def is_known(self) -> bool:
        """Whether the model type is in the table of its kind."""
        return self.facts is not UNKNOWN

    @property
    def is_latent(self) -> bool:
        """Whether attention is latent (MLA); with `use_mla` false it is that of Llama."""
        return "qk_rope_head_dim" in self.values and bool(self.values.get("use_mla", True))

    @property
    def maximum_length(self) -> int:
        """The max_position_embeddings, 0 if there is none."""
        key = "max_position_embeddings"
        return scalars.whole_number(key, self.values.get(key, 0), 0)

    def values_of(self, layer_type: str | None) -> Config:
        """Return the values of layers of a type."""
        own = self.own_values.get(layer_type)
        return {**self.values, **own} if own else self.values

    def head_dim(self, layer_type: str | None) -> int:
        """Return the width of a head vector, or of its rotated part with latent attention (MLA)."""
        values = self.values_of(layer_type)
        key = "qk_rope_head_dim" if self.is_latent else "head_dim"
        width = values.get(key)
        if width is None:  # it follows from the hidden size and the number of heads
            for part in ("hidden_size", "num_attention_heads"):
                if part not in values:
                    rule = "be given, or `head_dim`, which follows from it"
                    raise ArgumentError(part, MISSING, rule)
            heads = scalars.whole_number(part, values[part], 1, limits.HEADS)
            width = values["hidden_size"]
            width = scalars.whole_number("hidden_size", width, 1, limits.HIDDEN_SIZE) // heads
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
    ) -> Layer:
        """Return one layer, the layers of one type, or all rotated layers, which must be alike.

        facts: those of `attention`, perhaps changed. known: see `Layer.refuse_unknown`. index,
        layer_type: at most one may be given. Raises ValueError or TypeError for other facts, and if
        the config does not determine the layer.
        """
        # An index that there is not is refused later.
        own = self.layers[index : index + 1] if index is not None else ()
        is_rotated = None not in [layer.rope_parameters for layer in own]
        facts = facts if is_rotated else facts.without_rotation()
        facts.refuse_unknown(known)
        if facts.qk_norm is not None and facts.norm_epsilon is None:
            raise ValueError("the config lacks the epsilon of the norms; add rms_norm_eps")
        spec = None
        if is_rotated:
            # The pairing plays no part in the attention, and an unknown model type has none.
            spec = self.spec(layer_type, index, interleaved=None if self.is_known else False)
            factor = float(spec.attention_factor.max())
            if facts.qk_norm == "after" and factor != 1:  # the norms undo it
                rule = f"follow a rotation with an attention factor of {factor:.6g}"
                raise ValueError(f"norms of queries and keys {rule}")
        layer_type = self.type_of(layer_type, index)
        window = self._window(facts, layer_type)
        num_heads, num_kv_heads = self.heads(layer_type, index)
        width = self.head_dim(layer_type) if spec is None else spec.head_dim
        section = (own[0] if own else layer_of(layer_type, self.rope_parameters)).rope_parameters
        return replace(
            facts,
            **(_WITHOUT_NORMS if facts.qk_norm is None else {}),
            index=index,
            layer_type=layer_type,
            rope_parameters=section,
            spec=spec,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=width,
            value_dim=width,
            scale=width**-0.5 if facts.scale is None else facts.scale,
            window=window or None,
            softcap=facts.softcap or None,
            query_factors=query_factors(facts.query_scale, {**self.values, **(section or {})}),
        )

    def _window(self, facts: Layer, layer_type: str | None) -> int | None:
        """Return the number of keys that a query attends to in layers of a type, None for all keys.

        Raises ValueError if the type is needed and not given, or if its attention is not known.
        """
        types = self.rotated_types
        differs = facts.window is not None and not facts.window_in_all_layers
        if layer_type is None and len(types) > 1 and differs:
            listed = cut(", ".join(sorted(map(str, types))))
            raise ValueError(f"layers differ ({listed}); give `layer` or `layer_type`")
        if layer_type not in (None, *FULL_LAYERS, *WINDOW_LAYERS):
            raise ValueError(f"the attention of layers of type {shown(layer_type)} is not known")
        if layer_type is None and differs:
            raise ValueError(
                f"it is not known which layers have the window of {facts.window} keys "
                "(`sliding_window`), and the layer type is None; add `layer_types` to the config, "
                "or give --set window=N, or window=none for all keys, to the command"
            )
        return None if differs and layer_type in FULL_LAYERS else facts.window


# The facts of norms in a layer without.
_NORMS = ("v_norm", "norm_weighted", "norm_offset", "norm_epsilon")
_WITHOUT_NORMS: dict[str, Any] = {name: getattr(Layer, name) for name in _NORMS}
