"""M-RoPE ids against get_rope_index of transformers, on random batches of text, image and video.

Since transformers 5.3 text after a video starts past its longer side. Where frames are separate,
the ids are the same either way.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from rope_cpu import positions

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

# Model folder, its model class, whether frames stand apart, ids per second.
MODELS = [
    ("qwen2_vl", "Qwen2VLModel", False, None),
    ("qwen2_5_vl", "Qwen2_5_VLModel", False, 2),
    ("qwen3_vl", "Qwen3VLModel", True, None),
    ("glm4v", "Glm4vModel", True, None),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeModel", False, None),
]
IMAGE_TOKEN, VIDEO_TOKEN = 900, 901


class Theirs:
    """The two methods of a model, without the model: they need its configuration alone."""

    def __init__(self, folder, name, tokens_per_second):
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        model = getattr(module, name)
        vision = SimpleNamespace(
            spatial_merge_size=2,
            tokens_per_second=tokens_per_second,
            temporal_merge_size=2,
            temporal_patch_size=2,
        )
        self.config = SimpleNamespace(vision_config=vision)
        self._index, self._ids = model.get_rope_index, model.get_vision_position_ids

    def get_vision_position_ids(self, *args, **kwargs):
        return self._ids(self, *args, **kwargs)

    def get_rope_index(self, *args, **kwargs):
        return self._index(self, *args, **kwargs)


def batch(random, apart, merged_frames):
    """Return token ids (batch, seq), left-padded, their mask, and the grids in order."""
    rows, images, videos = [], [], []
    for _ in range(3):
        row = []
        for _ in range(random.integers(1, 5)):
            row += [int(t) for t in random.integers(0, 100, size=random.integers(1, 6))]
            kind = random.integers(0, 3)
            grid = [1, *(2 * random.integers(1, 6, size=2)).tolist()]
            if kind == 1:
                images.append(grid)
                row += [IMAGE_TOKEN] * (grid[1] * grid[2] // 4)
            elif kind == 2:
                grid[0] = int(random.integers(1, 4)) * merged_frames
                videos.append(grid)
                frame = [VIDEO_TOKEN] * (grid[1] * grid[2] // 4)
                row += ([*frame, 5] if apart else frame) * (grid[0] // merged_frames)
        rows.append(row)
    length = max(map(len, rows))
    tokens = np.array([[0] * (length - len(row)) + row for row in rows])
    mask = np.array([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask, images, videos


@pytest.mark.parametrize(
    ("folder", "name", "apart", "tokens_per_second"), MODELS, ids=[m[0] for m in MODELS]
)
@pytest.mark.parametrize("draw", range(12))
@pytest.mark.parametrize("masked", [False, True])
def test_ids_equal_get_rope_index(folder, name, apart, tokens_per_second, draw, masked, rng):
    merged = 2 if folder == "ernie4_5_vl_moe" else 1
    tokens, mask, images, videos = batch(rng, apart, merged)
    types = positions.token_types(tokens, image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN)
    seconds = (
        rng.uniform(0.1, 3, size=len(videos)).astype(np.float32) if tokens_per_second else None
    )
    more = {} if seconds is None else {"second_per_grid_ts": torch.from_numpy(seconds)}
    theirs, offsets = Theirs(folder, name, tokens_per_second).get_rope_index(
        torch.from_numpy(tokens),
        torch.from_numpy(types).int(),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        attention_mask=torch.from_numpy(mask) if masked else None,
        **more,
    )
    for start_after in ("largest_id", "longer_side") if apart else ("longer_side",):
        ours, offset = positions.mrope(
            types,
            image_grid_thw=images or None,
            video_grid_thw=videos or None,
            merge_size=2,
            merge_frames=merged,
            seconds_per_grid=seconds,
            tokens_per_second=tokens_per_second or 1,
            split_frames=apart,
            start_after=start_after,
            attention_mask=mask if masked else None,
        )
        assert np.array_equal(ours, theirs.permute(1, 2, 0).numpy())
        assert np.array_equal(offset, offsets[:, 0].numpy())


START, SOUND_START, SOUND_TOKEN = 902, 903, 904


def omni_sequence(random):
    """Return tokens of one sequence with sound, images and videos, and the grids of each kind."""
    tokens, sounds, grids = [], [], {IMAGE_TOKEN: [], VIDEO_TOKEN: []}
    for kind in random.permutation([SOUND_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN, SOUND_TOKEN]).tolist():
        tokens += [int(t) for t in random.integers(0, 100, size=random.integers(1, 5))]
        if kind == SOUND_TOKEN:
            features = int(random.integers(1, 9)) * 4
            sounds.append(features)
            tokens += [SOUND_START, *[kind] * (features // 4), 5]
            continue
        grid = [1, *(2 * random.integers(1, 6, size=2)).tolist()]
        grid[0] = int(random.integers(1, 4)) if kind == VIDEO_TOKEN else 1
        grids[kind].append(grid)
        tokens += [START, *[kind] * (grid[0] * grid[1] * grid[2] // 4), 5]
    return tokens, sounds, grids


@pytest.mark.parametrize("draw", range(12))
def test_sound_has_the_ids_of_qwen_omni(draw, rng):
    tokens, sounds, grids = omni_sequence(rng)
    seconds = rng.uniform(0.1, 3, size=1).astype(np.float32)
    module = importlib.import_module("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    model = module.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    own = SimpleNamespace(
        spatial_merge_size=2,
        config=SimpleNamespace(
            image_token_id=IMAGE_TOKEN,
            video_token_id=VIDEO_TOKEN,
            audio_token_id=SOUND_TOKEN,
            vision_start_token_id=START,
            audio_start_token_id=SOUND_START,
            position_id_per_seconds=25,
            seconds_per_chunk=2.0,
        ),
        get_llm_pos_ids_for_vision=lambda *given: model.get_llm_pos_ids_for_vision(None, *given),
    )
    theirs, deltas = model.get_rope_index(
        own,
        torch.tensor([tokens]),
        torch.tensor(grids[IMAGE_TOKEN]),
        torch.tensor(grids[VIDEO_TOKEN]),
        torch.ones(1, len(tokens), dtype=torch.long),
        audio_seqlens=torch.tensor(sounds),
        second_per_grids=torch.from_numpy(seconds),
    )
    types = positions.token_types([tokens], image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN)
    types[np.array([tokens]) == SOUND_TOKEN] = positions.SOUND
    ours, offset = positions.mrope(
        types,
        image_grid_thw=grids[IMAGE_TOKEN],
        video_grid_thw=grids[VIDEO_TOKEN],
        seconds_per_grid=seconds,
        tokens_per_second=25,
    )
    assert np.array_equal(ours, theirs.permute(1, 2, 0).numpy())
    assert np.array_equal(offset, deltas.reshape(-1).numpy())
