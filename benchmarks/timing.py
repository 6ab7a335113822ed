"""Times as ratios: all ways of doing something in turn, round after round, on a machine that is never quiet."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Way = TypeVar("Way", bound=Hashable)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The time of one `work`, averaged over a few in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def ratios(ways: Mapping[Way, Callable[[], object]], reference: Way, rounds: int) -> dict[Way, list[float]]:
    """Of each way, round by round, its time over that of the reference in the same round."""
    ways[reference]()
    repeats = max(1, int(0.005 / seconds(ways[reference], 3)))
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        turns = random.sample(list(ways), len(ways))  # what ran just before leaves the memory in another state
        times = {way: seconds(ways[way], repeats) for way in turns}
        for way, spent in times.items():
            found[way].append(spent / times[reference])
    return found


def median(values: list[float]) -> str:
    """As the tables print it."""
    return f"{statistics.median(values):.2f}"
