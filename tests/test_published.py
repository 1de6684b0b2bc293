"""Published config files, by their rope-relevant facts: each means what its model's code computes, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rope_cpu import config

FACTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "published_configs.json").read_text(encoding="utf-8")
)
READ = [name for name, entry in FACTS.items() if "expected" in entry]
REFUSED = [name for name, entry in FACTS.items() if "refused" in entry]


def check(spec: Any, expected: dict[str, Any]) -> None:
    inv_freq = spec.inv_freq[0, :, 0].sum(axis=0)
    assert inv_freq.size == expected["pairs"]
    np.testing.assert_allclose(inv_freq[expected["at"]], expected["inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(inv_freq.sum(), expected["sum"], rtol=1e-6)
    assert float(spec.attention_factor[0]) == pytest.approx(expected["attention_factor"], rel=1e-6)


@pytest.mark.parametrize("name", READ)
def test_frequencies_are_those_of_the_models_code(name: str) -> None:
    entry = FACTS[name]
    for layer_type, expected in entry["expected"].items():
        spec = config.read(entry["config"], layer_type=layer_type or None)
        check(spec, expected)
        if "interleaved" in entry:
            assert spec.interleaved is entry["interleaved"]
        if "long" in entry:
            check(spec.at_length(10**6), entry["long"])


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ValueError, match="`"):
        config.read(FACTS[name]["config"])


def test_every_file_is_accounted_for() -> None:
    others = [name for name in FACTS if name not in READ and name not in REFUSED]
    assert len(FACTS) == 143
    assert all(name.startswith("diffusers/") for name in others)
