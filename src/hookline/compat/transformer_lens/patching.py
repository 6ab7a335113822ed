"""Activation patching by TransformerLens's names, returning tensors; `hookline.experiments` returns labeled results."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from jaxtyping import Int
from torch import Tensor

from hookline.compat.transformer_lens._impl import sweeps
from hookline.compat.transformer_lens._impl.absent import refusing
from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer
from hookline.compat.transformer_lens.cache import ActivationCache

__all__ = [name for name in dir(sweeps) if name.startswith("get_act_patch_")]


def _tensor_of(sweep: sweeps.Sweep) -> Callable[..., Tensor]:
    """The sweep, returning a tensor. The metric may go by either of TransformerLens's names."""

    @wraps(sweep)
    def patch(
        model: HookedTransformer,
        corrupted_tokens: Int[Tensor, "batch pos"],
        clean_cache: ActivationCache,
        patching_metric: Callable[[Tensor], Tensor] | None = None,
        metric: Callable[[Tensor], Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        chosen = metric if patching_metric is None else patching_metric
        return sweep(model, corrupted_tokens, clean_cache, chosen, **options).values.to(model.cfg.device)

    return patch


globals().update({name: _tensor_of(getattr(sweeps, name)) for name in __all__})

__getattr__ = refusing("transformer_lens.patching")
