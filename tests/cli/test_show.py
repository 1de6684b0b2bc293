"""`rope-cpu show`: the words, by hand, and a drawing that is one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from rope_cpu.cli import show
from rope_cpu.cli.common import UsageError

LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
}
GEMMA4 = {"model_type": "gemma4_text"}


def shown(config: dict[str, Any], tmp_path: Path, *arguments: str) -> int:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    return show.run(parser.parse_args([str(path), *arguments]))


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_llama3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(LLAMA3, tmp_path) == 0
    found = lines(capsys.readouterr().out)
    assert found[:3] == [
        "llama, all layers",
        "pairs 64: (i, i+64), half-split",
        "widths 128 of 128 elements of a head are rotated",
    ]
    # Wavelengths 2π·b^(2i/d): below 8192/4 nothing is scaled, i < 28.2…; above 8192 all is, i > 34.9…
    assert "pairs 0-28: as the base has them" in found
    assert "pairs 35-63: 8 times as long" in found
    assert "rope_theta 500000.0" in found
    assert "attention factor 1" in found


def test_an_odd_share_is_no_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exponents go over the share itself, 25 elements, of which 26 turn: that is what the base gives."""
    config = {"model_type": "stablelm", "hidden_size": 400, "num_attention_heads": 4, "partial_rotary_factor": 0.25}
    assert shown(config, tmp_path) == 0
    found = lines(capsys.readouterr().out)
    assert "widths 26 of 100 elements of a head are rotated" in found
    assert not any("times as long" in line for line in found)


def test_both_sides_of_longrope(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(PHI3, tmp_path)
    found = lines(capsys.readouterr().out)
    assert "at 64 tokens" in found
    assert "at 4096 tokens" in found
    assert "pairs 0-15: as the base has them" in found
    assert "pairs 0-15: 2 times as long" in found
    assert "short_factor 16 values, 1.0 … 1.0" in found
    assert found.count("attention factor 1.41421") == 2


@pytest.mark.parametrize("model_type", ["nanochat", "qwen2_vl_text"])
def test_lengths_whatever_the_rule_is_part_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str
) -> None:
    keys = {"model_type": model_type, "hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 100}
    shown({**keys, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, tmp_path)
    found = lines(capsys.readouterr().out)
    assert "at 100 tokens" in found
    assert "at 400 tokens" in found


def test_every_layer_type_or_the_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(GEMMA4, tmp_path)
    found = lines(capsys.readouterr().out)
    assert "gemma4_text, sliding_attention" in found
    assert "pairs 64-255: do not turn" in found
    shown(GEMMA4, tmp_path, "--layer-type", "sliding_attention")
    assert "gemma4_text, full_attention" not in lines(capsys.readouterr().out)
    shown({"model_type": "beam"}, tmp_path)
    assert "beam, full_attention: not rotated" in lines(capsys.readouterr().out)


def test_layers_that_are_not_rotated_are_no_part_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    granite = {**sizes, "model_type": "granite_swa", "layer_rope_theta": [5e6, 0]}
    assert shown(granite, tmp_path) == 0
    found = lines(capsys.readouterr().out)
    assert found[0] == "granite_swa, all rotated layers"
    assert "rope_theta 5000000.0" in found
    shown({**sizes, "model_type": "cohere2"}, tmp_path)
    assert "cohere2, full_attention: not rotated" in lines(capsys.readouterr().out)


def test_several_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown({"model_type": "qwen2_vl_text", "hidden_size": 1536, "num_attention_heads": 12}, tmp_path)
    assert "axes 3, which turn 16, 24, 24 pairs" in lines(capsys.readouterr().out)
    shown({"model_type": "gemma4_vision", "hidden_size": 768, "num_attention_heads": 12, "head_dim": 64}, tmp_path)
    assert any(line.startswith("axes 2") for line in lines(capsys.readouterr().out))


def test_pairs_that_turn_backwards_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown({"model_type": "nanochat"}, tmp_path)
    assert "direction backwards: by the opposite of position times frequency" in lines(capsys.readouterr().out)
    shown(LLAMA3, tmp_path)
    assert "direction" not in capsys.readouterr().out


def test_a_model_without_a_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown({"hidden_size": 64, "num_attention_heads": 2}, tmp_path, "--half")
    assert lines(capsys.readouterr().out)[0] == "unknown model type, all layers"


def test_the_pairing_may_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = {**LLAMA3, "model_type": "mymodel"}
    with pytest.raises(UsageError, match="`interleaved`"):
        shown(unknown, tmp_path)
    shown(unknown, tmp_path, "--interleaved")
    assert "pairs 64: (2i, 2i+1), interleaved" in lines(capsys.readouterr().out)
    shown(unknown, tmp_path, "--half")
    assert "pairs 64: (i, i+64), half-split" in lines(capsys.readouterr().out)


@pytest.mark.parametrize(("name", "start"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml")])
def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    shown(PHI3, tmp_path, "--plot", str(tmp_path / name))
    assert capsys.readouterr().out.endswith(f"written: {tmp_path / name}\n")
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x.unknown", "must end in .png or .svg"),
        ("noext", "must end in .png or .svg"),
        ("folder", "must end in .png or .svg"),
        ("folder.png", "it is a folder"),
        ("no/x.png", "there is no folder"),
    ],
)
def test_a_plot_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    """It is refused before anything is printed, and nothing is written elsewhere."""
    pytest.importorskip("matplotlib")
    for folder in ("folder", "folder.png"):
        (tmp_path / folder).mkdir()
    with pytest.raises(UsageError, match=said):
        shown(LLAMA3, tmp_path, "--plot", str(tmp_path / name))
    assert capsys.readouterr().out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "folder", "folder.png"}
