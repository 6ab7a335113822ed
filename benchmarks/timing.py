"""Times as ratios: alternatives are timed in turn, for several rounds, so that noise affects all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Way = TypeVar("Way", bound=Hashable)


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Return the time of one call of `work`, averaged over several calls; on a GPU, until its kernels have ended."""
    _wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait()
    return (time.perf_counter() - start) / repeats


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ratios(ways: Mapping[Way, Callable[[], object]], reference: Way, rounds: int) -> dict[Way, list[float]]:
    """Return for each alternative its time relative to the reference, per round."""
    ways[reference]()
    repeats = max(1, int(0.005 / seconds(ways[reference], 3)))
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        turns = random.sample(list(ways), len(ways))  # the state of memory depends on what ran before
        times = {way: seconds(ways[way], repeats) for way in turns}
        for way, spent in times.items():
            found[way].append(spent / times[reference])
    return found


def median(values: list[float]) -> str:
    """Format the median for a table."""
    return f"{statistics.median(values):.2f}"
