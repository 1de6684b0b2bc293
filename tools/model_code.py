"""The modelling code of transformers that rotates for a config class, read from its source."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from model_source import annotated, built_by, class_definitions, is_rotary
from rotary_modules import mapped_model
from transformers import PreTrainedConfig

MODELS = Path(transformers.__file__).parent / "models"

# Attention classes beside that of the model whose rotary module is looked at.
OTHERS = "Vision(?!Text)|Indexer|NoteAudio"


def code_of(cls: type[PreTrainedConfig]) -> tuple[Path, str]:
    """Return the folder with a config class's modelling code, and the name of the code's config.

    A folder without modelling code has the code of the model that the auto mapping names.
    """
    folder = MODELS / cls.__module__.split(".")[-2]
    model = None if class_definitions(folder) else mapped_model(cls)
    if model is None:
        return folder, cls.__name__
    return MODELS / model.__module__.split(".")[-2], model.config_class.__name__


def wholes_of(cls: type[PreTrainedConfig]) -> list[str]:
    """Return the names of the config classes of the same module that have this one as a part."""
    module = sys.modules[cls.__module__]
    found = []
    for name, whole in vars(module).items():
        if not (inspect.isclass(whole) and issubclass(whole, PreTrainedConfig)):
            continue
        with contextlib.suppress(Exception):  # nothing is known of a class that needs arguments
            if any(type(part) is cls for part in vars(whole()).values()):
                found.append(name)
    return found


def rotary_class(cls: type[PreTrainedConfig]) -> ast.ClassDef | None:
    """Return the rotary module of a config class; None if its code has none.

    A module may be annotated with the config of the whole that the config class is a part of, or
    with a class that the config class renames.
    """
    folder, config_name = code_of(cls)
    renamed = [base.__name__ for base in cls.__mro__[1:]]
    for name in (config_name, *renamed[: renamed.index("PreTrainedConfig")], *wholes_of(cls)):
        rotary = [node for node in built_by(folder, name) if is_rotary(node)]
        direct = [node for node in rotary if annotated(node, name)]
        if rotary:
            return (direct or rotary)[0]
    return None


# Model types whose attention calls no function of its module, or others than the model's own:
# whether their code pairs neighbours, and where it says so.
READ_BY_HAND = {
    "dots3_note_audio_encoder": (False, "DotsNoteAudioAttention rotates halves"),
    "dots3_note_text": (True, "apply_rotary_pos_emb_interleave"),
    "qwen2_5_omni_dit": (True, "DiTAttention parts neighbours into halves before it rotates"),
    "wav2vec2-bert": (False, "the attention method _apply_rotary_embedding rotates halves"),
    "wav2vec2-conformer": (False, "the attention method _apply_rotary_embedding rotates halves"),
}


def pairing(cls: type[PreTrainedConfig]) -> bool | str:
    """Return whether pairs are neighbours, or the config key that decides.

    Then a right angle moves the unit vector of element 1 to element 0. DeepSeek's kind reads
    neighbours and writes the halves apart: the same rotation and a permutation of its result.
    """
    folder, _ = code_of(cls)
    if cls.model_type in READ_BY_HAND:
        return READ_BY_HAND[cls.model_type][0]
    if any("config.rope_interleave" in ast.unparse(n) for n in class_definitions(folder).values()):
        return "rope_interleave"
    unit = torch.zeros(8)
    unit[1] = 1
    found = {
        int(rotated(apply, unit, math.pi / 2).abs().argmax()) == 0
        for apply in apply_functions(folder.name).values()
    }
    if len(found) != 1:
        raise SystemExit(f"{cls.model_type}: its apply functions pair in these ways: {found or ''}")
    return found.pop()


def apply_functions(folder: str) -> dict[str, Any]:
    """Return the apply functions of a folder's attention classes, except vision and indexers."""
    found: dict[str, Any] = {}
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for name, cls in vars(module).items():
        own = inspect.isclass(cls) and cls.__module__ == module.__name__
        if own and re.search("Attention|MLA", name) and not re.search(OTHERS, name):
            for called in re.findall(r"\b(apply_rotary\w*)\(", inspect.getsource(cls)):
                found[called] = getattr(module, called)
    return found


def rotated(apply: Any, x: torch.Tensor, angle: float) -> torch.Tensor:
    """Return a vector that an apply function of transformers rotates by one angle in all pairs.

    The arguments are passed by name, because their order differs between functions and releases.
    Some functions take cos and sin of the elements, others of the pairs.
    """
    head = x[None, None, None]
    for width in (x.numel(), x.numel() // 2):
        angles = torch.full((1, 1, width), angle, dtype=x.dtype)
        arguments = {
            **dict.fromkeys(("q", "k", "v", "xq", "xk", "x", "tensor"), head),
            "cos": angles.cos(),
            "sin": angles.sin(),
            "freqs_cis": torch.polar(torch.ones_like(angles), angles),
        }
        names = inspect.signature(apply).parameters
        given = {name: arguments[name] for name in names if name in arguments}
        try:
            result = apply(**given)
        except RuntimeError:
            continue
        return (result if isinstance(result, torch.Tensor) else result[0]).flatten()
    raise LookupError(f"{apply.__module__}.{apply.__name__} takes cos and sin of another shape")
