"""Absurd configs on the command line: exit status 2 and one paragraph, no traceback."""

import json

import pytest

from rope_cpu.cli import main as cli

LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4}


def test_more_heads_than_can_be_verified_exit_with_2(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "head_dim": 2**12, "num_attention_heads": 2**12}))
    assert cli.main(["verify", str(path)]) == 2
    assert "too large to verify" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--opset", "--max-positions", "--seq-len", "--seed", "--layer"])
def test_numbers_of_thousands_of_digits_exit_with_2(option, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", "-o", str(tmp_path / "out.onnx"), option, "9" * 5000])
    assert stop.value.code == 2
    assert "invalid int value" in capsys.readouterr().err
