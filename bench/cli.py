"""`rope-cpu bench`: the speed on this machine, its memory bandwidth, and other libraries."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import rope_cpu
from rope_cpu.arguments.texts import shown
from rope_cpu.command_line import (
    UsageError,
    check_file,
    check_picture,
    print_lines,
    write_errors,
)
from rope_cpu.kernels.threads import checked_thread_count

from . import environment, listing, models, plot, report
from .compare import Finding, compare, same_machine
from .measurement.case import Case
from .measurement.measure import measure
from .measurement.rows import Result, Row
from .option_values import percentage, thread_counts
from .results import ALL_FACTS, Run, load, save
from .suites.catalog import catalog, matching, select

# The factor that counts as slower if --fail-slower is not given.
_THRESHOLD = 0.1

_DEFAULT_MODEL = "llama3-8b"
_NOT_WITH_LIST = ("json", "plot", "compare", "fail_slower", "from_file")
_NOT_WITH_FROM = ("json", "model", "config", "layer_type", "peers", "threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu bench`."""
    parser.add_argument(
        "patterns",
        nargs="*",
        metavar="PATTERN",
        help="cases to time, as names, parts of names, or patterns with * and ?; "
        "default: some of each family, see --list, or with --from all",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the families of cases and the contenders, or the cases that match PATTERN",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        help=f"model whose heads and rotation to use: {', '.join(models.MODELS)} "
        f"(default: {_DEFAULT_MODEL})",
    )
    source.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json of a Hugging Face model, or its folder, whose heads and rotation to use",
    )
    parser.add_argument(
        "--layer-type",
        metavar="NAME",
        help="with --config: layer type, such as full_attention, if layer types differ in their "
        "rotation",
    )
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        help="time other libraries in all decode and prefill cases, or in none; default: in the "
        "most common ones",
    )
    parser.add_argument(
        "--threads",
        type=thread_counts,
        metavar="N[,N…]",
        default=(),
        help="number of threads; several numbers, such as 1,2,4, are compared",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples and figures")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the times as dots (.png or .svg)"
    )
    parser.add_argument(
        "--from",
        dest="from_file",
        type=Path,
        metavar="RUN.json",
        help="time nothing; show, draw or compare a run, a file written by --json",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="OLD.json",
        help="show changes since an older run, a file written by --json",
    )
    parser.add_argument(
        "--fail-slower",
        type=percentage,
        metavar="10%",
        help="with --compare: exit with 1 if a row is slower by more than this",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if a row of rope_cpu is wrong, failed or too slow, else 0.

    Raises UsageError for invalid arguments, OSError for files that cannot be read or written.
    """
    try:
        if args.list:
            return _list(args)
        return _run(args)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def _list(args: argparse.Namespace) -> int:
    _check_not_given(args, _NOT_WITH_LIST, "--list")
    model = _model(args)
    cases = _all_cases(args, model)
    if args.patterns:
        print_lines(listing.names(select(cases, args.patterns)))
    else:
        print_lines(listing.overview(cases, model))
    return 0


def _run(args: argparse.Namespace) -> int:
    _check_output_arguments(args)
    if args.from_file:
        return _show(args)
    model = _model(args)
    cases = select(_all_cases(args, model), args.patterns)
    old = _older_run(args)
    command = shlex.join(["rope-cpu", *sys.argv[1:]])
    new = Run(command, model.name, environment.record())
    _time(new, cases)
    if args.json:
        with write_errors(args.json):
            save(new, args.json)
    return _finish(args, new, new.cases, old)


def _show(args: argparse.Namespace) -> int:
    """Show the cases of a saved run that match a pattern; without patterns, all."""
    _check_not_given(args, _NOT_WITH_FROM, "--from")
    run = load(args.from_file, ALL_FACTS)
    old = _older_run(args)
    cases = _selected(run, args) if args.patterns else run.cases
    print_lines(report.saved_run(run, cases))
    return _finish(args, run, cases, old)


def _selected(run: Run, args: argparse.Namespace) -> list[Result]:
    names = [case.name for case in run.cases]
    try:
        selected = matching(names, names, args.patterns)
    except ValueError as error:
        raise ValueError(f"{error} of {args.from_file}") from None
    return [case for case in run.cases if case.name in selected]


def _older_run(args: argparse.Namespace) -> Run | None:
    return load(args.compare) if args.compare else None


def _finish(args: argparse.Namespace, run: Run, cases: list[Result], old: Run | None) -> int:
    """Draw cases of a run, compare them with those of an older run, and return the exit code."""
    if args.plot:
        with write_errors(args.plot):
            plot.save(run, args.plot, cases)
    new = replace(run, cases=cases)
    findings = [] if old is None else _findings(args, new, old)
    return _exit_code(args, new, findings)


def _check_not_given(args: argparse.Namespace, options: Sequence[str], other: str) -> None:
    """Raise ValueError if any of some options is given with another one, which times nothing."""
    for option in options:
        value = getattr(args, option)
        if value in (None, ()):
            continue
        flag = "--no-peers" if value is False else _flag(option)
        raise ValueError(f"`{flag}` is given with `{other}`, which times nothing")


def _flag(option: str) -> str:
    return "--from" if option == "from_file" else f"--{option.replace('_', '-')}"


def _check_output_arguments(args: argparse.Namespace) -> None:
    """Raise now rather than after the timing."""
    if args.fail_slower is not None and args.compare is None:
        raise ValueError(
            f"`--fail-slower` is {100 * args.fail_slower:.3g}%, but there is no `--compare`"
        )
    if args.json:
        check_file(args.json)
    if args.plot:
        check_picture(args.plot)


def _model(args: argparse.Namespace) -> models.Model:
    if args.config:
        return models.from_file(args.config, args.layer_type)
    if args.layer_type:
        raise ValueError(
            f"`--layer-type` is {shown(args.layer_type)}, which needs `--config`: the models of "
            "`--model` have one rotation for all layers"
        )
    return models.known(_DEFAULT_MODEL if args.model is None else args.model)


def _all_cases(args: argparse.Namespace, model: models.Model) -> list[Case]:
    """Return all cases, and set the number of threads."""
    for count in args.threads:
        rope_cpu.set_num_threads(checked_thread_count("--threads", count))
    compared_threads = args.threads if len(args.threads) > 1 else ()
    return catalog(model, args.peers, compared_threads)


def _findings(args: argparse.Namespace, new: Run, old: Run) -> list[Finding]:
    """Print and return the changes since an older run."""
    threshold = args.fail_slower or _THRESHOLD
    findings = compare(new, old)
    print_lines(report.findings_lines(findings, threshold, same_machine(new, old)))
    return findings


def _exit_code(args: argparse.Namespace, new: Run, findings: list[Finding]) -> int:
    if any(case.broken for case in new.cases):
        return 1
    if args.fail_slower is None:
        return 0
    if not findings:
        raise ValueError(
            f"`--fail-slower` has nothing to judge: no row that was timed is in {args.compare}"
        )
    return int(any(finding.change.slower(args.fail_slower) for finding in findings))


def _time(run: Run, cases: list[Case]) -> None:
    """Measure the cases, and print each as soon as it is measured."""
    start = time.perf_counter()
    print_lines(report.heading(run.environment, run.model))
    if cases:
        print_lines(report.forecast(cases))
        print_lines(report.columns())
    with _progress() as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            print_lines(report.title(case))
            result = _measured(case)
            run.cases.append(result)
            print_lines(report.case_lines(result))
            progress.advance(task)
    run.seconds = time.perf_counter() - start
    print_lines(report.closing(run))


def _measured(case: Case) -> Result:
    free = environment.available_memory()
    if case.memory <= free / 2:
        return measure(case)
    needed = f"{case.memory / 2**30:.1f} GiB of memory"
    reason = f"needs {needed}, more than half of the {free / 2**30:.1f} GiB free"
    return Result(case.name, case.what, [Row("all rows", "ours", "skipped", reason)])


def _progress() -> Progress:
    """Return a display of the number of finished cases, on standard error if it is a terminal."""
    console = Console(stderr=True)
    return Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=2,  # drawing must not disturb the timings
        redirect_stdout=sys.stdout.isatty(),  # tables pass through the display only on a terminal
        transient=True,
        disable=not console.is_terminal,
    )
