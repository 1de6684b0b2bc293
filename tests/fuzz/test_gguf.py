"""Mutated GGUF files: each makes a working rotary embedding, or is refused in few words."""

from __future__ import annotations

import struct
import time
from functools import cache

import gguf_files
import numpy as np
import pytest
from hypothesis import strategies as st
from refusals import LONGEST_TEXT, check_ours

from rope_cpu import RotaryEmbedding
from rope_cpu.models.gguf import ARCHITECTURES

# Seconds; a file takes a millisecond, and the machine may be shared.
LONGEST = 10.0

VALUES = {
    "attention.key_length": 16,
    "attention.key_length_swa": 16,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": [4, 0, 2],
    "attention.sliding_window": 128,
    "attention.sliding_window_pattern": [True, False, True],
    "block_count": 3,
    "context_length": 4096,
    "rope.freq_base": 5e5,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": 16,
    "rope.dimension_count_swa": 16,
    "rope.dimension_sections": [4, 2, 2, 0],
    "rope.scale_linear": 2.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.attn_factor": 1.25,
    "rope.scaling.alpha": 1000.0,
    "rope.scaling.finetuned": True,
    "rope.scaling.original_context_length": 1024,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
FACTORS = np.linspace(1, 4, 8)
TENSORS = (gguf_files.FREQS, gguf_files.SHORT, gguf_files.LONG)
ROTATED = [name for name, row in ARCHITECTURES.items() if "pairing" in row]

EXTREMES = (0, 1, 3, 8, 9, 13, 2**16, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
FLOATS = st.floats(width=32) | st.sampled_from((0.0, -1.0, 1e-38, 3e38))
NUMBERS = st.integers(0, 2**32 - 1) | st.integers(0, 300) | FLOATS
NEW_VALUES = (
    NUMBERS
    | st.booleans()
    | st.sampled_from(("", "none", "linear", "yarn", "longrope", "x" * 2000, "é"))
    | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
    | st.lists(st.integers(0, 16), min_size=1, max_size=6)
)
LAYER_TYPES = st.sampled_from((None, None, "full_attention", "sliding_attention", "x" * 5000))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def check(path, layer_type, overrides=None):
    """Rotate by a file's embedding; raise unless that works, or the file is refused briefly."""
    rope = read(path, layer_type, overrides)
    if rope is None:
        return
    if rope.spec.needs_length:
        rope = rope.at_length(4096)
    x = np.ones((1, 1, 1, rope.head_dim), np.float32)
    ids = np.ones((1, rope.axes) if rope.axes > 1 else 1)
    assert np.isfinite(rope.rotate(x, ids)).all()
    assert len(repr(rope)) < LONGEST_TEXT


def read(path, layer_type, overrides=None):
    """Return the rotary embedding of a file, None if it is refused."""
    start = time.monotonic()
    try:
        return RotaryEmbedding.from_gguf(path, layer_type=layer_type, overrides=overrides)
    except ValueError as error:
        check_ours(error)
        return None
    finally:
        seconds = time.monotonic() - start
        assert seconds < LONGEST, f"took {seconds:.0f} s"


@st.composite
def contents(draw):
    """Draw what a file has: an architecture, some values of which a few are changed, tensors."""
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True))
    values = {key: VALUES[key] for key in keys}
    for key in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3)):
        values[key] = draw(NEW_VALUES)
    tensors = {
        name: draw(st.sampled_from((FACTORS, FACTORS[:4], -FACTORS, FACTORS * np.inf)))
        for name in draw(st.lists(st.sampled_from(TENSORS), unique=True))
    }
    return draw(st.sampled_from(ROTATED)), values, tensors


def test_mutated_metadata(search, path):
    def check_contents(held, layer_type, overrides):
        check(gguf_files.write(path, *held), layer_type, overrides)

    overrides = st.none() | st.dictionaries(st.sampled_from(sorted(VALUES)), NEW_VALUES, max_size=3)
    search(check_contents, 200, held=contents(), layer_type=LAYER_TYPES, overrides=overrides)


FOREIGN = ("rope.local.freq_base", "rope.mscale", "yarn.factor", "attention.alibi", "rotary_pct")


def test_no_file_is_answered_as_if_a_key_were_not_there(search, path):
    """Keys that nothing reads are refused unless they say 0, 1 or no."""

    def check_key(architecture, key, value):
        values = {name: VALUES[name] for name in ("attention.key_length", "context_length")}
        values |= {"rope.dimension_sections": [4, 2, 2, 0]} if "vl" in architecture else {}
        plain = read(gguf_files.write(path, architecture, values), "full_attention")
        rope = read(gguf_files.write(path, architecture, values | {key: value}), "full_attention")
        neutral = value is False or (value is not True and value in (0, 1))
        assert rope == (plain if neutral else None)

    names = st.sampled_from(ROTATED)
    values = NEW_VALUES.filter(bool) | st.sampled_from((0, 0.0, False))  # gguf writes no ""
    search(check_key, 100, architecture=names, key=st.sampled_from(FOREIGN), value=values)


@cache
def whole_files(folder):
    """Return the bytes of files of three kinds."""
    kinds = (
        ("llama", {"attention.key_length": 16}, {gguf_files.FREQS: FACTORS}),
        ("qwen2vl", {"attention.key_length": 16, "rope.dimension_sections": [4, 2, 2, 0]}, {}),
        ("phi3", VALUES | {"rope.freq_base_swa": 5e5}, dict.fromkeys(TENSORS[1:], FACTORS)),
    )
    files = []
    for kind in kinds:
        path = gguf_files.write(folder / "whole.gguf", *kind, strings={"tokens": ["a", "bc"]})
        files.append(path.read_bytes())
    return files


@st.composite
def damages(draw):
    """Draw changes to bytes: (place from 0 to 1, new bytes, bytes that they replace)."""
    numbers = st.sampled_from(EXTREMES)
    new = (
        st.binary(min_size=1, max_size=4)
        | numbers.map(lambda number: struct.pack("<Q", number))
        | numbers.map(lambda number: struct.pack("<I", number % 2**32))
    )
    change = st.tuples(st.floats(0, 1), new, st.sampled_from((None, 0, 1, 8)))
    return draw(st.lists(change, min_size=1, max_size=4)), draw(st.floats(0, 1.5))


def test_damaged_bytes(search, path, tmp_path):
    def check_bytes(kind, damage, layer_type):
        content = bytearray(whole_files(tmp_path)[kind])
        changes, share = damage
        for place, new, replaced in changes:
            at = int(place * (len(content) - 1))
            content[at : at + (len(new) if replaced is None else replaced)] = new
        path.write_bytes(content[: max(1, int(share * len(content)))])
        check(path, layer_type)

    search(check_bytes, 300, kind=st.integers(0, 2), damage=damages(), layer_type=LAYER_TYPES)
