"""`rope-cpu show --plot`: a picture in the format of its suffix, or an early error."""

from dataclasses import replace

import numpy as np
import pytest
from text_configs import LLAMA3, PHI3

from rope_cpu.cli.command_line import UsageError
from rope_cpu.cli.groups import layer_groups
from rope_cpu.models import reader

pytest.importorskip("matplotlib")

from rope_cpu.cli.show_plot import draw

LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(("name", "start"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml")])
def test_plot(shown, tmp_path, name, start):
    assert shown(PHI3, "--plot", str(tmp_path / name))[-1] == f"written: {tmp_path / name}"
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("x.unknown", "must end in .png or .svg"),
        ("folder.png", "it must be a file in a folder that exists"),
        ("no/x.png", "it must be a file in a folder that exists"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_first(shown, tmp_path, capsys, name, rule):
    """Nothing is printed, and nothing is written elsewhere."""
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match=rule):
        shown(PHI3, "--plot", str(tmp_path / name))
    assert capsys.readouterr().out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "folder.png"}


def test_a_plot_of_nothing_is_refused(shown):
    words = ("--layer-type", "full_attention", "--plot", "x.png")
    with pytest.raises(UsageError, match="not rotated"):
        shown({"model_type": "beam"}, *words)


def curves(config):
    """Return {title and unit of a panel: {label of a curve: its wavelengths}}."""
    figure = draw(list(layer_groups(reader.read(config))))
    return {
        f"{panel.get_title()}: {panel.get_ylabel()}": {
            line.get_label(): line.get_ydata() for line in panel.lines
        }
        for panel in figure.axes
    }


def test_a_panel_has_the_wavelengths_of_each_length_and_those_before_scaling():
    (found,) = curves(PHI3).values()
    before = 2 * np.pi * 1e4 ** (np.arange(16) / 16)
    long = "all layers at 4096 tokens"
    expected = {"all layers at 64 tokens": 1, long: 2, f"{long} before scaling": 1}
    assert list(found) == list(expected)
    for label, factor in expected.items():
        np.testing.assert_allclose(found[label], factor * before, rtol=1e-14)


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        (LLAMA3, ["all layers", "all layers before scaling"]),
        (
            {"model_type": "gemma3_text", "rope_scaling": LINEAR},
            ["sliding_attention", "full_attention", "full_attention before scaling"],
        ),
    ],
)
def test_each_layer_type_has_its_curves(config, labels):
    assert list(map(list, curves(config).values())) == [labels]


def test_a_panel_for_each_axis():
    units = {"image": "positions", "row": "patches", "column": "patches"}
    expected = [f"{axis}: wavelength in {unit}" for axis, unit in units.items()]
    assert list(curves({"_class_name": "FluxTransformer2DModel"})) == expected


def test_dollar_signs_are_no_formulas(tmp_path):
    config = reader.read({"model_type": r"a$\x$", "head_dim": 8, "rope_theta": 1e4})
    (group,) = layer_groups(config, None, False)
    figure = draw([group, replace(group, layer_type=r"b$\y$")])
    figure.savefig(tmp_path / "x.png")
