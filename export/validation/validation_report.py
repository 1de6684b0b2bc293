"""What a validation found, case by case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Outcome:
    """One case: what was drawn, and how far the model's result lay from the exact one.

    error: largest |result − exact|; ratio: largest error / tolerance; against_numpy: largest difference from
    this package's NumPy kernels, nan where they were not run; problem: why the case failed, empty where it passed;
    refused: the model has to refuse to run it.
    """

    case: str
    seed: int
    shape: tuple[int, ...]
    error: float = 0.0
    ratio: float = 0.0
    against_numpy: float = float("nan")
    problem: str = ""
    refused: bool = False

    @property
    def passed(self) -> bool:
        """Whether the case is as it must be."""
        return not self.problem and self.ratio <= 1

    def __str__(self) -> str:
        about = f"{self.case:<26} {'x'.join(map(str, self.shape)):<14}"
        if self.refused:
            return f"{about} {self.problem or 'refused when it ran, as it must be'}"
        if self.problem and not self.ratio:  # it did not run
            return f"{about} {self.problem}"
        numpy = "" if np.isnan(self.against_numpy) else f", from NumPy {self.against_numpy:.2e}"
        verdict = "ok" if self.passed else self.problem or "OUT OF TOLERANCE"
        return f"{about} error {self.error:.2e}, {self.ratio:.0%} of tolerance{numpy}: {verdict}"


@dataclass(frozen=True)
class Report:
    """The result of `validate`: passed, max_abs_error, the outcome of each case, and the worst of them."""

    title: str
    outcomes: tuple[Outcome, ...]
    _replay: Callable[[Outcome], dict[str, NDArray[Any]]] = field(repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def max_abs_error(self) -> float:
        """Largest |result − exact| of all cases; infinite where a case failed to run."""
        if any(outcome.problem and not outcome.ratio for outcome in self.outcomes):
            return float("inf")
        return max((outcome.error for outcome in self.outcomes), default=0.0)

    @property
    def worst(self) -> Outcome:
        """The case that failed, or that came closest to its tolerance."""
        return max(
            self.outcomes,
            key=lambda outcome: (not outcome.passed, np.nan_to_num(outcome.ratio, nan=np.inf)),
        )

    def replay(self, outcome: Outcome | None = None) -> dict[str, NDArray[Any]]:
        """Run a case again, the worst by default; return its inputs, and results, exact values and bounds by name.

        The result is empty for a case that runs no model, such as the checker's.
        """
        return self._replay(self.worst if outcome is None else outcome)

    def __str__(self) -> str:
        failed = sum(not outcome.passed for outcome in self.outcomes)
        verdict = (
            f"{failed} of {len(self.outcomes)} cases FAILED"
            if failed
            else f"passed, {len(self.outcomes)} cases"
        )
        worst = f"  largest error {self.max_abs_error:.3e}; worst case: {self.worst.case} (seed {self.worst.seed})"
        return "\n".join(
            [f"{self.title}: {verdict}", worst, *(f"  {outcome}" for outcome in self.outcomes)]
        )
