"""Repeats: which shapes are worth a graph, for runs that come in many shapes, such as the batches of an experiment."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable

from hookline.engine import undo

_REMEMBERED = 1024
"""How many shapes without a place are remembered."""
_PAUSE = 5.0
"""The most seconds that count for one run: the time until the next one may be that of something else."""


class Repeats:
    """Which shapes are compiled, at most `places`: those whose uncompiled runs have taken `patience` seconds.

    That is about what a graph costs, so nobody waits more than twice as long as necessary. It must come twice at least.
    A place is taken from another shape only if that has not come for a while: more shapes in turn than there are places
    would compile in every run.
    """

    def __init__(self, places: int, patience: float) -> None:
        self._places, self._patience, self._now, self._lock = places, patience, 0, undo.interrupt_safe(threading.Lock())
        self._taken: dict[Hashable, float] = {}  # seconds, of shapes without a place
        self._last: dict[Hashable, int] = {}
        self._running: dict[int, tuple[Hashable, float]] = {}  # by thread: the shape of the last run, and its start

    def why_not(self, shape: Hashable) -> str | None:
        """Why the run of this shape that begins now is not compiled; None if it is."""
        thread, now = threading.get_ident(), time.perf_counter()
        with self._lock:
            before, since = self._running.get(thread, (None, now))
            if before in self._taken:
                self._taken[before] += min(now - since, _PAUSE)
            self._running[thread] = (shape, thread), now
            return self._why_not((shape, thread))

    def _why_not(self, shape: Hashable) -> str | None:
        self._now += 1
        if shape not in self._last:
            if shape not in self._taken:
                self._taken[shape] = 0.0
                if len(self._taken) > _REMEMBERED:
                    del self._taken[next(iter(self._taken))]
                return "its shape has come once so far"
            if self._taken[shape] < self._patience:
                return f"its shape has not taken {self._patience:g} s so far: compile(patience=…) sets that"
            if len(self._last) >= self._places:
                oldest = min(self._last, key=self._last.__getitem__)
                if self._now - self._last[oldest] <= 4 * self._places:
                    return f"{self._places} other shapes are in use: compile(limit=…) sets how many are kept"
                del self._last[oldest]
        self._last[shape] = self._now
        return None
