"""Stores as torch data sets: batches in a reproducible random order, or single rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hookline.errors import HooklineError
from hookline.store.stored_rows import Rows, joined

if TYPE_CHECKING:
    from hookline.store.store import Store


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
        starts = self._starts(random)
        pool: list[Rows] = []
        for start in starts:
            pool.append(self._store.rows(start, start + self._run(), self._points))
            if sum(map(len, pool)) >= self._pool_rows:
                left = yield from self._emitted(self._mixed(pool, random))
                pool = [left] if len(left) else []
        if pool:
            left = yield from self._emitted(self._mixed(pool, random))
            if len(left) and not self._drops_last:
                yield left

    def _run(self) -> int:
        """How many rows are read at once."""
        return _RUN if self._shuffles else self.batch_size

    def _starts(self, random: torch.Generator) -> list[int]:
        """The rows that this worker reads, in order."""
        starts = torch.arange(0, len(self._store), self._run())
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


_RUN = 256


class RowDataset(Dataset[dict[str, Tensor]]):
    """Single rows by number, as dictionaries: `example`, `position`, `token`, and each point by the requested name.

    A DataLoader collates them. `Batches` is faster, since it reads many rows at once.
    """

    def __init__(self, store: Store, points: str | Sequence[str] | None = None) -> None:
        self._store, self._points = store, store.select(points)
        asked = [points] if isinstance(points, str) else points or ()
        self._called = {store.select(name)[0]: name for name in asked if name in store}

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if row not in range(-len(self), len(self)):
            raise IndexError(f"row {row} is out of range: there are {len(self)} rows")
        row %= len(self)
        rows = self._store.rows(row, row + 1, self._points)
        places = {"example": rows.example[0], "position": rows.position[0], "token": rows.token[0]}
        return places | {self._called.get(name, name): x[0] for name, x in rows.activations.items()}
