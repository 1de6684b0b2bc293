"""The server through its port, by the `openai` package and by clients that behave badly."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest
from rope_server.app import create_app
from rope_server.engine import Settings
from servers import PROMPTS, Running
from starlette.testclient import TestClient

JSON = {"Content-Type": "application/json"}
MESSAGE = {"role": "user", "content": "a", "refusal": None, "annotations": [], "tool_calls": []}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def server(llama):
    running = Running(llama.folder, "--pages", "512")
    yield running
    assert running.end() == -signal.SIGTERM


@pytest.fixture
def small_server(llama):
    """A server of few pages and a short queue."""
    running = Running(llama.folder, "--pages", "32", "--queue", "4", "--sequences", "2")
    yield running
    running.process.kill()
    running.process.wait()


def async_client(server):
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
    )


async def together(server, prompts, **fields):
    async with async_client(server) as client:
        calls = [
            client.completions.create(model=server.model, prompt=prompt, seed=index, **fields)
            for index, prompt in enumerate(prompts)
        ]
        return [answer.choices[0].text for answer in await asyncio.gather(*calls)]


def test_whole_and_streamed_answers_are_equal(server):
    fields = {"max_tokens": 30, "seed": 5, "logprobs": 3}
    whole = server.complete("Once", **fields)
    chunks = [*server.complete("Once", stream=True, **fields)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage.completion_tokens == 30
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    logprobs = whole.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 30
    streamed = [x for chunk in chunks for x in chunk.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx(logprobs.token_logprobs, abs=2e-4)


def test_chat(server):
    fields = {"max_completion_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]
    create = server.openai.chat.completions.create
    whole = create(model=server.model, messages=messages, **fields)
    streamed = create(
        model=server.model,
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    )
    *chunks, usage = streamed
    assert usage.usage == whole.usage
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert text == whole.choices[0].message.content
    content = whole.choices[0].logprobs.content
    assert len(content) == 12
    assert content[0].logprob == content[0].top_logprobs[0].logprob


def test_stop_strings_end_the_text(server):
    text = server.complete("Once", max_tokens=60, temperature=0).choices[0].text
    stop = text[20:25]
    choice = server.complete("Once", max_tokens=60, temperature=0, stop=stop).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    server.wait_until_idle()


def test_tokens_as_prompt(server):
    assert server.complete([5, 6, 7], max_tokens=3).usage.prompt_tokens == 3
    assert server.complete([[5, 6, 7], [8]], max_tokens=3).usage.prompt_tokens == 4


@pytest.mark.parametrize(
    ("path", "fields", "neutral"),
    [
        ("/v1/completions", {"prompt": "a"}, {"echo": False, "best_of": 1, "suffix": None}),
        ("/v1/chat/completions", CHAT, {"tools": [], "response_format": {"type": "text"}}),
        ("/v1/chat/completions", {"messages": [MESSAGE]}, {"logprobs": False}),
    ],
)
def test_values_that_change_nothing(server, path, fields, neutral):
    common = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "n": 1,
        "user": "a",
        **dict.fromkeys(("max_tokens", "temperature", "top_p", "stop", "stream_options", "tools")),
        **dict.fromkeys(("stream", "logprobs", "best_of", "functions")),
    }
    expected = server.post(path, **fields, seed=1).json()["choices"]
    answer = server.post(path, **fields, seed=1, **{**common, **neutral})
    assert answer.json().get("choices") == expected


def test_several_prompts(server):
    fields = {"max_tokens": 40, "temperature": 0}
    alone = [server.complete(prompt, **fields) for prompt in PROMPTS[:5]]
    stop = alone[2].choices[0].text[8:12]
    alone = [server.complete(prompt, stop=stop, **fields) for prompt in PROMPTS[:5]]
    whole = server.complete(PROMPTS[:5], stop=stop, **fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4]
    found = [(choice.text, choice.finish_reason) for choice in whole.choices]
    assert found == [(x.choices[0].text, x.choices[0].finish_reason) for x in alone]
    assert whole.usage.total_tokens == sum(x.usage.total_tokens for x in alone)
    texts = [""] * 5
    for chunk in server.complete(PROMPTS[:5], stop=stop, stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [text for text, _ in found]
    server.wait_until_idle()


def test_200_clients_get_what_they_get_alone(server):
    fields = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.95}
    found = asyncio.run(together(server, PROMPTS, **fields))
    alone = [
        server.complete(prompt, seed=index, **fields).choices[0].text
        for index, prompt in enumerate(PROMPTS)
    ]
    assert found == alone
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        ("/v1/completions", {"prompt": "a", "model": "gpt"}, 404, "'gpt'"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 600}, 400, "more than 512"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, 400, "best_of"),
        ("/v1/completions", {"prompt": "a", "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "there is no field 'suffix'"),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 0.1}, 400, "presence_penalty"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": None}, 400, "prompt: Field required"),
        ("/v1/completions", {"prompt": ["a", ""]}, 400, "no tokens"),
        ("/v1/completions", {"prompt": []}, 400, "at least 1"),
        ("/v1/completions", {"prompt": 5}, 400, "prompt: Input should be a valid list"),
        ("/v1/completions", {"prompt": ["a"] * 129}, 400, "at most 128"),
        ("/v1/completions", {"prompt": "a", "stop": "x" * 1001}, 400, "at most 1000"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n can only be 1"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 5}, 400, "at most 4"),
        ("/v1/completions", {"prompt": [5, "6"]}, 400, ".1: Input should be a valid integer"),
        ("/v1/completions", {"prompt": "a", "temperature": math.nan}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "needs stream"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": [9999]}, 400, "token 9999"),
        ("/v1/completions", {"prompt": ""}, 400, "no tokens"),
        ("/v1/completions", {"prompt": "word " * 600}, 400, "more than 512"),
        ("/v1/completions", {"prompt": "a" * 2**20}, 413, "bytes"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, 400, "no role x"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "needs logprobs"),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json"}}, 400, "only be {"),
        ("/v1/embeddings", {}, 404, "Not Found"),
    ],
)
def test_refused_requests(server, path, fields, status, words):
    body = json.dumps({"model": server.model, **fields})
    answer = httpx.post(f"{server.url}{path}", content=body, headers=JSON, timeout=60)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", r'"prompt": "\ud800"'),
        ("/v1/completions", r'"prompt": "a", "stop": ["\udfff"]'),
        ("/v1/chat/completions", r'"messages": [{"role": "user", "content": "\ud800"}]'),
        ("/v1/chat/completions", r'"messages": [{"role": "\ud800", "content": "a"}]'),
        ("/v1/completions", r'"prompt": "a", "\ud800": 1'),
    ],
)
def test_halves_of_surrogate_pairs(server, path, fields):
    body = f'{{"model": "{server.model}", {fields}}}'
    answer = httpx.post(f"{server.url}{path}", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n",
            b"411",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{]",
            b"400",
        ),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: LOCALHOST:80\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: localhost.example.com:8000\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: \r\n\r\n", b"421"),
        (b"no HTTP at all\r\n\r\n", b"400"),
    ],
)
def test_heads_of_requests(server, raw, status):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw)
        assert connection.recv(100).split()[1] == status


def test_the_case_of_an_allowed_host_is_ignored(llama):
    client = TestClient(create_app(llama.folder, Settings(), ["Model.Example"]))
    hosts = ("model.example", "MODEL.example:80", "example")
    statuses = [client.get("/", headers={"Host": host}).status_code for host in hosts]
    assert statuses == [200, 200, 421]


def leave_whole(address, body):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(address, json=body, timeout=0.1)


def leave_streamed(address, body):
    with httpx.stream("POST", address, json={**body, "stream": True}) as answer:
        next(answer.iter_lines())


@pytest.mark.parametrize("leave", [leave_whole, leave_streamed])
def test_a_client_that_leaves_frees_its_pages(server, leave):
    before = server.metric("generated_tokens_total")
    body = {"model": server.model, "prompt": "a", "max_tokens": 500}
    leave(f"{server.url}/v1/completions", body)
    server.wait_until_idle()
    assert server.metric("generated_tokens_total") - before < 500


def test_a_full_queue(small_server):
    async def flood():
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits()) as client:
            body = {"model": small_server.model, "prompt": "a", "max_tokens": 100}
            calls = [
                client.post(f"{small_server.url}/v1/completions", json=body) for _ in range(40)
            ]
            return await asyncio.gather(*calls)

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if answer.status_code == 503]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == 40
    assert len(served) >= 4
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}


def test_sigterm_drains(small_server):
    body = {"model": small_server.model, "prompt": "a", "max_tokens": 400, "stream": True}
    lines = []
    with httpx.stream("POST", f"{small_server.url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not lines:
                small_server.process.send_signal(signal.SIGTERM)
            lines += [line] if line else []
    assert len(lines) == 401
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    # uvicorn raises the signal again when all is done.
    assert small_server.process.wait(60) == -signal.SIGTERM


def slow(port):
    """Open a connection that sends half a request."""
    connection = socket.create_connection(("127.0.0.1", port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    connection.sendall(head + b"{")
    return connection


def leaving(port, model):
    """Send a request and close the connection."""
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 400, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())


@pytest.mark.parametrize(
    ("grace", "signals"), [("1", [signal.SIGTERM]), ("300", [signal.SIGINT, signal.SIGINT])]
)
def test_half_a_request_does_not_keep_the_server(llama, grace, signals):
    running = Running(llama.folder, "--grace", grace)
    try:
        with slow(running.port):
            running.post(prompt="a")  # so that the half is there
            for number in signals:
                running.process.send_signal(number)
                time.sleep(0.5)
            running.process.wait(30)
    finally:
        running.process.kill()


def test_others_are_served_beside_300_bad_clients(server):
    fields = {"max_tokens": 16, "temperature": 0}
    expected = asyncio.run(together(server, PROMPTS[:20], **fields))
    connections = [slow(server.port) for _ in range(100)]
    for _ in range(100):
        leaving(server.port, server.model)
    for index in range(100):
        size = 2**20 if index % 2 else 1
        server.post(prompt="a" * size, max_tokens="many")
    assert asyncio.run(together(server, PROMPTS[:20], **fields)) == expected
    for connection in connections:
        connection.close()
    server.wait_until_idle()


def test_nothing_grows_over_2000_requests(server):
    for _ in range(3):  # until allocators have what they keep
        asyncio.run(together(server, PROMPTS, max_tokens=4))
    before, memory = server.resources()
    for _ in range(10):
        asyncio.run(together(server, PROMPTS, max_tokens=4))
    after, more_memory = server.resources()
    assert after == before
    # Of 2,000 requests with more than 4 KB left behind by each.
    assert more_memory - memory < 8e6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        "rope_server.engine.forward",
        "rope_server.engine.draw",
        "rope_server.text.Text.encode",
        "rope_server.text.Text.decode",
        "rope_server.protocol.Answer._choice",
    ],
)
def test_a_failure_is_told(llama, monkeypatch, place, stream):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(place, fail)
    app = create_app(llama.folder, Settings())
    with TestClient(app, raise_server_exceptions=False) as client:
        body = {"model": llama.folder.name, "prompt": "a", "stream": stream}
        answer = client.post("/v1/completions", json=body)
    message = answer.text.removeprefix("data: ")
    error = {"message": "the server failed at this request", "type": "server_error"}
    assert json.loads(message) == {"error": error}


def test_health_and_page(server):
    assert httpx.get(f"{server.url}/health").json() == {"alive": True}
    assert "textarea" in httpx.get(server.url).text
    assert server.openai.models.list().data == [server.openai.models.retrieve(server.model)]
    assert httpx.get(f"{server.url}/v1/models/other").json()["error"]["type"].startswith("invalid")
    assert httpx.get(f"{server.url}/docs").status_code == 404
    assert httpx.get(f"{server.url}/openapi.json").status_code == 404
    assert server.metric("steps_total") >= 0


def test_openblas_threads_do_not_spin(llama):
    """The variable is set before NumPy is imported, unless the user has set it."""
    code = "import sys, os, rope_server; print('numpy' in sys.modules, os.environ[{!r}])"
    command = [sys.executable, "-c", code.format("OPENBLAS_THREAD_TIMEOUT")]
    for given, expected in [({}, "False 8"), ({"OPENBLAS_THREAD_TIMEOUT": "20"}, "False 20")]:
        kept = {k: v for k, v in os.environ.items() if k != "OPENBLAS_THREAD_TIMEOUT"}
        answer = subprocess.run(command, env=kept | given, capture_output=True, text=True)
        assert answer.stdout.split("\n")[0] == expected
