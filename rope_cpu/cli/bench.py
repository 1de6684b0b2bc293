"""`rope-cpu bench`: the speed on this machine, its memory bandwidth, and other libraries."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.arguments.texts import escaped, shown
from rope_cpu.bench import report
from rope_cpu.bench.cases import all_cases
from rope_cpu.bench.measure import Case, measure
from rope_cpu.bench.results import environment
from rope_cpu.bench.workloads import MODELS, Model
from rope_cpu.cli import command_line
from rope_cpu.cli.command_line import print_lines, write_errors
from rope_cpu.kernels.threads import checked_thread_count
from rope_cpu.models.reader import read

_DEFAULT_MODEL = "llama3-8b"
# Sequence length for frequencies that depend on it.
_LENGTH = 4096
_NOT_WITH_LIST = ("json", "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu bench`."""
    add = parser.add_argument
    patterns = "names of cases, or parts, or patterns with * and ? (default: --list marks them)"
    add("patterns", nargs="*", metavar="PATTERN", help=patterns)
    add("--list", action="store_true", help="list all cases, or those of PATTERN")
    source = parser.add_mutually_exclusive_group()
    model = f"model whose heads and rotation to use (default: {_DEFAULT_MODEL})"
    source.add_argument("--model", choices=MODELS, default=_DEFAULT_MODEL, help=model)
    config = "config.json, or its folder, of a model to use instead"
    source.add_argument("--config", type=Path, metavar="FILE", help=config)
    command_line.add_layer_type(parser)
    peers = "time other libraries in all cases, or in none (default: in the most common cases)"
    add("--peers", action=argparse.BooleanOptionalAction, help=peers)
    threads = "number of threads; several numbers, such as 1,2,4, are compared"
    add("--threads", type=_thread_counts, metavar="N[,N…]", default=(), help=threads)
    add("--json", type=Path, metavar="FILE", help="write all samples")
    add("--plot", type=Path, metavar="FILE", help="draw the times as bars (.png or .svg)")


def _thread_counts(text: str) -> tuple[int, ...]:
    """Convert the value of --threads."""
    try:
        counts = {int(part) for part in text.split(",")}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a number of threads, nor several such as 1,2,4"
        ) from None
    return tuple(sorted(counts))


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if a row of rope_cpu is wrong or failed, else 0.

    Raises UsageError for invalid arguments, OSError for files that cannot be read or written.
    """
    with command_line.usage_errors():
        return _list(args) if args.list else _run(args)


def _list(args: argparse.Namespace) -> int:
    for option in _NOT_WITH_LIST:
        if getattr(args, option):
            raise ValueError(f"`--{option}` is given with `--list`, which times nothing")
    model = model_from_arguments(args)
    cases = _all_cases(args, model)
    print_lines(report.listing(select(cases, args.patterns) if args.patterns else cases))
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.json:
        command_line.check_file(args.json)
    if args.plot:
        command_line.check_picture(args.plot)
    model = model_from_arguments(args)
    cases = select(_all_cases(args, model), args.patterns)
    shapes = f"{model.name}: {model.heads} + {model.kv_heads} heads of {model.rope.head_dim}"
    facts = environment()
    print_lines(report.heading(facts, shapes))
    results = []
    for case in cases:
        print_lines([f"{case.name}: {case.what}"])
        results.append(measure(case))
        print_lines(report.case_lines(results[-1]))
    if args.json:
        cases_run = [asdict(result) for result in results]
        content = {"model": shapes, "environment": facts, "cases": cases_run}
        with write_errors(args.json):
            args.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")
    if args.plot:
        with write_errors(args.plot):
            report.draw(results, args.plot)
    return int(any(result.broken for result in results))


def model_from_arguments(args: argparse.Namespace) -> Model:
    """Return the model of --config or of --model, half-split for an unknown model type."""
    if args.config is None:
        name = args.model
        config = read(MODELS[name])
    else:
        file = (args.config / "config.json" if args.config.is_dir() else args.config).absolute()
        name = escaped(file.parent.name if file.stem == "config" else file.stem)
        config = command_line.read_config(args.config)
    try:
        rope = RotaryEmbedding.from_config(config, layer_type=args.layer_type)
    except (TypeError, ValueError):
        rope = RotaryEmbedding.from_config(config, layer_type=args.layer_type, interleaved=False)
    return Model(name, *config.heads(args.layer_type), rope.at_length(_LENGTH))


def _all_cases(args: argparse.Namespace, model: Model) -> list[Case]:
    """Return all cases, and set the number of threads."""
    compared_threads = args.threads if len(args.threads) > 1 else ()
    if args.peers and compared_threads:
        raise ValueError(
            f"`--peers` is given with `--threads {','.join(map(str, compared_threads))}`: several "
            "numbers compare rope_cpu with itself; give one number, or leave `--peers` out"
        )
    for count in args.threads:
        rope_cpu.set_num_threads(checked_thread_count("--threads", count))
    return all_cases(model, args.peers, compared_threads)


def select(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """Return the cases that match a pattern; without patterns, the default cases.

    A pattern is a whole name, a pattern with * and ?, or a part of names. Raises ArgumentError if a
    pattern matches none.
    """
    if not patterns:
        return [case for case in cases if case.default]
    selected = {name for pattern in patterns for name in _matching(cases, pattern)}
    return [case for case in cases if case.name in selected]


def _matching(cases: Sequence[Case], pattern: str) -> list[str]:
    whole = [case.name for case in cases if fnmatchcase(case.name, pattern)]
    found = whole or [case.name for case in cases if pattern in case.name]
    if not found:
        raise ArgumentError("pattern", pattern, "match a case", "`--list` shows all cases")
    return found
