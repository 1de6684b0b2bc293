"""`rope-cpu bench`: the speed on this machine, its memory bandwidth, and other libraries."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.bench import report
from rope_cpu.bench.cases import all_cases
from rope_cpu.bench.measure import Case, measure
from rope_cpu.bench.results import environment
from rope_cpu.cli import command_line
from rope_cpu.cli.command_line import print_lines

# Sequence length for frequencies that depend on it.
_LENGTH = 4096
_NOT_WITH_LIST = ("json", "plot", "threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu bench`."""
    add = parser.add_argument
    patterns = "names of cases, or parts, or patterns with * and ? (default: --list marks them)"
    add("patterns", nargs="*", metavar="PATTERN", help=patterns)
    add("--list", action="store_true", help="list all cases, or those of PATTERN")
    config = "model whose heads and rotation to use, as of `show` (default: Llama 3.1 8B)"
    add("--config", type=Path, metavar="FILE", help=config)
    command_line.add_layer_type(parser)
    command_line.add_pairing_arguments(parser)
    peers = "time the other libraries that are installed too (default: yes)"
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help=peers)
    add("--threads", type=int, metavar="N", help="number of threads")
    add("--json", type=Path, metavar="FILE", help="write all samples")
    add("--plot", type=Path, metavar="FILE", help="draw the times as bars (.png or .svg)")


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if a row of rope_cpu is wrong or failed, else 0.

    Raises UsageError for invalid arguments, OSError for files that cannot be read or written.
    """
    with command_line.usage_errors():
        return _list(args) if args.list else _run(args)


def _list(args: argparse.Namespace) -> int:
    for option in _NOT_WITH_LIST:
        if getattr(args, option) is not None:
            raise ValueError(f"`--{option}` is given with `--list`, which times nothing")
    _, cases = _cases(args)
    print_lines(report.listing(select(cases, args.patterns) if args.patterns else cases))
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.json:
        command_line.check_file(args.json)
    if args.plot:
        command_line.check_picture(args.plot)
    if args.threads is not None:
        rope_cpu.set_num_threads(args.threads)
    shapes, all_of_model = _cases(args)
    cases = select(all_of_model, args.patterns)
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
        command_line.write_json(args.json, content)
    if args.plot:
        with command_line.write_errors(args.plot):
            report.draw(results, args.plot)
    return int(any(result.broken for result in results))


def _cases(args: argparse.Namespace) -> tuple[str, list[Case]]:
    """Return a line on the model of --config, and the cases with its heads and rotation."""
    config = command_line.config_from_arguments(args)
    rope = RotaryEmbedding.from_config(
        config, layer_type=args.layer_type, interleaved=args.interleaved
    )
    heads = config.heads(args.layer_type)
    cases = all_cases(rope.at_length(_LENGTH), heads)
    if not args.peers:
        cases = [replace(case, peers={}) for case in cases]
    name = command_line.config_name(args)
    return f"{name}: {heads[0]} + {heads[1]} heads of {rope.head_dim}", cases


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
