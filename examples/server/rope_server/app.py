"""The HTTP server: OpenAI's protocol, health, metrics and a page, in front of an engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rope_server.engine import Engine, Event, QueueFullError, Sequence, Settings
from rope_server.engine import Request as EngineRequest
from rope_server.protocol import Answer, ChatRequest, CompletionRequest, Piece, Usage
from rope_server.sampling import Sampling
from rope_server.text import Detokenizer, Text
from rope_server.weights import load

PAGE = Path(__file__).with_name("index.html")
BODY_BYTES = 2**20
FAILED = "the server failed at this request"
CLIENT_LEFT = 499  # nobody reads this status


class Server:
    """A model as clients see it: its name, its text and its engine."""

    def __init__(self, folder: str | Path, settings: Settings) -> None:
        folder = Path(folder).resolve()
        self.name = folder.name
        self.facts = {"id": self.name, "object": "model", "created": 0, "owned_by": "rope_server"}
        self.engine = Engine(load(folder), settings)
        self.text = Text(folder)

    def check_name(self, name: str) -> None:
        """Raise HTTPException for the name of another model."""
        if name != self.name:
            raise HTTPException(404, f"there is no model {name[:80]!r}, only {self.name!r}")

    async def start(self, body: CompletionRequest | ChatRequest) -> Answering:
        """Queue a request; raise HTTPException if it cannot be served."""
        self.check_name(body.model)
        try:
            # A long text takes a while.
            prompts = await asyncio.to_thread(body.tokens, self.text)
            return Answering(self, body, prompts)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except QueueFullError as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from error


class Answering:
    """The prompts of a request in the engine, from the event loop's side."""

    def __init__(
        self, server: Server, body: CompletionRequest | ChatRequest, prompts: list[list[int]]
    ) -> None:
        self.body = body
        self.answer = Answer(body, server.text)
        self._prompts = prompts
        self._engine = server.engine
        self._text = server.text
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._generated = 0
        self._sequences: list[Sequence] = []
        try:
            for index in range(len(prompts)):
                self._sequences.append(self._engine.submit(self._request(index)))
        except Exception:
            self.leave()
            raise

    @property
    def usage(self) -> Usage:
        """Number of tokens so far."""
        return Usage(sum(map(len, self._prompts)), self._generated)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the texts as their tokens come; raise RuntimeError if a step failed."""
        running = {
            index: Detokenizer(self._text, prompt, self.body.stops)
            for index, prompt in enumerate(self._prompts)
        }
        while running:
            index, event = await self._events.get()
            if index not in running:  # a stop string has ended its text
                continue
            if event.finish == "error":
                raise RuntimeError("a step of this request failed")
            piece = self._piece(index, event, running[index])
            if piece.finish is not None:
                del running[index]
                self._engine.leave(self._sequences[index])
            yield piece

    def leave(self) -> None:
        """Take the sequences out of the engine, if they are still there."""
        for sequence in self._sequences:
            self._engine.leave(sequence)

    def _request(self, index: int) -> EngineRequest:
        """Return what the engine is asked for a prompt."""
        body = self.body
        prompt = self._prompts[index]
        put = self._events.put_nowait
        return EngineRequest(
            prompt=prompt,
            max_tokens=body.most_tokens(self._engine.context - len(prompt)),
            sampling=Sampling(body.temperature, body.top_p, body.seed, body.alternatives),
            stop_tokens=self._text.stop_tokens,
            deliver=lambda event: self._loop.call_soon_threadsafe(put, (index, event)),
        )

    def _piece(self, index: int, event: Event, detokenizer: Detokenizer) -> Piece:
        """Return the text that an event makes certain."""
        text = ""
        tokens = []
        if event.drawn is not None:
            self._generated += 1
            tokens.append(event.drawn)
            text = detokenizer.add(event.drawn.token)
        if event.finish is not None:
            text += detokenizer.rest()
        finish = "stop" if detokenizer.has_stopped else event.finish
        return Piece(index, text, tokens, finish)


class Gate:
    """Refuse requests to other hosts, and bodies of unknown or too large a size.

    hosts: names that the header Host may have; none accepts all. By DNS rebinding a page of another
    site reaches a local server, under the name of that site.
    """

    def __init__(self, app: Any, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = [host.lower() for host in hosts]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request of ASGI."""
        app = self._app
        if scope["type"] == "http":
            app = self._refusal(scope["method"], dict(scope["headers"])) or app
        await app(scope, receive, send)

    def _refusal(self, method: str, headers: dict[bytes, bytes]) -> Response | None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and host not in self._hosts and host.rpartition(":")[0] not in self._hosts:
            return _error(421, f"the server is not {host[:80]!r}, only {', '.join(self._hosts)}")
        if method != "POST":
            return None
        length = headers.get(b"content-length")
        if length is None or b"transfer-encoding" in headers:  # which would go before it
            return _error(411, "the body must have a Content-Length and no Transfer-Encoding")
        if int(length) > BODY_BYTES:
            return _error(413, f"the body has {int(length)} bytes; at most {BODY_BYTES}")
        return None


