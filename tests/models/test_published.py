"""Published config files: each gives the frequencies of its model's code, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rope_cpu.models import reader

FACTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "published_configs.json").read_text(encoding="utf-8")
)
READ = [name for name, entry in FACTS.items() if "expected" in entry]
REFUSED = {
    "diffusers/ace_step-3.5b": "`_class_name` is 'Transformer2DModel'; it must be one of",
    "diffusers/longcat_video": "`_class_name` is 'LongCatVideoTransformer3DModel'; it must be one",
    "gpt_neox-2.7b-2021": ".*`model_type` is 'gpt-neox' .did you mean 'gpt_neox'",
    "hf_olmo-tiny": "`rope` is False in a config of model type 'hf_olmo'",
    "minicpm3-4b-nomodeltype": ".*`model_type` is None, so the pairing is not known",
    "nemotron_h-30b-a3b": "`model_type` is 'nemotron_h': its attention layers are not rotated",
}


def check(spec: Any, expected: dict[str, Any]) -> None:
    inv_freq = spec.inv_freq[0, :, 0].sum(axis=0)
    assert inv_freq.size == expected["pairs"]
    np.testing.assert_allclose(inv_freq[expected["at"]], expected["inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(inv_freq.sum(), expected["sum"], rtol=1e-6)
    assert float(spec.attention_factor[0]) == pytest.approx(expected["attention_factor"], rel=1e-6)


@pytest.mark.parametrize("name", READ)
def test_frequencies_are_those_of_the_models_code(name: str) -> None:
    entry = FACTS[name]
    for layer_type, expected in entry["expected"].items():
        spec = reader.read(entry["config"]).spec(layer_type=layer_type or None)
        check(spec, expected)
        if "interleaved" in entry:
            assert spec.interleaved is entry["interleaved"]
        if "long" in entry:
            check(spec.at_length([10**6]), entry["long"])


def with_numpy(value: Any) -> Any:
    """Return a value with scalars of NumPy for numbers."""
    if isinstance(value, dict):
        return {key: with_numpy(entry) for key, entry in value.items()}
    return np.array(value)[()] if isinstance(value, int | float) else value


def test_numbers_of_numpy_are_those_of_python() -> None:
    for name in READ:
        config = FACTS[name]["config"]
        numbers, numpy = reader.read(config), reader.read(with_numpy(config))
        assert numpy.values == numbers.values
        assert numpy.attention == numbers.attention, name
        assert numpy.layers == numbers.layers


@pytest.mark.parametrize("name", [name for name, entry in FACTS.items() if "refused" in entry])
def test_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{REFUSED[name]}"):
        reader.read(FACTS[name]["config"]).spec()


# Widths of three axes and the base, as the classes' own code has them.
THREE_AXES = {
    "chroma": ((16, 56, 56), 1e4),
    "cogvideox-5b": ((16, 24, 24), 1e4),
    "flux-schnell": ((16, 56, 56), 1e4),
    "hunyuan_video-1.5": ((16, 56, 56), 256.0),
    "qwen_image-20b": ((16, 56, 56), 1e4),
    "wan2.1-14b": ((44, 42, 42), 1e4),
    "wan2.2-5b": ((44, 42, 42), 1e4),
}


@pytest.mark.parametrize("name", THREE_AXES)
def test_axes_of_diffusers_models_stand_side_by_side(name: str) -> None:
    widths, base = THREE_AXES[name]
    spec = reader.read(FACTS[f"diffusers/{name}"]["config"]).spec()
    expected, start = np.zeros((3, sum(widths) // 2)), 0
    for row, width in zip(expected, widths, strict=True):
        row[start : start + width // 2] = [base ** (-2 * i / width) for i in range(width // 2)]
        start += width // 2
    np.testing.assert_allclose(spec.inv_freq[0, :, 0], expected, rtol=1e-14)
    assert spec.interleaved


def test_the_axes_of_ltx2_take_turns_over_all_heads() -> None:
    spec = reader.read(FACTS["diffusers/ltx2"]["config"]).spec()
    flat = spec.inv_freq[0].reshape(3, -1)
    expected = np.float32([np.pi / 2 * 1e4 ** (k / 681) for k in range(682)])
    assert not flat[:, :2].any()
    for axis in range(3):
        np.testing.assert_allclose(flat[axis, 2 + axis :: 3], expected, rtol=2.0**-23)
        assert np.count_nonzero(flat[axis]) == 682


def test_every_file_is_accounted_for() -> None:
    others = {name for name in FACTS if name not in READ and name not in REFUSED}
    assert others == {f"diffusers/{name}" for name in (*THREE_AXES, "ltx2")}
