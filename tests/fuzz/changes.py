"""What hooks do to activations and gradients. Both sides make a function of their own, which may keep state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RaisedError(Exception):
    """What the hooks that fail raise."""


def is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def ramp(x: Tensor) -> Tensor:
    """A vector along the last axis."""
    return torch.linspace(-1, 1, x.shape[-1], dtype=torch.float64).to(x.dtype)


def drawn(x: Tensor) -> Tensor:
    """Random numbers, in an order that does not depend on the memory of `x`."""
    return torch.randn(x.shape, dtype=x.dtype, device=x.device)


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def none_of(_result: Tensor) -> None:
    """Nothing: a hook that only reads computes something for itself."""


def part(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., ::2] = 0.25
    return x


def row(x: Tensor) -> Tensor:
    x = x.clone()
    x[:1] = 0
    return x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda x: x * 0.5 + 0.125,
    "negate": lambda x: -x,
    "third": lambda x: x * 0.3,
    "vector": lambda x: x + ramp(x),
    "leaky": lambda x: torch.where(x > 0, x, x * 0.1),
    "roll": lambda x: x.roll(1, 0) * 0.9,
    "part": part,
    "row": row,
    "same": lambda x: x * 1,
    "wide": lambda x: x.double() * 0.5,
    "strided": lambda x: (x * 0.75).transpose(0, -1).contiguous().transpose(0, -1),
}
DRAWING: dict[str, Callable[[Tensor], Tensor | None]] = {
    "noise": lambda x: x + 0.1 * drawn(x),
    "sample": lambda x: none_of(rows(x.detach()) @ rows(drawn(x)).T),
}
"""Changes that draw random numbers; the second only reads, and multiplies matrices."""
KEEPING = ("running", "calls", "mean")
"""Changes that keep state from call to call."""


def made(change: str) -> Callable[[Tensor], Tensor | None]:
    """A new function for a change; those that only read return None."""
    if change == "read":
        return lambda x: None
    if change == "raise":
        return _raise
    if change in KEEPING:
        return Keeping(change)
    function = DRAWING[change] if change in DRAWING else CHANGES[change]
    return lambda x: function(x) if is_number(x) else rotated(x)


def rotated(x: Tensor) -> Tensor:
    """Indices and masks trade places."""
    return x.roll(1, -1) if x.ndim else x.clone()


def _raise(x: Tensor) -> Tensor:
    raise RaisedError("a hook that fails")


class Keeping:
    """A function that counts its calls, or sums what it gets, in a tensor or a number."""

    def __init__(self, change: str) -> None:
        self.change, self.count, self.total = change, 0, torch.zeros((), dtype=torch.float64)

    def __call__(self, x: Tensor) -> Tensor | None:
        self.count += 1
        if not is_number(x):
            return None
        self.total.add_(x.detach().double().mean())
        if self.change == "calls":
            return None
        shift = self.count if self.change == "running" else self.total.item()
        return x + 0.125 * shift


def in_place(function: Callable[[Tensor], Tensor | None], *, through_data: bool = False) -> Callable[[Tensor], None]:
    """The same change, written to the activation."""

    def write(x: Tensor) -> None:
        new = function(x)
        if new is not None:
            (x.data if through_data else x).copy_(new.detach() if through_data else new)

    return write


def capped(x: Tensor) -> Tensor:
    """The projection on the ramp is between -0.25 and 0.5."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    along = (wide * unit(wide)).sum(-1, keepdim=True)
    return (wide + (along.clamp(-0.25, 0.5) - along) * unit(wide)).to(x.dtype)


def added_at_norm(x: Tensor) -> Tensor:
    """Plus half of the norm of each vector, along the ramp."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide + 0.5 * wide.norm(dim=-1, keepdim=True) * unit(wide)).to(x.dtype)


EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "scale": lambda x: x * -1.5,
    "add": lambda x: x + 2.0 * ramp(x),
    "replace": lambda x: torch.full_like(x, 0.25),
    "project_out": lambda x: x - (x * unit(x)).sum(-1, keepdim=True) * unit(x),
    "reflect": lambda x: x - 2 * (x * unit(x)).sum(-1, keepdim=True) * unit(x),
    "cap": capped,
    "match_norm": added_at_norm,
}
"""Edits as data, written out."""


def unit(x: Tensor) -> Tensor:
    return ramp(x) / ramp(x).norm()


class Text(NamedTuple):
    """Where the tokens of a batch are: the position in its text of each [row, column], -1 for padding.

    An activation has the last of these columns: in a generation, those of the pass, or as keys have, all so far.
    """

    positions: Tensor
    lengths: Tensor


def edited(x: Tensor, change: str, where: dict[str, Any], text: Text | None = None) -> Tensor:
    """What an edit as data makes of an activation; `where` holds indices that act on axes 1, 2 and -1.

    Positions count in the text, if it is said where that is.
    """
    inside = torch.ones(x.shape, dtype=torch.bool)
    if text is not None and where.get("pos") is not None:
        asked = torch.tensor(where["pos"])
        asked = torch.where(asked < 0, asked + text.lengths[:, None], asked)
        chosen = (text.positions[:, -x.shape[1] :, None] == asked[:, None]).any(-1)
        inside = inside & chosen.view(*chosen.shape, *[1] * (x.ndim - 2))
        where = {**where, "pos": None}
    for name, axis in (("pos", 1), ("head", 2), ("neuron", -1)):
        if (indices := where.get(name)) is not None:
            chosen = torch.zeros(x.shape[axis], dtype=torch.bool)
            chosen[list(indices)] = True
            shape = [1] * x.ndim
            shape[axis] = -1
            inside = inside & chosen.view(shape)
    if where.get("mask"):
        inside = inside & (torch.arange(x.shape[-1]) % 2 == 0)
    new = torch.where(inside, EDITS[change](x), x)
    if x.layout != torch.strided or new.dtype != x.dtype:
        return new
    return torch.empty_like(x).copy_(new)  # dropout draws its numbers in the order of the memory
