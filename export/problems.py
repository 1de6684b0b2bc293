"""Several reasons for one refusal, raised together."""

from __future__ import annotations

from collections.abc import Sequence


class SeveralProblemsError(ValueError):
    """Several problems with the arguments of one call, numbered in the text."""

    @property
    def problems(self) -> list[str]:
        """The texts of the problems."""
        return [str(problem) for problem in self.args]

    def __str__(self) -> str:
        return numbered(self.problems)


def numbered(problems: Sequence[str]) -> str:
    """Return one text of all problems."""
    if len(problems) == 1:
        return problems[0]
    return ". ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))


def problems_in(error: Exception) -> list[str]:
    """Return the texts of the problems that an error reports."""
    return error.problems if isinstance(error, SeveralProblemsError) else [str(error)]


def raise_together(errors: Sequence[Exception]) -> None:
    """Raise one error for all of these; the first itself if it is the only one, or a TypeError."""
    if not errors:
        return
    if len(errors) == 1 or isinstance(errors[0], TypeError):
        raise errors[0]
    raise SeveralProblemsError(*map(str, errors))
