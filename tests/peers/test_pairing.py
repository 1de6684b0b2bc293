"""The pairing of every model type with a rotary module, against its attention's apply function."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from rope_cpu.configs.model_types import model_facts

pytestmark = pytest.mark.peers

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from rotary_modules import modules  # noqa: E402

WIDTH = 8

# Attention classes beside that of the model whose rotary module is looked at.
OTHERS = "Vision(?!Text)|Indexer|NoteAudio"

# Model types whose attention calls no function of its module, and the source of their pairing.
READ_BY_HAND = {
    "dots3_note_audio_encoder": (
        "beside a language model that pairs neighbours, its own audio attention pairs halves"
    ),
    "wav2vec2-bert": "its attention method _apply_rotary_embedding rotates halves",
    "wav2vec2-conformer": "its attention method _apply_rotary_embedding rotates halves",
    "llama4_text": "rotates complex neighbours: apply_rotary_emb takes freqs_cis",
    "deepseek_v2": "rotates complex neighbours: apply_rotary_emb takes freqs_cis",
}


def apply_functions(folder: str) -> dict[str, Any]:
    """Return the apply functions of a folder's attention classes, except vision and indexers."""
    found: dict[str, Any] = {}
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for cls_name, cls in vars(module).items():
        own = inspect.isclass(cls) and cls.__module__ == module.__name__
        if own and re.search("Attention|MLA", cls_name) and not re.search(OTHERS, cls_name):
            for called in re.findall(r"\b(apply_rotary\w*)\(", inspect.getsource(cls)):
                found[called] = getattr(module, called)
    return found


def neighbours(apply: Any) -> bool:
    """Return whether a right angle moves the unit vector of element 1 to element 0.

    Then neighbours are paired.
    """
    x = torch.zeros(1, 1, 1, WIDTH)
    x[..., 1] = 1
    many = {"q", "k"} <= set(inspect.signature(apply).parameters)
    for width in (WIDTH, WIDTH // 2):  # some take cos and sin of the pairs, others of the elements
        cos, sin = torch.zeros(1, 1, width), torch.ones(1, 1, width)
        try:
            rotated = apply(x, x, cos, sin)[0] if many else apply(x, cos, sin)
        except RuntimeError:
            continue
        return int(rotated.abs().argmax()) == 0
    raise AssertionError(f"{apply} takes cos and sin of another shape")


def cases() -> list[tuple[str, str]]:
    """Return (folder, model type) of every language model's rotary module."""
    found = set()
    for folder, _, config_class in modules():
        known = model_facts(str(getattr(config_class, "model_type", "")))
        several_axes = (
            "vision" in str(getattr(config_class, "model_type", ""))
            and "text" not in config_class.model_type
        )
        if (
            known is not None
            and known.interleaved is not None
            and known.part is None
            and not several_axes
        ):
            found.add((folder, config_class.model_type))
    return sorted(found)


@pytest.mark.parametrize(("folder", "model_type"), cases())
def test_pairing(folder: str, model_type: str) -> None:
    if model_type in READ_BY_HAND:
        # A key that decides is one that transformers does not know: its code is that of True.
        assert bool(model_facts(model_type).interleaved) is ("complex" in READ_BY_HAND[model_type])
        return
    found = {neighbours(apply) for apply in apply_functions(folder).values()}
    known = model_facts(model_type)
    if known.interleaved == "rope_interleave":
        assert found == {True, False}
    else:
        assert found == {known.interleaved}
