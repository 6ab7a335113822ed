"""The writer: threads write shards while the model computes the rows of the next.

A `Buffer` holds the rows of one shard, a `Copier` fills it from the model's device, and a `Ledger` enters the written
shards into the store in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from hookline.engine import undo
from hookline.errors import StoreError, how_many, warn
from hookline.store.folders import Folder
from hookline.store.manifest import Column, Manifest, Progress, Shard, differences, writing
from hookline.store.selection import Batch, HarvestOptions
from hookline.store.shards import shard_columns, stage_shard
from hookline.values.casting import is_narrowed, overflow_problem

THREADS = 4
"""How many shards are written in parallel. One file takes 1 to 2 GB per second; a model on a GPU produces 3 or more."""

FIRST_BYTES = 8 * 2**20
"""The size of the first shard; each one after it may have twice the size of the one before, up to `shard_bytes`."""


class Writer:
    """Collects batches of rows into shards of whole batches. A context manager: its threads end with the context.

    While one buffer is filled, others are written. There are two buffers as long as a shard is written before the next
    one is full, and at most `THREADS + 1`; then `add` waits. A shard ends when it is full, `flush_every` seconds after
    its first rows, or when an exception ends the harvest. So a shard may be short, but it always has whole batches, and
    a resumed harvest runs the same batches as one that was never interrupted.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, options: HarvestOptions, sources: Mapping[str, Tensor]
    ) -> None:
        """`sources` are the activations of the first batch."""
        self._folder, self._about = folder, manifest.about
        self._columns = shard_columns(manifest.about)
        row = sum(column.nbytes for column in self._columns.values())
        self._shard_rows = options.shard_rows or max(1, options.shard_bytes // row)
        self._first_rows = self._shard_rows if options.shard_rows else max(1, FIRST_BYTES // row)
        self._flush_every, self._began = options.flush_every, 0.0
        self._is_pinned = any(x.is_cuda for x in sources.values())
        self._narrowed = [name for name, x in sources.items() if is_narrowed(x, self._columns[name].torch_dtype)]
        self._bad_rows, self._counting = Counter[str](), Lock()
        self._ledger = Ledger(folder, manifest)
        self._copier = Copier()
        self._buffer: Buffer | None = None
        self._free = list[Buffer]()
        self._handed_over = manifest.shards[-1] if manifest.shards else None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="hookline-store")
        self._writing = list[Future[Buffer | None]]()

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
        if error is None and self._bad_rows:
            shown = ", ".join(f"{how_many(count, 'row')} of {name}" for name, count in sorted(self._bad_rows.items()))
            warn(
                f"values that are NaN or infinite were stored: {shown} (of {self._ledger.manifest.rows:,}). The model "
                f"computed them: check its dtype and hooks, or leave such rows out when you read the store"
            )

    def add(self, batch: Batch, sources: dict[str, Tensor], before: Progress, after: Progress) -> None:
        """Add the rows of a batch. `before` and `after` are the progress in the data set around it."""
        self._collect()
        self._check_shapes(sources)
        is_due = monotonic() - self._began >= self._flush_every
        if self._buffer is not None and (self._buffer.rows + batch.rows > self._most_rows() or is_due):
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

    def _most_rows(self) -> int:
        """How many rows the next shard has at most. The first ones are shorter, so that writing begins early."""
        number = 0 if self._handed_over is None else self._handed_over.number + 1
        return min(self._shard_rows, self._first_rows << min(number, 32))

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
        return any(future.done() and future.exception() is not None for future in self._writing)

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
        for future in [future for future in self._writing if future.done()]:
            buffer = future.result()  # one that failed stays in the list
            self._writing.remove(future)
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
            bad = Counter({name: _count_bad(tensors[name]) for name in self._about.points})
            with writing(self._folder, self._ledger.manifest.rows):
                self._ledger.enter(stage_shard(self._folder, self._about, shard, tensors))
            with self._counting:
                self._bad_rows += bad  # of Counters: without zeros
            return buffer

    def _check_shapes(self, sources: dict[str, Tensor]) -> None:
        expected_shapes = {name: column.shape for name, column in self._about.points.items()}
        shapes = {name: tuple(x.shape[1:]) for name, x in sources.items()}
        if different := differences(shapes, expected_shapes):
            raise StoreError(f"the points have different shapes in different batches: {'; '.join(different[:3])}")

    def _check_range(self, tensors: dict[str, Tensor]) -> None:
        for name in self._narrowed:
            x = tensors[name]
            if bool(torch.isinf(x).any()):
                raise StoreError(f"{overflow_problem(name, x.dtype)}: harvest with dtype=torch.bfloat16")


def _count_bad(x: Tensor) -> int:
    """How many rows have a value that is not finite."""
    if not x.is_floating_point() or bool(x.sum(dtype=torch.float64).isfinite()):
        return 0  # the common case, in one pass over the data
    return int((~x.flatten(1).isfinite().all(1)).sum())


class Buffer:
    """A block of memory for the rows of one shard."""

    def __init__(self, columns: Mapping[str, Column], capacity: int, *, is_pinned: bool) -> None:
        self.capacity = capacity
        self._held = (0, Progress())
        self.shard: Shard | None = None
        """The shard that it is written as; None until it is scheduled."""
        self.lock = undo.interrupt_safe(Lock())
        self.is_taken = False
        """Whether a thread is writing it or has written it."""
        self._tensors = {
            name: torch.empty(capacity, *column.shape, dtype=column.torch_dtype, pin_memory=is_pinned)
            for name, column in columns.items()
        }
        self.events: list[Any] = []

    @property
    def rows(self) -> int:
        """How many rows it holds."""
        return self._held[0]

    @property
    def progress(self) -> Progress:
        """How far the data set had been read after the last batch in the buffer."""
        return self._held[1]

    def room(self, rows: int) -> dict[str, Tensor]:
        """Views of the next `rows` rows, which count only after `hold`."""
        return {name: x[self.rows : self.rows + rows] for name, x in self._tensors.items()}

    def hold(self, rows: int, progress: Progress) -> None:
        """Count this many more rows: a whole batch, which ends at `progress` in the data set."""
        # One assignment, so that an interrupt at any instruction finds all of a batch here or nothing of it.
        self._held = (self.rows + rows, progress)

    def filled(self) -> dict[str, Tensor]:
        """The rows, after waiting for pending copies."""
        for event in self.events:
            event.synchronize()
        return {name: x[: self.rows] for name, x in self._tensors.items()}

    def clear(self) -> None:
        """Empty it for the next shard."""
        self._held, self.events, self.shard, self.is_taken = (0, Progress()), [], None, False


class Copier:
    """Copies rows into a buffer; from a GPU on a separate stream, while the model runs the next batch."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._in_flight: tuple[list[Any], list[Tensor]] = ([], [])

    def copy(self, sources: Mapping[str, Tensor], index: Tensor | None, targets: Mapping[str, Tensor]) -> list[Any]:
        """Copy the rows at `index` (None: all), cast to the targets' dtypes; returns the CUDA events to wait for."""
        self.finish()  # releases the tensors of the previous batch
        devices = {x.device for x in sources.values() if x.is_cuda}
        for device in devices:
            self._stream(device).wait_stream(torch.cuda.current_stream(device))
        for name, x in sources.items():
            if x.is_cuda:
                with torch.cuda.stream(self._stream(x.device)):
                    targets[name].copy_(_at(x, index).to(targets[name].dtype), non_blocking=True)
            else:
                targets[name].copy_(_at(x, index))
        events = [self._stream(device).record_event() for device in devices]
        self._in_flight = (events, [*sources.values()] if events else [])
        return events

    def finish(self) -> None:
        """Wait for all pending copies. Their sources are kept alive until then."""
        events, _ = self._in_flight
        for event in events:
            event.synchronize()
        self._in_flight = ([], [])

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _at(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, to_device(index, x.device))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device without a synchronization: it is pinned first."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and x.is_cpu else x.to(device)


class Ledger:
    """The shards of a store. A shard gets its final name after all shards before it; then the manifest lists it.

    So the shards in the folder never have gaps, whenever a harvest is killed. Any thread may enter a shard without
    waiting: one thread places everything that can be placed, including what others enter in the meantime.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder, self.manifest = folder, manifest
        self._staged: dict[int, Shard] = {}
        self._placing = Lock()

    def enter(self, shard: Shard) -> None:
        """Enter a staged shard."""
        self._staged[shard.number] = shard
        # Check again after each release: a shard entered while the lock was held is left to its holder.
        while any(self._next()) and self._placing.acquire(blocking=False):
            try:
                self._place(list(self._next()))
            finally:
                self._placing.release()

    def discard(self) -> None:
        """Delete the shards that cannot be placed because an earlier one was never written."""
        for shard in self._staged.values():
            self._folder.discard(shard.name)

    def _next(self) -> Iterator[Shard]:
        """The staged shards that follow the placed ones without a gap."""
        for number in count(len(self.manifest.shards)):
            shard = self._staged.get(number)
            if shard is None:
                return
            yield shard

    def _place(self, shards: list[Shard]) -> None:
        self._folder.place([shard.name for shard in shards])
        manifest = self.manifest.with_shards(*shards)
        manifest.save(self._folder)
        self.manifest = manifest
        for shard in shards:
            del self._staged[shard.number]
