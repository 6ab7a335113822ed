"""Keys and values with one row per head, on a model whose heads share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.transformer import roles
from hookline.transformer.roles import child
from hookline.transformer.sites import head_counts
from hookline.weights.processing.swaps import Swaps, rounding


class Ungrouped:
    """A model in which every head has keys and values of its own: copies of its group's weights, until `undo`."""

    def __init__(self, model: HookedModel) -> None:
        self._points, self._swaps = model.index, Swaps()
        self._attributes: list[tuple[Any, str, int]] = []
        self._copies: list[tuple[nn.Parameter, Tensor]] = []
        tokens = model.example_tokens()
        before = _logits(model, tokens)
        for block in model.anatomy.blocks:
            if block.attn is not None:
                self._ungroup(block.attn, model.anatomy.main.config)
        self._points.refresh()
        if not torch.allclose(
            before, _logits(model, tokens), rtol=0, atol=rounding(before.dtype) * float(before.abs().max())
        ):
            self.undo()
            raise HooklineError(
                "the groups of this model's heads cannot be separated: to change one head, hook its row of "
                "hook_attn_scores, hook_pattern or hook_z"
            )

    def _ungroup(self, attn: Any, config: Any) -> None:
        heads, groups = head_counts(attn, config)
        modules = [child(attn, roles.KEY), child(attn, roles.VALUE)]
        if heads == groups:
            return
        if not all(type(module) is nn.Linear for module in modules) or not hasattr(attn, "num_key_value_groups"):
            raise HooklineError(
                f"{type(attn).__name__} has no separate linear maps to keys and values: to change one head, hook its "
                f"row of hook_attn_scores, hook_pattern or hook_z"
            )
        self._set(attn, "num_key_value_groups", 1)
        for module in modules:
            assert isinstance(module, nn.Linear)  # as checked
            for name, parameter in [
                (name, parameter) for name, parameter in module._parameters.items() if parameter is not None
            ]:
                repeated = (
                    parameter.detach().unflatten(0, (groups, -1)).repeat_interleave(heads // groups, 0).flatten(0, 1)
                )
                self._swaps.put(module, name, repeated)
                self._copies.append((module._parameters[name], repeated))  # type: ignore[arg-type]
            self._set(module, "out_features", module.out_features * heads // groups)

    def _set(self, owner: Any, name: str, value: int) -> None:
        self._attributes.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put the weights of the groups back; raises if the copies were changed."""
        if any(not torch.equal(copy, then.to(copy)) for copy, then in self._copies):
            raise HooklineError(
                "keys or values of single heads were changed or trained, and cannot be joined into groups again"
            )
        self._swaps.undo()
        for owner, name, value in reversed(self._attributes):
            setattr(owner, name, value)
        self._points.refresh()


@torch.no_grad()
def _logits(model: HookedModel, tokens: Tensor) -> Tensor:
    return model.module(tokens, use_cache=False).logits.float()
