"""The pairing of every model type with a rotary module, against its attention's apply function."""

from __future__ import annotations

from math import cos, sin
from typing import Any

import pytest

from rope_cpu.models.model_types import model_facts

pytestmark = pytest.mark.peers

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from rotary_modules import apply_functions, modules, rotated  # noqa: E402

WIDTH = 8
ANGLES = (0.7, -0.4)

# Of |q|·|k|: cos, sin, two products and a sum in each rotation, and the dot product over the width,
# each rounded in float32.
TOLERANCE = (2 * 5 + WIDTH) * 2.0**-24

# Model types whose attention calls no function of its module: whether their code pairs neighbours.
READ_BY_HAND = {
    "dots3_note_audio_encoder": (
        False,
        "beside a language model that pairs neighbours, its own audio attention pairs halves",
    ),
    "qwen2_5_omni_dit": (True, "DiTAttention parts neighbours into halves before it rotates"),
    "wav2vec2-bert": (False, "its attention method _apply_rotary_embedding rotates halves"),
    "wav2vec2-conformer": (False, "its attention method _apply_rotary_embedding rotates halves"),
}


def expected_score(q: Any, k: Any, angle: float, neighbours: bool) -> float:
    """Return the score of a query and a key, the query turned by an angle more, in closed form."""
    order = (lambda x: x.reshape(-1, 2).T) if neighbours else (lambda x: x.reshape(2, -1))
    q, k = q.double(), k.double()
    (q_0, q_1), (k_0, k_1) = order(q), order(k)
    return float(cos(angle) * (q @ k) + sin(angle) * (q_0 @ k_1 - q_1 @ k_0))


def pairings(apply: Any, direction: int) -> set[bool]:
    """Return which pairing gives the score of a query and a key that a function rotates.

    A score does not depend on the order in which the function writes the elements.
    """
    q, k = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    score = float(rotated(apply, q, ANGLES[0]) @ rotated(apply, k, ANGLES[1]))
    angle = direction * (ANGLES[0] - ANGLES[1])
    return {
        neighbours
        for neighbours in (True, False)
        if abs(expected_score(q, k, angle, neighbours) - score)
        <= TOLERANCE * float(q.norm() * k.norm())
    }


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
    known = model_facts(model_type)
    assert known is not None
    if model_type in READ_BY_HAND:
        assert known.interleaved is READ_BY_HAND[model_type][0]
        return
    found = [pairings(apply, known.rotation_sign) for apply in apply_functions(folder).values()]
    # A key that decides chooses between two functions. One that transformers does not know stands
    # for the code of another release, and the one function has the pairing of True.
    if known.interleaved == "rope_interleave":
        assert found in ([{True}, {False}], [{False}, {True}])
    else:
        assert {frozenset(pairing) for pairing in found} == {frozenset({bool(known.interleaved)})}
