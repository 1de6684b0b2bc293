"""The reader of GGUF headers against gguf's own reader, and on damaged files."""

from __future__ import annotations

import struct
import time

import gguf
import gguf_files
import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.models import gguf_header
from rope_cpu.models.gguf_header import read_header

VALUES = {"embedding_length": 64, "attention.head_count": 4, "rope.freq_base": 5e5}
FACTORS = {gguf_files.FREQS: np.linspace(1, 8, 8)}

# Seconds: a refusal takes a millisecond, and the machine may be shared.
LONGEST = 10.0


@pytest.fixture
def model(tmp_path):
    return gguf_files.write(
        tmp_path / "model.gguf",
        "llama",
        {**VALUES, "attention.sliding_window_pattern": [True, False], "name": "é"},
        {"other.weight": np.zeros((4, 8)), **FACTORS},
        strings={"tokenizer.ggml.tokens": ["a", "", "long" * 100], "numbers": [1, -2]},
    )


def refusal(path):
    """Return the text of the ValueError for a file, which names it."""
    start = time.monotonic()
    with pytest.raises(ValueError, match="damaged") as caught:
        RotaryEmbedding.from_gguf(path)
    assert time.monotonic() - start < LONGEST
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def damaged(folder, content):
    path = folder / "damaged.gguf"
    path.write_bytes(content)
    return refusal(path)


