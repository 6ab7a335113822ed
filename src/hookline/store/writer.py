"""The writer: shards are written by threads of their own, while the model computes the rows of the next."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from hookline.errors import StoreError
from hookline.store.buffers import Buffer, Copier
from hookline.store.folders import Folder
from hookline.store.ledger import Ledger
from hookline.store.manifest import Manifest, Progress, Shard, differences
from hookline.store.selection import Batch
from hookline.store.shards import columns_of, stage_shard

THREADS = 4
"""How many shards are written at once. One file takes some 1 to 2 GB a second; a model on a GPU gives 3 and more."""


class Writer:
    """Takes batches of rows, and puts them into shards of whole batches. A context: leave it and the threads are gone.

    While one buffer is filled, others are written. There are two of them as long as a shard is written before the next
    is full, and at most `THREADS + 1`; then whoever adds waits. Where a shard ends depends on the batches alone, so a
    harvest that was interrupted writes the same shards as one that was not.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, *, shard_rows: int, is_pinned: bool, narrowed: Collection[str]
    ) -> None:
        self._folder, self._about, self._narrowed = folder, manifest.about, narrowed
        self._shard_rows, self._is_pinned = shard_rows, is_pinned
        self._columns = columns_of(manifest.about)
        self._ledger = Ledger(folder, manifest)
        self._copier = Copier()
        self._buffer: Buffer | None = None
        self._free = list[Buffer]()
        self._handed_over = manifest.shards[-1] if manifest.shards else None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="hookline-store")
        self._writing = list[Future[Buffer]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Shards that are being written are finished. What is in the buffer is left: it is computed again, alike.
        self._copier.finish()
        self._threads.shutdown(wait=True)
        self._ledger.discard()

    def add(self, batch: Batch, sources: dict[str, Tensor], before: Progress) -> None:
        """Store the rows of a batch. `before` is how far the data set was looked at when it began."""
        self._collect()
        self._check_shapes(sources)
        if self._buffer is not None and self._buffer.rows + batch.rows > self._shard_rows:
            self._hand_over(self._buffer, before, is_last=False)
            self._buffer = None
        if self._buffer is None:
            self._buffer = self._empty_buffer(batch.rows)
        targets = self._buffer.take(batch.rows)
        targets["@example"].copy_(batch.example)
        targets["@position"].copy_(batch.position)
        targets["@token"].copy_(batch.token)
        self._buffer.events += self._copier.copy(sources, batch.index, targets)

    def finish(self, progress: Progress) -> None:
        """Write what is left, as the last shard, and wait for all that is being written."""
        if self._buffer is not None:
            self._hand_over(self._buffer, progress, is_last=True)
        wait(self._writing)
        self._collect()

    def _empty_buffer(self, rows: int) -> Buffer:
        """One with room for a shard, or for so many rows if these are more."""
        while not self._free and len(self._writing) > THREADS:
            wait(self._writing, return_when=FIRST_COMPLETED)
            self._collect()
        if self._free and self._free[-1].capacity >= rows:
            return self._free.pop()
        del self._free[-1:]  # one that is too small makes way
        return Buffer(self._columns, max(rows, self._shard_rows), is_pinned=self._is_pinned)

    def _hand_over(self, buffer: Buffer, progress: Progress, *, is_last: bool) -> None:
        self._handed_over = Shard.after(self._handed_over, buffer.rows, progress, is_last=is_last)
        self._writing.append(self._threads.submit(self._write, buffer, self._handed_over))

    def _collect(self) -> None:
        """Take back the buffers that are written; raise what went wrong with one."""
        done = [each for each in self._writing if each.done()]
        self._writing = [each for each in self._writing if each not in done]
        self._free += [each.result() for each in done]

    def _write(self, buffer: Buffer, shard: Shard) -> Buffer:
        """In a thread: the shard, and what is to be done to make it part of the store."""
        tensors = buffer.filled()
        self._check_range(tensors)
        try:
            self._ledger.enter(stage_shard(self._folder, self._about, shard, tensors))
        except OSError as error:
            raise cannot_write(self._folder, self._ledger.manifest, error) from error
        buffer.clear()
        return buffer

    def _check_shapes(self, sources: dict[str, Tensor]) -> None:
        wanted = {name: each.shape for name, each in self._about.points.items()}
        found = {name: tuple(x.shape[1:]) for name, x in sources.items()}
        if unlike := differences(found, wanted):
            raise StoreError(f"the points do not give the same in every batch: {'; '.join(unlike[:3])}")

    def _check_range(self, tensors: dict[str, Tensor]) -> None:
        for name in self._narrowed:
            x = tensors[name]
            if bool(torch.isinf(x).any()):
                raise StoreError(
                    f"{name} has values that are infinite as {x.dtype}, whose largest is "
                    f"{torch.finfo(x.dtype).max:.4g}: harvest with dtype=torch.bfloat16"
                )


def cannot_write(folder: Folder, manifest: Manifest, error: OSError) -> StoreError:
    """What is said when the disk is full, or will not be written to."""
    return StoreError(
        f"{folder.path} cannot be written to: {error.strerror or error}. What is in it can be read (at least "
        f"{manifest.rows:,} rows), and the same harvest goes on from there once there is room"
    )
