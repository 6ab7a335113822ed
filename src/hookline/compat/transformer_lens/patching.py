"""Activation patching by TransformerLens's names, returning tensors; `hookline.experiments` returns labeled results."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from hookline.compat.transformer_lens import sweeps
from hookline.compat.transformer_lens.absent import refusing
from hookline.compat.transformer_lens.cache import ActivationCache
from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer

Sweep = Callable[..., Float[Tensor, "..."]]


def _tensor_of(sweep: sweeps.ClassicSweep) -> Sweep:
    @wraps(sweep)
    def patch(
        model: HookedTransformer,
        corrupted_tokens: Int[Tensor, "batch pos"],
        clean_cache: ActivationCache,
        patching_metric: Callable[[Tensor], Tensor],
        **options: Any,
    ) -> Tensor:
        return sweep(model, corrupted_tokens, clean_cache, patching_metric, **options).values.to(model.cfg.device)

    return patch


def _every(sweep: sweeps.ClassicSweep) -> Sweep:
    """Accept TransformerLens's name of the metric argument."""
    one = _tensor_of(sweep)

    @wraps(sweep)
    def patch(model: Any, corrupted_tokens: Any, clean_cache: Any, metric: Any, **options: Any) -> Tensor:
        return one(model, corrupted_tokens, clean_cache, metric, **options)

    return patch


get_act_patch_resid_pre = _tensor_of(sweeps.get_act_patch_resid_pre)
get_act_patch_resid_mid = _tensor_of(sweeps.get_act_patch_resid_mid)
get_act_patch_attn_out = _tensor_of(sweeps.get_act_patch_attn_out)
get_act_patch_mlp_out = _tensor_of(sweeps.get_act_patch_mlp_out)

get_act_patch_attn_head_out_by_pos = _tensor_of(sweeps.get_act_patch_attn_head_out_by_pos)
get_act_patch_attn_head_q_by_pos = _tensor_of(sweeps.get_act_patch_attn_head_q_by_pos)
get_act_patch_attn_head_k_by_pos = _tensor_of(sweeps.get_act_patch_attn_head_k_by_pos)
get_act_patch_attn_head_v_by_pos = _tensor_of(sweeps.get_act_patch_attn_head_v_by_pos)
get_act_patch_attn_head_pattern_by_pos = _tensor_of(sweeps.get_act_patch_attn_head_pattern_by_pos)
get_act_patch_attn_head_pattern_dest_src_pos = _tensor_of(sweeps.get_act_patch_attn_head_pattern_dest_src_pos)

get_act_patch_attn_head_out_all_pos = _tensor_of(sweeps.get_act_patch_attn_head_out_all_pos)
get_act_patch_attn_head_q_all_pos = _tensor_of(sweeps.get_act_patch_attn_head_q_all_pos)
get_act_patch_attn_head_k_all_pos = _tensor_of(sweeps.get_act_patch_attn_head_k_all_pos)
get_act_patch_attn_head_v_all_pos = _tensor_of(sweeps.get_act_patch_attn_head_v_all_pos)
get_act_patch_attn_head_pattern_all_pos = _tensor_of(sweeps.get_act_patch_attn_head_pattern_all_pos)

get_act_patch_attn_head_all_pos_every = _every(sweeps.get_act_patch_attn_head_all_pos_every)
get_act_patch_attn_head_by_pos_every = _every(sweeps.get_act_patch_attn_head_by_pos_every)
get_act_patch_block_every = _every(sweeps.get_act_patch_block_every)

__getattr__ = refusing("transformer_lens.patching")
