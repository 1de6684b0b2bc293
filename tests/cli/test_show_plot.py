"""`rope-cpu show --plot`: a picture in the format of its suffix, or an early error."""

from dataclasses import replace

import numpy as np
import pytest
import text_configs
from text_configs import LLAMA3_SCALING, PHI3

from rope_cpu.cli.command_line import UsageError
from rope_cpu.cli.groups import layer_groups
from rope_cpu.models import reader

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rope_cpu.cli.show_plot import draw, expected_scores

GEMMA3 = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
LLAMA3 = {**text_configs.LLAMA3, "max_position_embeddings": 131072}
MROPE = {
    "model_type": "qwen2_vl_text",
    "hidden_size": 128,
    "num_attention_heads": 1,
    "max_position_embeddings": 1000,
}
FLUX = {"_class_name": "FluxTransformer2DModel"}
FLUX2 = {"_class_name": "Flux2Transformer2DModel"}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 128, "num_attention_heads": 2}
DYNAMIC = {"type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(("name", "start"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml")])
def test_plot(shown, tmp_path, name, start):
    assert shown(PHI3, "--plot", str(tmp_path / name))[-1] == f"written: {tmp_path / name}"
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("x.unknown", "must end in .png or .svg"),
        ("folder.png", "it is a folder"),
        ("no/x.png", "there is no folder"),
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


def figure_of(config, interleaved=None):
    """Return the figure of a config."""
    parsed = reader.read(config)
    return draw(list(layer_groups(parsed, None, interleaved)))


def legend_of(figure):
    """Return the labels of the legend."""
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def context_lines(panel, coordinate):
    """Return the places of the lines of contexts: 0 for vertical, 1 for horizontal ones."""
    return [line.get_data()[coordinate][0] for line in panel.lines if line.get_color() == "0.4"]


@pytest.mark.parametrize(
    ("config", "panels"), [(PHI3, 2), (GEMMA3, 2), (PIXTRAL, 3), (MROPE, 4), (FLUX, 4), (FLUX2, 5)]
)
def test_a_panel_for_each_axis_and_one_of_scores(config, panels):
    figure = figure_of(config)
    assert len(figure.axes) == panels
    for panel in figure.axes:
        assert panel.get_xlabel()
        assert panel.get_ylabel()
        assert panel.lines


def test_panels_have_the_units_of_their_axes():
    labels = [panel.get_ylabel() for panel in figure_of(FLUX).axes[:3]]
    assert [label.split()[-1] for label in labels] == ["positions", "patches", "patches"]


def test_contexts_are_marked_and_named():
    figure = figure_of(LLAMA3)
    waves, scores = figure.axes
    assert context_lines(waves, 1) == [8192, 131072]
    assert context_lines(scores, 0) == [8192, 131072]
    assert scores.get_xlim() == pytest.approx((1, 131072))
    contexts = ["original context: 8192 tokens", "maximum context: 131072 tokens"]
    assert legend_of(figure)[-2:] == contexts
    assert "rope type llama3; attention factor 1" in figure.get_suptitle()


def test_grids_have_no_context():
    figure = figure_of({**PIXTRAL, "max_position_embeddings": 1000})
    assert not any(context_lines(panel, 0) for panel in figure.axes)


UNKNOWN = {"hidden_size": 64, "num_attention_heads": 1, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "largest"),
    [
        ({**MROPE, "model_type": "llama", "max_position_embeddings": 32768}, 32768),
        ({**UNKNOWN, "max_position_embeddings": 2048, "rope_scaling": YARN}, 16384),
        ({**UNKNOWN, "max_position_embeddings": 100, "rope_scaling": DYNAMIC}, 400),
        ({**UNKNOWN, "rope_scaling": LLAMA3_SCALING}, 4 * 8192),
        ({**UNKNOWN, "rope_theta": 100.0}, 2 * np.pi * 100 ** (31 / 32)),
    ],
    ids=["maximum", "yarn", "dynamic", "original alone", "longest wavelength"],
)
def test_distances_reach_the_maximum_context(config, largest):
    scores = figure_of(config, interleaved=False).axes[-1]
    assert scores.get_xlim()[1] == pytest.approx(int(largest))  # distances are whole


