"""The targets: one object for each, with its limits and its rotation and attention."""

from __future__ import annotations

from collections.abc import Callable

from rope_cpu.arguments.scalars import choice

from .base import Target
from .onnx import ONNX
from .ort import ORT
from .primitive import PRIMITIVE

__all__ = ["TARGETS", "Target", "capable_targets", "find_target"]

TARGETS: dict[str, Target] = {target.name: target for target in (PRIMITIVE, ONNX, ORT)}


def find_target(name: object) -> Target:
    """Return the target of this name; raise ValueError if there is none."""
    return TARGETS[choice("target", name, tuple(TARGETS))]


def capable_targets(supports: Callable[[Target], bool]) -> str:
    """Return the targets for which `supports` is true, for an error text: "target 'primitive'"."""
    names = [repr(name) for name, target in TARGETS.items() if supports(target)]
    noun = "target" if len(names) == 1 else "targets"
    return f"{noun} {' and '.join(names)}"
