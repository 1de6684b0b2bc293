"""Expected scores: means of cosines over whole distances."""

import numpy as np
import pytest

from rope_cpu.cli.show_picture.scores import expected_scores

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


def test_the_tail_is_free_of_the_fast_pairs():
    """Single distances would give any cosine of a pair with a wavelength of 6.28 tokens."""
    _, scores = expected_scores(np.array([1.0]), 131072)
    assert np.abs(scores[-50:]).max() < 1e-3
