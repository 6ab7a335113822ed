"""The writer: shards are written by a thread of their own, while the model computes the rows of the next."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from hookline.errors import StoreError
from hookline.store.buffers import Buffer, Copier
from hookline.store.folders import Folder
from hookline.store.manifest import MANIFEST, Manifest, Progress, Shard, differences
from hookline.store.selection import Batch
from hookline.store.shards import columns_of, write_shard


class Writer:
    """Takes batches of rows, and puts them into shards of whole batches. A context: leave it and the thread is gone.

    There are two buffers, of one shard each: one is filled, the other written. Where a shard ends depends on the
    batches alone, so a harvest that was interrupted writes the same shards as one that was not.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, *, shard_rows: int, is_pinned: bool, narrowed: Collection[str]
    ) -> None:
        self._folder, self.manifest, self._narrowed = folder, manifest, narrowed
        self._shard_rows, self._is_pinned = shard_rows, is_pinned
        self._columns = columns_of(manifest.about)
        self._copier = Copier()
        self._buffer, self._free = self._new_buffer(shard_rows), [self._new_buffer(shard_rows)]
        self._handed_over = manifest.shards[-1] if manifest.shards else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hookline-store")
        self._writing: Future[Buffer] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A shard that is being written is finished. What is in the buffer is left: it is computed again, alike.
        self._copier.finish()
        self._thread.shutdown(wait=True)

    @property
    def rows(self) -> int:
        """How many it has been given, with those stored before."""
        return self._buffer.rows + (self._handed_over.stop_row if self._handed_over is not None else 0)

    def add(self, batch: Batch, sources: dict[str, Tensor], before: Progress) -> None:
        """Store the rows of a batch. `before` is how far the data set was looked at when it began."""
        self._collect(waits=False)
        self._check_shapes(sources)
        if self._buffer.rows and self._buffer.rows + batch.rows > self._shard_rows:
            self._hand_over(before, is_last=False)
        if self._buffer.rows + batch.rows > self._buffer.capacity:  # one batch that is more than a shard
            self._buffer = self._new_buffer(batch.rows)
        targets = self._buffer.take(batch.rows)
        targets["@example"].copy_(batch.example)
        targets["@position"].copy_(batch.position)
        targets["@token"].copy_(batch.token)
        self._buffer.events += self._copier.copy(sources, batch.index, targets)

    def finish(self, progress: Progress) -> Manifest:
        """Write what is left, as the last shard, and wait for it."""
        self._hand_over(progress, is_last=True)
        self._collect(waits=True)
        return self.manifest

    def _new_buffer(self, rows: int) -> Buffer:
        return Buffer(self._columns, rows, is_pinned=self._is_pinned)

    def _hand_over(self, progress: Progress, *, is_last: bool) -> None:
        """Have the buffer written as soon as the one before it is, and go on with the other."""
        shard = Shard.after(self._handed_over, self._buffer.rows, progress, is_last=is_last)
        self._collect(waits=True)
        self._writing = self._thread.submit(self._write, self._buffer, shard)
        self._buffer, self._handed_over = self._free.pop(), shard

    def _collect(self, *, waits: bool) -> None:
        """Take the other buffer back, if it is written; raise what went wrong with it."""
        if self._writing is not None and (waits or self._writing.done()):
            self._free.append(self._writing.result())
            self._writing = None

    def _write(self, buffer: Buffer, shard: Shard) -> Buffer:
        """In the thread: the shard, then the manifest with it."""
        tensors = buffer.filled()
        self._check_range(tensors)
        try:
            written = write_shard(self._folder, self.manifest.about, shard, tensors)
            new = self.manifest.with_shard(written)
            self._folder.write(MANIFEST, [new.to_bytes()])
        except OSError as error:
            raise cannot_write(self._folder, self.manifest, error) from error
        self.manifest = new
        buffer.clear()
        return buffer

    def _check_shapes(self, sources: dict[str, Tensor]) -> None:
        wanted = {name: each.shape for name, each in self.manifest.about.points.items()}
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
        f"{folder.path} cannot be written to: {error.strerror or error}. The {manifest.rows:,} rows in it so far can "
        f"be read, and the same harvest goes on from there once there is room"
    )
