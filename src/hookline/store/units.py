"""Units: the pieces into which the work of many workers is divided, and the records of those that are done.

A unit is a number of consecutive batches. Which examples it has depends only on the data, `batch_size` and the number
of batches, so it has the same rows whoever does it. Its shards are placed first, and then its record, `000007.json`,
which lists them. The names of shards contain their checksums: two workers that do the same unit write the same files,
or, if their GPUs round differently, files of different names, and the first record says which ones count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import count, islice
from threading import Lock

from torch import Tensor

from hookline.engine import undo
from hookline.errors import StoreError
from hookline.store.examples import Example, Examples
from hookline.store.folders import Folder
from hookline.store.manifest import Manifest, Progress, Shard
from hookline.store.selection import HarvestOptions
from hookline.store.shards import about_differences
from hookline.store.writer import Ledger, Writer

READERS = 16
"""How many records are read in parallel."""


@dataclass(frozen=True)
class Unit:
    """Consecutive batches of examples, each with the progress in the data set before and after it."""

    number: int
    batches: list[tuple[Progress, list[Example], Progress]]
    is_last: bool

    @property
    def before(self) -> Progress:
        """The progress at its start."""
        return self.batches[0][0]

    @property
    def after(self) -> Progress:
        """The progress at its end."""
        return self.batches[-1][2]


def units_of(examples: Examples, options: HarvestOptions, length: int) -> Iterator[Unit]:
    """Divide a data set into units of `length` batches."""
    number, batches = 0, list[tuple[Progress, list[Example], Progress]]()
    for before, items in examples.batches(options.batch_size, options.max_tokens):
        if len(batches) == length:
            yield Unit(number, batches, is_last=False)
            number, batches = number + 1, []
        batches.append((before, items, examples.progress))
    if batches:
        yield Unit(number, batches, is_last=True)


def unit_name(unit: int) -> str:
    """What the names of all files of a unit begin with."""
    return f"{unit:06d}"


def record_name(unit: int) -> str:
    """The file that lists the shards of a unit that is done."""
    return f"{unit_name(unit)}.json"


def recorded_units(names: list[str]) -> list[int]:
    """The units that have records among these files."""
    return sorted(
        int(name.removesuffix(".json")) for name in names if re.fullmatch(r"([1-9]\d*)?\d{6}\.json", name, re.A)
    )


def read_records(folder: Folder) -> tuple[dict[int, Manifest], dict[int, str]]:
    """The records of the units that are done, and what is wrong with the others."""
    names = folder.names()

    def read(unit: int) -> Manifest | str:
        where = f"{folder.path}/{record_name(unit)}"
        try:
            record = Manifest.from_bytes(folder.read(record_name(unit)), where, "unit")
        except (StoreError, OSError) as error:
            return str(error).partition(". `hookline")[0]
        others = {shard.unit for shard in record.shards} - {unit}
        if others:
            return f"{where} has shards of other units"
        lost = [shard.name for shard in record.shards if shard.name not in existing_files]
        return f"{where} lists {lost[0]}, which is missing" if lost else record

    existing_files, units = {*names}, recorded_units(names)
    with ThreadPoolExecutor(READERS) as threads:
        records = dict(zip(units, threads.map(read, units), strict=True))
    sound = {unit: record for unit, record in records.items() if isinstance(record, Manifest)}
    return sound, {unit: problem for unit, problem in records.items() if isinstance(problem, str)}


def merged(plan: Manifest, records: Mapping[int, Manifest], where: str) -> Manifest:
    """The shards of all units before the first that is missing, in order, as a harvest of one process has them."""
    shards, about = list[Shard](), plan.about
    for unit in count():
        if unit not in records:
            break
        record = records[unit]
        if not unit:
            about = replace(about, points=record.about.points)
        if different := about_differences(record.about, about):
            raise StoreError(f"unit {unit} of {where} belongs to a different harvest: {'; '.join(different[:3])}")
        for shard in record.shards:
            before = shards[-1] if shards else None
            placed = shard.placed_after(before)
            if not placed.follows(before) or (before is not None and before.is_last):
                raise StoreError(
                    f"units {unit - 1} and {unit} of {where} were made from different data: unit {unit} does not start "
                    f"where the one before it ends. Harvest again with the data that you want: it says which units to "
                    f"delete; or harvest into another store"
                )
            shards.append(placed)
    return replace(plan, about=about, shards=tuple(shards))


def load_manifest(folder: Folder) -> Manifest:
    """The manifest of a store. Of an unfinished one by many workers: with the units before the first missing one."""
    manifest = Manifest.load(folder)
    if manifest.about.unit is None or manifest.is_complete:
        return manifest
    return merged(manifest, read_records(folder)[0], folder.path)


def missing_units(folder: Folder) -> str:
    """Which units of an unfinished store are missing, in words."""
    records, _ = read_records(folder)
    last = max(records, default=-1)
    gaps = [str(unit) for unit in islice((unit for unit in range(last) if unit not in records), 9)]
    shown = [*gaps[:8], f"… ({last + 1 - len(records)} of them)"] if len(gaps) > 8 else gaps
    if last < 0 or not records[last].is_complete:
        shown.append(f"all from {last + 1} on" if last >= 0 else "all")
    return f"missing units: {', '.join(shown)}" if shown else "all units are done, but not merged"


class UnitLedger(Ledger):
    """Places the shards of units as they are written, and records a unit when all its shards are there."""

    def __init__(self, folder: Folder, manifest: Manifest, done: Callable[[int], None]) -> None:
        super().__init__(folder, manifest)
        self._done = done
        self._lock, self._shards = undo.interrupt_safe(Lock()), dict[int, dict[int, Shard]]()
        self.lengths = dict[int, int]()
        """How many shards each unit has, of those that are complete."""

    def enter(self, shard: Shard) -> None:
        """Place a staged shard."""
        assert shard.unit is not None
        try:
            self._folder.place([shard.name])
        except FileNotFoundError:  # others have finished the store, and deleted what was being written
            if record_name(shard.unit) not in self._folder.names():
                raise
        with self._lock:
            shards = self._shards.setdefault(shard.unit, {})
            shards[shard.number] = shard
            is_whole = len(shards) == self.lengths.get(shard.unit)
        if is_whole:
            record = replace(self.manifest, shards=tuple(shards[number] for number in sorted(shards)))
            self._folder.create(record_name(shard.unit), record.to_bytes("unit"))
            del self._shards[shard.unit]
            self._done(shard.unit)


class UnitWriter(Writer):
    """Writes the shards of units. An interrupt ends the units that are complete, and leaves out the last one."""

    def __init__(
        self,
        folder: Folder,
        manifest: Manifest,
        options: HarvestOptions,
        sources: Mapping[str, Tensor],
        done: Callable[[int], None],
    ) -> None:
        """`done` is called with each unit that is recorded, in any thread."""
        # Where a shard ends must not depend on the time.
        super().__init__(folder, manifest, replace(options, flush_every=math.inf), sources)
        self._first_rows = self._shard_rows
        self._units = self._ledger = UnitLedger(folder, manifest, done)

    def begin(self, unit: int, progress: Progress) -> None:
        """Begin a unit; the batches that are added belong to it."""
        self._buffer, self._handed_over = None, Shard.start(unit, progress)

    def end(self, progress: Progress, *, is_last: bool) -> None:
        """End a unit. It may have no rows; then it has one empty shard."""
        before = self._handed_over
        assert before is not None
        assert before.unit is not None
        buffer, self._buffer = self._buffer or self._empty_buffer(0), None
        self._units.lengths[before.unit] = before.number + 2
        self._hand_over(buffer, progress, is_last=is_last)

    def drain(self) -> None:
        """Wait until everything is written."""
        wait(self._writing)
        self._collect()

    def _flush(self, error: BaseException) -> None:
        """Leave out the unit that is not complete."""
