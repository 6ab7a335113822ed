"""Many workers harvest into one store: each does some units of the work, and those of workers that died.

Nothing but the store's folder connects the workers. Each goes over the whole data set, for its checksum, and runs the
model on its own units: at first those that `rank` and `world` give it, then all that nobody else is doing. The worker
that finds all units done writes the manifest of the whole store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from hookline.errors import HooklineError, StoreError, warn
from hookline.progress import progress_bar
from hookline.store.examples import Examples
from hookline.store.folders import PART, Folder
from hookline.store.identity import check_same
from hookline.store.leases import BEATS, LEASE, Leases
from hookline.store.manifest import (
    MANIFEST,
    SUFFIX,
    About,
    Manifest,
    Progress,
    Shard,
    differences,
    shard_names,
    versions,
    writing,
)
from hookline.store.selection import Batch
from hookline.store.store import Store
from hookline.store.teams import Team
from hookline.store.units import (
    Unit,
    UnitWriter,
    merged,
    read_records,
    record_name,
    recorded_units,
    unit_name,
    units_of,
)
from hookline.store.workers import HarvestWorker

if TYPE_CHECKING:
    from hookline.store.harvesting import Harvest

Span: TypeAlias = tuple[Progress, Progress, bool]
"""Where a unit begins and ends in the data set, and whether it is the last."""

FIRST_WAIT, LONGEST_WAIT = 0.05, 5.0
"""Seconds between two looks at what the other workers are doing; each wait is twice as long as the one before."""


def only_worker(folder: Folder, team: Team) -> HarvestWorker | None:
    """The worker for a store that many have begun, or for a sharded model; None if a plain harvest will do."""
    if team.size > 1:
        return HarvestWorker(0, 1)
    try:
        manifest = Manifest.from_bytes(folder.read(MANIFEST), folder.path)
    except (StoreError, OSError):  # a plain harvest says what is wrong
        return None
    return None if manifest.about.unit is None else HarvestWorker(0, 1)


class SharedHarvest:
    """One worker's part in a harvest of many."""

    def __init__(
        self, work: Harvest, dataset: Any, read: Callable[[], Examples], store: Store, worker: HarvestWorker
    ) -> None:
        self._work, self._read, self._worker, self._team = work, read, worker, work.team
        self._is_readable_once = isinstance(dataset, Iterator)
        self._store, self._folder = store, copy(store.folder)
        self._leases = Leases(self._folder, worker.lease)
        self._folder.part = f".{self._leases.owner}{PART}"
        self._stack = ExitStack()
        self._writer: UnitWriter | None = None
        self._columns: dict[str, Any] = {}
        self._waits = FIRST_WAIT
        self._last_state: tuple[Any, float] = None, 0.0
        self._records: dict[int, Manifest] = {}
        self._count, self._end = 0, Progress()
        """The number of units, and the end of the last one, once the data set has been read."""
        self._ends = dict[int, Progress]()
        """Where each unit ends, as it was first read."""
        self._empty = dict[int, Span]()
        """The units without rows that are not written yet, because no worker knows the columns."""

    def run(self, progress: bool) -> None:
        """Do this worker's units, then those that nobody does; returns when the store is complete."""
        _check_independent(self._work.model.module)
        about = self._work.about(self._store)  # all processes of a team compute parts of it
        rank, world, takes_any = self._worker.rank, self._worker.world, self._is_readable_once
        with self._stack:
            if self._team.is_first:
                self._stack.enter_context(self._leases)
            self._plan, self._done = self._team.decided(lambda: self._planned(about))
            self._go_over(lambda unit: takes_any or unit % world == rank, progress)
            while (free := self._team.decided(self._free_units)) is not None:
                if free:
                    self._go_over({*free}.__contains__, progress)
            self._team.decided(self._finish)

    def _planned(self, about: About) -> tuple[Manifest, dict[int, Span]]:
        """The manifest that all workers share, which has no shards until the store is complete; and what is done."""
        where, size = self._store.path, self._work.options.batch_size
        if untagged := self._work.untagged(about):
            raise StoreError(f"many workers cannot harvest into {where} together: {untagged}")
        is_new = MANIFEST not in self._folder.names() and not shard_names(self._folder)
        unit = self._worker.batches_per_unit(self._read().total, size)
        if is_new:
            new = Manifest(replace(about, options={**about.options, "unit": unit}), versions=versions())
            with writing(self._folder, 0):
                self._folder.make()
                self._folder.create(MANIFEST, new.to_bytes())
        manifest = Manifest.load(self._folder)
        if manifest.about.unit is None:
            raise StoreError(
                f"{where} was begun by a harvest of one process: let one process finish it, with shard=(0, 1), or "
                f"harvest into another store"
            )
        unit = manifest.about.unit if self._worker.unit is None else unit
        check_same(replace(about, options={**about.options, "unit": unit}), manifest, where)
        by_unit = dict[int, list[Shard]]()
        for shard in manifest.shards if manifest.is_complete else ():
            by_unit.setdefault(shard.unit or 0, []).append(shard)
        for unit, record in ({} if by_unit else read_records(self._folder)[0]).items():
            by_unit[unit], self._columns = [*record.shards], record.about.points
        spans = {
            unit: (shards[0].progress_before, shards[-1].progress, shards[-1].is_last)
            for unit, shards in by_unit.items()
        }
        return replace(manifest, shards=()), spans

    def _go_over(self, is_wanted: Callable[[int], bool], progress: bool) -> None:
        """Go over the data set once, and do the wanted units that no other worker is doing."""
        examples, options = self._read(), self._work.options
        left: float = math.inf if options.max_rows is None else options.max_rows
        count, after = 0, Progress()
        with progress_bar(progress, examples.total, " examples") as bar:
            for unit in units_of(examples, options, self._plan.about.unit or 1):
                self._check_data(unit)
                if is_wanted(unit.number) and self._team.decided(partial(self._take, unit.number), unit.after):
                    rows, after = self._do(unit, left)
                elif options.max_rows is not None:  # how many rows are left depends on all texts before
                    batches = list(self._batches(unit, left))
                    rows, after = sum(batch.rows for _, batch, _ in batches), batches[-1][2]
                else:
                    rows, after = 0, unit.after
                left -= rows
                count = unit.number + 1
                bar.update(after.examples - bar.n)
                if left <= 0:
                    break
        if count < self._count:
            raise StoreError(_changing(self._store.path, after.examples))
        self._count, self._end = count, after

    def _check_data(self, unit: Unit) -> None:
        """Raise if another worker did this unit on other data, or the data was different when it was first read."""
        if self._ends.setdefault(unit.number, unit.after) != unit.after:
            raise StoreError(_changing(self._store.path, unit.before.examples))
        if unit.number not in self._done:
            return
        before, after, is_last = self._done[unit.number]
        is_cut = is_last and self._work.options.max_rows is not None  # it ends within the unit
        if before != unit.before or not (is_cut or after == unit.after):
            raise StoreError(
                f"unit {unit.number} of {self._store.path} was made from other data: it differs among the examples "
                f"{unit.before.examples} to {unit.after.examples - 1}. Delete the files {unit_name(unit.number)}* to "
                f"do it again, harvest into another store, or pass the data set from its beginning"
            )

    def _take(self, unit: int) -> bool:
        """Take a unit, unless another worker does it or has done it."""
        if unit in self._done or unit in self._empty:
            return False
        with writing(self._folder, 0):
            if not self._leases.take(unit_name(unit)):
                return False
            if record_name(unit) in self._folder:
                self._give_up(unit)
                return False
        return True

    def _give_up(self, unit: int) -> None:
        self._leases.give_up(unit_name(unit))

    def _batches(self, unit: Unit, left: float) -> Iterator[tuple[Progress, Batch, Progress]]:
        """The batches of a unit, with at most `left` rows."""
        for before, items, after in unit.batches:
            batch = self._work.batch(items, before.examples)
            batch = batch if batch.rows <= left else batch.first(int(left))
            left -= batch.rows
            yield before, batch, after
            if left <= 0:
                return

    def _do(self, unit: Unit, left: float) -> tuple[int, Progress]:
        """Run the model on a unit, and hand it to the writer; returns the number of rows, and where the unit ends."""
        rows, after = 0, unit.before
        for before, batch, after in self._batches(unit, left):
            if batch.rows:
                sources = self._work.activations(batch)
                if self._team.is_first:
                    writer = self._writer or self._open_writer(sources)
                    if not rows:
                        writer.begin(unit.number, unit.before)
                    writer.add(batch, sources, before, after)
            rows += batch.rows
        is_last = unit.is_last or rows >= left
        if rows and self._writer is not None:
            self._writer.end(after, is_last=is_last)
        elif not rows and self._team.is_first:
            self._empty[unit.number] = unit.before, after, is_last
            self._give_up(unit.number)
        return rows, after

    def _open_writer(self, sources: dict[str, Tensor]) -> UnitWriter:
        """The writer for the rows, whose dtypes and shapes are known after the first batch of some worker."""
        columns = self._work.columns(sources) if sources else self._columns
        if self._columns and (different := differences(columns, self._columns)):
            raise StoreError(f"{self._store.path} has activations of other shapes or dtypes: {'; '.join(different)}")
        manifest = replace(self._plan, about=replace(self._plan.about, points=columns))
        writer = UnitWriter(self._folder, manifest, self._work.options, sources, self._give_up)
        self._writer = self._stack.enter_context(writer)
        return writer

    def _free_units(self) -> list[int] | None:
        """The units that no worker is doing, or none after a wait; None if all are done."""
        self._write_empty()
        if self._writer is not None:
            self._writer.drain()
        with writing(self._folder, 0):
            missing = self._missing()
            free = [unit for unit in missing if self._leases.is_free(unit_name(unit)) and unit not in self._empty]
        if not missing:
            return None
        if free and not self._is_readable_once:
            self._waits = FIRST_WAIT
            return free
        self._check_hope(missing)
        time.sleep(self._waits)
        self._waits = min(2 * self._waits, LONGEST_WAIT, self._worker.lease / BEATS)
        return []

    def _write_empty(self) -> None:
        """Write the units without rows, once the columns are known."""
        if self._empty and self._writer is None and not self._columns:
            for record in read_records(self._folder)[0].values():
                self._columns = record.about.points
        if not self._empty or (self._writer is None and not self._columns):
            return
        units, self._empty = self._empty, {}
        for unit, (before, after, is_last) in units.items():
            if self._take(unit):
                writer = self._writer or self._open_writer({})
                writer.begin(unit, before)
                writer.end(after, is_last=is_last)

    def _missing(self) -> list[int]:
        """The units that are not done. Records that are damaged, or whose shards are lost, are deleted."""
        if self._is_complete():
            return []
        missing = sorted({*range(self._count)} - {*recorded_units(self._folder.names())})
        if missing:
            return missing
        self._records, damaged = read_records(self._folder)
        for unit, why in damaged.items():
            warn(f"{why}: unit {unit} is done again")
            self._folder.delete(record_name(unit))
            self._done.pop(unit, None)
        return [unit for unit in damaged if unit < self._count]

    def _is_complete(self) -> bool:
        return Manifest.load(self._folder).is_complete

    def _check_hope(self, missing: list[int]) -> None:
        """Raise if this worker cannot do what is missing, and no other worker does anything."""
        where = self._store.path
        if {*missing} <= {*self._empty}:
            raise StoreError(
                f"there are no rows to store in {where}: the data set is empty, or no text has the positions"
            )
        state = missing, self._leases.contents(map(unit_name, missing))
        if state != self._last_state[0]:
            self._last_state = state, time.monotonic()
        if self._is_readable_once and time.monotonic() - self._last_state[1] > self._worker.lease:
            raise StoreError(
                f"{where} is not complete: units {', '.join(map(str, missing[:8]))} are missing, and the data set "
                f"cannot be read a second time to do them here. Harvest again with the same arguments and the data "
                f"from its beginning; or pass a list or another data set that can be read several times"
            )

    def _finish(self) -> None:
        """Write the manifest of the whole store, unless another worker has, and delete what is not needed any more."""
        if not self._count:
            raise StoreError(f"there are no rows to store in {self._store.path}: the data set is empty")
        if not self._is_complete():
            whole = merged(self._plan, self._records, self._store.path)
            if whole.is_complete and whole.shards[-1].progress == self._end:
                whole.save(self._folder)
        manifest = Manifest.load(self._folder)
        if not manifest.is_complete or manifest.shards[-1].progress != self._end:
            raise StoreError(
                f"{self._store.path} was made from other data: this data set has {self._end.examples:,} examples, and "
                f"the other workers had more or less. Harvest into another store"
            )
        # Other workers may be about to write this manifest as well; shards and leases are of no use to them any more.
        unfinished = [name for name in self._folder.names(unfinished=True) if SUFFIX in name]
        for name in (*unfinished, *(name for name in self._folder.names() if name.endswith(LEASE))):
            with suppress(OSError):  # the store is complete
                self._folder.delete(name)


def _changing(where: str, example: int) -> str:
    return (
        f"{where} is not complete, and cannot be completed from a data set that changes: from example {example} on, it "
        f"was different when it was read a second time. Pass a list, an iterator, or a data set that has the same "
        f"examples in the same order whenever it is read"
    )


def _check_independent(module: nn.Module) -> None:
    """Raise if the processes of a model must all run at the same time, but on batches of their own."""
    if not dist.is_available() or not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for kind in (FSDPModule, FullyShardedDataParallel, DistributedDataParallel):
        if any(isinstance(submodule, kind) for submodule in module.modules()):
            raise HooklineError(
                f"harvest cannot divide its work among the processes of a {kind.__name__}, which wait for each other "
                f"in every pass: hook a model that is not wrapped (model.module of DistributedDataParallel), or shard "
                f"it with transformers' DistributedConfig(tp_plan='auto')"
            )
