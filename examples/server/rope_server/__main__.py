"""Serve a model over HTTP: python -m rope_server FOLDER."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import uvicorn

from rope_server.app import create_app
from rope_server.engine import Settings

DEMO = Path(__file__).parents[1] / "demo"
KEEP_ALIVE = 75  # seconds, longer than the pools of clients and proxies keep a connection
HELP = {
    "cache_dtype": "float32, bfloat16 or int8",
    "pages": "number of pages of the caches",
    "page_size": "tokens on a page",
    "chunk": "tokens of prompts that a step reads",
    "sequences": "sequences that take part in a step",
    "queue": "requests that may wait",
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="rope_server", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("folder", nargs="?", type=Path, help="config.json, *.safetensors, …")
    source.add_argument("--demo", action="store_const", dest="folder", const=DEMO)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        text = f"{HELP[field.name]} (default {field.default})"
        parser.add_argument(option, type=type(field.default), default=field.default, help=text)
    given = parser.parse_args()
    settings = Settings(**{field.name: getattr(given, field.name) for field in fields(Settings)})
    uvicorn.run(
        create_app(given.folder, settings),
        host=given.host,
        port=given.port,
        timeout_keep_alive=KEEP_ALIVE,
        access_log=False,  # /metrics counts
    )


if __name__ == "__main__":
    main()
