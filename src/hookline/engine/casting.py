"""Casting: an edit's value in the dtype of its point, without a change that nobody asked for.

Fewer digits of a floating-point number are what the point has. A fraction lost at a point of token ids, expert indices
or masks is another edit, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookline.engine.order import Kind
from hookline.errors import HooklineError


def cast(value: Tensor, like: Tensor) -> Tensor:
    """The value in the dtype and on the device of another tensor; an error where that cannot hold it."""
    if value.is_complex() and not like.is_complex() and bool(value.imag.any()):
        raise HooklineError(f"a complex value for an activation of {like.dtype}")
    new = (value.real if value.is_complex() and not like.is_complex() else value).to(like.device, like.dtype)
    if new.dtype == value.dtype or new.is_floating_point() or new.is_complex() or new.is_meta:
        return new
    wrong = new.to(value.dtype) != value.to(new.device)
    if bool(wrong.any()):
        raise HooklineError(f"the value {value.to(new.device)[wrong][0].item()} cannot be held by {like.dtype}")
    return new


@dataclass(frozen=True)
class Choices:
    """The numbers that a point of indices may have, 0 to `count` - 1: kernels read past the end, or stop the device."""

    what: str
    count: int

    def wrong(self, chosen: Tensor, before: Tensor) -> str | None:
        """What is wrong with an edit, if anything."""
        bad = ((chosen < 0) | (chosen >= self.count)) & (chosen != before)
        if not bool(bad.any()):
            return None
        return f"chose the {self.what} {int(chosen[bad][0])}, but there are {self.count}: 0 to {self.count - 1}"


def choices_at(point: Any) -> Choices | None:
    """Of a point that has chosen experts, or ids that go into an embedding; None of any other."""
    if point.site.choices is not None:
        return point.site.choices
    if point.site.kind is not Kind.INPUT:
        return None
    embed = getattr(point.site.module, "base_layer", point.site.module)
    return Choices("token", embed.num_embeddings) if isinstance(embed, nn.Embedding) else None
