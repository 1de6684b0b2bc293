"""Encoders of transformers that rotate nothing, found by the names in the code of their classes."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
from functools import cache
from importlib import resources
from pathlib import Path

import pytest

from rope_cpu.models import vision
from rope_cpu.models.model_types import UNROTATED, known_types

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

MODELS = Path(transformers.__file__).parent / "models"
ROTATION = re.compile(r"rotary|(?<![pd])rope|rotate_half|freqs_cis|inv_freq|polar", re.IGNORECASE)
ENCODERS = {
    name
    for names in json.loads(
        resources.files("rope_cpu.models.data").joinpath("encoders.json").read_text("utf-8")
    ).values()
    for name in names
}

# Their base class names the outputs of other classes, or has position embeddings of that name.
BY_HAND = {
    *("gemma3n_audio", "gemma4_audio", "gemma4_unified_vision", "hy_v4_vl_vision"),
    *("nemotron_asr_streaming_encoder", "parakeet_encoder", "qwen3_omni_moe_audio_encoder"),
    "videoprism_vision_model",
}

# What encoders take, as the attribute `main_input_name` of their classes has it.
INPUTS = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}


@cache
def module(path):
    """Return the definitions of a modeling file, and its imports of others."""
    definitions, imports = {}, {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.ImportFrom) and ".modeling_" in f".{node.module}":
            root = path.parents[node.level - 1]
            file = root / f"{(node.module or '').replace('.', '/')}.py"
            if file.exists() and MODELS in file.parents:
                imports |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
    return definitions, imports


@cache
def names(path, definition):
    """Return the names and attributes that a definition uses, and the inputs that it states."""
    used, inputs = {definition}, set()
    for statement in getattr(module(path)[0][definition], "body", ()):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            text = ast.unparse(statement)
            inputs |= INPUTS & set(re.findall(r"^main_input_name = '(\w+)'", text))
            if "_can_record_outputs" in text:  # names of classes that it does not call
                continue
        for node in ast.walk(statement):
            used |= {getattr(node, key, None) for key in ("id", "attr", "arg", "name")}
    bases = getattr(module(path)[0][definition], "bases", ())
    used |= {base.id for base in bases if isinstance(base, ast.Name)}
    return {name for name in used if isinstance(name, str)}, inputs


def reached(path, start):
    """Return the names and the inputs in all definitions that are reached from some classes."""
    found, inputs, seen = set(), set(), set()
    todo = [(path, name) for name in start]
    while todo:
        file, name = todo.pop()
        if (file, name) in seen:
            continue
        seen.add((file, name))
        definitions, imports = module(file)
        if name in definitions:
            used, stated = names(file, name)
            found |= used
            inputs |= stated
            todo += [(file, other) for other in used]
        elif name in imports:
            todo.append(imports[name])
    return found, inputs


def users(path, configuration):
    """Return the classes of a modeling file that are made from a configuration class."""
    pattern = re.compile(rf"\b{configuration}\b")
    for name, node in module(path)[0].items():
        for part in getattr(node, "body", ()):
            is_method = isinstance(part, ast.FunctionDef) and part.name == "__init__"
            target = part.args if is_method else part
            is_own = is_method or isinstance(part, ast.AnnAssign | ast.Assign)
            if is_own and pattern.search(ast.unparse(target)):
                yield name
                break


def encoders():
    """Return {model type: the names of rotations in its code} for classes that take INPUTS.

    Models that wrap any others are left out.
    """
    found = {}
    for folder in pkgutil.iter_modules([str(MODELS)]):
        name = f"transformers.models.{folder.name}.configuration_{folder.name}"
        path = MODELS / folder.name / f"modeling_{folder.name}.py"
        try:
            members = vars(importlib.import_module(name)).values()
        except ModuleNotFoundError:
            continue
        for cls in members if path.exists() else ():
            is_own = inspect.isclass(cls) and cls.__module__ == name
            if not is_own or not issubclass(cls, transformers.PreTrainedConfig):
                continue
            start = list(users(path, cls.__name__))
            used, inputs = reached(path, start)
            parts = cls.sub_configs_defaults or {}
            is_auto = any(word.startswith("AutoModel") for word in used)
            wraps_others = "backbone_config" in parts or (bool(parts) and is_auto)
            if start and not wraps_others and (inputs or cls.model_type in ENCODERS):
                found[cls.model_type] = {word for word in used if ROTATION.search(word)}
    return found


def test_encoders_are_those_whose_code_speaks_of_no_rotation():
    found = encoders()
    rotating = {name: words for name, words in found.items() if words}
    assert not (ENCODERS - BY_HAND) & rotating.keys(), rotating
    known = ENCODERS | set(UNROTATED) | vision.REFUSED.keys() | {*known_types()}
    texts = {name for name in found if "text" in name}  # parts of models that encode both
    assert found.keys() - rotating.keys() - known - texts - vision.TOWERS.keys() == set()
    assert ENCODERS & vision.TOWERS.keys() == set()
    assert ENCODERS & {*known_types()} == set()
