"""`transformer_lens.tools.analysis`: direct logit attribution. `hookline.experiments` has the other analyses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.direct_paths import get_act_patch_direct_path as get_act_patch_direct_path
from hookline.compat.transformer_lens._impl.direct_paths import (
    get_act_patch_direct_path_all_sources as get_act_patch_direct_path_all_sources,
)
from hookline.compat.transformer_lens._impl.lens_errors import LensValueError
from hookline.compat.transformer_lens._impl.slices import SliceInput

Unit = Literal["component", "layer", "head"]


@dataclass
class DirectLogitAttribution:
    """The contribution of each component to a logit or to a difference of logits; `labels` name the first axis."""

    attribution: Tensor
    labels: list[str]
    unit: Unit

    def top(self, k: int = 5) -> list[tuple[str, float]]:
        """The components with the largest mean, and that mean."""
        means = self.attribution.reshape(len(self.labels), -1).mean(1)
        values, indices = means.topk(min(k, len(means)))
        return [(self.labels[index], value) for index, value in zip(indices.tolist(), values.tolist(), strict=True)]


def direct_logit_attribution(
    model: Any,
    input: str | Sequence[str] | Tensor | None = None,
    answer_tokens: Any = None,
    incorrect_tokens: Any = None,
    *,
    unit: Unit = "component",
    pos: SliceInput = -1,
    cache: Any = None,
) -> DirectLogitAttribution:
    """How much each component, layer or head contributes to the logit of the answer, or to its lead over another token.

    The model runs once, unless a cache of a run is given.
    """
    if unit not in get_args(Unit):
        raise LensValueError(f"unit must be one of {get_args(Unit)}, not {unit!r}")
    if answer_tokens is None or (input is None and cache is None):
        raise LensValueError("pass answer_tokens, and an input or the cache of a run")
    if cache is None:
        _, cache = model.run_with_cache(input)
    options: dict[str, Any] = {"pos_slice": pos, "return_labels": True}
    if unit == "component":
        stack, labels = cache.decompose_resid(**options)
    elif unit == "layer":
        stack, labels = cache.accumulated_resid(incl_mid=True, **options)
    else:
        stack, labels = cache.stack_head_results(incl_remainder=True, **options)
    attribution = cache.logit_attrs(stack, answer_tokens, incorrect_tokens, pos, has_batch_dim=cache.has_batch_dim)
    return DirectLogitAttribution(attribution, labels, unit)


__getattr__ = refusing("transformer_lens.tools.analysis")
