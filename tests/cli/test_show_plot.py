"""`rope-cpu show --plot`: a picture in the format of its suffix, or an early error."""

from dataclasses import replace

import numpy as np
import pytest

from rope_cpu.cli.show_summary import layer_rotations
from rope_cpu.command_line import UsageError
from rope_cpu.configs import reader

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


GEMMA3 = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
LLAMA3 = {
    "model_type": "llama",
    "head_dim": 128,
    "num_attention_heads": 1,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MROPE = {
    "model_type": "qwen2_vl_text",
    "hidden_size": 128,
    "num_attention_heads": 1,
    "max_position_embeddings": 1000,
}
FLUX = {"_class_name": "FluxTransformer2DModel"}
FLUX2 = {"_class_name": "Flux2Transformer2DModel"}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 128, "num_attention_heads": 2}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}


def figure_of(config, interleaved=None):
    """Return the figure of a config."""
    from rope_cpu.cli.show_picture.figure import draw

    return draw(list(layer_rotations(reader.read(config), None, interleaved)))


def legend_of(figure):
    """Return the labels of the legend."""
    (legend,) = [legend for part in figure.subfigs for legend in part.legends]
    return [text.get_text() for text in legend.get_texts()]


def title_of(figure):
    """Return the title of the figure."""
    return figure.subfigs[0].get_suptitle()


def context_lines(panel, coordinate):
    """Return where the dotted lines of a panel lie: 0 for vertical, 1 for horizontal ones."""
    dotted = [line for line in panel.lines if line.get_linestyle() == ":"]
    return [line.get_data()[coordinate][0] for line in dotted]


@pytest.mark.parametrize(
    ("config", "panels"),
    [(CONFIG, 2), (GEMMA3, 2), (PIXTRAL, 3), (MROPE, 4), (FLUX, 4), (FLUX2, 5)],
)
def test_a_panel_for_each_axis_and_one_of_scores(config, panels):
    figure = figure_of(config)
    assert len(figure.axes) == panels
    for panel in figure.axes:
        assert panel.get_xlabel()
        assert panel.get_ylabel()


def test_panels_have_the_units_of_their_axes():
    labels = [panel.get_ylabel() for panel in figure_of(FLUX).axes[:3]]
    assert [label.split()[-1] for label in labels] == ["positions", "patches", "patches"]


def test_expected_scores_do_not_exceed_one():
    """The attention factor, 1.41 here, is in the title instead."""
    figure = figure_of(CONFIG)
    for line in figure.axes[-1].lines:
        assert max(line.get_ydata()) <= 1
    assert "attention factor 1.414" in title_of(figure)


def test_contexts_are_marked_and_named():
    figure = figure_of(LLAMA3)
    waves, scores = figure.axes
    assert context_lines(waves, 1) == [8192, 131072]
    assert context_lines(scores, 0) == [8192, 131072]
    assert scores.get_xlim() == (1, 131072)
    for panel in (waves, scores):
        assert [text.get_text() for text in panel.texts] == ["original 8192", "maximum 131072"]
    title = title_of(figure)
    for part in ("llama", "llama3", "original context 8192", "maximum context 131072"):
        assert part in title


def test_labels_of_contexts_keep_away_from_the_ends_of_curves():
    """Pairs 40-63, of the width, start near the maximum context."""
    time, _, width, _ = figure_of({**MROPE, "max_position_embeddings": 40000}).axes
    assert time.texts[0].get_horizontalalignment() == "left"
    assert width.texts[0].get_horizontalalignment() == "right"


def test_grids_have_no_context():
    figure = figure_of({**PIXTRAL, "max_position_embeddings": 1000})
    assert not any(context_lines(panel, 0) for panel in figure.axes)


@pytest.mark.parametrize(
    ("change", "largest"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"max_position_embeddings": 2048, "rope_scaling": YARN}, 16384),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 400),
    ],
)
def test_distances_reach_the_maximum_context(change, largest):
    scores = figure_of({**MROPE, "model_type": "llama", **change}).axes[-1]
    assert scores.get_xlim()[1] == largest


def test_distances_without_a_maximum_reach_beyond_the_original_context():
    config = {
        "hidden_size": 64,
        "num_attention_heads": 1,
        "rope_theta": 1e4,
        "rope_scaling": LLAMA3["rope_scaling"],
    }
    assert figure_of(config, interleaved=False).axes[-1].get_xlim()[1] == 4 * 8192


def test_distances_without_any_context_reach_the_longest_wavelength():
    config = {"hidden_size": 64, "num_attention_heads": 1, "rope_theta": 100.0}
    longest = 2 * np.pi * 100 ** (31 / 32)
    scores = figure_of(config, interleaved=False).axes[-1]
    assert scores.get_xlim()[1] == pytest.approx(longest)


def test_scaled_pairs_are_shaded_and_named():
    figure = figure_of(LLAMA3)
    (shade,) = figure.axes[0].patches
    extent = shade.get_path().transformed(shade.get_patch_transform()).get_extents()
    assert (extent.x0, extent.x1) == (28.5, 63.5)
    assert legend_of(figure) == [
        "before scaling",
        "pairs that scaling changes: 29-63",
        "after scaling",
    ]


def test_panels_of_one_unit_share_the_scale_of_wavelengths():
    time, height, width, _ = figure_of(MROPE).axes
    assert time.get_yscale() == "log"
    assert time.get_ylim() == height.get_ylim() == width.get_ylim()


def test_equal_curves_are_all_visible():
    row, column = figure_of(FLUX).axes[-1].lines[1:3]
    assert row.get_linewidth() > column.get_linewidth()


def test_curves_of_all_layer_types_are_in_one_legend():
    labels = legend_of(figure_of(GEMMA3))
    assert "sliding_attention (default)" in labels
    assert "full_attention (linear) before scaling" in labels
    assert "full_attention (linear) after scaling" in labels


def test_the_curve_before_scaling_is_left_out_where_another_equals_it():
    assert legend_of(figure_of(CONFIG))[-1] == "at 4096 tokens"
    assert "before scaling" not in legend_of(figure_of(CONFIG))


def test_one_curve_without_scaling():
    assert legend_of(figure_of({**MROPE, "model_type": "llama"})) == ["all pairs"]


def test_the_caption_defines_the_expected_score():
    figure = figure_of(CONFIG)
    (caption,) = figure.subfigs[1].texts
    for part in ("Expected score", "mean", "cos(distance", "attention factor"):
        assert part in caption.get_text()


def test_dollar_signs_are_no_formulas(tmp_path):
    from rope_cpu.cli.show_picture.figure import draw

    rotation = next(layer_rotations(reader.read(CONFIG), None, None))
    figure = draw([replace(rotation, model=r"a$\x$"), replace(rotation, layers=r"b$\y$")])
    figure.savefig(tmp_path / "x.png")


@pytest.mark.parametrize("config", [CONFIG, GEMMA3, FLUX2])
def test_texts_lie_within_the_figure(config):
    """Legend and caption are inside, and cover neither each other nor the panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_of(config)
    FigureCanvasAgg(figure).draw()
    panels, footer = figure.subfigs
    legend = panels.legends[0].get_window_extent()
    caption = footer.texts[0].get_window_extent()
    for box in (legend, caption):
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    assert caption.y1 <= legend.y0
    assert all(legend.y1 <= panel.get_tightbbox().y0 for panel in figure.axes)
