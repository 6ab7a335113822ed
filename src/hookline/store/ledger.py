"""The ledger: shards are written in parallel, and become part of the store in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from threading import Lock

from hookline.store.folders import Folder, write_file
from hookline.store.manifest import MANIFEST, Manifest, Shard


class Ledger:
    """The shards of a store. A shard gets its final name after all shards before it; then the manifest lists it.

    So the shards in the folder never have gaps, whenever a harvest is killed. Any thread may enter a shard without
    waiting: one thread places everything that can be placed, including what others enter in the meantime.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder, self.manifest = folder, manifest
        self._staged: dict[int, Shard] = {}
        self._placing = Lock()

    def enter(self, shard: Shard) -> None:
        """Enter a staged shard."""
        self._staged[shard.number] = shard
        # Check again after each release: a shard entered while the lock was held is left to its holder.
        while any(self._next()) and self._placing.acquire(blocking=False):
            try:
                self._place(list(self._next()))
            finally:
                self._placing.release()

    def discard(self) -> None:
        """Delete the shards that cannot be placed because an earlier one was never written."""
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
