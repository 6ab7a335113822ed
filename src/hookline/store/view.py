"""One point of a store as a long tensor, of which only the requested rows are read."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.store.store import Store

_GAP = 64
"""Rows closer together than this are read at once."""


class View:
    """One point of a store, indexed as a tensor: `store["fc1"][100:200]`, `[::10]`, `[[5, 2]]`, `[mask]`, `[:9, 3]`."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self.name, self.column = store, name, store.points[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with the rows as the first axis."""
        return (len(self._store), *self.column.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype as stored."""
        return self.column.torch_dtype

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, which: Any) -> Tensor:
        if isinstance(which, tuple):
            rows = self[which[0]] if which else self[:]
            inside = which[1:] if isinstance(which[0] if which else 0, int) else (slice(None), *which[1:])
            return rows[inside]
        if isinstance(which, slice):
            places = range(len(self))[which]
            is_span = places.step == 1
            return self._span(places.start, places.stop) if is_span else self._some(torch.tensor([*places]).long())
        if isinstance(which, list | Tensor) or hasattr(which, "__array__"):
            return self._some(self._numbers(which))
        row = self._checked(index(which))
        return self._span(row, row + 1)[0]

    def _numbers(self, which: Any) -> Tensor:
        """Row numbers or a mask as nonnegative row numbers."""
        rows = torch.as_tensor(which).cpu()
        if rows.dtype == torch.bool and rows.shape == (len(self),):
            return rows.nonzero().flatten()
        if rows.ndim > 1 or (rows.numel() and (rows.is_floating_point() or rows.dtype == torch.bool)):
            raise HooklineError(
                f"rows of {self.name!r} are selected by number or a mask of {len(self)}, not by {list(rows.shape)} of "
                f"{rows.dtype}"
            )
        for row in [] if not rows.numel() else [int(rows.min()), int(rows.max())]:
            self._checked(row)
        return torch.where(rows < 0, rows + len(self), rows).long()

    def _checked(self, row: int) -> int:
        if row not in range(-len(self), len(self)):
            raise IndexError(f"row {row} is out of range: there are {len(self)} rows")
        return row % len(self)

    def _some(self, rows: Tensor) -> Tensor:
        """Rows in any order; nearby rows are read together."""
        wanted, places = torch.unique(rows, return_inverse=True)
        ends = (wanted.diff() > _GAP).nonzero().flatten() + 1
        runs = [run for run in torch.tensor_split(wanted, ends) if len(run)]
        parts = [self._span(int(run[0]), int(run[-1]) + 1)[run - run[0]] for run in runs]
        return (torch.cat(parts) if parts else self._span(0, 0))[places]

    def _span(self, start: int, stop: int) -> Tensor:
        spans = self._store._spans(start, stop)
        parts = [self._store._column(shard, self.name, first, last) for shard, first, last in spans]
        return torch.cat(parts) if parts else torch.empty((0, *self.column.shape), dtype=self.dtype)

    def __repr__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.column.dtype}"
