"""Builders of position ids against ids written out token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from refusals import assert_refused

from rope_cpu import positions


def test_packed():
    assert positions.packed([0, 3, 3, 5, 9]).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert positions.packed([0]).tolist() == []


def test_left_padded():
    mask = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]]
    assert positions.left_padded(mask).tolist() == [
        [0, 0, 0, 1, 2],
        [0, 1, 2, 3, 4],
        [0, 0, 0, 1, 0],
    ]


@pytest.mark.parametrize("dtype", [bool, int, float, object, "bfloat16"])
def test_masks_of_any_dtype(dtype):
    mask = np.array([[0, 1, 1]]).astype(dtype)
    assert positions.left_padded(mask).tolist() == [[0, 0, 1]]


def test_grid_of_an_image_and_a_video():
    assert positions.grid((2, 3)).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    video = positions.grid((2, 2, 3))
    assert video.dtype == np.int64
    assert [tuple(p) for p in video] == [
        (t, r, c) for t in range(2) for r in range(2) for c in range(3)
    ]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 4), (2, 7)])
def test_grid_centred_and_scaled(rows, columns):
    """Patch centres of an image that spans -1 to 1 on both sides: 2 (i + 1/2) / n - 1."""
    ids = positions.grid((rows, columns), centred=True, scale=(2 / rows, 2 / columns))
    exact = [
        (2 * (r + 0.5) / rows - 1, 2 * (c + 0.5) / columns - 1)
        for r in range(rows)
        for c in range(columns)
    ]
    np.testing.assert_allclose(ids, exact, rtol=0, atol=4 * 2.0**-53)


def test_grid_with_whole_starts_stays_whole():
    ids = positions.grid((2, 3), start=(-1, -2))
    assert ids.dtype == np.int64
    assert ids.tolist() == [[-1, -2], [-1, -1], [-1, 0], [0, -2], [0, -1], [0, 0]]
    assert positions.grid((2,), start=0.5).tolist() == [[0.5], [1.5]]


@pytest.mark.parametrize("edge", [1, 2, 3])
def test_patches_come_square_after_square(edge):
    expected = []
    for frames, rows, columns in [(2, 6, 12), (1, 12, 6)]:
        for _ in range(frames):
            for top in range(0, rows, edge):
                for left in range(0, columns, edge):
                    expected += [[top + i, left + j] for i in range(edge) for j in range(edge)]
    assert positions.patches([[2, 6, 12], [1, 12, 6]], merge_size=edge).tolist() == expected
    assert positions.patches(np.zeros((0, 3), int), merge_size=edge).shape == (0, 2)


def test_unrotated_tokens_have_id_zero():
    ids = positions.grid((2, 2), start=1)
    padded = positions.with_unrotated(ids, before=2, after=1)
    assert padded.tolist() == [[0, 0], [0, 0], [1, 1], [1, 2], [2, 1], [2, 2], [0, 0]]
    assert positions.with_unrotated(np.ones((3, 4, 2)), before=1).shape == (3, 5, 2)


TEXT_IMAGE_VIDEO = [[0] * 2 + [1] * 6 + [0] + [2] * 8 + [0] * 2]


def test_mrope_token_by_token():
    ids, offset = positions.mrope(
        TEXT_IMAGE_VIDEO, image_grid_thw=[[1, 4, 6]], video_grid_thw=[[2, 4, 4]], merge_size=2
    )
    image = [
        [2, 2 + r, 2 + c] for r in range(2) for c in range(3)
    ]  # the longer side is 3: text goes on at 5
    video = [[6 + t, 6 + r, 6 + c] for t in range(2) for r in range(2) for c in range(2)]
    expected = [[0] * 3, [1] * 3, *image, [5] * 3, *video, [8] * 3, [9] * 3]
    assert ids.tolist() == [expected]
    assert offset.tolist() == [10 - 19]


def test_mrope_seconds_split_and_merged_frames():
    video = {"video_grid_thw": [[3, 2, 2]], "merge_size": 2}
    ids, _ = positions.mrope([[2] * 3], seconds_per_grid=[0.8], tokens_per_second=2, **video)
    assert ids[0].tolist() == [[math.floor(0.8 * 2 * t), 0, 0] for t in range(3)]
    ids, offset = positions.mrope([[0, 2, 0, 2, 0, 2, 0]], split_frames=True, **video)
    assert ids[0].tolist() == [[t] * 3 for t in range(7)]
    assert offset.tolist() == [0]
    ids, _ = positions.mrope([[2, 2]], video_grid_thw=[[4, 2, 2]], merge_frames=2)
    assert ids[0].tolist() == [[0, 0, 0], [1, 0, 0]]


def test_mrope_as_in_the_docstrings_of_the_models():
    """A video of 3 frames of 2 x 2, then text: `get_rope_index` of Qwen2-VL, then Qwen2.5-VL."""
    prompt = [[2] * 12 + [0] * 5]
    video = {"video_grid_thw": [[3, 2, 2]], "merge_size": 1}
    ids, offset = positions.mrope(prompt, **video)
    assert ids[0].T.tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7],
        [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 3, 4, 5, 6, 7],
        [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 3, 4, 5, 6, 7],
    ]
    assert offset.tolist() == [8 - 17]
    ids, offset = positions.mrope(prompt, seconds_per_grid=[2], tokens_per_second=25, **video)
    assert ids[0].T.tolist() == [
        [0, 0, 0, 0, 50, 50, 50, 50, 100, 100, 100, 100, 101, 102, 103, 104, 105],
        [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 101, 102, 103, 104, 105],
        [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 101, 102, 103, 104, 105],
    ]
    assert offset.tolist() == [106 - 17]


@pytest.mark.parametrize(
    ("options", "question", "answer"),
    [
        ({}, [22, 23], 24),
        ({"start_after": "largest_id"}, [22, 23], 24),
        ({"start_after": "longer_side"}, [3, 4], 22),
    ],
)
def test_text_after_a_long_video(options, question, answer):
    """A token of text, 21 frames of 2 x 2 tokens with the ids 1 … 21, and a question of two."""
    prompt = [[0] + [2] * 84 + [0] * 2]
    ids, offset = positions.mrope(prompt, video_grid_thw=[[21, 4, 4]], **options)
    assert ids[0, 1:85:4, 0].tolist() == list(range(1, 22))
    assert ids[0, 85:].tolist() == [[n] * 3 for n in question]
    assert (87 + offset).tolist() == [answer]


@pytest.mark.parametrize(("start_after", "starts"), [("largest_id", 5), ("longer_side", 1)])
def test_mrope_a_video_and_an_image_after_a_video(start_after, starts):
    """Frames of one token, two seconds apart: 0, 2, 4; then those of another, and an image."""
    ids, _ = positions.mrope(
        [[2] * 6 + [1] * 2],
        image_grid_thw=[[1, 2, 4]],
        video_grid_thw=[[3, 2, 2]] * 2,
        seconds_per_grid=[2, 2],
        start_after=start_after,
    )
    videos = [[n * starts + t, n * starts, n * starts] for n in range(2) for t in (0, 2, 4)]
    image = [[2 * starts, 2 * starts, 2 * starts + c] for c in range(2)]
    assert ids[0].tolist() == videos + image


def test_mrope_images_side_by_side():
    ids, _ = positions.mrope([[1] * 5], image_grid_thw=[[1, 2, 4], [1, 6, 2]])
    assert ids[0].tolist() == [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 3, 2], [2, 4, 2]]


def test_mrope_left_padded_batch():
    types = [[0, 0, 0, 1], [0, 1, 0, 0]]
    ids, offset = positions.mrope(
        types, image_grid_thw=[[1, 2, 2]] * 2, attention_mask=[[0, 0, 1, 1], [1, 1, 1, 1]]
    )
    assert ids[:, :, 0].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert offset.tolist() == [0, 0]


def test_mrope_padding_alone_has_no_largest_id():
    ids, offset = positions.mrope([[0, 0], [0, 0]], attention_mask=[[0, 0], [0, 1]])
    assert not ids.any()
    assert offset.tolist() == [0, 0]


def test_token_types():
    types = positions.token_types([[5, 7, 7, 9, 5]], image_token_id=7, video_token_id=9)
    assert types.tolist() == [[0, 1, 1, 2, 0]]
    assert positions.token_types([[7, 9]], image_token_id=None, video_token_id=9).tolist() == [
        [0, 2]
    ]


IMAGE = [[1, 4, 4]]


def test_no_tokens_have_no_ids():
    ids, offset = positions.mrope(np.zeros((2, 0), int))
    assert (ids.shape, offset.tolist()) == ((2, 0, 3), [0, 0])
    assert positions.mrope([[]])[0].shape == (1, 0, 3)
    assert positions.token_types([], image_token_id=1, video_token_id=None).shape == (0,)


def apart(**options):
    return positions.mrope([[2, 0, 2]], video_grid_thw=[[2, 2, 2]], split_frames=True, **options)


def video(**options):
    return positions.mrope([[2]], video_grid_thw=[[1, 2, 2]], **options)


def types(image=None, video=None):
    return positions.token_types([1], image_token_id=image, video_token_id=video)


REFUSED = [
    (lambda: positions.packed([1, 3]), ValueError, "cu_seqlens"),
    (lambda: positions.packed([0, 3, 2]), ValueError, "cu_seqlens"),
    (lambda: positions.packed([0.0, 3.0]), TypeError, "cu_seqlens"),
    (lambda: positions.left_padded([0, 1]), ValueError, "attention_mask"),
    (lambda: positions.left_padded([[0, 2]]), ValueError, "attention_mask"),
    (lambda: positions.left_padded([["0"]]), TypeError, "attention_mask"),
    (lambda: positions.left_padded([[1], [1, 1]]), ValueError, "attention_mask"),
    (lambda: positions.left_padded(np.ma.array([[1]])), TypeError, "attention_mask"),
    (lambda: positions.packed(np.array([0, 2**63], np.uint64)), ValueError, "cu_seqlens"),
    (lambda: positions.grid((0, 3)), ValueError, "sizes"),
    (lambda: positions.grid(()), ValueError, "sizes"),
    (lambda: positions.grid((2, 3), centred=True, start=1), ValueError, "start"),
    (lambda: positions.grid((2, 3), centred="yes"), TypeError, "centred"),
    (lambda: positions.grid((2, 3), scale=(1, 2, 3)), ValueError, "scale"),
    (lambda: positions.grid((2, 3), scale=np.nan), ValueError, "scale"),
    (lambda: positions.grid((2, 3), start=1j), TypeError, "start"),
    (lambda: positions.grid((2, 3), scale=1e300), ValueError, "start"),
    (lambda: positions.grid((2, 3), start=1e300, scale=1e300), ValueError, "start"),
    (lambda: positions.grid((2,), start=2**53), ValueError, "start"),
    (lambda: positions.patches([[1, 3, 4]], merge_size=2), ValueError, "grid_thw"),
    (lambda: positions.patches(None), TypeError, "grid_thw"),
    (lambda: positions.with_unrotated([["a"]]), TypeError, "position_ids"),
    (lambda: positions.packed([[0], [1, 2]]), ValueError, "cu_seqlens"),
    (lambda: types(7, 7), ValueError, "image_token_id"),
    (lambda: positions.patches([1, 3, 4]), ValueError, "grid_thw"),
    (lambda: positions.patches([[1, 0, 2]]), ValueError, "grid_thw"),
    (lambda: positions.with_unrotated([1, 2]), ValueError, "position_ids"),
    (lambda: positions.mrope([[1] * 3], image_grid_thw=IMAGE), ValueError, "token_types"),
    (lambda: positions.mrope([[1] * 5], image_grid_thw=IMAGE), ValueError, "token_types"),
    (lambda: positions.mrope([[0] * 5], image_grid_thw=IMAGE), ValueError, "image_grid_thw"),
    (lambda: positions.mrope([[1] * 4]), ValueError, "token_types"),
    (lambda: positions.mrope([0]), ValueError, "token_types"),
    (lambda: positions.mrope([[4]]), ValueError, "token_types"),
    (lambda: positions.mrope([[0]], attention_mask=[[1, 1]]), ValueError, "attention_mask"),
    (lambda: positions.mrope([[0]], seconds_per_grid=[1.0]), ValueError, "seconds_per_grid"),
    (lambda: positions.mrope([[0]], seconds_per_grid=["a"]), TypeError, "seconds_per_grid"),
    (lambda: positions.mrope([[0]], tokens_per_second="a"), TypeError, "tokens_per_second"),
    (lambda: positions.mrope([[0]], split_frames="no"), TypeError, "split_frames"),
    (lambda: positions.mrope([[0]], start_after="max"), ValueError, "start_after"),
    (lambda: video(seconds_per_grid=[-1.0]), ValueError, "seconds_per_grid"),
    (lambda: video(seconds_per_grid=[np.nan]), ValueError, "seconds_per_grid"),
    (lambda: video(seconds_per_grid=[2], tokens_per_second=2e9), ValueError, "seconds_per_grid"),
    (lambda: types("a"), TypeError, "image_token_id"),
    (lambda: types(1, 1.5), TypeError, "video_token_id"),
    (lambda: apart(merge_frames=2), ValueError, "split_frames"),
    (lambda: apart(seconds_per_grid=[1.0]), ValueError, "split_frames"),
    (lambda: apart(tokens_per_second=2), ValueError, "split_frames"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals(call, error, argument):
    assert_refused(call, error, argument)


def test_sound_counts_up_like_text():
    ids, offset = positions.mrope([[0, 3, 3, 0, 2, 2, 0, 3]], video_grid_thw=[[2, 2, 2]])
    text, text_offset = positions.mrope([[0, 0, 0, 0, 2, 2, 0, 0]], video_grid_thw=[[2, 2, 2]])
    assert np.array_equal(ids, text)
    assert np.array_equal(offset, text_offset)


@pytest.mark.parametrize("types", [[0, 2, 2, 3, 3, 0], [0, 3, 2, 2, 0]])
def test_a_video_beside_its_audio_is_refused(types):
    with pytest.raises(ValueError, match="sound next to the tokens of a video"):
        positions.mrope([types], video_grid_thw=[[2, 2, 2]])


def test_a_run_of_other_length_than_its_grid_is_refused():
    with pytest.raises(ValueError, match=r"check the grids, .*`split_frames`"):
        positions.mrope([[0, 2, 2, 0, 0, 2, 2, 0]], video_grid_thw=[[4, 2, 2]])
