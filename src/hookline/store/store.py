"""Stores: activations on disk, read by row, by example, by point, or as batches for training."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.errors import StoreError, how_many, unknown_point
from hookline.store.folders import Bytes, Folder, LocalFolder
from hookline.store.integrity import Verification, rebuild_manifest, verify
from hookline.store.manifest import Column, Manifest, Shard
from hookline.store.shards import ROW, Header, is_sound, mismatch, open_shard, read_rows
from hookline.store.stored_rows import Batches, RowDataset, Rows, View
from hookline.store.units import load_manifest, missing_units
from hookline.text.outliers import Outliers, Outlying, outlying, row_norms

Span: TypeAlias = tuple[Shard, int, int]
"""A shard, and the rows of it from start to stop."""

_OPEN = 64
"""The number of shards kept open; each takes a file handle."""

_RUN = 8192
"""The number of rows read at a time when all rows are scanned."""


class Store:
    """Activations of many tokens, in a folder of shards with a manifest.

        store = hookline.harvest(model, texts, "blocks.*.hook_resid_post", "activations")
        store = hookline.store.LocalStore("activations")       # later, without the model
        store.rows(0, 1000)["blocks.0.hook_resid_post"]        # [1000, d_model]
        store["blocks.0.hook_resid_post"][5:8]                 # [3, d_model]: only those bytes are read
        store.example(7)                                       # all rows of the eighth text
        store.batches(4096, shuffle=True)                      # for training

    The checksum of each tensor in a shard is verified when its first row is read; `check=False` skips that.
    """

    def __init__(self, folder: Folder, *, check: bool = True) -> None:
        self.folder, self._checks = folder, check
        self._manifest: Manifest | None = None
        self._open: OrderedDict[int, tuple[Bytes, Header]] = OrderedDict()
        self._sound: set[tuple[int, str]] = set()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": OrderedDict()}

    @property
    def path(self) -> str:
        """Its path or address."""
        return self.folder.path

    @property
    def manifest(self) -> Manifest:
        """The contents of the store, as of the first access; `refresh()` reads it again."""
        if self._manifest is None:
            self._manifest = load_manifest(self.folder)
        return self._manifest

    def refresh(self) -> None:
        """Read the folder again: a harvest may have added rows."""
        self._manifest = None
        self._open.clear()
        self._sound.clear()

    @property
    def points(self) -> dict[str, Column]:
        """The stored points, with the dtype and shape of their rows."""
        return self.manifest.about.points

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def examples(self) -> int:
        """The number of examples that were read; some may have no rows."""
        return self.manifest.examples

    @property
    def is_complete(self) -> bool:
        """Whether the harvest is finished."""
        return self.manifest.is_complete

    def rows(self, start: int = 0, stop: int | None = None, points: str | Sequence[str] | None = None) -> Rows:
        """Returns the rows `start:stop`, of all points or of some (names or globs)."""
        start, stop, _ = slice(start, stop).indices(len(self))
        return self._rows(self._spans(start, stop), self.select(points))

    def example(self, number: int, points: str | Sequence[str] | None = None) -> Rows:
        """Returns the rows of one example, in the order of their positions."""
        if number not in range(-self.examples, self.examples):
            raise StoreError(f"example {number} is not in {self.path}: it has 0 to {self.examples - 1}")
        number %= self.examples
        stops = [shard.stop_example for shard in self.manifest.shards]
        shard = self.manifest.shards[bisect_right(stops, number)]
        numbers = self._column(shard, "@example", 0, shard.rows)
        first, last = (int(torch.searchsorted(numbers, number, right=right)) for right in (False, True))
        return self._rows([(shard, first, last)], self.select(points))

    def __getitem__(self, point: str) -> View:
        names = self.select([point])
        if len(names) != 1:
            raise StoreError(
                f"{point!r} matches {len(names)} points, expected exactly one: {names[:4]}; rows(points=…) takes more"
            )
        return View(self, names[0])

    def __contains__(self, point: object) -> bool:
        return isinstance(point, str) and (point in self.points or point in self._names)

    @property
    def _names(self) -> dict[str, str]:
        """The other names of the points, and the stored names they refer to."""
        return {
            other: name
            for name, column in self.points.items()
            for other in (column.asked, *column.also)
            if other and other not in self.points
        }

    def batches(self, batch_size: int, points: str | Sequence[str] | None = None, **options: Any) -> Batches:
        """Returns all rows in batches, for iteration or a DataLoader: see `Batches` for the options."""
        return Batches(self, batch_size, points, **options)

    def dataset(self, points: str | Sequence[str] | None = None) -> RowDataset:
        """Returns a torch Dataset whose items are single rows."""
        return RowDataset(self, points)

    def outlying(self, point: str, outliers: Outliers = "exclude") -> Outlying:
        """Counts the rows whose norm at a point is over 10 times the median, such as attention sinks.

            print(store.outlying("blocks.15.hook_resid_post"))
            # 480 of 10,048 rows (4.8%) outlying: norms up to 26,918, over 10 × the median of 177

        The result also has their row numbers. A harvest keeps them, and `sae.train` leaves them out. A number as
        `outliers` replaces the 10. This reads all rows of the point.
        """
        view = self[point]
        parts = [row_norms(view[start : start + _RUN]) for start in range(0, len(self), _RUN)]
        is_out, summary = outlying(torch.cat(parts) if parts else torch.zeros(0), outliers)
        return replace(summary, rows=is_out.nonzero().flatten())

    def verify(self, *, rebuild: bool = False) -> Verification:
        """Check every byte; returns a table of shards and problems. `rebuild` first rewrites a lost manifest."""
        if rebuild:
            rebuild_manifest(self.folder)
        self.refresh()
        return verify(self.folder)

    def rebuild(self) -> None:
        """Rewrite the manifest from the headers of the shards."""
        self.verify(rebuild=True)

    def select(self, points: str | Sequence[str] | None) -> list[str]:
        """Returns the stored points that match names or globs, in any dialect."""
        if points is None:
            return list(self.points)
        selected: dict[str, None] = {}
        for pattern in points if isinstance(points, Sequence) and not isinstance(points, str) else [points]:
            if not isinstance(pattern, str):
                raise StoreError(f"points in a store are selected by name, not by {pattern!r}: it has {[*self.points]}")
            matching = [self._names[pattern]] if pattern in self._names else []
            matching = matching or [name for name in self.points if pattern == name or fnmatchcase(name, pattern)]
            if not matching:
                raise unknown_point(pattern, self.points, hint=f"({self.path} has {len(self.points)} points.)")
            selected |= dict.fromkeys(matching)
        return list(selected)

    def _spans(self, start: int, stop: int) -> Iterator[Span]:
        """The parts of shards that make up the rows `start:stop`."""
        shards = self.manifest.shards
        index = bisect_right([shard.stop_row for shard in shards], start)
        while start < stop:
            shard = shards[index]
            last = min(stop, shard.stop_row)
            yield shard, start - shard.first_row, last - shard.first_row
            start, index = last, index + 1

    def _rows(self, spans: Iterable[Span], names: Sequence[str]) -> Rows:
        example, position, token, *activations = self._read([*ROW, *names], spans)
        return Rows(example, position, token, dict(zip(names, activations, strict=True)), self._names)

    def row_number(self, row: int) -> int:
        """A row number counted from the start; IndexError if there is no such row."""
        if row not in range(-len(self), len(self)):
            raise IndexError(f"row {row} is out of range: there are {len(self)} rows")
        return row % len(self)

    def _read(self, names: Sequence[str], spans: Iterable[Span]) -> list[Tensor]:
        parts = [[self._column(shard, name, start, stop) for name in names] for shard, start, stop in spans]
        if not parts:
            columns = [(ROW | self.points)[name] for name in names]
            return [torch.empty((0, *column.shape), dtype=column.torch_dtype) for column in columns]
        return parts[0] if len(parts) == 1 else [torch.cat(column) for column in zip(*parts, strict=True)]

    def _column(self, shard: Shard, name: str, start: int, stop: int) -> Tensor:
        file, header = self._opened(shard)
        place = header.tensors[name]
        if self._checks and (shard.number, name) not in self._sound:
            if not is_sound(file, place):
                raise self._refusal(shard, f"{name} is damaged: its checksum does not match")
            self._sound.add((shard.number, name))
        return read_rows(file, place, start, stop)

    def _opened(self, shard: Shard) -> tuple[Bytes, Header]:
        if shard.number not in self._open:
            try:
                file, header = open_shard(self.folder, shard.name)
            except StoreError as error:
                raise self._refusal(shard, str(error)) from error
            if problem := mismatch(self.manifest, shard, header):
                raise self._refusal(shard, problem)
            self._open[shard.number] = file, header
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(shard.number)
        return self._open[shard.number]

    def _refusal(self, shard: Shard, why: str) -> StoreError:
        return StoreError(
            f"{self.path}/{shard.name} cannot be read: {why}. `hookline store verify PATH` checks all shards"
        )

    def __repr__(self) -> str:
        kind, manifest = type(self).__name__, self.manifest
        state = "complete" if manifest.is_complete else "not complete"
        if manifest.about.unit is not None and not manifest.is_complete:
            state += f", {missing_units(self.folder)}: harvest again with the same arguments"
        return (
            f"{kind}({self.path!r}: {how_many(manifest.rows, 'row')} of {how_many(manifest.examples, 'example')}, "
            f"{how_many(len(self.points), 'point')}, {how_many(len(manifest.shards), 'shard')}, {state})"
        )


class LocalStore(Store):
    """A store in a local folder: see `Store`."""

    def __init__(self, path: str | Path, *, check: bool = True) -> None:
        if "://" in str(path):
            raise StoreError(f"{path} is not a local folder: use hookline.store.RemoteStore({str(path)!r})")
        super().__init__(LocalFolder(path), check=check)


class RemoteStore(Store):
    """A store on any file system that fsspec supports, `s3://…` or `memory://…`: see `Store`."""

    def __init__(self, url: str, *, check: bool = True) -> None:
        super().__init__(Folder(url), check=check)


def open_store(path: str | Path | Store) -> Store:
    """The store at a path or address.

    Examples:
        >>> store = hookline.harvest(model, texts, "blocks.2.hook_resid_post", "activations")
        >>> hookline.store.open_store("activations")
        LocalStore('...activations': 25 rows of 5 examples, 1 point, 1 shard, complete)
    """
    if isinstance(path, Store):
        return path
    text = str(path)
    if text.startswith("file://"):
        return LocalStore(text.removeprefix("file://"))
    return RemoteStore(text) if "://" in text else LocalStore(path)
