"""Entry point of the command `rope-cpu`: runs a subcommand and reports user errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

import rope_cpu
from rope_cpu.arguments.errors import AnyArgumentError
from rope_cpu.arguments.texts import escaped
from rope_cpu.cli.command_line import OutputError, UsageError
from rope_cpu.kernels.threads import read_variables

# Subcommands and their summaries. The module of one offers add_arguments(parser) and run(args) →
# exit code; it is imported only if it is called, since some need packages of the extras.
COMMANDS = {
    "verify": "check that the NumPy kernels and ONNX models are within tolerance",
    "bench": "measure the speed on this machine, against its memory bandwidth and other libraries",
    "export": "write the rotation of a model, or its attention, as a validated ONNX file",
    "check": "check the rotations of an ONNX file of any origin, and make them exact",
    "show": "explain the rotation that a model config describes",
    "warmup": "compile the kernels into the cache on disk, or empty it",
}

# Packages of the extras; `verify` needs two extras, so that the error names the one of all.
_OPTIONAL_PACKAGES = ("matplotlib", "onnx", "onnxruntime", "safetensors")
_INSTALL = 'pip install "rope-cpu[all]"'

# Arguments of the commands that are no options.
_POSITIONAL = ("config", "dtypes", "model", "patterns")
# Arguments of the library whose option has another name.
_RENAMED = {"tensors": "weights", "n": "threads"}

_BAD_USAGE = 2
_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
_BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the one of the process; return the exit code."""
    own_process = argv is None
    words = sys.argv[1:] if argv is None else argv
    if own_process and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without "µ" gets "?"
    try:
        try:
            return _run(list(words))
        finally:
            if own_process and sys.stdout is not None:
                sys.stdout.flush()  # now, so that an error is raised where it can be reported
    except OSError as error:
        if own_process and error.filename is None:
            # Nothing is written from here on, so that Python does not fail again on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, stopped reading
            return _BROKEN_PIPE
        return _report_error(f"{error.filename or 'standard output'}: {error.strerror or error}")


def _run(words: list[str]) -> int:
    command = words[0] if words else ""
    try:
        read_variables()
    except ValueError as error:
        return _report_error(str(error))
    if command not in COMMANDS:
        _overview().parse_args(words[:1])  # it exits: --version, --help, or a wrong word
    summary = COMMANDS[command]
    text = f"{summary[0].upper()}{summary[1:]}."
    parser = _Parser(prog=f"rope-cpu {command}", description=text, allow_abbrev=False)
    try:
        module = import_module(f"rope_cpu.cli.{command}")
        module.add_arguments(parser)
        args = parser.parse_args(words[1:])
        try:
            return int(module.run(args))
        except OutputError as error:
            return _report_error(str(error))
        except UsageError as error:
            return _report_error(f"{_error_text(error, args)}; {parser.see_help()}")
    except ImportError as error:
        package = _missing_package(error)
        if package not in _OPTIONAL_PACKAGES:
            raise
        return _report_error(f"`{command}` needs the package {package}: {_INSTALL}")
    except KeyboardInterrupt:
        return _INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """A parser whose errors end with its own --help."""

    def see_help(self) -> str:
        return f"see `{self.prog} --help`"

    def error(self, message: str) -> NoReturn:
        super().error(f"{escaped(message)}; {self.see_help()}")


def _error_text(error: UsageError, args: argparse.Namespace) -> str:
    """Return the text of an error, with an option in place of the argument that it sets."""
    cause = error.__cause__
    if not isinstance(cause, AnyArgumentError):
        return str(error)
    name = _RENAMED.get(cause.argument, cause.argument)
    if name not in vars(args) or name in _POSITIONAL:
        return str(error)
    if name == "interleaved":
        return _pairing_error(cause, args.interleaved)
    option = f"`--{name.replace('_', '-')}`"
    text = cause.text(option, "is not given" if cause.finding == "is None" else "")
    # The index of a layer is an argument of the library, and an option of some commands.
    return text.replace("; or give `layer`", "; or give --layer" if "layer" in vars(args) else "")


def _pairing_error(cause: AnyArgumentError, interleaved: bool | None) -> str:
    """Return the error of a pairing that is missing, or that contradicts the config."""
    if interleaved is None:
        return f"{cause.remedy}; give --interleaved for pairs (2i, 2i+1), --half for (i, i+n)"
    return cause.text("--interleaved" if interleaved else "--half", "is given")


def _missing_package(error: ImportError) -> str:
    """Return the top-level name of the package that could not be imported."""
    # rope_cpu.export raises an ImportError of its own; the name is in its cause.
    module = error.name or getattr(error.__cause__, "name", None) or ""
    return module.partition(".")[0]


def _overview() -> _Parser:
    """Return the parser of a command line without a command, whose --help lists all of them."""
    parser = _Parser(
        prog="rope-cpu",
        description=(rope_cpu.__doc__ or "").partition("\n")[0],
        epilog="`rope-cpu COMMAND --help` shows the arguments of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rope-cpu {rope_cpu.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, summary in COMMANDS.items():
        commands.add_parser(command, help=summary)
    return parser


def _report_error(text: str) -> int:
    print(f"rope-cpu: {escaped(text)}", file=sys.stderr)
    return _BAD_USAGE
