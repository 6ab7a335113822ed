"""The writer: threads write shards while the model computes the rows of the next."""

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
"""How many shards are written in parallel. One file takes 1 to 2 GB per second; a model on a GPU produces 3 or more."""


class Writer:
    """Collects batches of rows into shards of whole batches. A context manager: its threads end with the context.

    While one buffer is filled, others are written. There are two buffers as long as a shard is written before the next
    one is full, and at most `THREADS + 1`; then `add` waits. A shard ends when it is full, `flush_every` seconds after
    its first rows, or when an exception ends the harvest. So a shard may be short, but it always has whole batches, and
    a resumed harvest runs the same batches as one that was never interrupted.
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
        """Add the rows of a batch. `before` and `after` are the progress in the data set around it."""
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
        """Write the remaining rows as the last shard, which may be empty, and wait for all writes."""
        if self._buffer is None:
            self._buffer = self._empty_buffer(0)
        self._hand_over(self._buffer, progress, is_last=True)
        self._buffer = None
        wait(self._writing)
        self._collect()

    def _is_due(self) -> bool:
        return monotonic() - self._began >= self._flush_every

    def _flush(self, error: BaseException) -> None:
        """Write the rows of all finished batches when `error` ends the harvest; add a note to it if that fails."""
        if self._buffer is None or not self._buffer.rows:
            return
        self._hand_over(self._buffer, self._buffer.progress, is_last=False)
        wait(self._writing)
        try:
            self._collect()
        except (StoreError, RuntimeError) as problem:
            error.add_note(f"The last {self._buffer.rows:,} rows could not be stored: {problem}")

    def _has_failed(self) -> bool:
        """Whether a shard could not be written; no later shard becomes part of the store then."""
        return any(each.done() and each.exception() is not None for each in self._writing) or self._is_broken

    def _end(self) -> None:
        """Finish the shards that are being written, even if interrupted again: it takes seconds."""
        while True:
            try:
                self._copier.finish()
                self._threads.shutdown(wait=True)
                self._ledger.discard()
            except KeyboardInterrupt:
                continue
            return

    def _empty_buffer(self, rows: int) -> Buffer:
        """A free buffer with room for a shard, or for `rows` if that is more."""
        while not self._free and len(self._writing) > THREADS:
            wait(self._writing, return_when=FIRST_COMPLETED)
            self._collect()
        if self._free and self._free[-1].capacity >= rows:
            return self._free.pop()
        del self._free[-1:]  # one that is too small makes way
        return Buffer(self._columns, max(rows, self._shard_rows), is_pinned=self._is_pinned)

    def _hand_over(self, buffer: Buffer, progress: Progress, *, is_last: bool) -> None:
        """Schedule the buffer for writing. May be called again after an interrupt."""
        if buffer.shard is None:
            buffer.shard = Shard.after(self._handed_over, buffer.rows, progress, is_last=is_last)
        self._handed_over = buffer.shard
        self._writing.append(self._threads.submit(self._write, buffer, buffer.shard))

    def _collect(self) -> None:
        """Reclaim the buffers that are written; raise the error of one that failed."""
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
        """In a thread: write the shard and enter it into the store. None if the buffer was already written."""
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
        if different := differences(found, wanted):
            raise StoreError(f"the points have different shapes in different batches: {'; '.join(different[:3])}")

    def _check_range(self, tensors: dict[str, Tensor]) -> None:
        for name in self._narrowed:
            x = tensors[name]
            if bool(torch.isinf(x).any()):
                raise StoreError(
                    f"{name} has values that overflow {x.dtype}, whose maximum is "
                    f"{torch.finfo(x.dtype).max:.4g}: harvest with dtype=torch.bfloat16"
                )


def cannot_write(folder: Folder, manifest: Manifest, error: OSError) -> StoreError:
    """The error for a full or unwritable disk."""
    return StoreError(
        f"{folder.path} cannot be written to: {error.strerror or error}. Its rows so far can be read (at least "
        f"{manifest.rows:,}), and the same harvest can be resumed once there is space"
    )
