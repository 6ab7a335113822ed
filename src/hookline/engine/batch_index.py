"""Rows of a batch: which of them, and what of a tensor or a text is theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HooklineError

Rows: TypeAlias = int | slice | Sequence[int] | Tensor
"""Which rows of a batch: one, without its axis then; or several."""

one_draw: ContextVar[int | None] = ContextVar("hookline_one_draw", default=None)
"""How many rows the batch has, while all of them get the same random numbers."""


@contextmanager
def drawn_once(count: int) -> Iterator[None]:
    """While a batch of `count` rows runs in an experiment: a row has the noise that it has when it runs by itself."""
    token = one_draw.set(count)
    try:
        yield
    finally:
        one_draw.reset(token)


def checked_rows(which: Rows, count: int) -> Any:
    """The rows as torch takes them, if there are such."""
    if isinstance(which, slice):
        return which
    if isinstance(which, Tensor) and which.dtype == torch.bool:
        if which.shape != (count,):
            raise HooklineError(f"a mask over {list(which.shape)} rows, but there are {count}")
        return which.nonzero().flatten().tolist()
    found = which.tolist() if isinstance(which, Tensor) else which
    for row in [found] if isinstance(found, int) else found:
        if row not in range(-count, count):
            raise HooklineError(f"row {row!r}, but there are {count}")
    return found if isinstance(found, int) else list(found)


def of_rows(x: Tensor, name: str, which: Any, count: int) -> Tensor:
    """Some rows of a tensor that has `count` of them, or the same for all."""
    if x.ndim == 0:
        return x
    if x.shape[0] == count:
        return x[which]
    if x.shape[0] == 1:  # the same for all rows
        return x[0] if isinstance(which, int) else x
    raise HooklineError(
        f"{name!r} has the shape {list(x.shape)}: its first axis is not that of the {count} rows, so leave it out"
    )
