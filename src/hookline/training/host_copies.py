"""Numbers on their way from a device to the host: the copy begins at once, and is waited for when it is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """A copy of tensors without axes, from whatever devices they are on, in one transfer for each device."""

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        self._places: dict[torch.device, list[int]] = {}
        for place, number in enumerate(numbers):
            self._places.setdefault(number.device, []).append(place)
        self._parts = [_begun(torch.stack([numbers[i] for i in places])) for places in self._places.values()]

    def values(self) -> list[float]:
        """The numbers, in their order."""
        values = [0.0] * sum(map(len, self._places.values()))
        for places, (part, event) in zip(self._places.values(), self._parts, strict=True):
            if event is not None:
                event.synchronize()
            for place, value in zip(places, part.tolist(), strict=True):
                values[place] = value
        return values


def _begun(stacked: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Begin to copy to the host. Returns the copy, and what tells when it is complete."""
    if stacked.device.type != "cuda":
        return stacked, None
    copy = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(stacked.device))
    return copy, event
