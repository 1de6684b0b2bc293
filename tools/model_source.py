"""Classes in the source text of transformers: nothing here imports transformers or torch."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROTARY = re.compile("Rotary|RoPE|Rope")


@cache
def class_definitions(folder: Path) -> dict[str, ast.ClassDef]:
    """Return the classes in the modelling files of a folder, by name."""
    return {
        node.name: node
        for path in sorted(folder.glob("modeling_*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def has_rotary_module(folder: Path) -> bool:
    """Return True if a class of a folder's modelling files has the name of a rotary module."""
    return any(
        re.search(rf"^class \w*({ROTARY.pattern})", path.read_text(encoding="utf-8"), re.MULTILINE)
        for path in folder.glob("modeling_*.py")
    )


def annotated(node: ast.ClassDef, config_name: str) -> bool:
    """Return True for a class that is built from a config of this name."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return any(
                argument.annotation is not None
                and config_name in re.findall(r"\w+", ast.unparse(argument.annotation))
                for argument in item.args.args
            )
    return False


def built_by(folder: Path, config_name: str) -> list[ast.ClassDef]:
    """Return the classes that are built from a config of this name, and those that they build."""
    classes = class_definitions(folder)
    waiting = [name for name, node in classes.items() if annotated(node, config_name)]
    found: dict[str, ast.ClassDef] = {}
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        found[name] = classes[name]
        called = [
            node.func.id
            for node in ast.walk(classes[name])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
        waiting += [name for name in (*called, *bases) if name in classes]
    return list(found.values())


def is_rotary(node: ast.ClassDef) -> bool:
    """Return True for a rotary module that is built from a config."""
    return ROTARY.search(node.name) is not None and any(
        isinstance(item, ast.FunctionDef)
        and item.name == "__init__"
        and any(argument.arg == "config" for argument in item.args.args)
        for item in node.body
    )
