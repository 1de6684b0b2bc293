"""The table of diffusers' classes in docs/configs.md has those that are known and refused."""

from __future__ import annotations

import re
from pathlib import Path

from rope_cpu.configs.diffusers.config import BUILDERS, REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "configs.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Classes of diffusers\n")[1].split("\n## ")[0]
CLASS = re.compile(r"`(\w+(?:Model|Transformer))`")


def test_each_known_class_stands_once_in_the_table():
    rows = [line for line in SECTION.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in CLASS.findall(row)]
    assert len(names) == len(set(names))
    assert set(names) == set(BUILDERS)


def test_refused_classes_stand_below_the_table():
    below = SECTION.split("Refused are")[1]
    assert set(CLASS.findall(below)) == set(REFUSED)
