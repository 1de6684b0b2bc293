"""Requests of many wrong parts are refused at the first; no server runs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from rope_server.protocol import ChatRequest, CompletionRequest

MANY = 100_000
PROMPT = {"model": "m", "prompt": "a"}
NAMES = {f"field {index}": 0 for index in range(MANY)}


def chat(message):
    return {"model": "m", "messages": [message]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, PROMPT | NAMES),
        (CompletionRequest, PROMPT | {"stream_options": NAMES}),
        (CompletionRequest, PROMPT | {"prompt": [{}] * MANY}),
        (CompletionRequest, PROMPT | {"prompt": [*"a" * MANY]}),
        (CompletionRequest, PROMPT | {"stop": [0] * MANY}),
        (CompletionRequest, PROMPT | {"stop": "a" * MANY}),
        (CompletionRequest, PROMPT | {"logit_bias": NAMES}),
        (CompletionRequest, [0] * MANY),
        (ChatRequest, {"model": "m", "messages": [0] * MANY}),
        (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": ""}] * MANY}),
        (ChatRequest, chat(NAMES)),
        (ChatRequest, chat({"role": "user", "content": [0] * MANY})),
        (ChatRequest, chat({"role": "user", "content": [{"type": "text", "text": ""}] * MANY})),
        (ChatRequest, chat({"role": "user", "content": [NAMES]})),
        (ChatRequest, chat({"role": "user", "content": "", "tool_calls": [0] * MANY})),
        (ChatRequest, chat({"role": "user", "content": ""}) | {"tools": [0] * MANY}),
        (ChatRequest, chat({"role": "user", "content": ""}) | {"response_format": NAMES}),
    ],
)
def test_the_first_error_alone_is_reported(kind, body):
    """One for each type that a value may have, of which there are three at most."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 3
