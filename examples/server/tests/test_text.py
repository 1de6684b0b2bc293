"""Chat templates against transformers; text that comes token by token."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers
from rope_server.text import Detokenizer, Text
from tokenizers import Tokenizer

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "<b>Où?</b> {{ 1 + 1 }}"},
]
TEXT = "Grüße, 日本 and 🎉: the end of a longer text."


@pytest.fixture(scope="module")
def text(llama):
    return Text(llama.folder)


@pytest.fixture(scope="module")
def peer(llama):
    return transformers.AutoTokenizer.from_pretrained(llama.folder)


def test_chat_template(text, peer):
    expected = peer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert text.encode_chat(MESSAGES) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ tools is none }} {{ documents is none }}",
        "{{ bos_token }} {{ pad_token }}",
        "{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% endfor %}",
        "{{ strftime_now('%Y-%m-%d') }}",
        "  {% set x = 1 %}\n  {{ x }}{{ eos_token }}\n",
    ],
)
def test_parts_of_templates(llama, peer, tmp_path, template):
    shutil.copy(llama.folder / "tokenizer.json", tmp_path)
    config = json.loads((llama.folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": None}))
    (tmp_path / "chat_template.jinja").write_text(template)
    rendered = peer.apply_chat_template(
        MESSAGES, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    expected = peer(rendered, add_special_tokens=False)["input_ids"]
    assert Text(tmp_path).encode_chat(MESSAGES) == expected


def test_texts_are_not_truncated(llama, text, tmp_path):
    """Nor padded, whatever tokenizer.json says of batches for training."""
    tokenizer = Tokenizer.from_file(str(llama.folder / "tokenizer.json"))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Text(tmp_path).encode(TEXT) == text.encode(TEXT)


def test_refused_conversations(text, tmp_path, llama):
    with pytest.raises(ValueError, match="no role cook"):
        text.encode_chat([{"role": "cook", "content": ""}])
    (tmp_path / "tokenizer.json").write_text((llama.folder / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match="no chat template"):
        Text(tmp_path).encode_chat(MESSAGES)


def test_templates_cannot_reach_python(tmp_path, llama):
    (tmp_path / "tokenizer.json").write_text((llama.folder / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="refuses"):
        Text(tmp_path).encode_chat(MESSAGES)


def pieces(text, tokens, stops):
    detokenizer = Detokenizer(text, [], stops)
    found = []
    for token in tokens:
        found.append(detokenizer.add(token))
        if detokenizer.has_stopped:
            return found
    return [*found, detokenizer.rest()]


def test_pieces_are_the_text(text):
    tokens = text.encode(TEXT)
    found = pieces(text, tokens, [])
    assert "".join(found) == TEXT
    assert "\ufffd" not in "".join(found)
    assert len(found) == len(tokens) + 1


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ([" and 🎉"], "Grüße, 日本"),
        (["longer", "🎉: the e"], "Grüße, 日本 and "),
        (["the ends", "text."], "Grüße, 日本 and 🎉: the end of a longer "),
        (["text. And"], TEXT),
        (["G"], ""),
    ],
)
def test_stop_strings_span_tokens(text, stops, expected):
    assert "".join(pieces(text, text.encode(TEXT), stops)) == expected


def test_no_text_is_held_back_needlessly(text):
    tokens = text.encode("aXbXc")
    detokenizer = Detokenizer(text, [], ["XY"])
    assert [detokenizer.add(token) for token in tokens] == ["a", "", "Xb", "", "Xc"]
