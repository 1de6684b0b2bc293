"""`rope-cpu bench`: how fast is it here, how close to the limit of this machine, how much faster than the others."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rope_cpu
from rope_cpu.bench import compare, environment, models, report, results
from rope_cpu.bench.cases import catalog, select
from rope_cpu.bench.contender import Case
from rope_cpu.bench.measure import Result, measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rope-cpu bench`."""
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="cases: a part of a name, or * and ? patterns")
    parser.add_argument("--list", action="store_true", help="name the cases (* marks those of a plain run) and stop")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="llama3-8b", help=f"heads and rotation of {', '.join(models.MODELS)}")
    which.add_argument("--config", metavar="FILE", help="heads and rotation of a Hugging Face config.json")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        help="time other libraries in every rotation, or in none (default: in the headline)",
    )
    parser.add_argument("--threads", type=_count, metavar="N", help="threads of everybody")
    parser.add_argument("--json", metavar="FILE", help="write every sample and figure")
    parser.add_argument("--compare", metavar="OLD.json", help="say what got slower since an older --json")
    parser.add_argument(
        "--fail-slower", type=_percent, metavar="10%", help="exit 1 where --compare finds something slower by more"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code: 1 where something of ours is wrong or too much slower, 2 for bad usage."""
    try:
        return _run(args)
    except (ValueError, TypeError, OSError) as error:
        print(f"rope-cpu bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.threads is not None:
        rope_cpu.set_num_threads(args.threads)
    if args.fail_slower is not None and args.compare is None:
        raise ValueError("`--fail-slower` is given without `--compare`, which says slower than what")
    model = models.from_file(args.config) if args.config else models.known(args.model)
    cases = catalog(model, args.peers)
    if args.list:
        for case in cases if not args.patterns else select(cases, args.patterns):
            print(f"{'*' if case.default else ' '} {case.name:<34} {case.what}"[: report.WIDTH])
        return 0
    old = results.load(args.compare) if args.compare else None
    chosen = select(cases, args.patterns)
    done = results.Run(" ".join(["rope-cpu", *sys.argv[1:]]), model.name, environment.record())
    _print(report.heading(done.environment, model.name))
    start = time.perf_counter()
    with _progress(len(chosen)) as (say, advance):
        for case in chosen:
            result = _measured(case, say)
            done.cases.append(result)
            advance(report.case_lines(result))
        done.seconds = time.perf_counter() - start
        findings = [] if old is None else _compared(done, old, args.fail_slower or 0.1, chosen, say)
    done.environment["threading_layer"] = environment.record()["threading_layer"]
    _print(report.closing(done))
    if args.json:
        results.save(done, args.json)
    slower = False
    if old is not None:
        threshold = args.fail_slower or 0.1
        elsewhere = old.environment["processor"] != done.environment["processor"]
        _print(report.findings_lines(findings, threshold, elsewhere))
        slower = args.fail_slower is not None and any(f.change.slower(threshold) for f in findings)
    broken = any(row.role == "ours" and row.status in ("wrong", "failed") for case in done.cases for row in case.rows)
    return int(slower or broken)


def _measured(case: Case, say: Callable[[str], object]) -> Result:
    free = environment.available_memory()
    if case.memory > free / 2:
        row = f"needs {case.memory / 2**30:.1f} GiB of memory, half of {free / 2**30:.1f} GiB is too little"
        return Result(case.name, f"not timed: {row}")
    return measure(case, say=say)


def _compared(
    done: results.Run, old: results.Run, threshold: float, chosen: list[Case], say: Callable[[str], object]
) -> list[compare.Finding]:
    by_name = {case.name: case for case in chosen}
    findings = compare.compare(done, old)
    return compare.confirm(findings, old, threshold, lambda name: measure(by_name[name], say=say))


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], object], Callable[[Iterator[str]], None]]]:
    """Show on stderr what runs now, where that is a terminal; tables go to stdout as they are ready."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    # Redirected, stdout would be written through the display, wrapped and out of order with it.
    redirect = console.is_terminal and sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=redirect, refresh_per_second=2) as bar:
        task = bar.add_task("", total=total)

        def advance(lines: Iterator[str]) -> None:
            _print(lines)
            bar.advance(task)

        yield lambda text: bar.update(task, description=text), advance


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _count(text: str) -> int:
    return int(text)


def _percent(text: str) -> float:
    value = float(text.removesuffix("%")) / 100
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 %")
    return value
