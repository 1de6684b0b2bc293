"""OpenAI's protocol: the fields of requests, and the objects of answers."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rope_server.sampling import Drawn
from rope_server.text import Text

# Fields that clients send unasked, with the value that changes nothing. No other is served.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tools": [],
    "tool_calls": [],
    "annotations": [],
}
MOST_PROMPTS = 128
MOST_PARTS = 4096  # messages of a conversation, and parts of a message


class Piece(NamedTuple):
    """A part of the answer to a prompt: text, tokens, and the reason if it is the last."""

    index: int
    text: str
    tokens: list[Drawn]
    finish: str | None


class Usage(NamedTuple):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        """Return the JSON object."""
        return self._asdict() | {"total_tokens": sum(self)}


class Strict(BaseModel):
    """A part of a request. Null and neutral fields play no part; unknown ones are refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Refuse the first unknown field; pydantic would report each of a hundred thousand."""
        if not isinstance(data, dict):
            return data
        given = {x: data[x] for x in data if data[x] is not None and data[x] != NEUTRAL.get(x)}
        for name in given:
            if name in NEUTRAL:
                raise ValueError(f"{name} can only be {json.dumps(NEUTRAL[name])}")
            if name not in cls.model_fields:
                raise ValueError(f"there is no field {name[:40]!r}")
        return given


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = False


def _listed(value: Any) -> Any:
    """Return one text, or the tokens of one, as a list of one."""
    is_tokens = isinstance(value, list) and isinstance(next(iter(value), None), int)
    return [value] if isinstance(value, str) or is_tokens else value


Tokens = Annotated[list[int], Field(fail_fast=True)]
Stop = Annotated[str, Field(max_length=1000)]


class Common(Strict):
    """Fields that both kinds of request have."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0)
    stop: Annotated[list[Stop], BeforeValidator(_listed)] = Field([], max_length=4, fail_fast=True)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""  # of the client, and for its own records

    @model_validator(mode="after")
    def _check_unicode(self) -> Self:
        """Refuse halves of surrogate pairs, which no tokenizer takes."""
        json.dumps(self.model_dump(), ensure_ascii=False).encode()
        return self

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        """Refuse fields that play no part without another."""
        for name, other in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
            if name in self.model_fields_set and not getattr(self, other):
                raise ValueError(f"{name} needs {other}")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings; an empty one stops nothing."""
        return [stop for stop in self.stop if stop]


class CompletionRequest(Common):
    """The body of /v1/completions. prompt: a text or its tokens, or several."""

    kind: ClassVar = "text_completion"
    chunk_kind: ClassVar = "text_completion"
    prompt: Annotated[list[Tokens | str], BeforeValidator(_listed)] = Field(
        min_length=1, max_length=MOST_PROMPTS, fail_fast=True
    )
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to report the log probabilities of; None reports nothing."""
        return self.logprobs

    def tokens(self, text: Text) -> list[list[int]]:
        """Return the tokens of each prompt."""
        return [text.encode(x) if isinstance(x, str) else x for x in self.prompt]

    def most_tokens(self, room: int) -> int:
        """Return max_tokens, by default that of OpenAI."""
        return self.max_tokens or max(min(16, room), 1)

    @staticmethod
    def choice(piece: Piece, text: Text, is_chunk: bool) -> dict[str, Any]:
        """Return the choice of an answer, or of a chunk, which has the same form."""
        return {"text": piece.text, "logprobs": _completion_logprobs(piece.tokens, text)}


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: str
    content: Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)] | str

    def plain(self) -> dict[str, str]:
        """Return the message with one text."""
        is_text = isinstance(self.content, str)
        text = self.content if is_text else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatRequest(Common):
    """The body of /v1/chat/completions."""

    kind: ClassVar = "chat.completion"
    chunk_kind: ClassVar = "chat.completion.chunk"
    messages: list[Message] = Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to report the log probabilities of; None reports nothing."""
        return self.top_logprobs if self.logprobs else None

    def tokens(self, text: Text) -> list[list[int]]:
        """Return the tokens of the conversation, the only prompt."""
        return [text.encode_chat([message.plain() for message in self.messages])]

    def most_tokens(self, room: int) -> int:
        """Return max_tokens under its newer or older name, by default 256 or what there is."""
        return self.max_completion_tokens or self.max_tokens or max(min(256, room), 1)

    @staticmethod
    def choice(piece: Piece, text: Text, is_chunk: bool) -> dict[str, Any]:
        """Return the choice of an answer, or of a chunk, which has another form."""
        message = {"role": "assistant", "content": piece.text}
        name = "delta" if is_chunk else "message"
        return {name: message, "logprobs": _chat_logprobs(piece.tokens, text)}


class Answer:
    """The objects of one answer, with one id."""

    def __init__(self, request: CompletionRequest | ChatRequest, text: Text) -> None:
        self._request = request
        self._text = text
        self._common = {
            "id": f"{request.kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """Return the answer of all pieces."""
        of_prompts = defaultdict(list)
        for piece in pieces:
            of_prompts[piece.index].append(piece)
        choices = [self._choice(_joined(of_prompts[index]), False) for index in sorted(of_prompts)]
        body = {"object": self._request.kind, "choices": choices, "usage": usage.body()}
        return self._common | body

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the chunk of one piece."""
        return self._chunk([self._choice(piece, True)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk, of the numbers of tokens alone."""
        return self._chunk([]) | {"usage": usage.body()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._common | {"object": self._request.chunk_kind, "choices": choices}

    def _choice(self, piece: Piece, is_chunk: bool) -> dict[str, Any]:
        choice = self._request.choice(piece, self._text, is_chunk)
        return choice | {"index": piece.index, "finish_reason": piece.finish}


def _joined(pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    tokens = [drawn for piece in pieces for drawn in piece.tokens]
    return Piece(pieces[0].index, text, tokens, pieces[-1].finish)


def _completion_logprobs(tokens: Sequence[Drawn], text: Text) -> dict[str, Any] | None:
    reported = [drawn for drawn in tokens if drawn.logprob is not None]
    if not reported:
        return None
    top = [{text.token_text(i): logprob for i, logprob in drawn.top} for drawn in reported]
    return {
        "tokens": [text.token_text(drawn.token) for drawn in reported],
        "token_logprobs": [drawn.logprob for drawn in reported],
        "top_logprobs": top,
    }


def _chat_logprobs(tokens: Sequence[Drawn], text: Text) -> dict[str, Any] | None:
    content = [
        _logprob(text, drawn.token, drawn.logprob)
        | {"top_logprobs": [_logprob(text, *pair) for pair in drawn.top]}
        for drawn in tokens
        if drawn.logprob is not None
    ]
    return {"content": content} if content else None


def _logprob(text: Text, token: int, logprob: float) -> dict[str, Any]:
    piece = text.token_text(token)
    return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}
