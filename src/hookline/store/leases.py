"""Leases: which worker is doing which unit of work, so that a unit is not done twice, and is taken over if needed.

A lease is a small file that its holder rewrites again and again. Whoever wants the unit watches the file: if it does
not change for the time of a lease, its holder is taken for dead. Clocks of different machines are never compared. A
worker that was only asleep may then do a unit that another one has taken over. That costs time and nothing else,
because both write the same rows, and the first record of a unit counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, Self
from uuid import uuid4

from hookline.engine import undo
from hookline.store.folders import Folder, is_gone, this_process

LEASE = ".lease"
"""How the name of a lease ends."""

BEATS = 4
"""How often a lease is rewritten within its time."""


class Leases:
    """The leases of one worker. A context manager: a thread rewrites them, and in the end they are given up."""

    def __init__(self, folder: Folder, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self.owner = uuid4().hex[:12]
        self._beat = 0
        self._held = set[str]()
        self._seen = dict[str, tuple[bytes, float]]()
        self._changing, self._over = undo.interrupt_safe(Lock()), Event()
        self._thread = Thread(target=self._keep, name="hookline-leases", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for name in list(self._held):
            with suppress(OSError):  # it runs out by itself
                self.give_up(name)

    def take(self, name: str) -> bool:
        """Take the lease of that name, unless another worker holds it; returns whether it was taken."""
        with self._changing:
            if not self._folder.create(name + LEASE, self._content()):
                if not self.is_free(name):
                    return False
                self._folder.overwrite(name + LEASE, self._content())
            self._held.add(name)
        return True

    def give_up(self, name: str) -> None:
        """Delete a lease, if this worker still holds it."""
        with self._changing:
            if name in self._held and self._is_mine(name):
                self._folder.delete(name + LEASE)
            self._held.discard(name)

    def is_free(self, name: str) -> bool:
        """Whether nobody holds a lease, as far as can be known; call it again and again to find dead holders."""
        try:
            content = self._folder.read(name + LEASE)
        except FileNotFoundError:
            return True
        if is_gone(content.decode(errors="replace")):
            return True
        before, since = self._seen.get(name, (None, 0.0))
        if content != before:
            self._seen[name] = content, monotonic()
            return False
        return monotonic() - since >= self._seconds

    def contents(self, names: Iterable[str]) -> dict[str, bytes | None]:
        """The contents of leases, which change as long as their holders live."""
        return {name: self._seen.get(name, (None, 0.0))[0] for name in names}

    def _content(self) -> bytes:
        content: dict[str, Any] = {**json.loads(this_process()), "owner": self.owner, "beat": self._beat}
        return json.dumps(content).encode()

    def _is_mine(self, name: str) -> bool:
        try:
            return json.loads(self._folder.read(name + LEASE))["owner"] == self.owner
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _keep(self) -> None:
        """In a thread: rewrite the leases, and let go of those that others have taken over."""
        while not self._over.wait(self._seconds / BEATS):
            self._beat += 1
            for name in list(self._held):
                with suppress(OSError), self._changing:  # the next beat tries again
                    if name not in self._held:
                        continue
                    if self._is_mine(name):
                        self._folder.overwrite(name + LEASE, self._content())
                    else:
                        self._held.discard(name)
