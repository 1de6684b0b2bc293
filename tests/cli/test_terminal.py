"""No text of a file drives the terminal: every command prints names and values with escapes."""

import contextlib
import json
import re

import numpy as np
import pytest
from control_characters import MARK, WRITTEN, check_printed

from rope_cpu.arguments.texts import MAX_CHARACTERS, cut, escaped, shown
from rope_cpu.cli import main as cli
from rope_cpu.cli import verify


def test_escapes_are_those_of_repr():
    assert escaped(MARK) == repr(MARK)[1:-1] == WRITTEN
    assert escaped(escaped(MARK)) == WRITTEN
    assert escaped("½ µs, 中文, é 🙂") == "½ µs, 中文, é 🙂"
    for text in (cut(MARK), shown(MARK)[1:-1], cut(MARK * 1000), shown({MARK: MARK * 1000})):
        assert WRITTEN[:10] in text
        assert text.isprintable()
        assert len(text) <= MAX_CHARACTERS


def test_a_value_is_one_line():
    assert shown(np.eye(2)) == "array([[1., 0.], [0., 1.]])"


@pytest.fixture
def printed(capfd):
    """Run `rope-cpu`; return what it and the libraries print on both streams, checked."""

    def printed(*words):
        capfd.readouterr()
        with contextlib.suppress(SystemExit):  # argparse
            cli.main([str(word) for word in words])
        text = "".join(capfd.readouterr())
        check_printed(text)
        return text

    return printed


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
TYPES = ["full_attention", MARK, "sliding_attention"]
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES, "num_hidden_layers": 1, "rope_scaling": YARN},
    "a wrong value": {"model_type": "llama", **SIZES, "rope_scaling": {"rope_type": MARK}},
    "a wrong name": {"model_type": "llama", **SIZES, "rope_scaling": YARN | {MARK: 1}},
    "layers": {
        "model_type": MARK,
        **SIZES,
        "layer_types": TYPES,
        "sliding_window": 8,
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e4} for name in TYPES},
    },
}
EXPORT = "export -o out.onnx --max-positions 8 --half"
RUNS = [(config, words) for config in list(CONFIGS)[1:] for words in ("show --half", "verify")]
RUNS.append(("a wrong name", EXPORT))
RUNS.append(("layers", f"{EXPORT} --attention --layer 1 --set window=none"))


@pytest.fixture
def _brief(monkeypatch, tmp_path):
    """No rotation is measured or written: names are printed before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "rows", lambda *_: ())


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize(("config", "command"), RUNS)
def test_configs(config, command, printed, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[config]))
    assert WRITTEN in printed(*command.split(), file)


@pytest.mark.usefixtures("_brief")
def test_names_of_files(printed, tmp_path):
    model = tmp_path / MARK
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    for words in (
        ("show", model / "none"),
        ("show", model, "--plot", model / "none/a.svg"),
        ("verify", model),
        ("verify", model, "--json", model),
        ("verify", "--layer-type", MARK),
        ("export", model, "-o", model / "out.onnx"),
        ("export", model, *["--attention", "--layer", "0", "-o", "out.onnx", "--weights"], model),
        ("check", model / "config.json"),
        ("bench", "--config", model / "none"),
        ("bench", "--list", MARK),
        ("warmup", "--cache-dtypes", MARK),
        (MARK,),
        ("show", f"--{MARK}"),
    ):
        # `verify` wraps lines, anywhere in a word as long as this path.
        assert WRITTEN in printed(*words).replace("\n", ""), words


@pytest.mark.usefixtures("_brief")
@pytest.mark.filterwarnings("ignore:Glyph .* missing from (current )?font")
def test_a_picture(printed, tmp_path):
    """Matplotlib warns of characters that its font lacks, and writes them to an SVG."""
    pytest.importorskip("matplotlib")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["layers"]))
    assert WRITTEN in printed("show", "config.json", "--half", "--plot", "a.svg")
    assert not re.search("[\x1b\x07\x9b\u202e]", (tmp_path / "a.svg").read_text())
