"""Rotary positions and ALiBi biases."""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.compat.transformer_lens.native.native_config import NativeConfig

Rotation: TypeAlias = tuple[Float[Tensor, "batch pos rotary"], Float[Tensor, "batch pos rotary"]]
"""Cosines and sines of the rotary angles of each position."""


def rotation(config: NativeConfig, position_ids: Int[Tensor, "batch pos"], dtype: torch.dtype) -> Rotation:
    """The rotary angles of each position, computed in float32 or wider."""
    assert config.rotary_dim is not None  # the configuration fills it in
    wide = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, config.rotary_dim, 2, device=position_ids.device, dtype=wide)
    angles = position_ids[..., None].to(wide) * config.rotary_base ** (-pair / config.rotary_dim)
    angles = angles.repeat_interleave(2, -1) if config.rotary_adjacent_pairs else torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(
    x: Float[Tensor, "batch head pos d_head"], rotation: Rotation, *, adjacent: bool
) -> Float[Tensor, "batch head pos d_head"]:
    """Apply rotary positions to queries or keys."""
    cos, sin = (each[:, None] for each in rotation)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if adjacent:
        quarter = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        quarter = torch.cat([-second, first], -1)
    return torch.cat([turned * cos + quarter * sin, rest], -1)


def alibi(heads: int, queries: Int[Tensor, " pos"], keys: Int[Tensor, " key"]) -> Float[Tensor, "1 head pos key"]:
    """The ALiBi bias of scores, by distance and head."""
    slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device=keys.device))
    back = (keys[None] - queries[:, None]).clamp(max=0)
    return (slopes[:, None, None] * back)[None]


def with_alibi(
    mask: Tensor | None, heads: int, queries: Tensor, keys: Tensor, *, is_causal: bool, dtype: torch.dtype
) -> Float[Tensor, "batch head pos key"]:
    """An additive mask with the ALiBi bias at visible positions. Without a mask: all positions, or earlier ones."""
    bias = alibi(heads, queries, keys).to(dtype)
    if mask is None:
        mask = (keys[None] <= queries[:, None])[None, None] if is_causal else torch.ones_like(bias, dtype=torch.bool)
    return torch.where(mask, bias, torch.finfo(dtype).min) if mask.dtype == torch.bool else mask + bias
