"""No text of a file drives the terminal: every command prints names and values with escapes."""

import contextlib
import copy
import json
import re

import gguf_files
import numpy as np
import pytest
from control_characters import MARK, WRITTEN, check_printed
from fuzz.mutations import at, paths_in
from safetensors_files import write_safetensors

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


def marked(content):
    """Yield copies of a file's content with the mark in one place: a value, a name, a new name."""
    for path in paths_in(content):
        value = at(content, path)[path[-1]]
        for new in (MARK, {MARK: value}, *([value + MARK] if isinstance(value, str) else [])):
            changed = copy.deepcopy(content)
            at(changed, path)[path[-1]] = new
            yield changed
        if isinstance(at(content, path), dict):
            changed = copy.deepcopy(content)
            at(changed, path)[f"{path[-1]}{MARK}"] = at(changed, path).pop(path[-1])
            yield changed
    yield content | {MARK: MARK}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
TYPES = ["full_attention", MARK, "sliding_attention"]
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES, "num_hidden_layers": 1, "rope_scaling": YARN},
    "layers": {
        "model_type": MARK,
        **SIZES,
        "layer_types": TYPES,
        "sliding_window": 8,
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e4} for name in TYPES},
    },
    "vision": {"model_type": "qwen2_vl_vision", "embed_dim": 64, "num_heads": 4},
    "diffusers": {"_class_name": "FluxTransformer2DModel", "axes_dims_rope": [4, 6, 6]},
}
COMMANDS = (
    "show --half",
    "verify",
    "export -o out.onnx --max-positions 8 --half --layer-type full_attention",
    "export -o out.onnx --max-positions 8 --half --attention --layer 1 --set window=none",
)


@pytest.fixture
def _brief(monkeypatch, tmp_path):
    """No rotation is measured or written: names are printed before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "rows", lambda *_: ())


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config, command, printed, tmp_path):
    text = ""
    file = tmp_path / "config.json"
    for changed in marked(CONFIGS[config]):
        file.write_text(json.dumps(changed))
        text += printed(*command.split(), file)
    assert WRITTEN in text


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


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize("words", [("show",), ("verify",), ("export", "-o", "out.onnx")])
def test_gguf_files(words, printed, tmp_path):
    values = {"embedding_length": 64, "attention.head_count": 4, "rope.freq_base": 1e4}
    places = [*values, "rope.scaling.type", "attention.sliding_window_pattern", MARK]
    text = ""
    for architecture in ("llama", f"llama{MARK}"):
        for place in places:
            path = tmp_path / "model.gguf"
            general = {"general.name": MARK, MARK: MARK}
            changed = values | {place: MARK}
            gguf_files.write(path, architecture, changed, {MARK: np.ones(8)}, general=general)
            text += printed(words[0], path, *words[1:])
    assert WRITTEN in text


@pytest.mark.usefixtures("_brief")
def test_safetensors_files(printed, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "hidden_size": 64}))
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    weights = {f"self_attn.{name}.weight": np.ones((n, 64), np.float32) for name, n in rows.items()}
    prefix = f"{MARK}.0."
    named = {f"{prefix}{name}": array for name, array in weights.items()}
    files = {
        "a part that is not known": named | {f"{prefix}self_attn.{MARK}": np.ones(1, np.float32)},
        "a wrong shape": named | {f"{prefix}self_attn.q_proj.weight": np.ones((3, 64), np.float32)},
        "two modules": named | {f"other{name}": array for name, array in named.items()},
        "no module": {MARK: np.ones(1, np.float32)},
    }
    words = ("export", "config.json", "--attention", "--layer", "0", "-o", "out.onnx", "--weights")
    for what, tensors in files.items():
        write_safetensors(tmp_path / "model.safetensors", tensors)
        assert WRITTEN in printed(*words, "model.safetensors"), what
    for index in ({"weight_map": MARK}, {"weight_map": {MARK: MARK}}):
        (tmp_path / "a.safetensors.index.json").write_text(json.dumps(index))
        printed(*words, "a.safetensors.index.json")
