"""Mutated published configs: each makes a working rotary embedding, or is refused in few words."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from control_characters import MARK
from fuzz import mutations, rotation_keys
from fuzz.mutations import LARGEST_NUMBER
from hypothesis import strategies as st
from refusals import LONGEST_TEXT, check_ours

from rope_cpu import RotaryEmbedding
from rope_cpu.frequencies.rope_types import ROPE_TYPES
from rope_cpu.frequencies.scaling import INERT_KEYS
from rope_cpu.models import model_types, reader

# Seconds; a config takes a millisecond, and the machine may be shared.
LONGEST = 60.0

ROOT = Path(__file__).parents[2]


def configs():
    """Return all configs by name: the project's own, and those in a folder beside the checkout."""
    published = json.loads((ROOT / "tests/data/published_configs.json").read_text())
    found = {name: entry["config"] for name, entry in published.items()}
    found["llama3.1-8b"] = model_types.data("llama3.1-8b.json")
    for path in sorted((ROOT.parent / "shared/configs").glob("**/*.json")):
        held = json.loads(path.read_text())
        if isinstance(held, dict):
            found[path.name] = held
    return found


CONFIGS = configs()
KEYS = sorted({key for config in CONFIGS.values() for key in config})
PARTS = [part for config in CONFIGS.values() for part in config.values() if isinstance(part, dict)]
INNER_KEYS = sorted({key for part in PARTS for key in part})
WHOLE = (0, 1, 2, 3, 7, -1, -2, 64, 128, -(2**70), LARGEST_NUMBER, LARGEST_NUMBER - 1)
REAL = (0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"))
NUMBERS = (
    st.sampled_from(WHOLE + REAL)
    | st.integers(-LARGEST_NUMBER, LARGEST_NUMBER)
    | st.floats(-LARGEST_NUMBER, LARGEST_NUMBER)
)
TYPES = (*ROPE_TYPES, "su", "mrope")
NAMES = st.sampled_from(
    (*TYPES, "full_attention", "sliding_attention", "", "x" * 5000, "\0", MARK, "None", "1")
)
SCALARS = (
    st.none()
    | st.booleans()
    | NUMBERS
    | NAMES
    | st.sampled_from(("llama", "qwen2_vl", "gemma3", "phi3", "glm4"))
)
NEW_KEYS = st.sampled_from(KEYS) | st.sampled_from(INNER_KEYS) | NAMES
VALUES = mutations.values(SCALARS, NEW_KEYS)


def mutated():
    """Draw a config with one to four changes."""
    return st.sampled_from(sorted(CONFIGS)).flatmap(
        lambda name: mutations.mutated(CONFIGS[name], VALUES, NEW_KEYS)
    )


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "layer_type": NAMES | VALUES,
        "layer": NUMBERS | VALUES,
        "interleaved": st.booleans() | VALUES,
        "angle_dtype": st.sampled_from(("float32", "float64", "x")),
    },
)


def test_mutated_configs(search):
    search(check, 150, config=mutated(), arguments=ARGUMENTS)


@pytest.mark.parametrize("part", ["vision_config", "text_config"])
def test_mutated_parts(search, part):
    """The vision tower, or the language model, of a multimodal config, by itself."""

    def check_part(config, arguments):
        inner = config.get(part)
        if isinstance(inner, dict):
            check(inner, arguments)

    search(check_part, 40, config=mutated(), arguments=ARGUMENTS)


def check(config, arguments):
    """Compute cos and sin for a config; raise unless they are finite or it is refused briefly."""
    start = time.monotonic()
    try:
        rope = RotaryEmbedding.from_config(config, **arguments)
        if rope.spec.needs_length:
            rope = rope.at_length(4096)
        cos, sin = rope.cos_sin(np.ones(rope.axes) if rope.axes > 1 else 1)
        assert np.isfinite(cos).all()
        assert np.isfinite(sin).all()
        x = np.ones((1, 1, 1, rope.head_dim), np.float32)
        ids = np.ones((1, rope.axes) if rope.axes > 1 else 1)
        heads = rope.spec.inv_freq.shape[2]
        assert np.isfinite(rope.rotate(np.repeat(x, heads, 2), ids)).all()
        assert len(repr(rope)) < LONGEST_TEXT
    except (ValueError, TypeError) as error:
        check_ours(error)
    seconds = time.monotonic() - start
    assert seconds < LONGEST, f"took {seconds:.0f} s"


SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
}
THETA = {"rope_theta": 10000.0}
# The calls whose answers describe all layers of a config.
LAYERS = [
    *({"layer_type": name} for name in (None, "full_attention", "sliding_attention")),
    *({"layer_type": name} for name in ("indexed_attention", "main", "compress", "hybrid")),
    *({"layer": layer} for layer in range(5)),
]


def small_config(model_type):
    """Return a small config of a model type; None: without one."""
    own = {} if model_type is None else {"model_type": model_type}
    return SIZES | own | ({} if model_type in model_types.known_types() else THETA)


def rotation(config, **arguments):
    """Return what identifies the rotation of some layers, or the text of the refusal."""
    try:
        spec = reader.read(config).spec(**arguments)
        specs = [spec, spec.at_length([9999])] if spec.needs_length else [spec]
    except (ValueError, TypeError) as error:
        return str(error)
    return tuple(
        (spec.inv_freq.tobytes(), float(spec.attention_factor[0]), spec.blocks, spec.interleaved)
        for spec in specs
    )


def answers(config):
    """Return the rotations of all layers and the rest of the attention; None for a refusal."""
    known = config.get("model_type") in model_types.known_types()
    pairing = {} if known else {"interleaved": False}
    rotations = [rotation(config, **layers, **pairing) for layers in LAYERS]
    if all(isinstance(answer, str) for answer in rotations):
        return None
    return rotations, reader.read(config).attention


def base_config(model_type, in_section):
    """Return a small config with or without rope parameters."""
    return small_config(model_type) | ({"rope_parameters": THETA} if in_section else {})


@cache
def answers_without(model_type, in_section):
    """Return the answers for a small config, with or without rope parameters."""
    return answers(base_config(model_type, in_section))


def ignored(config):
    """Return the keys that are documented as ignored, for the model type of a config or for all."""
    model = reader.read(config)
    facts = model.facts
    is_whole = facts.whole_head or "qk_rope_head_dim" in model.values
    documented = {"partial_rotary_factor"} if is_whole else set()
    if facts.rope_parameters and "rope_parameters" not in config:
        # They fill sections of a file, and not always those of the class.
        listed = {name for keys in facts.top_level.values() for name in keys}
        documented |= {"partial_rotary_factor"} | ({"rope_theta"} - listed)
    # Of a key in `refuse` the values that matter to the code are listed.
    return {*INERT_KEYS, *documented, *facts.ignored, *facts.refuse}


def is_unread(model_type, in_section, key, values):
    """Return True if a config with one more key is answered as if it were not there."""
    without = answers_without(model_type, in_section)
    config = base_config(model_type, in_section)
    if without is None or key in ignored(config):
        return False
    facts = reader.read(config).facts
    default = {**facts.defaults, **facts.mrope, **facts.filled.get("", {})}.get(key)
    if isinstance(default, bool):
        return False  # one value of a flag is the default, and the other is neutral
    values = [value for value in values if value != default]
    if in_section:
        changed = [config | {"rope_parameters": THETA | {key: value}} for value in values]
    else:
        changed = [config | {key: value} for value in values]
    return bool(changed) and all(answers(config) == without for config in changed)


MODEL_TYPES = st.sampled_from([None, "mystery", *sorted(model_types.known_types())])
# Whether a key stands in the rope parameters, and the key with its values.
PLACED_KEYS = st.one_of(
    st.tuples(st.just(in_section), st.sampled_from([*keys.items()]))
    for in_section, keys in (
        (False, rotation_keys.TOP_LEVEL),
        (False, rotation_keys.NEW),
        (True, rotation_keys.IN_SECTION),
    )
)


def test_unread_keys(search):
    """A key of a rotation is read, refused or documented as ignored."""

    def check_key(model_type, placed):
        in_section, (key, values) = placed
        assert not is_unread(model_type, in_section, key, values), f"{key} is not read"

    search(check_key, 300, model_type=MODEL_TYPES, placed=PLACED_KEYS)
