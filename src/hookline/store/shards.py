"""Shards: safetensors files whose headers describe the harvest and hold the checksum of each tensor.

    8 bytes           the length of the header
    the header        JSON: each tensor's dtype, shape and place, and under __metadata__ the harvest, checksums, a seal
    the tensors       @example, @position and @token of each row, then the activations at each point

The seal is the checksum of the header itself, computed with zeros in place of the seal.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookline.errors import StoreError
from hookline.files.tensorfile import BAD_CONTENT, reason
from hookline.store.folders import Bytes, Folder
from hookline.store.manifest import (
    About,
    Column,
    Manifest,
    Shard,
    check_format,
    differences,
    manifest_checksum,
    versions,
)

ROW = {"@example": Column("int64", ()), "@position": Column("int32", ()), "@token": Column("int32", ())}
"""The columns of every row: its example, position and token (-1 if there is none)."""

DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
"""The dtypes that can be stored, and their safetensors names."""

_THREADS = 4
"""How many checksums of a shard are computed in parallel."""

_UNSEALED = b'"seal":"00000000"'


@dataclass(frozen=True)
class Place:
    """The location of a tensor in a file."""

    column: Column
    start: int
    stop: int
    sum: str


@dataclass(frozen=True)
class Header:
    """The parsed header of a shard."""

    about: About
    shard: Shard
    tensors: dict[str, Place]


def shard_columns(about: About) -> dict[str, Column]:
    """All columns in file order: wide dtypes first, so that all of them are aligned."""
    every = {**ROW, **about.points}
    return dict(sorted(every.items(), key=lambda named_column: -named_column[1].torch_dtype.itemsize))


def stage_shard(folder: Folder, about: About, shard: Shard, tensors: Mapping[str, Tensor]) -> Shard:
    """Write a staged shard with these rows; returns it with its size and seal."""
    parts = {name: memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy()) for name in shard_columns(about)}  # type: ignore[arg-type]
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = dict(zip(parts, threads.map(manifest_checksum, parts.values()), strict=True))
    header, seal = _header(about, shard, sums)
    shard = replace(shard, bytes=len(header) + sum(map(len, parts.values())), seal=seal)
    folder.stage(shard.name, [header, *parts.values()])
    return shard


def _header(about: About, shard: Shard, sums: Mapping[str, str]) -> tuple[bytes, str]:
    """The header and its seal. safetensors allows only strings as metadata, so other values are JSON strings."""
    inside = {"about": about.to_json(), "shard": shard.unsealed().to_json(), "sums": sums, "versions": versions()}
    plain = {"hookline": "shard", "format": str(about.format), "seal": "00000000"}
    metadata = plain | {key: json.dumps(value) for key, value in inside.items()}
    text = json.dumps({"__metadata__": metadata, **_layout(about, shard)}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    seal = manifest_checksum(header)
    return header.replace(_UNSEALED, _sealed(seal)), seal


def _sealed(seal: str) -> bytes:
    return _UNSEALED.replace(b"00000000", seal.encode())


def _layout(about: About, shard: Shard) -> dict[str, dict[str, Any]]:
    """The dtype, shape and place of each tensor, as a safetensors header has them."""
    layout: dict[str, dict[str, Any]] = {}
    start = 0
    for name, column in shard_columns(about).items():
        stop = start + shard.rows * column.nbytes
        shape = [shard.rows, *column.shape]
        layout[name] = {"dtype": DTYPES[column.dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    return layout


def open_shard(folder: Folder, name: str, *, check: bool = False) -> tuple[Bytes, Header]:
    """Open a shard and read its header; StoreError says what is wrong. `check` verifies the tensors too."""
    try:
        file = folder.open(name)
    except FileNotFoundError:
        raise StoreError("it is missing") from None
    except OSError as error:
        raise StoreError(f"it cannot be opened ({reason(error)})") from error
    try:
        (length,) = struct.unpack("<Q", bytes(file[:8]))
        raw = bytes(file[: 8 + length])
        if len(raw) != 8 + length:
            raise ValueError("it is truncated within its header")
        header = _parsed(raw, len(file))
    except (*BAD_CONTENT, OSError, struct.error) as error:
        raise StoreError(f"its header is damaged, or it is not a shard: {reason(error)}") from error
    damaged = [tensor_name for tensor_name, place in header.tensors.items() if check and not is_sound(file, place)]
    if damaged:
        raise StoreError(f"bytes have changed in {', '.join(damaged)}")
    return file, header


def _parsed(raw: bytes, size: int) -> Header:
    fields = json.loads(raw[8:])
    metadata = fields.pop("__metadata__")
    seal = metadata["seal"]
    if manifest_checksum(raw.replace(_sealed(seal), _UNSEALED, 1)) != seal:
        raise ValueError("its seal does not match")
    check_format(int(metadata["format"]))
    about, sums = About.from_json(json.loads(metadata["about"])), json.loads(metadata["sums"])
    shard = replace(Shard.from_json(json.loads(metadata["shard"])), seal=seal, bytes=size)
    if fields != _layout(about, shard):
        raise ValueError(f"its tensors are not {shard.rows} rows of its columns, {list(shard_columns(about))}")
    tensors, end = dict[str, Place](), len(raw)
    for name, column in shard_columns(about).items():
        start, end = end, end + shard.rows * column.nbytes
        tensors[name] = Place(column, start, end, sums[name])
    if size != end:
        raise StoreError(f"it is {'truncated' if size < end else 'too long'}: {size:,} bytes, not {end:,}")
    return Header(about, shard, tensors)


def about_differences(current: About, stored: About) -> list[str]:
    """What differs between two descriptions of harvests, as phrases."""
    ours, theirs = current.to_json(), stored.to_json()
    return [line for part in ours for line in differences(ours[part], theirs[part])]


def mismatch(manifest: Manifest, shard: Shard, header: Header) -> str:
    """Why a file is not the shard that the manifest describes; empty if it is."""
    if different := about_differences(header.about, manifest.about):
        return "it belongs to a different harvest than the manifest: " + "; ".join(different[:3])
    actual = header.shard
    if shard.unit is not None:  # the file's numbers count from the start of its unit
        actual = replace(actual, number=shard.number, first_row=shard.first_row)
    if actual == shard:
        return ""
    if actual.number != shard.number:
        return f"it is another shard of this harvest, number {actual.number}: {actual.name} under a wrong name"
    if (actual.data_before, actual.data_after) != (shard.data_before, shard.data_after):
        return f"it is shard {actual.number} of other data"
    different = differences(asdict(actual), asdict(shard))
    return f"it is not shard {actual.number} of the manifest: {'; '.join(different[:3])}"


def is_sound(file: Bytes, place: Place) -> bool:
    """Whether a tensor matches its checksum."""
    return manifest_checksum(file[place.start : place.stop]) == place.sum


def read_rows(file: Bytes, place: Place, start: int, stop: int) -> Tensor:
    """A copy of some rows of a tensor; nothing else of the file is read."""
    dtype, width = place.column.torch_dtype, place.column.nbytes
    raw = bytearray(file[place.start + start * width : place.start + stop * width])
    x = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return x.view(stop - start, *place.column.shape)
