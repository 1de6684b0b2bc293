"""Text to tokens and back: the tokenizer, the chat template, and text that comes token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are no character


class Text:
    """The tokenizer and the chat template of a folder.

    stop_tokens: ids that end a text. template: None in a folder without chat template.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
        self.tokenizer.no_truncation()  # which tokenizer.json may ask for, and transformers ignores
        self.tokenizer.no_padding()
        self.stop_tokens = _stop_tokens(folder)
        added = self.tokenizer.get_added_tokens_decoder()
        self._skipped = {token for token, facts in added.items() if facts.special}
        self._bytes = {self.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        config = _json(folder / "tokenizer_config.json")
        self._special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        source = _template_source(folder, config)
        self.template = None if source is None else _environment().from_string(source)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts before it."""
        return self._tokens(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's answer starts.

        Raises ValueError if there is no template, or if it refuses the conversation.
        """
        if self.template is None:
            raise ValueError("the model has no chat template; use /v1/completions")
        try:
            text = self.template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses `messages`: {error}") from error
        return self._tokens(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without those that are special."""
        return self.tokenizer.decode(tokens)

    def is_open(self, token: int) -> bool:
        """Return True if the text up to a token may change with the next one.

        A run of byte tokens is decoded as one: if it is not UTF-8, each of its bytes becomes a
        replacement character. Tokens without text do not end a run.
        """
        is_skipped = token in self._skipped or self.tokenizer.id_to_token(token) is None
        return is_skipped or token in self._bytes

    def token_text(self, token: int) -> str:
        """Return the text of one token after another: some decoders take a space off the first."""
        once = self.tokenizer.decode([token], skip_special_tokens=False)
        twice = self.tokenizer.decode([token, token], skip_special_tokens=False)
        return twice[len(once) :]

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        # For a batch tokenizers releases the interpreter, so that other requests are served.
        encodings = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids


class Detokenizer:
    """The text of a sequence as its tokens come, up to the first of some stop strings.

    Text is held back while it may be the beginning of a stop string, and while later tokens may
    change it. The text of new tokens is what they add to that of a window of tokens, which begins
    with those whose text was returned last: some tokenizers take a space off the first word.
    """

    def __init__(self, text: Text, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.has_stopped = False
        self._text = text
        self._stops = stops
        self._held = ""
        self._window = list(prompt)
        self._known = text.decode(prompt)  # the text of the first tokens of the window
        self._known_tokens = len(prompt)

    def add(self, token: int) -> str:
        """Return the text that one more token makes certain."""
        self._window.append(token)
        if self._text.is_open(token):
            return ""
        text = self._text.decode(self._window)
        if text == self._known or text.endswith(REPLACEMENT):
            return ""
        return self._certain(self._new(text))

    def rest(self) -> str:
        """Return the text held back, at the end of the sequence."""
        return self._certain(self._new(self._text.decode(self._window))) + self._held

    def _new(self, text: str) -> str:
        """Return what the text of the window has beyond the known, and restart the window."""
        known = self._known
        if not text.startswith(known):  # the prompt ended inside a character
            known = known.rstrip(REPLACEMENT)
        del self._window[: self._known_tokens]
        self._known = self._text.decode(self._window)
        self._known_tokens = len(self._window)
        return text[len(known) :]

    def _certain(self, text: str) -> str:
        """Return what is certain of the text held back and more of it."""
        held = self._held + text
        places = [held.find(stop) for stop in self._stops if stop in held]
        if places:
            self.has_stopped = True
            self._held = ""
            return held[: min(places)]
        end = len(held) - max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[end:]
        return held[:end]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that a stop string begins with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.exists() else {}


def _stop_tokens(folder: Path) -> frozenset[int]:
    """Return the ids that end a text; generation_config.json goes before config.json."""
    configs = [_json(folder / name) for name in ("generation_config.json", "config.json")]
    found = next((x["eos_token_id"] for x in configs if x.get("eos_token_id") is not None), [])
    return frozenset([found] if isinstance(found, int) else found)


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        return next((x["template"] for x in source if x["name"] == "default"), None)
    return source


def _environment() -> jinja2.Environment:
    """Return the environment that transformers renders chat templates in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON; the filter of jinja2 would escape characters of HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
