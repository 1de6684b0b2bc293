"""`rope-cpu bench --list`: families, parts of names and contenders on one screen."""

import re

import pytest

import rope_cpu
from rope_cpu.bench import environment, listing, models
from rope_cpu.bench.implementations.table import OURS, PEERS, PEERS_BY_PACKAGES
from rope_cpu.bench.suites.case_names import FAMILIES, SUFFIXES, family, title
from rope_cpu.bench.suites.catalog import catalog, select

# A line of a family: name, number of cases, number of default ones, description.
FAMILY_LINE = re.compile(r"  (\S+) +(\d+) +(\d+)  (.+)")


def overview(name="llama3-8b", **more):
    """Return the cases of a model, and the lines of their overview."""
    model = models.known(name)
    cases = catalog(model, **more)
    return cases, list(listing.overview(cases, model))


def test_the_overview_has_one_screen_of_80_columns():
    _, lines = overview()
    assert len(lines) <= 57
    assert max(map(len, lines)) <= 80


def test_missing_packages_and_long_names_fit_80_columns(monkeypatch):
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    monkeypatch.setitem(models.MODELS, "a model " * 30, models.MODELS["llama3-8b"])
    _, lines = overview("a model " * 30)
    assert max(map(len, lines)) <= 80


def test_the_families_have_all_cases():
    cases, lines = overview()
    rows = [found.groups() for line in lines if (found := FAMILY_LINE.fullmatch(line))]
    *families, (name, count, default_count, _) = rows
    assert [(name, text) for name, _, _, text in families] == list(FAMILIES.items())
    for row_name, row_count, row_default_count, _ in families:
        own = [case for case in cases if family(case.name) == row_name]
        assert int(row_count) == len(own)
        assert int(row_default_count) == sum(case.default for case in own)
    assert (name, int(count), int(default_count)) == ("all", len(cases), len(select(cases, [])))


@pytest.mark.parametrize("model", ["llama3-8b", "cohere-35b"])
def test_every_part_of_a_name_is_explained_once(model):
    cases, lines = overview(model)
    parts = {part for case in cases for part in case.name.split("/")[1:]}
    first_words = [line.split()[0] for line in lines if line.startswith("  ")]
    (dtypes,) = (line for line in lines if line.startswith("  dtype "))
    for part in parts:
        assert first_words.count(part) == (part in SUFFIXES)
        assert part in SUFFIXES or part in dtypes


def test_suffixes_are_in_their_order_in_names():
    cases, _ = overview()
    for case in cases:
        suffixes = [part for part in case.name.split("/") if part in SUFFIXES]
        assert suffixes == [suffix for suffix in SUFFIXES if suffix in suffixes]


def test_every_contender_is_named_with_its_version_or_how_to_install_it(monkeypatch):
    missing = {"torch", "jax"}
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr(environment.metadata, "version", lambda name: f"1.2+{name}")
    _, lines = overview()
    shown = lines[next(i for i, line in enumerate(lines) if line.startswith("Contenders")) :]
    names = "; ".join(line.strip(" ;") for line in shown if line.startswith("    ")).split("; ")
    assert names == [*OURS, *PEERS]
    text = "\n".join(shown)
    assert f"rope_cpu {rope_cpu.__version__}" in text
    assert "torch: not installed: pip install torch" in text
    assert "jax: not installed: pip install jax" in text
    for packages in PEERS_BY_PACKAGES:
        for package in packages:
            assert (f"{package} 1.2+{package}" in text) == missing.isdisjoint(packages)


def test_a_module_without_a_distribution_of_its_name_is_installed(monkeypatch):
    def version(name):
        raise environment.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.metadata, "version", version)
    assert environment.installed_version("numpy") == "of unknown version"
    assert environment.installed_version("no_such_module") is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decode-1/float32", "one token, float32"),
        ("prefill-512/bfloat16/half/out/cold", "512 tokens, bfloat16, half-split, into other"),
        ("layouts", "512 tokens, packed or"),
        ("a family of an older version/float32", "a family of an older version, float32"),
    ],
)
def test_titles(name, words):
    assert title(name).startswith(words)
