"""Repeats: which shapes are worth a graph, for runs that come in many shapes, such as the batches of an experiment."""

from __future__ import annotations

import threading
from collections.abc import Hashable

_REMEMBERED = 1024
"""How many shapes that came once are remembered."""


class Repeats:
    """Places for the shapes that come again. A shape gets one when it comes for the second time in a thread.

    A place is taken from another shape only if that has not come for a while: more shapes in turn than there are places
    would compile in every run.
    """

    def __init__(self, places: int) -> None:
        self._places, self._now, self._lock = places, 0, threading.Lock()
        self._seen: dict[Hashable, None] = {}
        self._last: dict[Hashable, int] = {}

    def why_not(self, shape: Hashable) -> str | None:
        """Why a run of this shape is not compiled; None if it is."""
        with self._lock:
            return self._why_not((shape, threading.get_ident()))

    def _why_not(self, shape: Hashable) -> str | None:
        self._now += 1
        if shape not in self._last:
            if shape not in self._seen:
                self._seen[shape] = None
                if len(self._seen) > _REMEMBERED:
                    del self._seen[next(iter(self._seen))]
                return "its shape has come once so far"
            if len(self._last) >= self._places:
                oldest = min(self._last, key=self._last.__getitem__)
                if self._now - self._last[oldest] <= 4 * self._places:
                    return f"{self._places} other shapes are in use: compile(limit=…) sets how many are kept"
                del self._last[oldest]
        self._last[shape] = self._now
        return None
