"""Classes of diffusers with adjacent pairs: their own cos and sin, and their own rotation.

Each function gets a model without weights. The model's own modules compute cos and sin, and the
function that its attention calls rotates.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers.models import embeddings
from diffusers_models import (
    COLUMNS,
    CPU,
    FRAMES,
    GRID,
    ROWS,
    Own,
    adjacent,
    module_of,
    nested,
    shared,
    some_ids,
    swapped,
    video,
)
from torch import nn

from rope_cpu import positions


def of_ids(instance: nn.Module, module: str = "pos_embed", axes: int = 3) -> Own:
    ids = some_ids(axes)
    cos, sin = getattr(instance, module)(torch.from_numpy(ids))
    return Own(ids, adjacent(cos), adjacent(sin), shared(cos, sin))


def of_complex_table(instance: nn.Module, processor: str) -> Own:
    ids = some_ids(3)
    freqs = instance.rope_embedder(torch.from_numpy(ids))
    apply = nested(getattr(module_of(instance), processor), "apply_rotary_emb")
    return Own(ids, freqs.real, freqs.imag, partial(apply, freqs_cis=freqs[None]))


def lumina2(instance: nn.Module) -> Own:
    ids = some_ids(3)
    freqs = instance.rope_embedder._get_freqs_cis(torch.from_numpy(ids)[None])
    rotate = partial(embeddings.apply_rotary_emb, freqs_cis=freqs, use_real=False)
    return Own(ids, freqs[0].real, freqs[0].imag, rotate)


def qwen(instance: nn.Module, apply: str = "apply_rotary_emb_qwen") -> Own:
    image, text = instance.pos_embed([(1, ROWS, 8)], max_txt_seq_len=3, device=CPU)
    ids = np.concatenate(
        [
            positions.grid((1, ROWS, 8), start=(0, -3, -4)),
            4 + np.arange(3)[:, None].repeat(3, axis=1),
        ]
    )
    freqs = torch.cat([image, text])
    module = importlib.import_module(type(instance.pos_embed).__module__)
    rotate = partial(getattr(module, apply), freqs_cis=freqs, use_real=False)
    return Own(ids, freqs.real, freqs.imag, rotate)


def qwen21(instance: nn.Module) -> Own:
    is_image = torch.tensor([False] * 3 + [True] * (ROWS * 8))
    freqs = instance.pos_embed([(1, ROWS, 8)], is_image, device=CPU)
    text = np.arange(3)[:, None].repeat(3, axis=1)
    ids = np.concatenate([text, positions.grid((1, ROWS, 8), start=(3, -3, -4))])
    apply = module_of(instance).apply_rotary_emb_qwen
    return Own(ids, freqs.real, freqs.imag, partial(apply, freqs_cis=freqs, use_real=False))


def of_video(instance: nn.Module) -> Own:
    cos, sin = instance.rope(video(instance))
    return Own(positions.grid(GRID), adjacent(cos), adjacent(sin), shared(cos, sin))


def framepack(instance: nn.Module) -> Own:
    patch = instance.config.patch_size
    frames = torch.tensor([2, 5, 11])
    cos, sin = instance.rope(frames, ROWS * patch, COLUMNS * patch, CPU)
    ids = positions.grid(GRID)
    ids[:, 0] = frames.numpy()[ids[:, 0]]
    return Own(ids, adjacent(cos), adjacent(sin), shared(cos, sin))


def hunyuan_image(instance: nn.Module) -> Own:
    rows, columns = instance.config.patch_size
    cos, sin = instance.rope(torch.zeros(1, 1, ROWS * rows, COLUMNS * columns))
    return Own(positions.grid(GRID[1:]), adjacent(cos), adjacent(sin), shared(cos, sin))


def joy(instance: nn.Module) -> Own:
    cos, sin = instance.get_rotary_pos_embed(list(GRID))[0]
    apply = module_of(instance)._apply_rotary_emb
    return Own(
        positions.grid(GRID), adjacent(cos), adjacent(sin), lambda x: apply(x, x, (cos, sin))[0]
    )


def joy_plus(instance: nn.Module) -> Own:
    stop = (2 + FRAMES, ROWS, COLUMNS)
    cos, sin = instance._get_rotary_pos_embed_for_range((2, 0, 0), stop)
    apply = module_of(instance)._apply_rotary_emb_batched
    ids = positions.grid(GRID, start=(2, 0, 0))
    tables = (cos[None], sin[None])
    return Own(ids, adjacent(cos), adjacent(sin), lambda x: apply(x, x, tables)[0])


def prx(instance: nn.Module) -> Own:
    ids = module_of(instance).get_image_ids(1, ROWS * 2, COLUMNS * 2, patch_size=2, device=CPU)
    matrices = instance.pe_embedder(ids)
    apply = partial(module_of(instance).apply_rope, freqs_cis=matrices)
    table = matrices[0, 0]
    return Own(ids[0].numpy(), table[..., 0, 0], table[..., 1, 0], partial(swapped, apply))


def hidream(instance: nn.Module) -> Own:
    ids = some_ids(3)
    matrices = instance.pe_embedder(torch.from_numpy(ids)[None])
    apply = module_of(instance).apply_rope
    table = matrices[0, :, 0]
    return Own(ids, table[..., 0, 0], table[..., 1, 0], lambda x: apply(x, x, matrices)[0])


def helios(instance: nn.Module) -> Own:
    frames = torch.tensor([[4, 6, 9]])
    table = instance.rope(frames, ROWS, COLUMNS, CPU).flatten(2).transpose(1, 2)
    ids = positions.grid(GRID)
    ids[:, 0] = frames[0].numpy()[ids[:, 0]]
    cos, sin = table[0].chunk(2, dim=-1)
    apply = module_of(instance).apply_rotary_emb_transposed
    return Own(ids, adjacent(cos), adjacent(sin), partial(apply, freqs_cis=table))


def of_matrices(ids: np.ndarray, matrices: torch.Tensor, apply: Callable[..., Any]) -> Own:
    """Matrices are (tokens, 1, pairs, 2, 2)."""
    table = matrices[:, 0]
    return Own(ids, table[..., 0, 0], table[..., 1, 0], lambda x: apply(x, matrices[None]))


def kandinsky5(instance: nn.Module) -> Own:
    scale = (1.0, 2.0, 3.16)
    ranges = [torch.arange(n) for n in GRID]
    matrices = instance.visual_rope_embeddings((1, *GRID), ranges, scale)
    apply = nested(module_of(instance).Kandinsky5AttnProcessor, "apply_rotary")
    own = of_matrices(positions.grid(GRID) / scale, matrices[0].flatten(0, 2), apply)
    # The attention of Kandinsky 5 rounds its rotated vectors to bfloat16.
    return own._replace(rotate=lambda x: own.rotate(x).float(), epsilon=2.0**-9)


def kandinsky6(instance: nn.Module) -> Own:
    ranges = tuple(torch.arange(n) for n in GRID)
    matrices = instance.visual_rope_embeddings(ranges, instance.config.scale_factor)
    apply = module_of(instance).apply_rotary
    return of_matrices(positions.grid(GRID), matrices.flatten(0, 2), apply)


def wan(instance: nn.Module, processor: type | None = None) -> Own:
    cos, sin = instance.rope(video(instance))
    owner = processor or type(instance.blocks[0].attn1.processor)
    apply = nested(owner, "apply_rotary_emb")
    ids = positions.grid(GRID)
    return Own(ids, adjacent(cos)[0, :, 0], adjacent(sin)[0, :, 0], lambda x: apply(x, cos, sin))


def sana_video(instance: nn.Module) -> Own:
    return wan(instance, module_of(instance).SanaLinearAttnProcessor3_0)


def of_complex(ids: np.ndarray, freqs: torch.Tensor, rotate: Callable[..., Any]) -> Own:
    """Frequencies are (1, 1, tokens, pairs)."""
    return Own(ids, freqs[0, 0].real, freqs[0, 0].imag, rotate)


def anyflow(instance: nn.Module) -> Own:
    layout = {"total_frames": FRAMES, "full_frame_shape": GRID[1:]}
    freqs = instance.rope(layout, CPU)["query"]
    apply = partial(module_of(instance).apply_rotary_emb, freqs=freqs)
    return of_complex(positions.grid(GRID), freqs, partial(swapped, apply))


def anyflow_far(instance: nn.Module) -> Own:
    layout = {
        "total_frames": 5,
        "full_frame_shape": (4, 6),
        "compressed_frame_shape": (2, 3),
        "num_compressed_frames": 2,
    }
    freqs = instance.rope(layout, CPU)["query"]
    apply = partial(module_of(instance).apply_rotary_emb, freqs=freqs)
    # A compressed frame is at the middle of 2 x 2 patches; AnyFlow normalises the mean of their
    # cos and sin, which is the cos and sin of the middle.
    compressed = positions.grid((2, 2, 3), start=(0, 0.25, 0.25), scale=(1, 2, 2))
    ids = np.concatenate([compressed, positions.grid((3, 4, 6), start=(2, 0, 0))])
    return of_complex(ids, freqs, partial(swapped, apply))


def wan_animate2(instance: nn.Module) -> Own:
    freqs = instance._rope_freqs((0, 0, 0), CPU)
    apply = module_of(instance).rope_apply
    head_dim = 2 * freqs.shape[1]
    # Vectors (1, 0, 1, 0, …) become (cos, sin, cos, sin, …).
    units = torch.tensor([1.0, 0.0]).repeat(1, math.prod(GRID), 1, head_dim // 2)
    sizes = torch.tensor([GRID])
    table = apply(units, sizes, freqs)[0, :, 0]
    ids = positions.grid(GRID)
    return Own(ids, table[:, 0::2], table[:, 1::2], lambda x: apply(x, sizes, freqs))


def sana_wm(instance: nn.Module) -> Own:
    freqs = instance.rope(GRID, CPU)
    apply = module_of(instance)._apply_rotary_emb

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return apply(x.permute(0, 2, 3, 1), freqs).permute(0, 3, 1, 2)

    return of_complex(positions.grid(GRID), freqs, rotate)


def _crop_grid(scale: tuple[float, ...]) -> np.ndarray:
    """Return the grid of a crop whose rows and columns are scale apart."""
    return positions.grid((FRAMES, 4, 8), scale=scale)


def cogvideox(instance: nn.Module) -> Own:
    head_dim = instance.config.attention_head_dim
    cos, sin = embeddings.get_3d_rotary_pos_embed(head_dim, ((0, 0), (2, 12)), (4, 8), FRAMES)
    rotate = partial(swapped, partial(embeddings.apply_rotary_emb, freqs_cis=(cos, sin)))
    return Own(_crop_grid((1, 0.5, 1.5)), adjacent(cos), adjacent(sin), rotate)


def easyanimate(instance: nn.Module) -> Own:
    # The base grid is 30 rows of 45 patches.
    cos, sin = instance.rope_embedding(torch.zeros(1, 1, FRAMES, 10 * 2, 15 * 2))
    rotate = partial(swapped, partial(embeddings.apply_rotary_emb, freqs_cis=(cos, sin)))
    ids = positions.grid((FRAMES, 10, 15), scale=(1, 3, 3))
    return Own(ids, adjacent(cos), adjacent(sin), rotate)


def hunyuan_dit(instance: nn.Module) -> Own:
    head_dim = instance.config.attention_head_dim
    cos, sin = embeddings.get_2d_rotary_pos_embed(head_dim, ((0, 0), (2, 12)), (4, 8))
    rotate = partial(swapped, partial(embeddings.apply_rotary_emb, freqs_cis=(cos, sin)))
    rows_and_columns = positions.grid((4, 8), scale=(0.5, 1.5))
    return Own(rows_and_columns[:, ::-1], adjacent(cos), adjacent(sin), rotate)
