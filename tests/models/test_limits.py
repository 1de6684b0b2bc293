"""Absurd configs: whatever stands in any place is read, or refused by name with a short text."""

import json

import numpy as np
import pytest
from refusals import nested, refusal
from text_configs import GEMMA3, LLAMA, of, read

from rope_cpu.models import reader

HUGE = 10**5000
TYPES = ["full_attention", "sliding_attention"]
LISTED = {"layer_types": TYPES, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
VISION = {"patch_size": 14, "num_heads": 4, "hidden_size": 64, "head_dim": 16, "rope_theta": 1e4}


def image(name, head_dim, **keys):
    """Return a config of diffusers."""
    return {"_class_name": name, "attention_head_dim": head_dim, **keys}


def mrope(section):
    keys = {"rope_scaling": {"type": "mrope", "mrope_section": section}}
    return of("qwen2_vl", hidden_size=64, num_attention_heads=4, **keys)


LTX = image("LTXVideoTransformer3DModel", 16, num_attention_heads=2)
FLUX = image("FluxTransformer2DModel", 128, axes_dims_rope=[16, 56, 56])
WAN = image("WanTransformer3DModel", 128, num_attention_heads=4)
CONFIGS = {
    "yarn": {
        **LLAMA,
        "rope_theta": 1e4,
        "rope_scaling": {**YARN, "beta_fast": 32, "beta_slow": 1},
        "num_hidden_layers": 2,
        "max_position_embeddings": 99,
    },
    "llama3": of(
        "llama", head_dim=8, rope_parameters={**LLAMA3, "original_max_position_embeddings": 64}
    ),
    "longrope": of("phi3", head_dim=8, max_position_embeddings=64, rope_scaling=LONGROPE),
    "layers": {**GEMMA3, **LISTED, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256},
    "window": {**GEMMA3, **LISTED, "sliding_window": 4},
    "nested": {**GEMMA3, **LISTED, "rope_parameters": dict(zip(TYPES, (YARN, {}), strict=True))},
    "interval": {**LLAMA, "num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "mask": {**LLAMA, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "latent": of("deepseek_v3", qk_rope_head_dim=64, kv_lora_rank=512, rope_scaling=YARN),
    "gemma 4": of("gemma4_text", **LISTED, num_attention_heads=8, per_layer_config={"0": {}}),
    "step": of("granite_swa", head_dim=64, **LISTED, layer_rope_theta=[1e4, 1e4]),
    "M-RoPE": mrope([2, 3, 3]),
    "whole": of("llava", text_config=LLAMA, vision_config=VISION),
    "dbrx": of("dbrx", d_model=64, n_heads=4, attn_config={"kv_n_heads": 2, "rope_theta": 1e4}),
    "heads": {**LLAMA, **LISTED, "num_attention_heads_per_layer": [4, 8]},
    "pixtral": of("pixtral", **VISION),
    "loftr": of("efficientloftr", hidden_size=64),
    "sam": of(
        "sam2_video",
        memory_attention_hidden_size=64,
        memory_attention_downsample_rate=1,
        memory_attention_num_attention_heads=1,
    ),
    "wan": WAN,
    "ltx": LTX,
    "flux": FLUX,
    "cogvideox": {"use_rotary_positional_embeddings": True, "attention_head_dim": 64},
}
VALUES = [
    *(2**20, 2**31, 2**40, 10**400, HUGE, -1, 0, -(2**63), 1.5, 5e-324, 1e308, True),
    *(float("nan"), float("inf"), "", "x" * 10**6, b"x", [], [["x"]], ["full_attention", ["x"]]),
    *([1.0] * 10**5, [HUGE], nested(10**5), {}, {"a": {}}, {"rope_type": {}}, {1: 2, "a": 3}),
    *(set(), object(), np.float32(2), np.int64(7), np.array(5), np.array([1, 2])),
    np.array(HUGE, dtype=object),
]


def places(config):
    """Yield the path of every value of a config."""
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in places(value))


def replaced(config, path, value):
    """Return a config with another value in one place."""
    key, *rest = path
    return {**config, key: replaced(config[key], rest, value) if rest else value}


def uses(config):
    """Yield calls for all that is asked of a config."""
    yield lambda: reader.read(config).spec(interleaved=False)
    yield lambda: reader.read(config).spec(layer_type="full_attention", interleaved=False)
    yield lambda: reader.read(config).spec(layer=0, interleaved=False)
    yield lambda: reader.read(config).heads()
    yield lambda: reader.read(config).attention


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_anywhere_is_read_or_refused_by_name(name):
    for path in places(CONFIGS[name]):
        for value in VALUES:
            for call in uses(replaced(CONFIGS[name], path, value)):
                try:
                    call()
                except (ValueError, TypeError) as error:
                    text = str(error)
                    assert "`" in text or "add one of num_attention_heads" in text, (path, text)
                    assert len(text) < 2000, (path, text[:300])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_themselves_are_read(name):
    """So that values in their places are reached."""
    options = [{}, {"layer_type": "full_attention"}, {"layer": 0}]
    for option in options:
        try:
            reader.read(CONFIGS[name]).spec(**option)
        except ValueError:
            continue
        return
    pytest.fail("no layers of this config can be read")


LONG_SECTION = {"x" * 10**5: {"rope_theta": 2e4}, "full_attention": {}}
REFUSED = [
    (LLAMA | {"head_dim": 2**40}, "`head_dim` is 1099511627776; it must be at most 65536"),
    (LLAMA | {"hidden_size": 2**31}, "`hidden_size` is 2147483648; it must be at most 16777216"),
    (LLAMA | {"num_attention_heads": 2**13}, "`num_attention_heads` is 8192"),
    (LLAMA | {"num_hidden_layers": 2**31}, "`num_hidden_layers` is 2147483648"),
    (LLAMA | {"num_hidden_layers": 10**400}, "`num_hidden_layers` is an integer of 1329 bits"),
    (LLAMA | {"layer_types": ["x"] * 10**6}, "it must have at most 65536 entries"),
    (LLAMA | {"no_rope_layers": [1] * 10**6}, "it must have at most 65536 entries"),
    (LLAMA | {"layer_types": ["full_attention", ["x"]]}, "; it must hold strings"),
    (LLAMA | {"model_type": "x" * 10**7}, "`model_type` is 'xxx"),
    (LLAMA | {"model_type": nested(10**5)}, "`model_type` is [[[["),
    (LLAMA | {"rope_parameters": LONG_SECTION}, "selects layers whose rope parameters are [{"),
    (LLAMA | {"rope_scaling": {"rope_type": {}}}, "`rope_type` is {}; it must be a rope type"),
    (LLAMA | {"rope_scaling": {"factor": {}}}, "`factor` is {}; it must be a number"),
    (mrope({}), "`mrope_section` is {}; it must be a seq"),
    (mrope([8, {}]), "`mrope_section` is {}; it must be an"),
    (mrope([1] * 65), "it must have at most 64 entries"),
    (
        of("llama", head_dim=8, rope_scaling=LONGROPE | {"long_factor": [1.0] * 10**6}),
        "at most 32768 entries",
    ),
    (of("efficientloftr", hidden_size=2**17), "`hidden_size` is 131072; it must be at most 65536"),
    (of("pixtral", **VISION | {"head_dim": 2**17}), "`head_dim` is 131072"),
    (
        LTX | {"attention_head_dim": 2**14, "num_attention_heads": 2**12},
        "`num_attention_heads` is 4096: a table of 3 x",
    ),
    (FLUX | {"axes_dims_rope": [2**40] * 3}, "`axes_dims_rope` is 1099511627776; it must"),
    (FLUX | {"axes_dims_rope": "aa"}, "`axes_dims_rope` is 'aa'; it must be a sequence"),
    (WAN | {"attention_head_dim": 2**40}, "`attention_head_dim` is 1099511627776"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=[row[1] for row in REFUSED])
def test_absurd_values_are_refused(config, words):
    assert words in refusal(lambda: reader.read(config).spec())


def test_a_config_inside_itself_is_refused():
    config = {"model_type": "no such"}
    config["text_config"] = config
    assert "too deep to follow" in refusal(lambda: reader.read(config))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 10**5, "not valid JSON: maximum recursion"),
        ('{"a":' * 10**5, "not valid JSON: maximum recursion"),
        ('{"head_dim": ' + "9" * 5000 + "}", "is not valid JSON"),
        (" " * (2**24 + 1), "has 16777217 bytes"),
        (json.dumps({**LLAMA, "model_type": "x" * 10**7}), "`model_type` is 'xxx"),
    ],
    ids=["list", "object", "digits", "long", "name"],
)
def test_absurd_files_are_refused(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        reader.read(path).spec()
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("path", ["x" * 300, "x/" * 10**6, "a\0b"], ids=["name", "path", "null"])
def test_paths_that_no_system_holds_are_refused(path):
    assert "it must be a file, or a folder" in refusal(lambda: reader.read(path))


LAYERS = [2**40, HUGE, "x" * 10**7, nested(10**5), {}, 1.5]


@pytest.mark.parametrize("layer", LAYERS, ids=range(len(LAYERS)))
def test_absurd_layers_are_refused(layer):
    assert "`layer` is" in refusal(lambda: read(LLAMA, {"num_hidden_layers": 2}, layer=layer))
