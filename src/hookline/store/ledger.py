"""The ledger: shards are written several at a time, and become part of the store one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from threading import Lock

from hookline.store.folders import Folder, write_file
from hookline.store.manifest import MANIFEST, Manifest, Shard


class Ledger:
    """Which shards there are. A shard gets its name when all before it have theirs; then the manifest tells of it.

    So whenever a harvest is killed, what is in the folder has no gaps. Any thread may enter a shard, and none waits:
    one of them places all that can be placed, also what the others enter meanwhile.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder, self.manifest = folder, manifest
        self._staged: dict[int, Shard] = {}
        self._placing = Lock()

    def enter(self, shard: Shard) -> None:
        """Take a shard that is staged."""
        self._staged[shard.number] = shard
        # Looked at again each time the lock is free: what was entered while it was held is left to who held it.
        while any(self._next()) and self._placing.acquire(blocking=False):
            try:
                self._place(list(self._next()))
            finally:
                self._placing.release()

    def discard(self) -> None:
        """Drop what could not be placed, since a shard before it was never written."""
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
        write_file(self._folder, MANIFEST, [manifest.to_bytes()])
        self.manifest = manifest
        for shard in shards:
            del self._staged[shard.number]
