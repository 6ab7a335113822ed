"""The manifest: what a store contains, and its shards."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Self

import torch

from hookline import __version__
from hookline.errors import StoreError
from hookline.files.tensorfile import BAD_CONTENT, reason
from hookline.store.folders import Folder

MANIFEST, SUFFIX = "manifest.json", ".safetensors"

FORMATS = (1, 2)
"""The formats that can be read. A store of many workers, whose options have a "unit", has the second."""


@dataclass(frozen=True)
class Column:
    """How one point is stored in each row."""

    dtype: str
    shape: tuple[int, ...]
    asked: str = field(default="", compare=False)
    """The name by which the point was requested, if it differs."""
    also: tuple[str, ...] = field(default=(), compare=False)
    """Its names in other dialects."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """The size of one row in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read it from a manifest or a shard; ValueError or TypeError if it is invalid."""
        column = cls(fields["dtype"], tuple(fields["shape"]), fields["asked"], tuple(fields.get("also", ())))
        if not isinstance(getattr(torch, column.dtype, None), torch.dtype) or not all(map(_is_size, column.shape)):
            raise ValueError(f"a column has the dtype {column.dtype!r} and the shape {list(column.shape)}")
        if not all(isinstance(name, str) for name in (column.asked, *column.also)):
            raise ValueError(f"a column has the names {[column.asked, *column.also]}")
        return column


@dataclass(frozen=True)
class About:
    """The model, the options and the points of a store: the identity of its harvest."""

    model: dict[str, Any]
    options: dict[str, Any]
    points: dict[str, Column]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read it from a manifest or a shard."""
        points = {name: Column.from_json(column) for name, column in fields["points"].items()}
        if not isinstance(fields["model"], dict) or not isinstance(fields["options"], dict):
            raise ValueError("model and options are not objects with fields")
        about = cls(fields["model"], fields["options"], points)
        if about.unit is not None and not (_is_size(about.unit) and about.unit):
            raise ValueError(f"a unit of work has {_short(about.unit)} batches")
        return about

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def unit(self) -> int | None:
        """How many batches a unit of work has, if the store is of many workers."""
        return self.options.get("unit")

    @property
    def format(self) -> int:
        """The format of its files."""
        return FORMATS[0] if self.unit is None else FORMATS[1]


