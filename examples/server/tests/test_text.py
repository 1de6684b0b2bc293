"""Chat templates against transformers; text that comes token by token."""

from __future__ import annotations

import json
import shutil
import threading
import time

import pytest
import tokenizers
import transformers
from rope_server.__main__ import DEMO
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


def pieces(text, tokens, stops, prompt=()):
    detokenizer = Detokenizer(text, prompt, stops)
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


def byte_fallback(folder):
    """Return a text as Llama 2, Mistral, Gemma and Phi-3 have it: bytes beside pieces of words."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁▁", "▁a", "a", "▁bc", "é", "▁日", "日本", "\ufffd", ",", "ing"]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(pieces[:3])
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return Text(folder)


def random_tokens(text, rng):
    """Return parts of characters of several bytes, and any tokens, also such as have no text."""
    found = []
    for _ in range(rng.integers(1, 12)):
        character = text.encode("€é🎉日"[rng.integers(4)])
        found += character[: rng.integers(len(character) + 1)]
        any_tokens = rng.integers(0, text.tokenizer.get_vocab_size() + 3, rng.integers(4))
        found += any_tokens.tolist()
    return found


@pytest.mark.parametrize("kind", ["bytes and pieces", "pieces of bytes", "the demo's"])
def test_random_tokens_have_the_text_of_the_whole(kind, text, rng, tmp_path):
    texts = {"bytes and pieces": byte_fallback(tmp_path), "the demo's": Text(DEMO)}
    text = texts.get(kind, text)
    for _ in range(3000):
        prompt = text.encode("aa")[: rng.integers(3)]
        tokens = random_tokens(text, rng)
        found = text.tokenizer.decode(prompt) + "".join(pieces(text, tokens, [], prompt))
        assert found == text.tokenizer.decode(prompt + tokens)


def test_texts_of_single_tokens(text, tmp_path):
    """With the space that a decoder takes off the first word of a text."""
    names = {"▁bc": " bc", "a": "a", "日本": "日本", "<0xE2>": "\ufffd", "</s>": "</s>"}
    found = byte_fallback(tmp_path)
    texts = [found.token_text(found.tokenizer.token_to_id(name)) for name in names]
    assert texts == [*names.values()]
    assert "".join(map(text.token_text, text.encode("a bc </s>"))) == "a bc </s>"


def test_others_run_while_a_long_text_is_encoded(text):
    encoding = threading.Thread(target=text.encode, args=["a" * 2**20])
    encoding.start()
    pauses = 0
    while encoding.is_alive():
        time.sleep(0.001)
        pauses += 1
    assert pauses > 20


def test_a_character_of_bytes_comes_with_the_next_token(tmp_path):
    text = byte_fallback(tmp_path)
    names = ["▁a", "<0xE2>", "<0x82>", "<0xAC>", "▁a", "<0xE2>"]
    tokens = [text.tokenizer.token_to_id(name) for name in names]
    assert pieces(text, tokens, []) == ["a", "", "", "", "€ a", "", "\ufffd"]
    assert pieces(text, tokens[:4], ["€"]) == ["a", "", "", "", ""]
    assert pieces(text, tokens[2:5], [], tokens[:2]) == ["", "", "€ a", ""]


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
