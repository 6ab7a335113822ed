"""Casting: converting the result of an edit to the dtype of its point, unless that would change the edit.

Rounding a floating-point number is fine. Dropping the fraction of a number at a point of token ids, expert indices or
masks would be a different edit, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


def check_cache_dtype(dtype: torch.dtype | None) -> None:
    """Raise if a cache would lose its values in this dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise HooklineError(
            f"dtype={dtype!r}: a cache of floating-point activations needs a floating dtype, such as torch.float16 or "
            f"torch.bfloat16. For integers, convert single tensors: cache[name].round().to(torch.int8)"
        )


def check_cache_device(device: Any) -> None:
    """Raise if torch knows no such device."""
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise HooklineError(f'device={device!r} must be a device of torch, such as "cpu" or "cuda:0"') from error


def is_narrowed(x: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a floating-point tensor would have a smaller range in another floating dtype."""
    if dtype is None or not x.is_floating_point():
        return False
    return torch.finfo(x.dtype).max > torch.finfo(dtype).max


def overflows(x: Tensor, new: Tensor) -> Tensor:
    """Whether finite values of `x` are infinite in `new`, as a tensor that is not read yet.

    The lowest value of a dtype, which masks attention scores, may become -inf.
    """
    lost = new.isinf() & (x.isfinite() & (x != torch.finfo(x.dtype).min)).to(new.device)
    return lost.any()


def overflow_problem(name: str, dtype: torch.dtype) -> str:
    """The error message for values that overflow, without the advice."""
    return f"{name} has values that overflow {dtype}, whose maximum is {torch.finfo(dtype).max:.4g}"


@dataclass(frozen=True)
class Choices:
    """The valid indices at a point, 0 to `count` - 1. Others would read out of bounds or stop the device."""

    what: str
    count: int
    has_marks: bool = False
    """Whether the model itself may have other numbers, where nothing is chosen."""

    def wrong(self, chosen: Tensor, before: Tensor) -> str | None:
        """Return the problem with an edit as the end of a sentence; None if there is none."""
        bad = self._outside(chosen) & (chosen != before)
        if not bool(bad.any()):
            return None
        if not self.has_marks and bool(self._outside(before).any()):
            return None  # an embedding of positions that gets tokens for their shape: nothing is looked up there
        return f"chose the {self.what} {int(chosen[bad][0])}, but there are {self.count}: 0 to {self.count - 1}"

    def _outside(self, chosen: Tensor) -> Tensor:
        return (chosen < 0) | (chosen >= self.count)
