"""`rope-cpu show --plot`: a picture in the format of its suffix, or an early error."""

import pytest

from rope_cpu.command_line import UsageError

pytest.importorskip("matplotlib")

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
CONFIG = {
    "model_type": "phi3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 64,
    "rope_scaling": LONGROPE,
}


@pytest.mark.parametrize(("name", "start"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml")])
def test_plot(shown, tmp_path, name, start):
    assert shown(CONFIG, "--plot", str(tmp_path / name))[-1] == f"written: {tmp_path / name}"
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("x.unknown", "must end in .png or .svg"),
        ("noext", "must end in .png or .svg"),
        ("folder", "must end in .png or .svg"),
        ("folder.png", "it is a folder"),
        ("no/x.png", "there is no folder"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_first(shown, tmp_path, capsys, name, rule):
    """Nothing is printed, and nothing is written elsewhere."""
    for folder in ("folder", "folder.png"):
        (tmp_path / folder).mkdir()
    with pytest.raises(UsageError, match=rule):
        shown(CONFIG, "--plot", str(tmp_path / name))
    assert capsys.readouterr().out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "folder", "folder.png"}
