"""The sweeps of the classic patching module, by their classic names: each is one call of `patching.sweep`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hookline.engine.cache import ActivationCache
from hookline.experiments.core.prompts import Prompt
from hookline.experiments.patching import sweep
from hookline.experiments.result import Result
from hookline.model import HookedModel


class ClassicSweep(Protocol):
    """A sweep that knows what it goes over."""

    def __call__(
        self,
        model: HookedModel,
        corrupted_tokens: Prompt,
        clean_cache: ActivationCache,
        patching_metric: Callable[..., Any],
        **options: Any,
    ) -> Result:
        """Patch clean activations into the corrupted run."""


def _classic(points: str | Sequence[str], *over: str) -> ClassicSweep:
    def patch(
        model: HookedModel,
        corrupted_tokens: Prompt,
        clean_cache: ActivationCache,
        patching_metric: Callable[..., Any],
        **options: Any,
    ) -> Result:
        return sweep(model, clean_cache, corrupted_tokens, patching_metric, points=points, over=over, **options)

    patch.__doc__ = (
        f"Clean {points if isinstance(points, str) else ', '.join(points)} into the corrupted run, by {over}."
    )
    return patch


get_act_patch_resid_pre = _classic("resid_pre", "layer", "pos")
get_act_patch_resid_mid = _classic("resid_mid", "layer", "pos")
get_act_patch_attn_out = _classic("attn_out", "layer", "pos")
get_act_patch_mlp_out = _classic("mlp_out", "layer", "pos")

get_act_patch_attn_head_out_by_pos = _classic("z", "layer", "pos", "head")
get_act_patch_attn_head_q_by_pos = _classic("q", "layer", "pos", "head")
get_act_patch_attn_head_k_by_pos = _classic("k", "layer", "pos", "head")
get_act_patch_attn_head_v_by_pos = _classic("v", "layer", "pos", "head")
get_act_patch_attn_head_pattern_by_pos = _classic("pattern", "layer", "head", "pos")
get_act_patch_attn_head_pattern_dest_src_pos = _classic("pattern", "layer", "head", "pos", "src")

get_act_patch_attn_head_out_all_pos = _classic("z", "layer", "head")
get_act_patch_attn_head_q_all_pos = _classic("q", "layer", "head")
get_act_patch_attn_head_k_all_pos = _classic("k", "layer", "head")
get_act_patch_attn_head_v_all_pos = _classic("v", "layer", "head")
get_act_patch_attn_head_pattern_all_pos = _classic("pattern", "layer", "head")

_HEAD = ("z", "q", "k", "v", "pattern")
get_act_patch_attn_head_all_pos_every = _classic(_HEAD, "point", "layer", "head")
get_act_patch_attn_head_by_pos_every = _classic(_HEAD, "point", "layer", "pos", "head")
get_act_patch_block_every = _classic(("resid_pre", "attn_out", "mlp_out"), "point", "layer", "pos")
