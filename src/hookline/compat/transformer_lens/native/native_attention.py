"""The attention of a native transformer, through transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hookline.compat.transformer_lens.native.native_config import NativeConfig
from hookline.compat.transformer_lens.native.position_ids import Rotation, rotated


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention with an optional soft cap; returns the weighted values and the pattern."""
    groups: Any = module.num_key_value_groups
    scores = torch.matmul(query, key.repeat_interleave(groups, 1).transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    pattern = F.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    mixed = torch.matmul(pattern, value.repeat_interleave(groups, 1))
    return mixed.transpose(1, 2).contiguous(), pattern


class NativeAttention(nn.Module):
    """Multi-head attention; heads may share keys and values."""

    def __init__(self, config: NativeConfig, layer: int) -> None:
        super().__init__()
        assert config.head_dim is not None  # set by the config
        assert config.num_key_value_heads is not None
        assert config.attention_scale is not None
        self.config, self.layer_idx = config, layer
        self.head_dim, self.is_causal = config.head_dim, config.is_causal
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = 1 / config.attention_scale
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer + 1
        width, shared = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width)
        self.k_proj = nn.Linear(config.hidden_size, shared)
        self.v_proj = nn.Linear(config.hidden_size, shared)
        self.o_proj = nn.Linear(width, config.hidden_size)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotation: Rotation | None = None,
        qk_positions: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output of attention, and the pattern if it was computed."""
        of_places = hidden_states if qk_positions is None else hidden_states + qk_positions
        query, key = self._heads(self.q_proj(of_places)), self._heads(self.k_proj(of_places))
        value = self._heads(self.v_proj(hidden_states))
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            adjacent = self.config.rotary_adjacent_pairs
            query, key = rotated(query, rotation, adjacent=adjacent), rotated(key, rotation, adjacent=adjacent)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        mixed, pattern = attend(
            self, query, key, value, attention_mask,
            scaling=self.scaling, softcap=self.config.attn_logit_softcapping,
        )  # fmt: skip
        return self.o_proj(mixed.flatten(2)), pattern

    def _heads(self, x: Tensor) -> Tensor:
        """`b p (h e)` as `b h p e`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
