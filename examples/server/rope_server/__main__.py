"""Serve a model over HTTP: python -m rope_server FOLDER."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

import uvicorn

from rope_server.app import create_app
from rope_server.engine import CACHES, Settings

DEMO = Path(__file__).with_name("demo")
LOCAL = ("127.0.0.1", "localhost", "[::1]")
KEEP_ALIVE = 75  # seconds, longer than the pools of clients and proxies keep a connection
GRACE = "seconds that clients have to end after SIGTERM (default 300)"
ALLOWED_HOST = "one more name of this server than the local ones; default for another --host: all"
HELP = {
    "cache_dtype": ", ".join(CACHES),
    "pages": "number of pages of the caches",
    "page_size": "tokens on a page",
    "chunk": "tokens of prompts that a step reads",
    "sequences": "sequences that take part in a step",
    "queue": "requests that may wait",
}


def main() -> None:
    """Run the command line."""
    parser = _parser()
    given = parser.parse_args()
    try:
        sizes = {field.name: getattr(given, field.name) for field in fields(Settings)}
        app = create_app(given.folder or DEMO, Settings(**sizes), _hosts(given))
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    uvicorn.run(
        app,
        host=given.host,
        port=given.port,
        http="h11",  # of uvicorn's parsers the one that limits headers
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=given.grace,
        access_log=False,  # /metrics counts
    )


def _hosts(given: argparse.Namespace) -> Collection[str]:
    """Return the names that clients may call; none accepts all."""
    is_local = given.host in ("127.0.0.1", "localhost", "::1")
    return [*LOCAL, *given.allowed_host] if is_local or given.allowed_host else []


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with an option for each of the settings."""
    parser = argparse.ArgumentParser(prog="rope_server", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("folder", nargs="?", type=Path, help="config.json, *.safetensors, …")
    source.add_argument("--demo", action="store_true", help="a small model of the package")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--allowed-host", action="append", default=[], help=ALLOWED_HOST)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--grace", type=int, default=300, help=GRACE)
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        text = f"{HELP[field.name]} (default {field.default})"
        parser.add_argument(option, type=type(field.default), default=field.default, help=text)
    return parser


if __name__ == "__main__":
    main()
