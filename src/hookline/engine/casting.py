"""Casting: converting the result of an edit to the dtype of its point, unless that would change the edit.

Rounding a floating-point number is fine. Dropping the fraction of a number at a point of token ids, expert indices or
masks would be a different edit, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookline.engine.order import Kind
from hookline.errors import HooklineError


def cast(value: Tensor, like: Tensor) -> Tensor:
    """Return the value in the dtype and on the device of another tensor; raise if the dtype cannot represent it."""
    if value.is_complex() and not like.is_complex() and bool(value.imag.any()):
        raise HooklineError(f"a complex value for an activation of {like.dtype}")
    new = (value.real if value.is_complex() and not like.is_complex() else value).to(like.device, like.dtype)
    if new.dtype == value.dtype or new.is_floating_point() or new.is_complex() or new.is_meta:
        return new
    wrong = new.to(value.dtype) != value.to(new.device)
    if bool(wrong.any()):
        raise HooklineError(f"the value {value.to(new.device)[wrong][0].item()} does not fit into {like.dtype}")
    return new


@dataclass(frozen=True)
class Choices:
    """The valid indices at a point, 0 to `count` - 1. Others would read out of bounds or stop the device."""

    what: str
    count: int

    def wrong(self, chosen: Tensor, before: Tensor) -> str | None:
        """Return the problem with an edit as the end of a sentence; None if there is none."""
        bad = ((chosen < 0) | (chosen >= self.count)) & (chosen != before)
        if not bool(bad.any()):
            return None
        return f"chose the {self.what} {int(chosen[bad][0])}, but there are {self.count}: 0 to {self.count - 1}"


def choices_at(point: Any) -> Choices | None:
    """Return the valid indices at a point of chosen experts or token ids; None for other points."""
    if point.site.choices is not None:
        return point.site.choices
    if point.site.kind is not Kind.INPUT:
        return None
    embed = getattr(point.site.module, "base_layer", point.site.module)
    return Choices("token", embed.num_embeddings) if isinstance(embed, nn.Embedding) else None
