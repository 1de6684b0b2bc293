"""The command `rope-cpu`: imports the subcommand's module, and reports what a user can get wrong in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

import rope_cpu
from rope_cpu.cli.common import UsageError

# Each module offers add_arguments(parser) and run(args) → exit code, and is imported only when its command is called.
COMMANDS = {
    "verify": (
        "rope_cpu.cli.verify",
        "check that NumPy and ONNX rotate alike and within tolerance",
    ),
    "bench": (
        "rope_cpu.bench.cli",
        "measure how fast it is here, against this machine's limit and other libraries",
    ),
    "export": (
        "rope_cpu.export.cli",
        "write a model's rotation, or its attention, as an ONNX file that was validated",
    ),
    "show": ("rope_cpu.cli.show", "say what a model's config means for its rotation"),
    "warmup": ("rope_cpu.cli.warmup", "compile the kernels into the cache on disk"),
}

# The extra that brings a package a command may need.
_EXTRA_OF = {"rich": "cli", "matplotlib": "cli", "onnx": "onnx", "onnxruntime": "onnx"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process' own by default) and return the exit code; 2 for bad usage."""
    if argv is None and isinstance(sys.stdout, TextIOWrapper):  # an encoding without "µ" gets "?"
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if argv is None and sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except OSError as error:
        if (
            argv is None and error.filename is None
        ):  # standard output's, which must not be tried again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
            return 141
        return _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")


def _run(given: list[str]) -> int:
    name = next((word for word in given if not word.startswith("-")), None)
    try:
        args = _parser(name).parse_args(given)
        return int(args.run(args))
    except UsageError as error:
        return _complain(str(error))
    except ImportError as error:
        # rope_cpu.export raises an ImportError of its own; the name is that of its cause.
        package = (error.name or getattr(error.__cause__, "name", None) or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        return _complain(
            f'`{name}` needs the package {package}: pip install "rope-cpu[{_EXTRA_OF[package]}]"'
        )
    except KeyboardInterrupt:
        return 130


def _parser(name: str | None) -> argparse.ArgumentParser:
    """Return the parser of everything, with the arguments of the one command that is called."""
    parser = argparse.ArgumentParser(
        prog="rope-cpu", description=rope_cpu.__doc__, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"rope-cpu {rope_cpu.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, (module_name, summary) in COMMANDS.items():
        sub = commands.add_parser(command, help=summary, description=summary, allow_abbrev=False)
        if command == name:
            module = import_module(module_name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def _complain(text: str) -> int:
    print(f"rope-cpu: {text}", file=sys.stderr)
    return 2
