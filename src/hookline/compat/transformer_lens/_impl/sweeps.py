"""The sweeps of TransformerLens's patching module, by their names there: each is one call of `patching.sweep`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hookline.engine import ActivationCache
from hookline.experiments.core.prompts import Prompt
from hookline.experiments.patching import sweep
from hookline.experiments.result import Result
from hookline.model import HookedModel

Sweep: TypeAlias = Callable[..., Result]


def _sweep(points: str, over: str) -> Sweep:
    """A function that patches clean activations of these points into a corrupted run, one at a time."""

    def patch(
        model: HookedModel,
        corrupted_tokens: Prompt,
        clean_cache: ActivationCache,
        patching_metric: Callable[..., Any],
        **options: Any,
    ) -> Result:
        point_names = points.split() if " " in points else points
        return sweep(
            model, clean_cache, corrupted_tokens, patching_metric, points=point_names, over=over.split(), **options
        )

    patch.__doc__ = f"Patch clean {points.replace(' ', ', ')} into the corrupted run, over {over.replace(' ', ', ')}."
    return patch


get_act_patch_resid_pre = _sweep("resid_pre", "layer pos")
get_act_patch_resid_mid = _sweep("resid_mid", "layer pos")
get_act_patch_attn_out = _sweep("attn_out", "layer pos")
get_act_patch_mlp_out = _sweep("mlp_out", "layer pos")

get_act_patch_attn_head_out_by_pos = _sweep("z", "layer pos head")
get_act_patch_attn_head_q_by_pos = _sweep("q", "layer pos head")
get_act_patch_attn_head_k_by_pos = _sweep("k", "layer pos head")
get_act_patch_attn_head_v_by_pos = _sweep("v", "layer pos head")
get_act_patch_attn_head_pattern_by_pos = _sweep("pattern", "layer head pos")
get_act_patch_attn_head_pattern_dest_src_pos = _sweep("pattern", "layer head pos src")

get_act_patch_attn_head_out_all_pos = _sweep("z", "layer head")
get_act_patch_attn_head_q_all_pos = _sweep("q", "layer head")
get_act_patch_attn_head_k_all_pos = _sweep("k", "layer head")
get_act_patch_attn_head_v_all_pos = _sweep("v", "layer head")
get_act_patch_attn_head_pattern_all_pos = _sweep("pattern", "layer head")

get_act_patch_attn_head_all_pos_every = _sweep("z q k v pattern", "point layer head")
get_act_patch_attn_head_by_pos_every = _sweep("z q k v pattern", "point layer pos head")
get_act_patch_block_every = _sweep("resid_pre attn_out mlp_out", "point layer pos")
