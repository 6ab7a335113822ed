"""Rows of a batch: selecting them from a tensor, and drawing the same random numbers for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HooklineError

Rows: TypeAlias = int | slice | Sequence[int] | Tensor
"""Rows of a batch: one, which drops the axis, or several."""

one_draw: ContextVar[int | None] = ContextVar("hookline_one_draw", default=None)
"""The number of rows in the batch, while all of them get the same random numbers."""


@contextmanager
def drawn_once(count: int) -> Iterator[None]:
    """Give every row of a batch of `count` rows the noise that it would get by itself."""
    token = one_draw.set(count)
    try:
        yield
    finally:
        one_draw.reset(token)


def checked_rows(which: Rows, count: int) -> Any:
    """Return the rows as an index for torch, or raise if the batch does not have them."""
    if isinstance(which, slice):
        return which
    which = which.cpu() if isinstance(which, Tensor) else which
    try:
        return torch.arange(count)[list(which) if isinstance(which, Sequence) else which].tolist()
    except (IndexError, TypeError) as error:
        raise HooklineError(f"row {which!r} is not in this batch of {count}: {error}") from error


def of_rows(x: Tensor, name: str, which: Any, count: int) -> Tensor:
    """Return some rows of a tensor that has `count` of them, or one that all of them share."""
    if x.ndim == 0:
        return x
    if x.shape[0] == count:
        return x[which]
    if x.shape[0] == 1:
        return x[0] if isinstance(which, int) else x
    raise HooklineError(
        f"{name!r} has the shape {list(x.shape)}: its first axis is not the batch of {count} rows, so leave it out"
    )
