"""The estimate of a run's duration; its arithmetic, not the time that a machine takes."""

import pytest

from rope_cpu.bench import estimate, models
from rope_cpu.bench.implementations import table
from rope_cpu.bench.measurement.case import Case
from rope_cpu.bench.measurement.timing import Effort
from rope_cpu.bench.suites.catalog import catalog, select


def case(**facts):
    return Case("a case", "", list, **facts)


def default_cases(peers=None):
    return select(catalog(models.known("llama3-8b"), peers), [])


def test_a_case_takes_its_budget_and_what_is_beyond_it():
    usual = estimate.seconds(case())
    assert usual == estimate.PREPARATION + 1 + estimate.SHARE_OF_BUDGET
    longer = estimate.seconds(case(effort=Effort(budget=6.0)))
    assert longer - usual == pytest.approx(5 * (1 + estimate.SHARE_OF_BUDGET))
    assert estimate.seconds(case(first_calls=4.0, overrun=2.0)) == pytest.approx(usual + 6)
    memory = int(3 * estimate.FILLED_PER_SECOND)
    assert estimate.seconds(case(memory=memory)) == pytest.approx(usual + 3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "5 s"),
        (22, "20 s"),
        (58, "60 s"),
        (62, "1 min"),
        (96, "1 min 40 s"),
        (119, "2 min"),
        (169, "2 min 50 s"),
        (171, "3 min"),
        (1410, "24 min"),
    ],
)
def test_durations_are_rounded(seconds, text):
    assert estimate.about(seconds) == text


def test_a_summary_has_the_number_of_cases_and_the_sum():
    assert estimate.summary([case()]) == "1 case, about 5 s"
    many = [case(overrun=1.0)] * 40
    assert estimate.summary(many) == f"40 cases, about {estimate.about(40 * 2.65)}"


def test_the_budgets_are_most_of_a_plain_run():
    cases = default_cases(peers=False)
    budgets = sum(case.effort.budget for case in cases)
    assert budgets < sum(map(estimate.seconds, cases)) < 3 * budgets


def test_compilers_are_included_where_they_are_installed(monkeypatch):
    def total(*missing):
        monkeypatch.setattr(table, "find_spec", lambda name: None if name in missing else name)
        return sum(case.first_calls for case in default_cases())

    headlines = 6
    assert total() == headlines * table.first_calls([table.TORCH_COMPILED]) > 0
    assert total("torch") == 0
    assert total("transformers") == 0
