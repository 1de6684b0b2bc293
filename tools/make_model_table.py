"""Write rope_cpu/models/data/models.json: each model type's values for a silent config file.

The table holds facts only. The configuration classes of transformers give defaults, names and
sub-configs. The modelling code (model_code.py) gives the config of a rotary module, the pairing,
and whether the default type honours partial_rotary_factor. A config class with rope parameters
whose code is not found stops this script.

Run it with the transformers to describe: python tools/make_model_table.py
SOURCES.md beside the table names its release.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from model_code import MODELS, pairing, rotary_class  # noqa: E402

from rope_cpu.models.keys import is_rotation_key  # noqa: E402
from rope_cpu.models.model_types import ModelFacts  # noqa: E402

TARGET = ROOT / "rope_cpu" / "models" / "data" / "models.json"

WIDTHS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "qk_rope_head_dim",
    "index_head_dim",
    "max_position_embeddings",
)
# Facts of a model's attention besides the rotation. A null in a file beats them: `with_defaults`.
ATTENTION = (
    *("sliding_window", "use_sliding_window", "attention_chunk_size", "attn_logit_softcapping"),
    *("attention_multiplier", "query_pre_attn_scalar", "kv_lora_rank", "num_kv_shared_layers"),
)
NAMES = (*WIDTHS, *ATTENTION, "layer_types", "rope_theta", "partial_rotary_factor")

# Types of layers that have a state or a convolution in place of positions.
WITHOUT_POSITIONS = ("linear_attention", "conv")

# Model types whose positions have several coordinates, or which rotate other things than heads.
SEVERAL_AXES = (
    "efficientloftr",
    "eomt_dinov3",
    "sapiens2",
    "musicflamingo",
    "dinov3_vit",
    "vjepa2",
    "llama4_vision_model",
)

# Top-level keys of older files that hold a base, or the rotated share of a head.
THETA_KEYS = (
    *(
        "rope_theta",
        "rotary_emb_base",
        "rope_local_base_freq",
        "global_rope_theta",
        "local_rope_theta",
    ),
    *("compress_rope_theta", "swa_rope_theta"),
)
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")

# The parts of a multimodal config that hold a language model.
TEXT_PARTS = ("text_config", "thinker_config")


def config_classes() -> list[type[PreTrainedConfig]]:
    """Return every configuration class."""
    found = []
    for path in sorted(MODELS.glob("*/configuration_*.py")):
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        found += [
            cls
            for cls in vars(module).values()
            if inspect.isclass(cls)
            and issubclass(cls, PreTrainedConfig)
            and cls.__module__ == module.__name__
        ]
    return found


def sections(cls: type[PreTrainedConfig], **given: Any) -> dict[str, Any]:
    """Return the rope sections of a config with these keys by layer type; "" for a flat one."""
    try:
        instance = cls(**given)
    except Exception:  # the class does not take these keys
        return {}
    instance.allow_global_per_layer_attribute_access = True
    parameters = getattr(instance, "rope_parameters", None) or {}
    nested = instance.nested_rope_parameter_keys(parameters)
    if not nested:
        return {"": parameters}
    order = list(getattr(instance, "layer_types", None) or ())  # some classes build a set
    labels = [label for label in parameters if label in nested]
    labels.sort(key=lambda label: order.index(label) if label in order else -1)
    return {label: parameters[label] for label in labels}


def filled_in(cls: type[PreTrainedConfig], labels: list[str]) -> dict[str, dict[str, float]]:
    """Return, by layer type, the base and rotated share that a class adds to a section without."""
    linear = {"rope_type": "linear", "factor": 3.0}
    given = linear if labels == [""] else {label: dict(linear) for label in labels}
    found = sections(cls, rope_parameters=given) or sections(
        cls, rope_parameters={"rope_type": "default"}
    )
    return {
        label: {
            key: section[key]
            for key in ("rope_theta", "partial_rotary_factor")
            if section.get(key) is not None
        }
        for label, section in found.items()
        if label in labels and section
    }


def old_keys(
    cls: type[PreTrainedConfig], keys: tuple[str, ...], reads: str, value: float, **given: Any
) -> dict[str, str]:
    """Return which old top-level key fills `reads` of which section, found by setting each key."""
    found: dict[str, str] = {}
    for key in keys:
        for label, section in sections(cls, **copy.deepcopy(given), **{key: value}).items():
            if section and section.get(reads) == value:
                found.setdefault(label, key)
    return found


def reads_head_dim(cls: type[PreTrainedConfig]) -> bool:
    """Return False for a class that computes `head_dim` from other keys."""
    try:
        taken = cls(head_dim=48)
        taken.allow_global_per_layer_attribute_access = True
    except Exception as error:  # a value that this class refuses shows nothing
        print(f"head_dim of {cls.__name__} not tried: {type(error).__name__}")
        return True
    return bool(getattr(taken, "head_dim", 48) == 48)


def plain_defaults(cls: type[PreTrainedConfig], renamed: dict[str, str]) -> dict[str, Any]:
    """Return the numbers that a config class has as defaults of widths and of attention."""
    fields = getattr(cls, "__dataclass_fields__", {})
    found = {name: fields.get(renamed.get(name, name)) for name in (*WIDTHS, *ATTENTION)}
    return {
        name: field.default
        for name, field in found.items()
        if field is not None and isinstance(field.default, int | float)
    }


def section_facts(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return a class's own rope sections, and the defaults of missing keys in those of a file."""
    found: dict[str, Any] = {}
    parameters = sections(cls)
    flat = parameters.get("", {})
    filled = filled_in(cls, list(parameters))
    if "" not in parameters or any(
        flat[key] != filled.get("", flat).get(key) for key in flat if key != "rope_type"
    ):
        found["rope_parameters"] = parameters
    if "" not in parameters or filled.get(""):
        found["filled"] = filled
    return found


