"""Shards: safetensors files whose headers describe the harvest and hold the checksum of each tensor.

    8 bytes           the length of the header
    the header        JSON: each tensor's dtype, shape and place, and under __metadata__ the harvest, checksums, a seal
    the tensors       @example, @position and @token of each row, then the activations at each point

The seal is the checksum of the header itself, computed with zeros in place of the seal.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookline.engine.tensorfile import BAD_CONTENT, reason
from hookline.errors import StoreError
from hookline.store.folders import Bytes, Folder
from hookline.store.manifest import FORMAT, About, Column, Shard, versions

ROW = {"@example": Column("int64", ()), "@position": Column("int32", ()), "@token": Column("int32", ())}
"""The columns of every row: its example, position and token (-1 if there is none)."""

DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
"""The dtypes that can be stored, and their safetensors names."""

_UNSEALED = b'"seal":"00000000"'


@dataclass(frozen=True)
class Place:
    """The location of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    sum: str


@dataclass(frozen=True)
class Header:
    """The parsed header of a shard."""

    about: About
    shard: Shard
    tensors: dict[str, Place]


def columns_of(about: About) -> dict[str, Column]:
    """All columns in file order: wide dtypes first, so that all of them are aligned."""
    every = {**ROW, **about.points}
    return dict(sorted(every.items(), key=lambda each: -each[1].torch_dtype.itemsize))


def stage_shard(folder: Folder, about: About, shard: Shard, tensors: Mapping[str, Tensor]) -> Shard:
    """Write a staged shard with these rows; returns it with its size and seal."""
    parts = {name: _bytes(tensors[name]) for name in columns_of(about)}
    header = _header(about, shard, {name: _sum(part) for name, part in parts.items()})
    folder.stage(shard.name, [header, *parts.values()])
    return replace(shard, bytes=len(header) + sum(map(len, parts.values())), seal=_seal(header))


def _bytes(x: Tensor) -> memoryview:
    return memoryview(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _sum(part: Any) -> str:
    return f"{zlib.crc32(part):08x}"


def _header(about: About, shard: Shard, sums: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": _metadata(about, shard, sums)}
    start = 0
    for name, column in columns_of(about).items():
        shape = [shard.rows, *column.shape]
        stop = start + shard.rows * column.nbytes
        fields[name] = {"dtype": DTYPES[column.dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header.replace(_UNSEALED, _UNSEALED.replace(b"00000000", _sum(header).encode()))


def _metadata(about: About, shard: Shard, sums: Mapping[str, str]) -> dict[str, str]:
    """The metadata of the header. safetensors allows strings only, so other values are JSON strings."""
    inside = {"about": about.to_json(), "shard": asdict(shard.unsealed()), "sums": sums, "versions": versions()}
    plain = {"hookline": "shard", "format": str(FORMAT), "seal": "00000000"}
    return plain | {key: json.dumps(value) for key, value in inside.items()}


def _seal(header: bytes) -> str:
    start = header.index(_UNSEALED[:8]) + 8
    return header[start : start + 8].decode()


def read_header(file: Bytes) -> Header:
    """Read and check the header of a shard; StoreError says what is wrong. The tensors are not checked."""
    try:
        (length,) = struct.unpack("<Q", bytes(file[:8]))
        raw = bytes(file[: 8 + length])
        if len(raw) != 8 + length:
            raise ValueError("it is truncated within its header")
        return _parsed(raw, len(file))
    except (*BAD_CONTENT, OSError, struct.error) as error:
        raise StoreError(f"its header is damaged, or it is not a shard: {reason(error)}") from error


def _parsed(raw: bytes, size: int) -> Header:
    fields = json.loads(raw[8:])
    metadata = fields.pop("__metadata__")
    sealed, seal = _UNSEALED.replace(b"00000000", metadata["seal"].encode()), metadata["seal"]
    if _sum(raw.replace(sealed, _UNSEALED, 1)) != seal:
        raise ValueError("its seal does not match")
    if metadata["format"] != str(FORMAT):
        raise ValueError(f"its format is {metadata['format']}, and this version of hookline reads {FORMAT}")
    about, sums = About.from_json(json.loads(metadata["about"])), json.loads(metadata["sums"])
    shard = replace(Shard.from_json(json.loads(metadata["shard"])), seal=seal)
    tensors = {
        name: Place(_from_safetensors(each["dtype"]), tuple(each["shape"]), *_offsets(each, len(raw)), sums[name])
        for name, each in fields.items()
    }
    _check_layout(about, shard, tensors, len(raw))
    end = max(place.stop for place in tensors.values())
    if size != end:
        raise StoreError(f"it is {'truncated' if size < end else 'too long'}: {size:,} bytes, not {end:,}")
    return Header(about, replace(shard, bytes=size), tensors)


def _check_layout(about: About, shard: Shard, tensors: Mapping[str, Place], start: int) -> None:
    """Check that the tensors are those of the columns, contiguous and of the right size."""
    columns = columns_of(about)
    if list(tensors) != list(columns):
        raise ValueError(f"it has the tensors {list(tensors)}, not {list(columns)}")
    for name, column in columns.items():
        stop = start + shard.rows * column.nbytes
        wanted = (column.torch_dtype, (shard.rows, *column.shape), start, stop)
        found = tensors[name]
        if (found.dtype, found.shape, found.start, found.stop) != wanted:
            raise ValueError(
                f"{name} is not {shard.rows} rows of {list(column.shape)}, {column.dtype}, from {start} on"
            )
        start = stop


def _offsets(described: Mapping[str, Any], start: int) -> tuple[int, int]:
    first, last = described["data_offsets"]
    return start + first, start + last


def _from_safetensors(name: str) -> torch.dtype:
    ours = {theirs: ours for ours, theirs in DTYPES.items()}
    return getattr(torch, ours[name])


def is_sound(file: Bytes, place: Place) -> bool:
    """Whether a tensor matches its checksum."""
    return _sum(file[place.start : place.stop]) == place.sum


def read_rows(file: Bytes, place: Place, start: int, stop: int) -> Tensor:
    """A copy of some rows of a tensor; nothing else of the file is read."""
    shape = (max(0, stop - start), *place.shape[1:])
    width = math.prod(place.shape[1:]) * place.dtype.itemsize
    raw = bytearray(file[place.start + start * width : place.start + stop * width])
    return torch.frombuffer(raw, dtype=place.dtype).view(shape) if raw else torch.empty(shape, dtype=place.dtype)
