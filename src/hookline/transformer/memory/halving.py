"""Halving: run a batch in smaller parts when it does not fit into memory."""

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
"""Parts of the messages of out-of-memory errors of backends without their own error class."""


class BatchFitter:
    """The number of items that go through a model at once: all of them, until memory runs out; then half, and so on.

        fit = Fit("prompts")
        for some, found in fit.parts(prompts, run):      # calls run(some) on parts of the prompts, in order
            …

    The size found to fit is kept for all calls of `parts`. The first time that memory runs out, it warns. A single item
    that does not fit raises the device's error.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.most: int | None = None
        """The largest weight of a part; None until memory has run out."""

    def parts(
        self, items: Sequence[T], run: Callable[[Sequence[T]], R], *, weight: int = 1
    ) -> Iterator[tuple[Sequence[T], R]]:
        """Run the items, in order, in parts that fit. `weight` is the memory of an item, in any unit."""
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
            # Outside the handler: the error's traceback holds everything that the failed run had computed.
            free_memory()
            if self.most is None:
                self._warn(size)
            self.most = size // 2 * weight

    def _warn(self, size: int) -> None:
        warnings.warn(
            f"out of memory with {size} {self.what} at once: continuing with half as many, or fewer if necessary. The "
            f"results are the same; a smaller batch_size avoids the failed attempt",
            HooklineWarning,
            stacklevel=users_level(),
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is out of memory, or was caused by such an error, also in a hook."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
            return True
        error = (error.original_error if isinstance(error, HookError) else None) or error.__cause__
    return False


def free_memory() -> None:
    """Release GPU memory that is held by uncollected objects and by the allocator."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU for this process: on the device, in the allocator, within its memory fraction."""
    if device.index is None:  # not all memory functions of torch accept "cuda" without an index
        device = torch.device(device.type, torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in torch 2.6
    allowed = total if fraction is None else int(fraction(device) * total)
    return max(0, min(free + unused, allowed - allocated))