def mrope_facts(cls: type[PreTrainedConfig], code: str) -> dict[str, Any]:
    """Return the M-RoPE sections of a rope section without them, and their order.

    The config class adds them, or the code of the rotary class falls back on them.
    """
    fallback = re.search(r"'mrope_section', (\[[\d, ]+\])", code)
    if fallback is None:
        return {}
    added = sections(cls, rope_parameters={"rope_type": "default"}).get("", {}) or {}
    interleaved = "mrope_section[dim] * 3" in code or "length = mrope_section[dim]" in code
    section = added.get("mrope_section", json.loads(fallback[1]))
    return {"mrope": {"mrope_section": section, "mrope_interleaved": interleaved}}


def old_key_facts(cls: type[PreTrainedConfig], has_own_sections: bool) -> dict[str, Any]:
    """Return the effect of old top-level keys on the rope sections, unless it is the usual one.

    The usual keys need an entry to change the sections of a class, and others do in any case.
    """
    usual = ("rope_theta", PARTIAL_KEYS[0])
    given = {"rope_parameters": {"rope_type": "default"}}
    top_level: dict[str, dict[str, str]] = {}
    for name, keys, value in (
        (usual[0], THETA_KEYS, 777.0),
        (usual[1], PARTIAL_KEYS, 0.375),
    ):
        found = old_keys(cls, keys, name, value)
        for label, key in found.items():
            if has_own_sections or key != name:
                top_level.setdefault(label, {})[name] = key
        is_flat = "" in sections(cls)
        if (
            name == usual[1]
            and is_flat
            and not {**found, **old_keys(cls, keys, name, value, **given)}
        ):
            top_level.setdefault("", {})[name] = ""
    linear = {"rope_type": "linear", "factor": 3.0}
    scaled = sorted(
        key
        for key, value in sections(cls, rope_scaling=linear).items()
        if (value or {}).get("factor") == 3.0
    )
    facts = {"top_level": top_level, "scaled": [label for label in scaled if label]}
    return {key: found for key, found in facts.items() if found}


def ignored_keys(cls: type[PreTrainedConfig], labels: list[str]) -> list[str]:
    """Return the standard top-level keys that change no section of a class or of a file."""
    section = {"rope_type": "default"}
    given = section if labels == [""] else {label: dict(section) for label in labels}
    values = {"rope_theta": 777.0, "partial_rotary_factor": 0.375}
    return [
        key
        for key, value in values.items()
        if not old_keys(cls, (key,), key, value)
        and not old_keys(cls, (key,), key, value, rope_parameters=given)
    ]


