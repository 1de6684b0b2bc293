"""The results of `validate` and `check`: an Outcome for each case or rotation, and the Report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rope_cpu.arguments.texts import escaped


@dataclass(frozen=True)
class Outcome:
    """The result of one case of `validate`, or of one rotation of `check`.

    Attributes
    ----------
    case : str
        Name of the case, or of the rotation's tables or frequencies.
    seed : int
        Seed of its random inputs.
    shape : tuple of int
        Shape of the first tensor, (batch, tokens, heads, head_dim) or (batch, tokens, in), or of
        cos, (positions, pairs); empty for static checks.
    error : float
        Largest |result − exact|.
    ratio : float
        Largest error as a fraction of its tolerance; above 1 the case fails.
    problem : str
        Why the case failed, empty otherwise.
    refused : bool
        Whether the model must refuse to run.
    largest_input : float
        Largest |element| of the first inputs: queries and keys, or hidden states.
    facts : dict
        Of `check`: the values that were read and measured, by name.

    Examples
    --------
    >>> from rope_cpu import RotaryEmbedding, export
    >>> rope = RotaryEmbedding(16)
    >>> report = export.validate(export.export_rope(rope, max_positions=32), rope)
    >>> outcome = report.outcomes[1]
    >>> outcome.case, outcome.shape, outcome.passed
    ('one token', (1, 1, 4, 16), True)
    """

    case: str
    seed: int
    shape: tuple[int, ...]
    error: float = 0.0
    ratio: float = 0.0
    problem: str = ""
    refused: bool = False
    largest_input: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def passed(self) -> bool:
        """Whether the case has no problem and every error is within its tolerance."""
        return not self.problem and self.ratio <= 1

    def __str__(self) -> str:
        verdict = "ok" if self.passed else self.problem or "OUT OF TOLERANCE"
        text = f"error {self.error:.2e}, {self.ratio:.0%} of tolerance: {verdict}"
        if self.refused:
            text = self.problem or "refused when it ran, as it must be"
        elif _failed_to_run(self):
            text = self.problem
        return escaped(f"{self.case:<26} {'x'.join(map(str, self.shape)):<14} {text}")


@dataclass(frozen=True)
class Report:
    """The result of `validate` or `check`; `str(report)` is a table of all outcomes.

    Attributes
    ----------
    title : str
        Kind, target, dtype and opset of the model, or the path of a file of others.
    outcomes : tuple of Outcome
        The static checks, then one outcome per case; of `check`, one per rotation.

    Examples
    --------
    >>> from rope_cpu import RotaryEmbedding, export
    >>> rope = RotaryEmbedding(16)
    >>> report = export.validate(export.export_rope(rope, max_positions=32), rope)
    >>> report.passed
    True
    >>> print(str(report).splitlines()[0])
    rope model, target onnx, float32, opset 23: passed, 14 cases
    """

    title: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def max_abs_error(self) -> float:
        """Largest |result − exact| of all cases; infinite if a case failed to run."""
        if any(_failed_to_run(outcome) for outcome in self.outcomes):
            return float("inf")
        return max((outcome.error for outcome in self.outcomes), default=0.0)

    @property
    def worst(self) -> Outcome:
        """The case with the largest error relative to its tolerance, failed cases first."""
        return max(
            self.outcomes,
            key=lambda outcome: (not outcome.passed, np.nan_to_num(outcome.ratio, nan=np.inf)),
        )

    def __str__(self) -> str:
        cases = len(self.outcomes)
        failed = sum(not outcome.passed for outcome in self.outcomes)
        verdict = f"{failed} of {cases} cases FAILED" if failed else f"passed, {cases} cases"
        worst = (
            f"  largest error {self.max_abs_error:.3e}; worst case: {self.worst.case} "
            f"(seed {self.worst.seed})"
        )
        lines = [f"{self.title}: {verdict}", worst]
        largest_input = max((outcome.largest_input for outcome in self.outcomes), default=0.0)
        if largest_input:
            lines.append(f"  inputs reach ±{largest_input:.4g}, and errors grow with them")
        for outcome in self.outcomes:
            lines.append(f"  {outcome}")
            known = {name: value for name, value in outcome.facts.items() if value is not None}
            lines += [f"    {name:<27} {value}" for name, value in known.items()]
        return "\n".join(map(escaped, lines))


def _failed_to_run(outcome: Outcome) -> bool:
    """Return True if a case failed before any result was compared."""
    return bool(outcome.problem) and not outcome.ratio
