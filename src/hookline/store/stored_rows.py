"""What a store returns: rows, one point as a long tensor, and torch data sets for training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hookline.errors import HooklineError, unknown_point

if TYPE_CHECKING:
    from hookline.store.store import Store

_GAP = 64
"""Rows closer together than this are read at once."""

_RUN = 256
"""The number of consecutive rows that are read at once in random order."""


@dataclass(frozen=True)
class Rows:
    """The activations of some tokens: `rows["blocks.0.hook_resid_post"]` is [row, d_model].

    Row `i` belongs to the token `token[i]` at `position[i]` of the example `example[i]`. Positions count from the
    text's first token, without padding. For networks without tokens, a row is a sample, and `position` and `token` are
    -1.
    """

    example: Int[Tensor, " row"]
    position: Int[Tensor, " row"]
    token: Int[Tensor, " row"]
    activations: Mapping[str, Tensor]
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Other names of points, and the names in `activations` they refer to."""

    def __len__(self) -> int:
        return len(self.example)

    def __getitem__(self, point: str) -> Tensor:
        name = point if point in self.activations else self.names.get(point, "")
        if name not in self.activations:
            raise unknown_point(point, self.activations)
        return self.activations[name]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Rows:
        """Returns a copy on another device."""
        return _combined(lambda x: x.to(device, non_blocking=non_blocking), self)

    def pin_memory(self) -> Rows:
        """Returns a copy in pinned memory; a DataLoader calls this."""
        return _combined(Tensor.pin_memory, self)

    def pick(self, which: Tensor | slice) -> Rows:
        """Returns some of the rows, in that order."""
        return _combined(lambda x: x[which], self)

    def __repr__(self) -> str:
        shapes = (
            f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in self.activations.items()
        )
        span = f"{int(self.example.min())} to {int(self.example.max())}" if len(self) else "none"
        return f"Rows: {len(self)} of examples {span}; {', '.join(shapes)}"


def joined(parts: Sequence[Rows]) -> Rows:
    """Concatenate several."""
    return parts[0] if len(parts) == 1 else _combined(lambda *xs: torch.cat(xs), *parts)


def _combined(change: Callable[..., Tensor], *parts: Rows) -> Rows:
    """Apply a function to each column of the parts."""
    names = ("example", "position", "token")
    example, position, token = (change(*(getattr(part, name) for part in parts)) for name in names)
    points = {name: change(*(part.activations[name] for part in parts)) for name in parts[0].activations}
    return Rows(example, position, token, points, parts[0].names)


class View:
    """One point of a store, indexed as a tensor: `store["fc1"][100:200]`, `[::10]`, `[[5, 2]]`, `[mask]`, `[:9, 3]`.

    Only the requested rows are read.
    """

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
        which, *inside = (which or (slice(None),)) if isinstance(which, tuple) else (which,)
        if isinstance(which, slice):
            places = range(len(self))[which]
            is_span = places.step == 1
            rows = self._span(places.start, places.stop) if is_span else self._some(torch.tensor([*places]).long())
            return rows[(slice(None), *inside)]
        numbers = self._numbers(torch.as_tensor(which).cpu())
        return self._some(numbers.reshape(-1))[(slice(None) if numbers.ndim else 0, *inside)]

    def _numbers(self, rows: Tensor) -> Tensor:
        """Row numbers or a mask as nonnegative row numbers."""
        if rows.dtype == torch.bool and rows.shape == (len(self),):
            return rows.nonzero().flatten()
        if rows.ndim > 1 or (rows.numel() and (rows.is_floating_point() or rows.dtype == torch.bool)):
            raise HooklineError(
                f"rows of {self.name!r} are selected by number or a mask of {len(self)}, not by {list(rows.shape)} of "
                f"{rows.dtype}"
            )
        for row in [] if not rows.numel() else [int(rows.min()), int(rows.max())]:
            self._store.row_number(row)
        return torch.where(rows < 0, rows + len(self), rows).long()

    def _some(self, rows: Tensor) -> Tensor:
        """Rows in any order; nearby rows are read together."""
        unique_rows, places = torch.unique(rows, return_inverse=True)
        ends = (unique_rows.diff() > _GAP).nonzero().flatten() + 1
        runs = [run for run in torch.tensor_split(unique_rows, ends) if len(run)]
        parts = [self._span(int(run[0]), int(run[-1]) + 1)[run - run[0]] for run in runs]
        return (torch.cat(parts) if parts else self._span(0, 0))[places]

    def _span(self, start: int, stop: int) -> Tensor:
        return self._store._read([self.name], self._store._spans(start, stop))[0]

    def __repr__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.column.dtype}"


