"""Mixtures of experts: the range of valid expert indices."""

from __future__ import annotations

from torch import nn

from hookline.values.casting import Choices


def choices_of(experts: nn.Module) -> Choices | None:
    """The valid expert indices; None if the number of experts is not known."""
    count = _count(experts)
    return Choices("expert", count, has_marks=True) if count is not None else None


def _count(experts: nn.Module) -> int | None:
    if isinstance(count := getattr(experts, "num_experts", None), int):
        return count
    weights = [parameter.shape[0] for parameter in experts.parameters(recurse=False) if parameter.ndim == 3]
    return weights[0] if weights else None
