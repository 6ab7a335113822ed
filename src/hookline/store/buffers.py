"""Buffers: rows on their way from the model to a shard."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hookline.store.manifest import Column, Progress, Shard


class Buffer:
    """A block of memory for the rows of one shard."""

    def __init__(self, columns: Mapping[str, Column], capacity: int, *, is_pinned: bool) -> None:
        self.capacity = capacity
        self._held = (0, Progress())
        self.shard: Shard | None = None
        """The shard that it is written as; None until it is scheduled."""
        self.lock = Lock()
        self.is_taken = False
        """Whether a thread is writing it or has written it."""
        self._tensors = {
            name: torch.empty(capacity, *each.shape, dtype=each.torch_dtype, pin_memory=is_pinned)
            for name, each in columns.items()
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
        """Copy the rows at `index` (None: all), cast to the targets' dtypes; returns what to wait for."""
        self.finish()  # what the batch before needed may now be let go
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
