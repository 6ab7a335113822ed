"""Tensors of fixed address: what changes from run to run, and what graphs write to."""

from __future__ import annotations

import torch
from torch import Tensor

_MARK = "_is_fixed_by_hookline"


def fixed(tensor: Tensor) -> Tensor:
    """Mark a tensor as one whose address graphs may rely on, and return it."""
    torch._dynamo.mark_static_address(tensor)
    setattr(tensor, _MARK, True)
    return tensor


def is_fixed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a compiled run, so that a graph may write to it."""
    return getattr(tensor, _MARK, False)