def test_scaled_pairs_are_shaded():
    (shade,) = figure_of(LLAMA3).axes[0].collections
    (path,) = shade.get_paths()
    assert (path.get_extents().x0, path.get_extents().x1) == (28.5, 63.5)


def test_panels_share_the_scale_of_wavelengths():
    time, height, width, _ = figure_of(MROPE).axes
    for panel in (time, height, width):
        assert panel.get_yscale() == "log"
        assert panel.get_ylim() == time.get_ylim()
        assert panel.yaxis.get_transform().base == 10


def test_equal_curves_are_all_visible():
    """The second one is wider and lies behind the first; others have one width."""
    image, row, column = figure_of(FLUX).axes[-1].lines
    assert image.get_linewidth() == row.get_linewidth() < column.get_linewidth()
    assert column.get_zorder() < row.get_zorder()


def test_curves_before_scaling_are_grey_and_behind():
    for panel in figure_of(GEMMA3).axes:
        sliding, after, before = panel.lines[:3]
        assert len({sliding.get_color(), after.get_color(), before.get_color()}) == 3
        assert float(before.get_color()) < 1  # a grey
        assert before.get_zorder() < min(sliding.get_zorder(), after.get_zorder())
        assert not before.get_marker()


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        (LLAMA3, ["after scaling", "before scaling", "pairs that scaling changes"]),
        (PHI3, ["at 64 tokens", "at 4096 tokens", "pairs that scaling changes"]),
        ({**MROPE, "model_type": "llama"}, ["all pairs"]),
        (
            GEMMA3,
            ["sliding_attention (default)"]
            + [
                f"full_attention (linear) {name}"
                for name in ("after scaling", "before scaling", "pairs that scaling changes")
            ],
        ),
    ],
    ids=["llama3", "longrope", "default", "layer types"],
)
def test_the_legend_names_each_curve_once(config, labels):
    """The curve before scaling is left out where another equals it."""
    assert [label for label in legend_of(figure_of(config)) if "context" not in label] == labels


def test_dollar_signs_are_no_formulas(tmp_path):
    config = reader.read({"model_type": r"a$\x$", "head_dim": 8, "rope_theta": 1e4})
    (group,) = layer_groups(config, None, False)
    figure = draw([group, replace(group, layer_type=r"b$\y$")])
    figure.savefig(tmp_path / "x.png")


@pytest.mark.parametrize("config", [PHI3, GEMMA3, FLUX2])
def test_the_legend_lies_within_the_figure_and_below_the_panels(config):
    figure = figure_of(config)
    FigureCanvasAgg(figure).draw()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0 <= legend.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= legend.y0
    assert all(legend.y1 <= panel.get_tightbbox().y0 for panel in figure.axes)


FREQUENCIES = 10000.0 ** (-np.arange(32) / 32)


@pytest.mark.parametrize("frequencies", [FREQUENCIES, np.array([2 * np.pi, 9.0, 0.5])])
def test_each_score_is_the_mean_over_all_distances_within_ten_percent(frequencies):
    distances, scores = expected_scores(frequencies, 5000)
    for distance, score in zip(distances, scores, strict=True):
        whole = np.arange(int(0.8 * distance), int(1.2 * distance) + 2)
        near = whole[(whole * 1.1 >= distance - 1e-9) & (whole <= distance * 1.1 + 1e-9)]
        mean = np.cos(near[:, None] * frequencies).mean()
        np.testing.assert_allclose(score, mean, rtol=0, atol=1e-10)


def test_distances_are_whole_from_one_to_the_largest():
    distances, _ = expected_scores(FREQUENCIES, 131072)
    assert distances[0] == 1
    assert distances[-1] == 131072
    np.testing.assert_array_equal(distances, np.round(distances))
    assert (np.diff(distances) > 0).all()


def test_fractions_of_a_position():
    """DINOv3 has distances up to 2, in steps of a patch."""
    distances, scores = expected_scores(np.array([2 * np.pi]), 2, step=0.25)
    assert (distances[0], distances[-1]) == (0.25, 2)
    np.testing.assert_allclose(scores[:4], [0, -1, 0, 1], rtol=0, atol=1e-12)


def test_no_score_exceeds_one():
    _, scores = expected_scores(FREQUENCIES, 10**6)
    assert scores.max() <= 1
    _, constant = expected_scores(np.array([1e-12]), 10)
    np.testing.assert_allclose(constant, 1, rtol=1e-14)
