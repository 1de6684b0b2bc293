"""Print the tables of docs/onnx.md: consumers by targets and kinds of files, measured.

Needs what .ci/nightly installs for tests/runtimes; from the repository's root:
python tools/runtimes_table.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtimes.consumers import CONSUMERS, consumer_version
from runtimes.exported_files import KINDS, MODELS, TARGETS
from runtimes.outcomes import EXPECTATIONS, expectation, measure

SEED = 55  # of the random data, as in docs/onnx.md
REASONS = list(dict.fromkeys(row["reason"] for row in EXPECTATIONS))


def cell(consumer, target, kind):
    """Return the outcome of the files of one cell, the most frequent one first.

    It is the largest error, a refusal, or "wrong" beyond any bound. Numbers of reasons are in
    brackets; other outcomes than the first name their models.
    """
    groups = {}
    for model in MODELS:
        outcome = measure(consumer, target, kind, model, SEED)
        expected = {} if outcome.within else expectation(consumer, target, kind, model)
        word = "refuses" if outcome.refusal else "wrong" if "wrong" in expected else ""
        groups.setdefault((expected.get("reason", ""), word), {})[model] = outcome.error
    parts = []
    for (reason, word), errors in sorted(groups.items(), key=lambda item: -len(item[1])):
        text = word or f"{max(errors.values()):.1e}".replace("e-0", "e-")
        number = f" [{REASONS.index(reason) + 1}]" if reason else ""
        models = f"{', '.join(errors)}: " if parts else ""
        parts.append(f"{models}{text}{number}")
    return "; ".join(parts)


def main():
    """Print a table for each target, and the reasons."""
    for target in TARGETS:
        print(f'| target `"{target}"` | {" | ".join(KINDS)} |')
        print("|---" * (1 + len(KINDS)) + "|")
        for consumer in CONSUMERS:
            cells = [cell(consumer, target, kind) for kind in KINDS]
            print(f"| {consumer} {consumer_version(consumer)} | {' | '.join(cells)} |", flush=True)
        print()
    for number, reason in enumerate(REASONS, 1):
        print(f"{number}. {reason}")


if __name__ == "__main__":
    main()