def create_app(folder: str | Path, settings: Settings, hosts: Collection[str] = ()) -> FastAPI:
    """Return the application that serves the model of a folder; hosts: see `Gate`."""
    server = Server(folder, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await asyncio.to_thread(server.engine.stop)

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # nor /docs, with scripts of others
    app.add_middleware(Gate, hosts=hosts)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _failed)
    registry = CollectorRegistry()
    registry.register(Metrics(server.engine))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await _answered(request, await server.start(body))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await _answered(request, await server.start(body))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.facts]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_name(name)
        return server.facts

    @app.get("/health")
    async def health() -> JSONResponse:
        is_alive = server.engine.is_alive
        return JSONResponse({"alive": is_alive}, 200 if is_alive else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry))

    @app.get("/pages")
    async def pages() -> list[int]:
        return server.engine.pages.states()

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text())

    return app


class Metrics:
    """The engine's state for Prometheus, read when it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Any:
        """Yield the metrics."""
        engine = self._engine
        for name, value in vars(engine.counters).items():
            yield CounterMetricFamily(f"rope_server_{name}", f"Total of {name}.", value)
        states = engine.pages.states()
        gauges = {
            "running": ("Sequences that take part in steps.", len(engine.running)),
            "waiting": ("Requests in the queue.", len(engine.waiting)),
            "pages_used": ("Pages of sequences.", sum(x > 0 for x in states)),
            "pages_kept": ("Pages of prefixes without a user.", states.count(-1)),
            "pages_empty": ("Pages that hold nothing.", states.count(0)),
        }
        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(f"rope_server_{name}", help_text, value)


class EventStream(StreamingResponse):
    """A streamed answer, whose sequence leaves the engine when the client does."""

    def __init__(self, answering: Answering) -> None:
        super().__init__(_streamed(answering), media_type="text/event-stream")
        self._answering = answering

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answering.leave()


async def _answered(request: Request, answering: Answering) -> Response:
    if answering.body.stream:
        return EventStream(answering)
    whole = asyncio.ensure_future(_whole(answering))
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({whole, left}, return_when=asyncio.FIRST_COMPLETED)
        return whole.result() if whole.done() else Response(status_code=CLIENT_LEFT)
    finally:
        whole.cancel()
        left.cancel()
        answering.leave()


async def _streamed(answering: Answering) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer."""
    try:
        async for piece in answering.pieces():
            yield _sent(answering.answer.chunk(piece))
    except Exception:
        logging.exception(FAILED)
        yield _sent(_error_body(500, FAILED))
        return
    if answering.body.stream_options.include_usage:
        yield _sent(answering.answer.usage_chunk(answering.usage))
    yield "data: [DONE]\n\n"


def _sent(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, allow_nan=False)}\n\n"


async def _whole(answering: Answering) -> Response:
    pieces = [piece async for piece in answering.pieces()]
    return JSONResponse(answering.answer.whole(pieces, answering.usage))


async def _left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Any) -> Response:
    return _error(error.status_code, str(error.detail), error.headers)


async def _invalid(request: Request, error: Any) -> Response:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return _error(400, f"{place}: {first['msg'].removeprefix('Value error, ')}")


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, FAILED)


def _error(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse(_error_body(status, message), status, headers)


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind}}