def test_reads_what_gguf_reads(model):
    values, tensors = read_header(str(model), FACTORS)
    reader = gguf.GGUFReader(model)
    fields = {name: field for name, field in reader.fields.items() if "GGUF" not in name}
    assert values.keys() == fields.keys()
    assert values.pop("tokenizer.ggml.tokens") is None
    for name, value in values.items():
        assert value == fields[name].contents(), name
    (tensor,) = (tensor for tensor in reader.tensors if tensor.name == gguf_files.FREQS)
    np.testing.assert_array_equal(tensors[gguf_files.FREQS], tensor.data)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_begin_at_a_multiple_of_the_alignment(alignment, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(alignment)
    writer.add_tensor("other.weight", np.zeros(3, np.float32))
    writer.add_tensor(gguf_files.FREQS, np.arange(1, 9, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, tensors = read_header(str(tmp_path / "model.gguf"), FACTORS)
    np.testing.assert_array_equal(tensors[gguf_files.FREQS], np.arange(1, 9))


def test_version_2_is_read_like_version_3(model):
    expected = RotaryEmbedding.from_gguf(model)
    content = model.read_bytes()
    model.write_bytes(content[:4] + struct.pack("<I", 2) + content[8:])
    assert RotaryEmbedding.from_gguf(model) == expected


def test_long_strings_are_cut_and_long_arrays_skipped(tmp_path):
    path = gguf_files.write(
        tmp_path / "model.gguf",
        "llama",
        {**VALUES, "chat_template": "x" * 5000},
        strings={"numbers": list(range(5000))},
    )
    values, _ = read_header(str(path), ())
    assert values["llama.chat_template"] == "x" * 4096
    assert values["numbers"] is None
    assert values["llama.attention.head_count"] == 4


@pytest.mark.parametrize("version", [0, 1, 4, 0x3000000])
def test_other_versions_are_refused(version, model):
    content = model.read_bytes()
    text = damaged(model.parent, content[:4] + struct.pack("<I", version) + content[8:])
    assert f"`version` is {version}; it must be at {'least 2' if version < 2 else 'most 3'}" in text


def test_big_endian_files_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "damaged.gguf", "llama", False, gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "`version` is 50331648; it must be" in refusal(tmp_path / "damaged.gguf")


def test_truncated_at_any_byte(model):
    """Every prefix is refused, up to the last byte of the last tensor that is read."""
    content = model.read_bytes()
    end = content.rindex(np.float32(8).tobytes()) + 4
    for size in range(end):
        text = damaged(model.parent, content[:size])
        assert "ends after" in text or "empty" in text, size
    (model.parent / "damaged.gguf").write_bytes(content[:end])
    RotaryEmbedding.from_gguf(model.parent / "damaged.gguf")


def key(name, kind, value):
    """Return the bytes of a key and its value."""
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def header(*entries, tensors=0, keys=None):
    count = len(entries) if keys is None else keys
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + b"".join(entries)


def array(kind, count, content=b""):
    return struct.pack("<IQ", kind, count) + content


def tensor(name, *sizes, kind=0, offset=0):
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", kind, offset)


LLAMA = key(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")
WIDTH = key(b"llama.attention.key_length", 4, struct.pack("<I", 16))
NAME = gguf_files.FREQS.encode()
HUGE = 2**60
TENSOR = header(LLAMA, WIDTH, tensors=1, keys=2)


def integer(value):
    return struct.pack("<I", value)


def text_of(size, content=b""):
    return struct.pack("<Q", size) + content


def architecture(kind, value):
    return header(key(b"general.architecture", kind, value))


def alignment(value):
    return header(LLAMA, key(b"general.alignment", 4, integer(value)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"PK\3\4" + bytes(100), "does not begin with b'GGUF'"),
        (header(keys=HUGE), "`metadata_kv_count` is 1152921504606846976"),
        (header(tensors=HUGE), "`tensor_count` is 1152921504606846976"),
        (header(LLAMA, keys=2), "ends after"),
        (header(key(b"a", 9, array(8, HUGE))), "1152921504606846976 strings"),
        (header(key(b"a", 9, array(4, HUGE))), "ends after"),
        (header(key(b"a", 9, array(10, 2**64 - 1))), "ends after"),
        (header(key(b"a", 8, text_of(HUGE))), "ends after"),
        (header(key(b"a", 9, array(8, 2, text_of(2**64 - 1, bytes(8))))), "ends after"),
        (header(text_of(HUGE), keys=1), "ends after"),
        (header(text_of(2**20, b"x" * 2**20) + integer(13), keys=1), "has type 13"),
        (header(key(b"a", 9, array(8, 2**21, bytes(2**24)))), "2097152 strings"),
        (header(key(b"a", 9, array(9, 1))), "has type 9"),
        (header(key(b"a", 13, b"")), "has type 13"),
        (header(key(b"a", 9, array(2**31, 1))), "has type 2147483648"),
        (header(key(b"a", 9, array(99, 10**6))), "has type 99"),
        (header(LLAMA, LLAMA), "appears twice"),
        (header(), "`general.architecture` is None"),
        (architecture(4, integer(7)), "`general.architecture` is 7"),
        (architecture(8, text_of(5000, b"x" * 5000)), "`general.architecture` is 'xxx"),
        (architecture(8, text_of(2, b"\xff\xfe")), "must be in llama.cpp b"),
        (alignment(3), "power of 2"),
        (alignment(0), "at least 1"),
        (header(LLAMA, WIDTH, 2 * tensor(NAME, 8), tensors=2, keys=2), "appears twice"),
        (TENSOR + tensor(NAME, HUGE), "shape [1152921504606846976]"),
        (TENSOR + tensor(NAME, 8, offset=HUGE), "ends after"),
        (TENSOR + text_of(1, b"a" + b"\xff" * 4), "ends after"),
        (TENSOR + tensor(NAME, 8, kind=8) + bytes(99), "type 8"),
        (TENSOR + tensor(NAME, 2, 4) + bytes(99), "one dimension"),
        (TENSOR + tensor(NAME, 7) + b"\0\0\x80\x3f" * 99, "shape (7,)"),
        (TENSOR + tensor(NAME, 8) + bytes(99), "finite and above 0"),
        (TENSOR + tensor(NAME, 8) + b"\xff" * 99, "is nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_files_are_refused_by_name(content, text, tmp_path):
    assert text in damaged(tmp_path, content)


def test_strings_far_behind_the_start_are_refused(monkeypatch, tmp_path):
    """The time for all arrays of strings is bounded, not only that for one of them."""
    monkeypatch.setattr(gguf_header, "_HEADER", 1000)
    tokens = [array(8, 100, bytes(800)) for _ in range(3)]
    content = header(*(key(b"%d" % index, 9, value) for index, value in enumerate(tokens)))
    assert "'2' has 100 strings at byte" in damaged(tmp_path, content)


def test_the_bytes_of_these_tests_are_those_of_a_file(tmp_path):
    """Without damage, the entries above make a file."""
    factors = np.arange(1, 9, dtype=np.float32).tobytes()
    content = header(LLAMA, WIDTH, tensor(NAME, 8), tensors=1, keys=2)
    (tmp_path / "model.gguf").write_bytes(content + bytes(-len(content) % 32) + factors)
    np.testing.assert_array_equal(
        RotaryEmbedding.from_gguf(tmp_path / "model.gguf").inv_freq,
        RotaryEmbedding(16).inv_freq / np.arange(1, 9),
    )
