"""The HTTP server: OpenAI's protocol, health, metrics and a page, in front of an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
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

from rope_server.engine import Engine, Event, QueueFullError, Settings
from rope_server.engine import Request as EngineRequest
from rope_server.protocol import Answer, ChatRequest, CompletionRequest, Piece, Usage
from rope_server.sampling import Sampling
from rope_server.text import Detokenizer, Text
from rope_server.weights import load

PAGE = Path(__file__).with_name("index.html")
BODY_BYTES = 2**20
FAILED = "the step of this request failed"
CLIENT_LEFT = 499  # nobody reads this status


class Server:
    """A model as clients see it: its name, its text and its engine."""

    def __init__(self, folder: str | Path, settings: Settings) -> None:
        folder = Path(folder).resolve()
        self.name = folder.name
        self.engine = Engine(load(folder), settings)
        self.text = Text(folder)

    async def start(self, body: CompletionRequest | ChatRequest) -> Answering:
        """Queue a request; raise HTTPException if it cannot be served."""
        if body.model != self.name:
            raise HTTPException(404, f"there is no model {body.model!r}, only {self.name!r}")
        try:
            # A long text takes a while, and tokenizers releases the interpreter meanwhile.
            prompt = await asyncio.to_thread(body.tokens, self.text)
            return Answering(self, body, prompt)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except QueueFullError as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from error


class Answering:
    """A request in the engine, from the event loop's side."""

    def __init__(
        self, server: Server, body: CompletionRequest | ChatRequest, prompt: list[int]
    ) -> None:
        self.body = body
        self.answer = Answer(body, server.text)
        self._prompt = prompt
        self._engine = server.engine
        self._text = server.text
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._generated = 0
        loop = asyncio.get_running_loop()
        request = EngineRequest(
            prompt=prompt,
            max_tokens=body.most_tokens(self._engine.context - len(prompt)),
            sampling=Sampling(body.temperature, body.top_p, body.seed, body.alternatives),
            stop_tokens=server.text.stop_tokens,
            deliver=lambda event: loop.call_soon_threadsafe(self._events.put_nowait, event),
        )
        self._sequence = self._engine.submit(request)

    @property
    def usage(self) -> Usage:
        """Number of tokens so far."""
        return Usage(len(self._prompt), self._generated)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the text as its tokens come."""
        detokenizer = Detokenizer(self._text, self._prompt, self.body.stops)
        finish = None
        while finish is None:
            piece = self._piece(await self._events.get(), detokenizer)
            finish = piece.finish
            yield piece

    def leave(self) -> None:
        """Take the sequence out of the engine, if it is still there."""
        self._engine.leave(self._sequence)

    def _piece(self, event: Event, detokenizer: Detokenizer) -> Piece:
        """Return the text that an event makes certain."""
        finish = event.finish
        if event.drawn is None:
            return Piece(detokenizer.rest(), [], finish)
        self._generated += 1
        text = detokenizer.add(event.drawn.token)
        if detokenizer.has_stopped:
            finish = "stop"
        elif finish is not None:
            text += detokenizer.rest()
        return Piece(text, [event.drawn], finish)


class LimitBody:
    """Refuse bodies of unknown or too large a size before they are read."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request of ASGI."""
        app = self._app
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = dict(scope["headers"])
            length = headers.get(b"content-length")
            if length is None or b"transfer-encoding" in headers:  # which would go before it
                app = _error(411, "the body must have a Content-Length and no Transfer-Encoding")
            elif int(length) > BODY_BYTES:
                app = _error(413, f"the body has {int(length)} bytes; at most {BODY_BYTES}")
        await app(scope, receive, send)


def create_app(folder: str | Path, settings: Settings) -> FastAPI:
    """Return the application that serves the model of a folder."""
    server = Server(folder, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await asyncio.to_thread(server.engine.stop)

    app = FastAPI(title="rope_server", lifespan=lifespan)
    app.add_middleware(LimitBody)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
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
        model = {"id": server.name, "object": "model", "created": 0, "owned_by": "rope_server"}
        return {"object": "list", "data": [model]}

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
    async for piece in answering.pieces():
        if piece.finish == "error":
            yield _sent(_error_body(500, FAILED))
            return
        yield _sent(answering.answer.chunk(piece))
    if answering.body.stream_options.include_usage:
        yield _sent(answering.answer.usage_chunk(answering.usage))
    yield "data: [DONE]\n\n"


def _sent(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


async def _whole(answering: Answering) -> Response:
    pieces = [piece async for piece in answering.pieces()]
    if pieces[-1].finish == "error":
        return _error(500, FAILED)
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
    return _error(400, f"{place}: {first['msg']}")


def _error(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse(_error_body(status, message), status, headers)


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind}}
