"""The layers of a native transformer: norms, rotary and ALiBi positions, attention, MLPs and blocks.

Attention goes through transformers' attention interface.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hookline.compat.transformer_lens._impl.native.native_config import NativeConfig

Rotation: TypeAlias = tuple[Float[Tensor, "batch pos rotary"], Float[Tensor, "batch pos rotary"]]
"""Cosines and sines of the rotary angles of each position."""


def rotation(config: NativeConfig, position_ids: Int[Tensor, "batch pos"], dtype: torch.dtype) -> Rotation:
    """The rotary angles of each position, computed in float32 or wider."""
    assert config.rotary_dim is not None  # set by the config
    wide = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, config.rotary_dim, 2, device=position_ids.device, dtype=wide)
    frequency = config.rotary_base ** (-pair / config.rotary_dim)
    if config.rotary_by_parts is not None:
        factor, low, high, context = config.rotary_by_parts
        share = ((frequency * context / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # by turns in the old context
        frequency = frequency * (share + (1 - share) / factor)
    angles = position_ids[..., None].to(wide) * frequency
    angles = angles.repeat_interleave(2, -1) if config.rotary_adjacent_pairs else torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(
    x: Float[Tensor, "batch head pos d_head"], rotation: Rotation, adjacent: bool
) -> Float[Tensor, "batch head pos d_head"]:
    """Apply rotary positions to queries or keys."""
    cos, sin = (component[:, None] for component in rotation)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if adjacent:
        quarter = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        quarter = torch.cat([-second, first], -1)
    return torch.cat([turned * cos + quarter * sin, rest], -1)


def with_alibi(
    mask: Tensor | None, config: NativeConfig, kind: str, stream: Tensor, cache: Cache | None
) -> Float[Tensor, "batch head pos key"]:
    """An additive mask with the ALiBi bias, by distance and head, at the positions that this mask allows.

    Without a mask these are all positions, or with causal attention all earlier ones.
    """
    length, heads = stream.shape[1], config.num_attention_heads
    start, n_keys, first_key = 0, length, 0
    if cache is not None:
        start = cache.get_seq_length()
        n_keys, first_key = cache.get_mask_sizes(length, (config.layer_types or []).index(kind))
    queries = torch.arange(start, start + length, device=stream.device)[:, None]
    keys = torch.arange(first_key, first_key + n_keys, device=stream.device)
    slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device=stream.device))
    bias = (slopes[:, None, None] * (keys - queries).clamp(max=0))[None].to(stream.dtype)
    if mask is None:
        mask = (keys <= queries)[None, None] if config.is_causal else torch.ones_like(bias, dtype=torch.bool)
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else mask + bias


def make_norm(config: NativeConfig, kind: str, width: int | None = None) -> nn.Module:
    """A norm of this kind, by default of the width of the stream; `none` is the identity."""
    width = config.hidden_size if width is None else width
    if kind == "none":
        return nn.Identity()
    make = nn.LayerNorm if kind.startswith("LN") else nn.RMSNorm
    return make(width, config.norm_eps, elementwise_affine=not kind.endswith("Pre"))


class NormedEmbedding(nn.Embedding):
    """Embeddings followed by a LayerNorm."""

    def __init__(self, config: NativeConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.ln = make_norm(config, "LN")

    def forward(self, input: Tensor) -> Tensor:
        """The normalized embeddings of tokens."""
        return self.ln(super().forward(input))


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
            query, key = (rotated(x, rotation, self.config.rotary_adjacent_pairs) for x in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        options: Any = {"scaling": self.scaling, "softcap": self.config.attn_logit_softcapping}
        mixed, pattern = attend(self, query, key, value, attention_mask, **options)
        return self.o_proj(mixed.flatten(2)), pattern

    def _heads(self, x: Tensor) -> Tensor:
        """Split the last axis into heads: `b p (h e)` to `b h p e`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SoLU(nn.Module):
    """`x * softmax(x)`."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it along the last axis."""
        return x * x.softmax(-1)


class NativeMLP(nn.Module):
    """An MLP: linear, activation function, linear; optionally gated."""

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None  # set by the config
        width = config.intermediate_size
        self.is_gated = config.gated_mlp
        if self.is_gated:
            self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=not self.is_gated)
        self.act = SoLU() if config.hidden_act.startswith("solu") else ACT2FN[config.hidden_act]
        kind = "none" if config.hidden_act != "solu_ln" else "LN" if config.normalization == "LN" else "LNPre"
        self.ln = make_norm(config, kind, width)
        self.down_proj = nn.Linear(width, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The output of the MLP."""
        if self.is_gated:
            gate = self.act(self.gate_proj(hidden_states))
            return self.down_proj(gate * self.up_proj(hidden_states))
        return self.down_proj(self.ln(self.act(self.up_proj(hidden_states))))


class NativeBlock(GradientCheckpointingLayer):
    """One layer: attention and an optional MLP, each reading the normalized stream and adding to it."""

    def __init__(self, config: NativeConfig, layer: int) -> None:
        super().__init__()
        self.has_mlp, self.is_parallel = not config.attention_only, config.parallel_attn_mlp
        after = config.normalization.removesuffix("Pre")
        self.ln1 = make_norm(config, config.normalization)
        self.attn = NativeAttention(config, layer)
        if self.has_mlp:
            self.ln2 = make_norm(config, config.normalization)
            self.mlp = NativeMLP(config)
        self.ln1_post = make_norm(config, after) if config.norms_after else None
        self.ln2_post = make_norm(config, after) if config.norms_after and self.has_mlp else None

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """The stream after this layer; `options` go to attention."""
        attended, _ = self.attn(self.ln1(hidden_states), **options)
        attended = attended if self.ln1_post is None else self.ln1_post(attended)
        middle = hidden_states + attended
        if not self.has_mlp:
            return middle
        added = self.mlp(self.ln2(hidden_states if self.is_parallel else middle))
        return middle + (added if self.ln2_post is None else self.ln2_post(added))
