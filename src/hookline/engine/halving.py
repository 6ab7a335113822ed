"""Halving: what does not fit into memory at once goes through in smaller parts."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from hookline.errors import HookError, HooklineWarning, users_level

T = TypeVar("T")
R = TypeVar("R")

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
"""How a RuntimeError of a backend without an error class of its own says that memory ran out."""


class Fit:
    """How much goes through a model at once: all of it, until memory runs out; then half, and half of that.

        fit = Fit("prompts")
        for some, found in fit.parts(prompts, run):      # run(some) for some of the prompts after the other
            …

    What has been found to fit holds for all calls of `parts`. The first time that memory runs out, a warning says so.
    A single item that does not fit raises the error of the device.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.most: int | None = None
        """The largest weight of a part, once memory has run out."""

    def parts(
        self, items: Sequence[T], run: Callable[[Sequence[T]], R], *, weight: int = 1
    ) -> Iterator[tuple[Sequence[T], R]]:
        """Run the items, in order, in parts that fit. `weight` is how much memory an item takes, in any unit."""
        start = 0
        while start < len(items):
            left = len(items) - start
            size = left if self.most is None else min(left, max(1, self.most // weight))
            part = items[start : start + size]
            try:
                found = run(part)
            except Exception as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            else:
                yield part, found
                start += size
                continue
            # Outside of the handler: the error's traceback keeps everything that the failed run had computed.
            free_memory()
            if self.most is None:
                self._warn(size)
            self.most = size // 2 * weight

    def _warn(self, size: int) -> None:
        warnings.warn(
            f"memory ran out with {size} {self.what} at once: continuing with half as many, or fewer if need be. The "
            f"results are the same; a smaller batch_size avoids the attempt",
            HooklineWarning,
            stacklevel=users_level(),
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory ran out, also one in a hook, or one that another was raised from."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
            return True
        error = (error.original_error if isinstance(error, HookError) else None) or error.__cause__
    return False


def free_memory() -> None:
    """Give back what is held on a GPU by objects that wait for the collector, and by the allocator."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """How much a GPU has left for this process: on the device, in the allocator, and within its memory fraction."""
    if device.index is None:  # torch's functions for memory do not all take "cuda" for the current device
        device = torch.device(device.type, torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in torch 2.6
    allowed = total if fraction is None else int(fraction(device) * total)
    return max(0, min(free + unused, allowed - allocated))
