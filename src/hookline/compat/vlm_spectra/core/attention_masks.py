"""Hooks of attention masks: `lm.blocks.5.attn.hook_mask`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError, describe
from hookline.hooks import Hook, HookType


class MaskHook(Hook):
    """Calls a function `(module, args, kwargs, mask)` with the attention mask of each call of an attention module.

    The mask is what is added to the scores, [batch, 1 or heads, query, key]: 0 where a query may attend, -inf where it
    may not. It is built where the model passes none, or one of booleans, and it includes the keys of earlier steps of
    generation. The function returns a new mask, or None.
    """

    hook_type = HookType.PRE_FORWARD

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ARG002
        """New arguments, with the mask that the function returned."""
        new = self.function(module, args, kwargs, mask_of_call(module, args, kwargs))
        return None if new is None else (args, kwargs | {"attention_mask": new})

    @property
    def described(self) -> str:
        """The name in messages."""
        return describe(self.function)


def mask_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The mask that a call of an attention module adds to its scores."""
    x, mask = (args[0] if args else kwargs["hidden_states"]), kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim != 4:
        raise HooklineError(
            f"the attention mask of this implementation has {mask.ndim} axes, not [batch, head, query, key]: load the "
            f"model with attn_implementation='eager' or 'sdpa'"
        )
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        return mask
    if mask is None:
        rows, n_new = x.shape[:2]
        n_keys = _earlier(module, kwargs) + n_new
        mask = torch.ones(n_new, n_keys, dtype=torch.bool, device=x.device).tril(n_keys - n_new).expand(rows, 1, -1, -1)
    return torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, float("-inf"))


def _earlier(module: nn.Module, kwargs: dict[str, Any]) -> int:
    """The number of keys that the cache already has for this layer."""
    cache = kwargs.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length(getattr(module, "layer_idx", 0)))
