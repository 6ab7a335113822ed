"""The writer: shards are written by threads of their own, while the model computes the rows of the next."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from time import monotonic
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
    is full, and at most `THREADS + 1`; then whoever adds waits. A shard ends where it is full, or `flush_every` seconds
    after its first rows came, or where an exception ends the harvest: so a shard may be short, but it always has whole
    batches, and a harvest that is resumed runs the same batches as one that was never interrupted.
    """

    def __init__(
        self,
        folder: Folder,
        manifest: Manifest,
        *,
        shard_rows: int,
        flush_every: float,
        is_pinned: bool,
        narrowed: Collection[str],
    ) -> None:
        self._folder, self._about, self._narrowed = folder, manifest.about, narrowed
        self._shard_rows, self._flush_every, self._is_pinned = shard_rows, flush_every, is_pinned
        self._began = 0.0
        self._columns = columns_of(manifest.about)
        self._ledger = Ledger(folder, manifest)
        self._copier = Copier()
        self._buffer: Buffer | None = None
        self._free = list[Buffer]()
        self._handed_over = manifest.shards[-1] if manifest.shards else None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="hookline-store")
        self._writing = list[Future[Buffer | None]]()
        self._is_broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._has_failed():
                self._flush(error)
        finally:
            self._end()

    def add(self, batch: Batch, sources: dict[str, Tensor], before: Progress, after: Progress) -> None:
        """Store the rows of a batch. `before` and `after` are how far the data set had been read around it."""
        self._collect()
        self._check_shapes(sources)
        if self._buffer is not None and (self._buffer.rows + batch.rows > self._shard_rows or self._is_due()):
            self._hand_over(self._buffer, before, is_last=False)
            self._buffer = None
        if self._buffer is None:
            self._began = monotonic()
            self._buffer = self._empty_buffer(batch.rows)
        targets = self._buffer.room(batch.rows)
        targets["@example"].copy_(batch.example)
        targets["@position"].copy_(batch.position)
        targets["@token"].copy_(batch.token)
        self._buffer.events += self._copier.copy(sources, batch.index, targets)
        self._buffer.hold(batch.rows, after)

    def finish(self, progress: Progress) -> None:
        """Write what is left as the last shard, which may be empty, and wait for all that is being written."""
        if self._buffer is None:
            self._buffer = self._empty_buffer(0)
        self._hand_over(self._buffer, progress, is_last=True)
        self._buffer = None
        wait(self._writing)
        self._collect()

    def _is_due(self) -> bool:
        return monotonic() - self._began >= self._flush_every

    def _flush(self, error: BaseException) -> None:
        """Keep the rows of all finished batches when `error` ends the harvest. If that fails, `error` says so too."""
        if self._buffer is None or not self._buffer.rows:
            return
        self._hand_over(self._buffer, self._buffer.progress, is_last=False)
        wait(self._writing)
        try:
            self._collect()
        except (StoreError, RuntimeError) as problem:
            error.add_note(f"The last {self._buffer.rows:,} rows could not be stored: {problem}")

    def _has_failed(self) -> bool:
        """Whether a shard could not be written. Then none after it becomes part of the store."""
        return any(each.done() and each.exception() is not None for each in self._writing) or self._is_broken

    def _end(self) -> None:
        """Finish the shards that are being written, also if further interrupts come meanwhile: it takes seconds."""
        while True:
            try:
                self._copier.finish()
                self._threads.shutdown(wait=True)
                self._ledger.discard()
            except KeyboardInterrupt:
                continue
            return

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
        """Have a thread write the buffer. Where an interrupt cut this short, it may be called again."""
        if buffer.shard is None:
            buffer.shard = Shard.after(self._handed_over, buffer.rows, progress, is_last=is_last)
        self._handed_over = buffer.shard
        self._writing.append(self._threads.submit(self._write, buffer, buffer.shard))

    def _collect(self) -> None:
        """Take back the buffers that are written; raise what went wrong with one."""
        done = [each for each in self._writing if each.done()]
        self._writing = [each for each in self._writing if each not in done]
        for each in done:
            try:
                buffer = each.result()
            except BaseException:
                self._is_broken = True
                raise
            if buffer is not None:
                buffer.clear()
                self._free.append(buffer)

    def _write(self, buffer: Buffer, shard: Shard) -> Buffer | None:
        """In a thread: write the shard and make it part of the store. None if the buffer had been written already."""
        with buffer.lock:  # a second call, after an interrupted one, returns when the first has written it
            if buffer.is_taken:
                return None
            buffer.is_taken = True
            tensors = buffer.filled()
            self._check_range(tensors)
            try:
                self._ledger.enter(stage_shard(self._folder, self._about, shard, tensors))
            except OSError as error:
                raise cannot_write(self._folder, self._ledger.manifest, error) from error
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
