"""Names of a whole decoder: caches and token mask as optimum and onnxruntime-genai have them."""

import re

import numpy as np
import pytest
from attention_oracle import attention
from attention_runs import agrees, draw_tensors

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation import session as runtime

ROPE = RotaryEmbedding(32, rope_theta=500.0)
OPTIONS = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "layout": "bshd",
    "max_positions": 64,
    "names": "optimum",
    "layer": 7,
}
CACHE = ("past_key_values.7.key", "past_key_values.7.value")
TOKENS = 9
PROMPT = 5
# Which tokens of the prompts are padding: on the right, on the left, and between tokens.
MASKS = {
    "none": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    "between": [[1, 1, 0, 1, 1], [1, 0, 0, 0, 1]],
}
BEHIND_TOKENS = ("none", "right")


@pytest.fixture(params=["growing", "shared"])
def cache(request):
    """The kind of a cache, each in turn."""
    return request.param


def names(values):
    return [value.name for value in values]


def test_names_are_those_of_optimum(target, cache):
    model = export.export_attention(
        ROPE, **OPTIONS, target=target, cache=cache, name_prefix="layers.7."
    )
    tensors = ["layers.7.q", "layers.7.k", "layers.7.v"]
    assert names(model.graph.input) == [*tensors, *CACHE, "attention_mask"]
    present = ["present.7.key", "present.7.value"]
    assert names(model.graph.output) == ["layers.7.attention", *present]
    mask = model.graph.input[-1].type.tensor_type
    assert mask.elem_type == 7  # int64
    assert mask.shape.dim[0].dim_param == "batch_size"


def test_position_ids_keep_their_name(target, cache):
    model = export.export_attention(
        ROPE, **OPTIONS, target=target, cache=cache, positions="position_ids", name_prefix="a."
    )
    assert "position_ids" in names(model.graph.input)
    assert export.validate(model, ROPE).passed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 4, "sinks": "input"},
        {"qk_norm": "input", "name_prefix": "layers.7."},
        {"layout": "bsd"},
    ],
    ids=str,
)
def test_validate_passes(target, cache, options):
    given = OPTIONS | options
    model = export.export_attention(ROPE, **given, target=target, cache=cache)
    report = export.validate(model, ROPE)
    assert report.passed, report


def test_tokens_of_an_axial_text_model(target, cache):
    rope = RotaryEmbedding.mrope(32, (4, 6, 6), rope_theta=1e4)
    model = export.export_attention(rope, **OPTIONS, target=target, cache=cache)
    assert export.validate(model, rope).passed


def steps(mask):
    """Yield mask and new tokens of a prompt and of single steps, as generation loops feed them."""
    yield mask, slice(0, PROMPT)
    for token in range(PROMPT, TOKENS):
        mask = np.concatenate([mask, np.ones((len(mask), 1), np.int64)], axis=1)
        yield mask, slice(token, token + 1)


@pytest.mark.parametrize("padding", MASKS)
def test_a_generation_loop_with_padded_prompts(target, cache, padding, rng):
    """Each row gives what its own tokens give without padding."""
    if cache == "shared" and padding not in BEHIND_TOKENS:
        pytest.skip("padding of a shared cache lies behind the tokens")
    tensors = draw_tensors(rng, np.float32, 2, TOKENS)
    model = export.export_attention(ROPE, **OPTIONS, target=target, cache=cache)
    mask = np.array(MASKS[padding], np.int64)
    result = generated(model, cache, tensors, mask)
    is_token = np.concatenate([mask, np.ones((2, TOKENS - PROMPT), np.int64)], axis=1) == 1
    for row in range(2):
        own = [x[row : row + 1, is_token[row]] for x in tensors]
        ids = np.arange(is_token[row].sum())[None]
        want = attention(ROPE, *own, ids, "float32")
        assert agrees(result[row : row + 1, is_token[row]], want)


def generated(model, cache, tensors, mask):
    """Return the attention of all tokens, prompt and single steps."""
    session = runtime.open_session(model, 1)
    capacity = 12 if cache == "shared" else 0
    past = dict(zip(CACHE, np.zeros((2, 2, 2, capacity, 32), np.float32), strict=True))
    results = []
    for tokens_mask, part in steps(mask):
        feeds = {name: x[:, part] for name, x in zip("qkv", tensors, strict=True)}
        feeds |= past | {"attention_mask": tokens_mask}
        result, *present = session.run(None, feeds)
        past = dict(zip(CACHE, present, strict=True))
        results.append(result)
    return np.concatenate(results, axis=1)


FIRST_COLUMN = "attention_mask_must_be_1_in_the_column_of_the_first_new_token"


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ([[0, 1, 1]], FIRST_COLUMN),  # padding on the left
        ([[1, 1, 1, 0, 0, 0]], FIRST_COLUMN),  # columns for the whole capacity
        ([[1, 1]], "attention_mask"),  # fewer columns than new tokens
        ([[1] * 13], "past_lengths_must_be_0_or_more_and_with_the_new_tokens_at_most_the_capacity"),
    ],
)
def test_a_shared_cache_refuses_other_masks(target, mask, text, rng):
    model = export.export_attention(ROPE, **OPTIONS, target=target, cache="shared")
    session = runtime.open_session(model, 1)
    feeds = dict(zip("qkv", draw_tensors(rng, np.float32, 1, 3), strict=True))
    feeds |= dict.fromkeys(CACHE, np.zeros((1, 2, 12, 32), np.float32))
    feeds["attention_mask"] = np.array(mask, np.int64)
    with pytest.raises(Exception, match=re.escape(text)):  # onnxruntime's errors share no class
        session.run(None, feeds)


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_a_growing_cache_refuses_a_mask_of_other_columns(target, columns, rng):
    model = export.export_attention(ROPE, **OPTIONS, target=target)
    session = runtime.open_session(model, 1)
    feeds = dict(zip("qkv", draw_tensors(rng, np.float32, 1, 3), strict=True))
    feeds |= dict.fromkeys(CACHE, np.zeros((1, 2, 0, 32), np.float32))
    feeds["attention_mask"] = np.ones((1, columns), np.int64)
    with pytest.raises(Exception, match=r"(?i)shape|broadcast|axis|dimension"):
        session.run(None, feeds)


def test_bind_knows_the_names(target, rng):
    model = export.export_attention(ROPE, **OPTIONS, target=target, cache="shared")
    tensors = draw_tensors(rng, np.float32, 1, 1)
    feeds = dict(zip("qkv", tensors, strict=True))
    feeds |= {name: np.zeros((1, 2, 12, 32), np.float32) for name in CACHE}
    feeds["attention_mask"] = np.ones((1, 1), np.int64)
    result = np.empty((1, 1, 4, 32), np.float32)
    session = runtime.open_session(model, 1)
    export.bind(session, feeds, {"attention": result})()
    np.testing.assert_array_equal(feeds[CACHE[1]][:, :, 0], tensors[2][:, 0])
    feeds |= {name: np.zeros((1, 2, 65, 32), np.float32) for name in CACHE}
    with pytest.raises(ValueError, match="at most 64 rows"):
        export.bind(session, feeds, {"attention": result})
