"""Classes of diffusers with half-split pairs, one axis or rotated heads as one vector.

As in `diffusers_rotations`, each function gets a model without weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers.models import attention_processor, embeddings
from diffusers_models import (
    COLUMNS,
    CPU,
    FRAMES,
    GRID,
    ROWS,
    Own,
    adjacent,
    halves,
    module_of,
    shared,
    some_ids,
    swapped,
    video,
)
from torch import nn

from rope_cpu import positions


def of_image_halves(instance: nn.Module, scale: tuple[int, int]) -> Own:
    patch = instance.config.patch_size
    cos, sin = instance.rope(torch.zeros(1, 1, 4 * patch, 8 * patch))
    rotate = partial(swapped, across_the_head(cos, sin))
    return Own(positions.grid((4, 8), scale=scale), halves(cos), halves(sin), rotate)


def across_the_head(cos: torch.Tensor, sin: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the shared function's rotation of the pairs (i, i + n)."""
    return partial(embeddings.apply_rotary_emb, freqs_cis=(cos, sin), use_real_unbind_dim=-2)


def allegro(instance: nn.Module) -> Own:
    config = instance.config
    *tables, frames, rows, columns = embeddings.get_3d_rotary_pos_embed_allegro(
        config.attention_head_dim,
        ((0, 0), (ROWS, COLUMNS)),
        (ROWS, COLUMNS),
        FRAMES,
        tuple(config[f"interpolation_scale_{axis}"] for axis in ("t", "h", "w")),
    )
    grids = torch.meshgrid(frames, rows, columns, indexing="ij")
    at = [grid.flatten()[None].long() for grid in grids]
    cos, sin = (
        torch.cat([halves(table[i])[ids[0]] for table, ids in zip(tables, at, strict=True)], -1)
        for i in range(2)
    )
    apply = partial(embeddings.apply_rotary_emb_allegro, freqs_cis=tables, positions=at)
    return Own(positions.grid(GRID), cos, sin, partial(swapped, apply))


def cosmos(instance: nn.Module) -> Own:
    cos, sin = instance.rope(video(instance), fps=None)
    rotate = partial(swapped, across_the_head(cos, sin))
    return Own(positions.grid(GRID), halves(cos), halves(sin), rotate)


def minimax_h3(instance: nn.Module) -> Own:
    ids = some_ids(3)
    cos, sin = instance.rope(torch.from_numpy(ids))
    apply = partial(module_of(instance)._apply_rotary_emb, cos=cos, sin=sin)
    return Own(ids, halves(cos), halves(sin), apply)


TOKENS = np.arange(40)


def ace_step(instance: nn.Module) -> Own:
    cos, sin = module_of(instance)._ace_step_rotary_freqs(
        TOKENS.size, instance.head_dim, instance.rope_theta, CPU, torch.float32
    )
    return Own(TOKENS, halves(cos), halves(sin), shared(cos, sin, -2))


def longcat_audio(instance: nn.Module) -> Own:
    cos, sin = instance.rotary_embed(torch.zeros(1, TOKENS.size, 1))
    apply = partial(module_of(instance)._apply_rotary_emb, rope=(cos, sin))
    return Own(TOKENS, halves(cos), halves(sin), apply)


def minimax_music(instance: nn.Module) -> Own:
    cos, sin = instance.rotary_emb(TOKENS.size, CPU)
    apply = partial(module_of(instance)._apply_partial_rotary_emb, rotary_emb=(cos, sin))
    return Own(TOKENS, halves(cos), halves(sin), apply)


def stable_audio(instance: nn.Module) -> Own:
    # As StableAudioPipeline computes them.
    cos, sin = embeddings.get_1d_rotary_pos_embed(
        instance.config.attention_head_dim // 2,
        TOKENS.size,
        use_real=True,
        repeat_interleave_real=False,
    )
    apply = attention_processor.StableAudioAttnProcessor2_0().apply_partial_rotary_emb
    rotate = partial(swapped, partial(apply, freqs_cis=(cos, sin)))
    return Own(TOKENS, halves(cos), halves(sin), rotate)


def stable_audio3(instance: nn.Module) -> Own:
    angles = instance.rotary_pos_emb(TOKENS.size, CPU)
    apply = partial(module_of(instance)._apply_rotary_partial, freqs=angles)
    return Own(TOKENS, halves(angles.cos()), halves(angles.sin()), apply)


def omnigen(instance: nn.Module, first: int = 0) -> Own:
    ids = first + TOKENS
    cos, sin = instance.rope(torch.zeros(1), torch.from_numpy(ids)[None])
    return Own(ids, halves(cos), halves(sin), partial(swapped, across_the_head(cos, sin)))


def _sections(instance: nn.Module, ids: np.ndarray, cos: torch.Tensor, sin: torch.Tensor) -> Own:
    """Rotate as the attention does; the tables are (1, tokens, head_dim)."""
    half = module_of(instance)._rotate_half

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return x * cos.unsqueeze(2) + half(x) * sin.unsqueeze(2)

    return Own(ids, halves(cos)[0], halves(sin)[0], rotate)


def ideogram4(instance: nn.Module) -> Own:
    ids = some_ids(3)
    return _sections(instance, ids, *instance.rotary_emb(torch.from_numpy(ids)[None]))


def cosmos3(instance: nn.Module) -> Own:
    ids = some_ids(3)
    by_axis = torch.from_numpy(ids.T.copy())[:, None]
    return _sections(instance, ids, *instance.rotary_emb(by_axis, CPU, torch.float32))


def _of_all_heads(
    instance: nn.Module, ids: np.ndarray, tables: tuple[torch.Tensor, torch.Tensor], apply: Any
) -> Own:
    """All heads are rotated as one vector; the tables are (1, tokens, all elements)."""
    heads = instance.config.num_attention_heads
    cos, sin = (adjacent(table)[0].unflatten(-1, (heads, -1)) for table in tables)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return apply(x.flatten(2), tables).unflatten(2, (heads, -1))

    return Own(ids, cos, sin, rotate)


def ltx(instance: nn.Module) -> Own:
    tables = instance.rope(torch.zeros(1), *GRID, rope_interpolation_scale=(0.5, 32, 32))
    ids = 2 * positions.grid(GRID, scale=(0.5 / 20, 32 / 2048, 32 / 2048)) - 1
    return _of_all_heads(instance, ids, tables, module_of(instance).apply_rotary_emb)


def ltx2(instance: nn.Module) -> Own:
    coordinates = instance.rope.prepare_video_coords(1, *GRID, CPU)
    middles = coordinates.mean(dim=-1)[0].T.double().numpy()
    tables = instance.rope(coordinates)
    ids = 2 * middles / (20, 2048, 2048) - 1
    return _of_all_heads(instance, ids, tables, module_of(instance).apply_interleaved_rotary_emb)
