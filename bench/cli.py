"""`rope-cpu bench`: how fast is it here, how close to the limit of this machine, how much faster than the others."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import rope_cpu
from rope_cpu.arguments.texts import shown
from rope_cpu.command_line import UsageError, check_file, check_picture, write_errors
from rope_cpu.kernels.threads import allowed

from . import environment, latency, models, plot, report
from .compare import Finding, compare, confirm, same_machine
from .measurement.case import Case
from .measurement.measure import Result, Row, measure
from .results import Run, load, save
from .suites.catalog import catalog, select

# What counts as slower where --fail-slower does not say.
_THRESHOLD = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rope-cpu bench`."""
    add = parser.add_argument
    add(
        "patterns",
        nargs="*",
        metavar="PATTERN",
        help="cases: names, parts of names, or patterns with * and ?",
    )
    add(
        "--list", action="store_true", help="name the cases (* marks those of a plain run) and stop"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model", default="llama3-8b", help=f"heads and rotation of {', '.join(models.MODELS)}"
    )
    which.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="heads and rotation of a Hugging Face config.json",
    )
    add(
        "--layer-type",
        metavar="NAME",
        help="which layers of --config, where their rotations differ",
    )
    add(
        "--peers",
        action=argparse.BooleanOptionalAction,
        help="time other libraries in every decode and prefill case",
    )
    add(
        "--threads",
        type=_counts,
        metavar="N[,N…]",
        default=(),
        help="threads to use; several: how rope_cpu scales",
    )
    add(
        "--latency",
        action="store_true",
        help="percentiles of many calls (cases only where patterns are given)",
    )
    add("--json", type=Path, metavar="FILE", help="write every sample and figure")
    add("--plot", type=Path, metavar="FILE", help="draw bars, limit and scaling (.png or .svg)")
    add(
        "--compare",
        type=Path,
        metavar="OLD.json",
        help="print what got slower since an older --json",
    )
    add(
        "--fail-slower",
        type=_percent,
        metavar="10%",
        help="with --compare, exit 1 where something got slower by more",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 where something of ours is wrong, failed or too much slower, else 0.

    Raises UsageError where the command cannot do what it was asked to, OSError where a file cannot be read or written.
    """
    try:
        return _run(args)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def _run(args: argparse.Namespace) -> int:
    model = _model(args)
    cases = _catalog(args, model, args.peers)
    if args.list:
        _refuse_beside_list(args)
        _print(report.listing(select(cases, args.patterns) if args.patterns else cases))
        return 0
    if args.fail_slower is not None and args.compare is None:
        raise ValueError(
            f"`--fail-slower` is {100 * args.fail_slower:.3g}%, but there is no `--compare`"
        )
    if args.json:
        check_file(args.json)
    if args.plot:
        check_picture(args.plot)
    old = load(args.compare) if args.compare else None
    chosen = [] if args.latency and not args.patterns else select(cases, args.patterns)
    new = Run(shlex.join(["rope-cpu", *sys.argv[1:]]), model.name, environment.record())
    _time(new, chosen, model if args.latency else None)
    if args.json:
        with write_errors(args.json):
            save(new, args.json)
    if args.plot:
        with write_errors(args.plot):
            plot.save(new, args.plot)
    findings = _compared(args, new, old) if old else []
    broken = any(case.broken for case in new.cases)
    if broken or args.fail_slower is None:
        return int(broken)
    if not findings:
        raise ValueError(
            f"`--fail-slower` has nothing to judge: no row that was timed is in {args.compare}"
        )
    return int(any(finding.change.slower(args.fail_slower) for finding in findings))


def _model(args: argparse.Namespace) -> models.Model:
    if args.layer_type and not args.config:
        raise ValueError(
            f"`--layer-type` is {shown(args.layer_type)}, but no `--config` has layer types"
        )
    return (
        models.from_file(args.config, args.layer_type) if args.config else models.known(args.model)
    )


def _catalog(args: argparse.Namespace, model: models.Model, peers: bool | None) -> list[Case]:
    """Return all cases, and set the number of threads."""
    for count in args.threads:
        rope_cpu.set_num_threads(allowed("--threads", count))
    return catalog(model, peers, args.threads if len(args.threads) > 1 else ())


def _refuse_beside_list(args: argparse.Namespace) -> None:
    for option in ("latency", "json", "plot", "compare", "fail_slower"):
        if getattr(args, option):
            raise ValueError(
                f"`--{option.replace('_', '-')}` is given with `--list`, which times nothing"
            )


def _compared(args: argparse.Namespace, new: Run, old: Run) -> list[Finding]:
    """Print and return what changed since an older run."""
    threshold = args.fail_slower or _THRESHOLD
    findings = confirm(compare(new, old), new, old, threshold, partial(_in_another_process, args))
    _print(report.findings_lines(findings, threshold, same_machine(new, old)))
    return findings


def _in_another_process(args: argparse.Namespace, name: str) -> Result:
    """Return a case measured where its arrays lie elsewhere in memory, which makes up to a fifth of a time."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        return processes.submit(_measure_alone, args, name).result()


def _measure_alone(args: argparse.Namespace, name: str) -> Result:
    (case,) = select(_catalog(args, _model(args), peers=False), [name])
    return measure(case)


def _time(run: Run, cases: list[Case], latency_of: models.Model | None) -> None:
    """Measure, and print as it goes."""
    start = time.perf_counter()
    _print(report.heading(run.environment, run.model))
    if cases:
        _print(report.columns())
    with _progress() as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            _print(report.title(case))
            run.cases.append(_measured(case))
            _print(report.case_lines(run.cases[-1]))
            progress.advance(task)
    if latency_of is not None:
        run.latency += latency.latencies(latency_of)
        _print(report.latency_lines(run.latency))
    run.seconds = time.perf_counter() - start
    _print(report.closing(run))


def _measured(case: Case) -> Result:
    free = environment.available_memory()
    if case.memory > free / 2:
        reason = f"needs {case.memory / 2**30:.1f} GiB of memory, more than half of the {free / 2**30:.1f} GiB free"
        return Result(case.name, case.what, [Row("all rows", "ours", "skipped", reason)])
    return measure(case)


def _progress() -> Progress:
    """Return a display of how many cases are done, on stderr where that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        *(BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()),
        console=console,
        refresh_per_second=2,  # drawing must not disturb the timings
        redirect_stdout=sys.stdout.isatty(),  # tables pass through the display only on a terminal
        transient=True,
        disable=not console.is_terminal,
    )


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no number of threads, nor several as in 1,2,4"
        ) from None


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no percentage above 0, such as 10%")
    return value
