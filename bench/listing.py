"""The listing of `rope-cpu bench`: families, parts of names, contenders; or the names of cases."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import rope_cpu
from rope_cpu.array_types import DTYPES

from . import estimate
from .environment import installed_version
from .implementations.table import OURS, PEERS_BY_PACKAGES
from .measurement.case import Case
from .models import Model
from .suites.case_names import FAMILIES, SUFFIXES, family

WIDTH = 80


def names(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the names and descriptions of cases, uncut; * marks the default ones."""
    width = max(len(case.name) for case in cases)
    for case in cases:
        mark = "*" if case.default else " "
        yield f"{mark} {case.name:<{width}} {case.what}"


def overview(cases: Sequence[Case], model: Model) -> Iterator[str]:
    """Yield the families of cases, the parts of their names, and the contenders."""
    yield from textwrap.wrap(f"Cases, with shapes of {model.name}: {model.heads_text}", WIDTH)
    yield from _families(cases)
    yield ""
    yield "A name, such as prefill-512/float32/out/cold, is a family and then any of:"
    yield from _parts_of_names(cases)
    yield "Arguments select cases: names, parts of names, patterns with * and ?."
    yield "`--list PATTERN` lists the names of those that it selects, `--list '*'` all."
    yield ""
    yield "Contenders; `--peers` times other libraries in all decode and prefill cases:"
    yield from _contenders()


def _families(cases: Sequence[Case]) -> Iterator[str]:
    """Yield a line for each family, and one for all together."""
    counts = Counter(family(case.name) for case in cases)
    default = [case for case in cases if case.default]
    default_counts = Counter(family(case.name) for case in default)
    width = max(map(len, counts))
    yield f"  {'family':<{width}} cases   *  (timed without arguments)"
    for name, count in counts.items():
        yield f"  {name:<{width}} {count:>5} {default_counts[name]:>3}  {FAMILIES[name]}"
    total = estimate.about(sum(map(estimate.seconds, default)))
    rest = f"the default ones take about {total}"
    yield f"  {'all':<{width}} {len(cases):>5} {len(default):>3}  {rest}"


def _parts_of_names(cases: Sequence[Case]) -> Iterator[str]:
    """Yield a line for the dtypes and one for each suffix that the names have."""
    parts = list(dict.fromkeys(part for case in cases for part in case.name.split("/")[1:]))
    dtypes = ", ".join(part for part in parts if part in DTYPES)
    meanings = {"dtype": dtypes}
    meanings |= {name: suffix.meaning for name, suffix in SUFFIXES.items() if name in parts}
    for name, meaning in meanings.items():
        yield f"  {name:<12} {meaning}"


def _contenders() -> Iterator[str]:
    """Yield the implementations of each set of packages, with the installed versions."""
    yield f"  rope_cpu {rope_cpu.__version__}"
    yield from _listed(OURS)
    for packages, peers in PEERS_BY_PACKAGES.items():
        yield f"  {_packages_text(packages)}"
        yield from _listed(peers)


def _packages_text(packages: Sequence[str]) -> str:
    versions = {package: installed_version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        return f"{', '.join(missing)}: not installed: pip install {' '.join(missing)}"
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def _listed(implementations: Iterable[str]) -> Iterator[str]:
    # Non-breaking spaces keep a name on one line.
    text = "; ".join(name.replace(" ", "\xa0") for name in implementations)
    for line in textwrap.wrap(
        text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    ):
        yield line.replace("\xa0", " ")