class Batches(IterableDataset[Rows]):
    """All rows of a store, each once, in batches of `Rows`.

        for batch in store.batches(4096, "blocks.3.hook_resid_post", shuffle=True, seed=0, epoch=2):
            batch["blocks.3.hook_resid_post"]            # [4096, d_model]

    A DataLoader takes it with `batch_size=None`; its workers split the rows among them.

    With `shuffle`, runs of 256 rows are read in random order and mixed in a pool of `pool_rows`, which is all that is
    held in memory. The order depends only on the seed, the epoch and the number of workers.
    """

    def __init__(
        self,
        store: Store,
        batch_size: int,
        points: str | Sequence[str] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        pool_rows: int = 65536,
    ) -> None:
        if batch_size < 1 or pool_rows < 1:
            raise HooklineError(f"batch_size and pool_rows must be at least 1, not {batch_size} and {pool_rows}")
        self._store, self._points, self.batch_size = store, store.select(points), batch_size
        self._shuffles, self._seed, self.epoch = shuffle, seed, epoch
        self._drops_last, self._pool_rows = drop_last, max(pool_rows, batch_size) if shuffle else batch_size

    def set_epoch(self, epoch: int) -> None:
        """Select the order of another epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Rows]:
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        run = _RUN if self._shuffles else self.batch_size  # how many rows are read at once
        pool: list[Rows] = []
        for start in self._starts(run, random):
            pool.append(self._store.rows(start, start + run, self._points))
            if sum(map(len, pool)) >= self._pool_rows:
                left = yield from self._emitted(self._mixed(pool, random))
                pool = [left] if len(left) else []
        if pool:
            left = yield from self._emitted(self._mixed(pool, random))
            if len(left) and not self._drops_last:
                yield left

    def _starts(self, run: int, random: torch.Generator) -> list[int]:
        """The first rows of the runs that this worker reads, in order."""
        starts = torch.arange(0, len(self._store), run)
        if self._shuffles:
            starts = starts[torch.randperm(len(starts), generator=random)]
        worker = get_worker_info()
        if worker is not None:
            starts = starts[worker.id :: worker.num_workers]
            random.manual_seed(int(torch.randint(2**40, (), generator=random)) + worker.id)
        return starts.tolist()

    def _mixed(self, pool: list[Rows], random: torch.Generator) -> Rows:
        rows = joined(pool)
        return rows.pick(torch.randperm(len(rows), generator=random)) if self._shuffles else rows

    def _emitted(self, rows: Rows) -> Generator[Rows, None, Rows]:
        """Yield whole batches; return the remainder."""
        whole = len(rows) - len(rows) % self.batch_size
        for start in range(0, whole, self.batch_size):
            yield rows.pick(slice(start, start + self.batch_size))
        return rows.pick(slice(whole, None))


class RowDataset(Dataset[dict[str, Tensor]]):
    """Single rows by number, as dictionaries: `example`, `position`, `token`, and each point by the requested name.

    A DataLoader collates them. `Batches` is faster, since it reads many rows at once.
    """

    def __init__(self, store: Store, points: str | Sequence[str] | None = None) -> None:
        self._store, self._points = store, store.select(points)
        requested = [points] if isinstance(points, str) else points or ()
        self._called = {store.select(name)[0]: name for name in requested if name in store}

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        row = self._store.row_number(row)
        rows = self._store.rows(row, row + 1, self._points)
        places = {"example": rows.example[0], "position": rows.position[0], "token": rows.token[0]}
        return places | {self._called.get(name, name): x[0] for name, x in rows.activations.items()}