def differences(current: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """The differences as phrases: `dtype is 'float32' here, but 'bfloat16' in the store`."""
    keys = [*current, *(key for key in stored if key not in current)]
    return [
        f"{key} is {_short(current.get(key))} here, but {_short(stored.get(key))} in the store"
        for key in keys
        if current.get(key) != stored.get(key)
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 240 else f"{text[:220]}… ({len(text)} characters)"


START = "0" * 32
"""The checksum of no data."""


@dataclass(frozen=True)
class Progress:
    """How far a data set has been read: the number of examples, and their checksum."""

    examples: int = 0
    sum: str = START


@dataclass(frozen=True)
class Shard:
    """One file: consecutive rows of whole batches of examples."""

    number: int
    first_row: int
    rows: int
    first_example: int
    stop_example: int
    """One after the last example that was read for it, whether or not it has rows."""
    data_before: str
    data_after: str
    """The checksum of all examples before `first_example`, and of all before `stop_example`."""
    is_last: bool
    """Whether the harvest ended with this shard."""
    bytes: int = 0
    seal: str = ""
    """The checksum of the file's header, which contains the checksums of its tensors."""
    unit: int | None = None
    """The unit of work that it belongs to, in a store of many workers. The header's numbers count from its start."""

    @property
    def name(self) -> str:
        """The file name. In a store of many workers it contains the seal, so equal names mean equal contents."""
        if self.unit is None:
            return f"{self.number:06d}{SUFFIX}"
        return f"{self.unit:06d}-{self.first_example:09d}-{self.seal}{SUFFIX}"

    @property
    def stop_row(self) -> int:
        """One after its last row."""
        return self.first_row + self.rows

    @property
    def progress(self) -> Progress:
        """How far the data set had been read when the shard ended."""
        return Progress(self.stop_example, self.data_after)

    @property
    def progress_before(self) -> Progress:
        """How far the data set had been read when it began."""
        return Progress(self.first_example, self.data_before)

    @classmethod
    def after(cls, before: Shard | None, rows: int, progress: Progress, *, is_last: bool) -> Self:
        """The shard that starts where `before` ends."""
        if before is None:
            before = cls.start(None, Progress())
        seen, counts = before.progress, (before.number + 1, before.stop_row, rows)
        sums = (seen.sum, progress.sum)
        return cls(*counts, seen.examples, progress.examples, *sums, is_last, unit=before.unit)

    @classmethod
    def start(cls, unit: int | None, progress: Progress) -> Self:
        """What the first shard of a unit follows."""
        examples, seen = progress.examples, progress.sum
        return cls(-1, 0, 0, examples, examples, seen, seen, is_last=False, unit=unit)

    def follows(self, before: Shard | None) -> bool:
        """Whether it starts where `before` ends."""
        expected = Shard.after(before, self.rows, self.progress, is_last=self.is_last)
        return self.unsealed() == replace(expected, unit=self.unit)

    def placed_after(self, before: Shard | None) -> Shard:
        """A copy whose number and rows count on from `before`."""
        return replace(self, number=before.number + 1, first_row=before.stop_row) if before is not None else self

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read it from a manifest or a shard; ValueError or TypeError if it is invalid."""
        shard = cls(**fields)
        if shard.unit is not None and not (_is_size(shard.unit) and re.fullmatch("[0-9a-f]{8}|", shard.seal)):
            raise ValueError(f"a shard of a unit is described as {_short(dict(fields))}")
        counts = (shard.number, shard.first_row, shard.rows, shard.first_example, shard.stop_example, shard.bytes)
        words = (shard.data_before, shard.data_after, shard.seal)
        is_right = all(map(_is_size, counts)) and all(isinstance(word, str) for word in words)
        if not is_right or not isinstance(shard.is_last, bool):
            raise ValueError(f"a shard is described as {_short(dict(fields))}")
        return shard

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {name: value for name, value in vars(self).items() if name != "unit" or value is not None}

    def unsealed(self) -> Shard:
        """A copy without the fields that are known only after writing."""
        return replace(self, bytes=0, seal="")


@dataclass(frozen=True)
class Manifest:
    """The contents of a store, and its shards in order."""

    about: About
    shards: tuple[Shard, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.shards[-1].stop_row if self.shards else 0

    @property
    def examples(self) -> int:
        """The number of examples read."""
        return self.shards[-1].stop_example if self.shards else 0

    @property
    def is_complete(self) -> bool:
        """Whether the harvest is finished."""
        return bool(self.shards) and self.shards[-1].is_last

    def with_shards(self, *shards: Shard) -> Manifest:
        """Returns a copy with more shards."""
        return replace(self, shards=(*self.shards, *shards))

    def to_bytes(self, kind: str = "store") -> bytes:
        """Returns the JSON file, with one line per shard. The kind is "store", or "unit" for some of its shards."""
        fields = {"hookline": kind, "format": self.about.format, "versions": self.versions, **self.about.to_json()}
        shards = [shard.to_json() for shard in self.shards]
        total = manifest_checksum(json.dumps({**fields, "shards": shards}).encode())
        start = json.dumps({"sum": total, **fields}, indent=1).removesuffix("\n}")
        lines = ",\n  ".join(map(json.dumps, shards))
        return f'{start},\n "shards": [\n  {lines}\n ]\n}}'.encode()

    def save(self, folder: Folder) -> None:
        """Write it to a folder; StoreError if the disk is full or cannot be written to."""
        with writing(folder, self.rows):
            folder.replace(MANIFEST, self.to_bytes())

    @classmethod
    def load(cls, folder: Folder) -> Self:
        """Read it from a folder; StoreError if there is none or it is damaged."""
        try:
            raw = folder.read(MANIFEST)
        except FileNotFoundError:
            shards = shard_names(folder)
            advice = (
                f"but {len(shards)} shards: `hookline store verify PATH --rebuild` rewrites it"
                if shards
                else "and no shard: harvest into it first"
            )
            raise StoreError(f"{folder.path} has no {MANIFEST}, {advice}") from None
        except OSError as error:
            raise StoreError(f"{folder.path}/{MANIFEST} cannot be opened: {reason(error)}") from error
        return cls.from_bytes(raw, f"{folder.path}/{MANIFEST}")

    @classmethod
    def from_bytes(cls, raw: bytes, where: str, kind: str = "store") -> Self:
        """Read the JSON file; StoreError if it is damaged."""
        try:
            fields = json.loads(raw)
            checksum = fields.pop("sum")
            if fields["hookline"] != kind or checksum != manifest_checksum(json.dumps(fields).encode()):
                raise ValueError("its checksum does not match")
            check_format(fields["format"])
            shards = tuple(Shard.from_json(shard_fields) for shard_fields in fields["shards"])
            start = Shard.start(shards[0].unit, shards[0].progress_before) if kind == "unit" else None
            for before, shard in zip((start, *shards), shards, strict=False):
                if not shard.follows(before):
                    raise ValueError(f"its shard {shard.number} does not start where the previous one ends")
            if not isinstance(fields["versions"], dict):
                raise ValueError(f"its versions are {_short(fields['versions'])}")
            return cls(About.from_json(fields), shards, fields["versions"])
        except BAD_CONTENT as error:
            raise StoreError(
                f"the manifest {where} is damaged: {reason(error)}. `hookline store verify PATH --rebuild` rewrites "
                f"it from the shards"
            ) from error


def check_format(file_format: Any) -> None:
    """ValueError if a file has a format that is not known."""
    if file_format not in FORMATS:
        supported = " and ".join(map(str, FORMATS))
        raise ValueError(f"its format is {file_format}, and this version of hookline reads {supported}")


def shard_names(folder: Folder) -> list[str]:
    """The files that are named like shards."""
    return [name for name in folder.names() if name.endswith(SUFFIX)]


@contextmanager
def writing(folder: Folder, rows: int) -> Iterator[None]:
    """Raise a StoreError if the disk is full or cannot be written to."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder.path} cannot be written to: {reason(error)}. Its rows so far (at least {rows:,}) are kept, and "
            f"the same harvest can be resumed once there is space"
        ) from error


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def manifest_checksum(content: Any) -> str:
    """The checksum of bytes, as a store's files record it."""
    return f"{zlib.crc32(content):08x}"


@cache
def versions() -> dict[str, str]:
    """The versions of the packages that compute and store the activations."""
    return {"hookline": __version__} | {name: version(name) for name in ("torch", "transformers", "safetensors")}