def facts(
    cls: type[PreTrainedConfig], instance: PreTrainedConfig, rotary: ast.ClassDef
) -> dict[str, Any]:
    """Return one model type's entry."""
    renamed = {name: cls.attribute_map[name] for name in NAMES if name in cls.attribute_map}
    defaults = plain_defaults(cls, renamed)
    code = ast.unparse(rotary)
    entry: dict[str, Any] = {
        "interleaved": pairing(cls),
        "defaults": defaults,
        **section_facts(cls),
        **mrope_facts(cls, code),
    }
    entry |= old_key_facts(cls, "rope_parameters" in entry)
    if ignored := ignored_keys(cls, list(sections(cls))):
        entry["ignored"] = ignored
    if "partial_rotary_factor" not in code:
        entry["whole_head"] = True
    if not reads_head_dim(cls):
        renamed["head_dim"] = ""
    if renamed:
        entry["names"] = renamed
    layer_types = getattr(instance, "layer_types", None) or ()
    if unrotated := [name for name in WITHOUT_POSITIONS if name in layer_types]:
        entry["unrotated"] = dict.fromkeys(unrotated, "")
    return entry


def text_part(instance: PreTrainedConfig) -> tuple[str, PreTrainedConfig | None]:
    """Return the language model's config inside a default config, and its key."""
    parts = {key: getattr(instance, key, None) for key in TEXT_PARTS}
    return next(
        ((key, part) for key, part in parts.items() if isinstance(part, PreTrainedConfig)),
        ("", None),
    )


def is_axial(cls: type[PreTrainedConfig]) -> bool:
    """Return True for models whose positions have several axes, and which have another table."""
    return (
        cls.default_rope_type == "axial"
        or cls.model_type.endswith("_vision")
        or cls.model_type in SEVERAL_AXES
    )


def row(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the row of a config class; empty for one without a rotation or a language model."""
    try:
        instance = cls()
    except Exception as error:  # a class that cannot be made without arguments has no defaults
        print(f"left out {cls.__name__}: {str(error)[:200]}")
        return {}
    found: dict[str, Any] = {}
    rotary = rotary_class(cls)
    rotates = getattr(instance, "rope_parameters", None) or (
        rotary is not None and hasattr(instance, "rope_theta")
    )
    if rotates and not is_axial(cls):
        if rotary is None:
            raise SystemExit(
                f"{cls.model_type}: its config has rope parameters, but no rotary module of its "
                "code was found, neither in its folder nor by the auto mapping"
            )
        instance.allow_global_per_layer_attribute_access = True
        found = facts(cls, instance, rotary)
    key, part = text_part(instance)
    if part is not None:
        found["part"] = [key, part.model_type]
    if reads(found) != sorted(ModelFacts().reads):
        found["reads"] = reads(found)
    return found


def reads(entry: dict[str, Any]) -> list[str]:
    """Return the keys with names of rotations that the code of a row reads, or refuses."""
    facts = ModelFacts(**entry)
    listed = facts.top_level.values()
    keys: set[Any] = {key for keys in listed for key in keys.values()}
    keys |= {*facts.refuse, *facts.names.values(), *facts.unrotated.values(), facts.interleaved}
    keys |= facts.defaults.keys() & {"qk_rope_head_dim"}
    # These fill the sections of a file, unless a key of another name does.
    keys |= {
        name
        for name in ("rope_theta", "partial_rotary_factor")
        if not any(name in keys for keys in listed)
    }
    has_layer_sections = bool({*facts.rope_parameters} - {""})
    if not facts.unrotated and not has_layer_sections:
        keys.update(("no_rope_layers", "layer_rope_theta", "no_rope_layer_interval"))
    return sorted(filter(is_rotation_key, keys - {*facts.ignored}))


def without_unknown_parts(table: dict[str, Any]) -> dict[str, Any]:
    """Return the rows with facts, and those of wholes whose language model has facts."""
    parts = {name for name, entry in table.items() if "defaults" in entry}
    parts |= {name for name in table if table[name].get("part", [None, None])[1] in parts}
    return {
        name: entry
        for name, entry in table.items()
        if "defaults" in entry or entry["part"][1] in parts
    }


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    table: dict[str, Any] = {}
    for cls in config_classes():
        if not isinstance(cls.model_type, str) or not cls.model_type:
            continue
        if found := row(cls):
            table[cls.model_type] = {**table.get(cls.model_type, {}), **found}
    table = without_unknown_parts(table)
    rows = [f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    TARGET.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(
        f"{len(table)} model types, {TARGET.stat().st_size} bytes, "
        f"transformers {transformers.__version__}"
    )


if __name__ == "__main__":
    main()
