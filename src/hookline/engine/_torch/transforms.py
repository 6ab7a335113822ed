"""Tensors inside `torch.func.grad`, `vmap` and similar functions, which wrap others.

Why: their memory cannot be shared, and the tensor inside counts the writes.
Needs: a test for such tensors, and the tensor that one wraps.
If it does not hold, no hook can be attached: the first raises an error.
"""

from __future__ import annotations

import torch

from hookline.engine._torch.proofs import insist, private

is_wrapped = private(torch, "_C._functorch.is_functorch_wrapped_tensor")
unwrapped = private(torch, "_C._functorch.get_unwrapped")


def probe() -> None:
    """A tensor in `vmap` wraps the one outside."""
    whole = torch.ones(2, 3)
    inside = []

    def look(x: torch.Tensor) -> torch.Tensor:
        inside.append((is_wrapped(x), unwrapped(x).shape))
        return x * 1

    torch.func.vmap(look)(whole)
    insist(inside == [(True, whole.shape)], "a tensor inside `vmap` wraps the one outside")
    insist(not is_wrapped(whole), "a tensor outside of all transforms wraps nothing")
