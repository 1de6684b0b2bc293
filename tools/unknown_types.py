"""Name the model types of transformers with a rotary module that stand in no table of rope_cpu.

    python tools/unknown_types.py FOLDER

FOLDER is an unpacked transformers, of any release. Its source text is read; neither transformers
nor torch nor rope_cpu is imported. The exit status is 1 if there are such model types.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

from model_source import built_by, has_rotary_module, is_rotary

DATA = Path(__file__).parents[1] / "rope_cpu" / "models" / "data"

# Keys of configs that only rotated models have.
ROPE_KEYS = {"rope_parameters", "rope_theta", "rope_scaling", "default_theta"}


def known_types() -> set[str]:
    """Return the model types of all tables, those that are refused by name included."""

    def table(name: str) -> dict:
        return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))

    named = {
        model_type
        for file in ("refused", "unrotated", "encoders")
        for model_types in table(file).values()
        for model_type in model_types
    }
    towers = {name for row in table("vision")["rows"] for name in row["names"]}
    return named | towers | {*table("models"), *table("other_models")}


def assigned(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return the names that a class body assigns, with their values."""
    found: dict[str, ast.expr | None] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = item.value
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            found[item.targets[0].id] = item.value
    return found


def configs(folder: Path) -> dict[str, ast.ClassDef]:
    """Return the config classes of a folder that name a model type, by model type."""
    found = {}
    for path in sorted(folder.glob("configuration_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                model_type = assigned(node).get("model_type")
                if isinstance(model_type, ast.Constant) and model_type.value:
                    found[model_type.value] = node
    return found


def names_in(folder: Path) -> set[str]:
    """Return the model types that a folder's configuration files name, without parsing them."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("configuration_*.py")]
    return set(re.findall(r"^ +model_type\b.*= *[\"'](.+)[\"']", "\n".join(texts), re.MULTILINE))


def rotary_modules(folder: Path, config: ast.ClassDef) -> set[str]:
    """Return the names of the rotary modules that are built from a config."""
    return {node.name for node in built_by(folder, config.name) if is_rotary(node)}


def unknown_in(folder: Path, known: set[str]) -> list[str]:
    """Return the model types of a folder that rotate and stand in no table.

    They have rope parameters of their own, or a rotary module that no known model type of the
    folder has. The config of a whole has that of its parts.
    """
    if names_in(folder) <= known:
        return []
    types = configs(folder)
    unknown = {name: config for name, config in types.items() if name not in known}
    with_keys = {name for name in unknown if ROPE_KEYS & assigned(unknown[name]).keys()}
    if not has_rotary_module(folder):
        return [name for name in unknown if name in with_keys]
    explained = {
        module
        for name, config in types.items()
        if name in known or name in with_keys
        for module in rotary_modules(folder, config)
    }
    return [
        name
        for name, config in unknown.items()
        if name in with_keys or rotary_modules(folder, config) - explained
    ]


def unknown_types(models: Path) -> dict[str, str]:
    """Return the model types that rotate and stand in no table, with the folder of each."""
    known = known_types()
    return {
        model_type: folder.name
        for folder in sorted(path for path in models.iterdir() if path.is_dir())
        for model_type in unknown_in(folder, known)
    }


def main(package: str) -> int:
    """Print the model types, one in a line."""
    models = Path(package) / "models"
    if not models.is_dir():
        raise SystemExit(f"{package} holds no transformers: it has no folder `models`")
    found = unknown_types(models)
    for model_type, folder in found.items():
        print(f"{model_type} (models/{folder}) has a rotary embedding and stands in no table")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
