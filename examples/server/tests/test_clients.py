"""Client libraries: a chat, a stream, and a second turn with the answer of the first."""

from __future__ import annotations

import json

import langchain_openai
import llm
import pytest
from servers import Running

SETTINGS = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server(llama):
    running = Running(llama.folder, "--pages", "512")
    yield running
    running.end()


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def expected(server):
    """The two answers, from plain requests."""

    def ask(*messages):
        answer = server.post("/v1/chat/completions", messages=messages, **SETTINGS)
        return answer.json()["choices"][0]["message"]["content"]

    first = ask(user("Who?"))
    return first, ask(user("Who?"), {"role": "assistant", "content": first}, user("And?"))


@pytest.mark.parametrize("dump", [lambda message: message, lambda message: message.model_dump()])
def test_openai(server, expected, dump):
    def ask(**fields):
        create = server.openai.chat.completions.create
        return create(model=server.model, **SETTINGS, **fields)

    message = ask(messages=[user("Who?")]).choices[0].message
    chunks = ask(messages=[user("Who?")], stream=True)
    streamed = "".join(chunk.choices[0].delta.content for chunk in chunks)
    second = ask(messages=[user("Who?"), dump(message), user("And?")]).choices[0].message
    assert (message.content, streamed, second.content) == (expected[0], *expected)


def test_langchain(server, expected):
    options = {"base_url": f"{server.url}/v1", "api_key": "none", "model": server.model}
    model = langchain_openai.ChatOpenAI(**options, **SETTINGS)
    message = model.invoke([("user", "Who?")])
    streamed = "".join(chunk.content for chunk in model.stream([("user", "Who?")]))
    second = model.invoke([("user", "Who?"), message, ("user", "And?")])
    assert (message.content, streamed, second.content) == (expected[0], *expected)
    texts = langchain_openai.OpenAI(**options, **SETTINGS).batch(["Once", "Twice"])
    assert texts == [server.complete(x, **SETTINGS).choices[0].text for x in ("Once", "Twice")]


@pytest.mark.parametrize("dump", [lambda message: message, lambda message: message.model_dump()])
def test_litellm(server, expected, dump, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # which it would download
    import litellm

    address = {"api_base": f"{server.url}/v1", "api_key": "none"}

    def ask(**fields):
        return litellm.completion(f"openai/{server.model}", **address, **SETTINGS, **fields)

    message = ask(messages=[user("Who?")]).choices[0].message
    chunks = ask(messages=[user("Who?")], stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    second = ask(messages=[user("Who?"), dump(message), user("And?")]).choices[0].message
    assert (message.content, streamed, second.content) == (expected[0], *expected)


def test_llm(server, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    names = {"model_id": "served", "model_name": server.model, "api_base": f"{server.url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([names]))
    options = {"key": "none", **SETTINGS}
    conversation = llm.get_model("served").conversation()
    first = conversation.prompt("Who?", stream=False, **options).text()
    second = "".join(conversation.prompt("And?", **options))
    assert (first, second) == expected
