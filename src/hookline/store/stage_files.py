"""The files of a harvest by layer: what one stage hands on to the next, and how far each has come."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load, save
from torch import Tensor

from hookline.errors import HookError, HooklineError, StoreError
from hookline.files.tensorfile import BAD_CONTENT, reason
from hookline.store.folders import Folder, LocalFolder
from hookline.store.manifest import Progress, differences, manifest_checksum
from hookline.store.selection import Batch

_STATE = "state.json"
_NOTE = "@note"
_HEAD = struct.Struct("<QI")
"""What comes before each record: its length and its checksum."""


def folder_beside(store: Folder) -> Path:
    """Where the stages of a harvest are: beside a local store; for a remote one, in the folder for temporary files."""
    if isinstance(store, LocalFolder):
        return Path(f"{store.path}.by_layer")
    name = hashlib.blake2b(store.path.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"hookline-{name}.by_layer"


class StageFiles:
    """A folder with one log per stage, and a file that says how much of them is complete.

    What is noted as complete has been synced to disk before. After a kill, anything longer than that is cut off. Every
    record and the state have checksums: a folder that is damaged is refused.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], flush_every: float) -> None:
        self.folder, self._flush_every = folder, flush_every
        self._state: dict[str, Any] = {"about": json.loads(json.dumps(about)), "stage": 0, "done": 0, "sizes": {}}
        self._logs: dict[str, Any] = {}
        self._saved = monotonic()
        self._open()

    def _open(self) -> None:
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._is_new = not (self.folder / _STATE).exists()
            if not self._is_new:
                self._state = self._found()
            sizes = self._state["sizes"]
            for name, size in sizes.items():
                file = self.folder / name
                if not file.is_file() or file.stat().st_size < size:
                    raise self._damaged(name)
                os.truncate(file, size)
            for file in self.folder.iterdir():
                if file.name != _STATE and file.name not in sizes:
                    file.unlink()

    def _found(self) -> dict[str, Any]:
        """The state that an earlier process saved; StoreError if it is damaged, or of a different harvest."""
        try:
            state = json.loads((self.folder / _STATE).read_text())
            if state.pop("sum") != manifest_checksum(json.dumps(state).encode()):
                raise self._damaged(_STATE)
        except BAD_CONTENT as error:
            raise self._damaged(_STATE) from error
        if different := differences(self._state["about"], state["about"]):
            raise StoreError(
                f"{self.folder} has the unfinished layers of a different harvest: {'; '.join(different)}. Delete "
                f"it, or harvest into another store"
            )
        return state

    def _damaged(self, name: str) -> StoreError:
        return StoreError(f"{self.folder / name} is damaged or missing: delete {self.folder}, and harvest again")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise a StoreError if the disk is full or cannot be written to."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{self.folder} cannot be written to: {reason(error)}. The batches that were saved there are kept, and "
                f"the same harvest continues with them"
            ) from error

    @property
    def stage(self) -> int:
        """The stage that is not finished."""
        return self._state["stage"]

    @property
    def done(self) -> int:
        """How many batches of that stage are complete."""
        return self._state["done"]

    @property
    def notes(self) -> dict[str, Any]:
        """Values to be kept until the harvest ends; saved with the next batches."""
        return self._state.setdefault("notes", {})

    def has(self, log: str) -> bool:
        """Whether a log has records that were saved."""
        return log in self._state["sizes"]

    def append(self, log: str, tensors: Mapping[str, Tensor], note: Any = None) -> None:
        """Add a record to a log."""
        note_bytes = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
        raw = save({**{name: _own(x) for name, x in tensors.items()}, _NOTE: note_bytes})
        with self._writing():
            if log not in self._logs:
                self._logs[log] = open(self.folder / log, "ab")  # noqa: SIM115 - see `close`
            self._logs[log].write(_HEAD.pack(len(raw), crc32(raw)))
            self._logs[log].write(raw)

    def count(self) -> None:
        """Count a batch of the current stage as done; now and then this is saved."""
        self._state["sizes"] |= {name: file.tell() for name, file in self._logs.items()}
        self._state["done"] += 1
        if monotonic() - self._saved >= self._flush_every:
            self.save()

    def finish(self, stage: int, unneeded: str = "") -> None:
        """End the current stage, and begin this one. Deletes a log that is no longer needed."""
        self._state |= {"stage": stage, "done": 0}
        self._state["sizes"] |= {name: file.tell() for name, file in self._logs.items()}
        self._state["sizes"].pop(unneeded, None)
        self.save()
        self.close()
        if unneeded:
            with self._writing():
                (self.folder / unneeded).unlink(missing_ok=True)

    def save(self) -> None:
        """Sync the logs, and note that everything so far is complete."""
        with self._writing():
            for file in self._logs.values():
                file.flush()
                os.fsync(file.fileno())
            part = self.folder / f"{_STATE}.part"
            with open(part, "w") as file:
                json.dump({"sum": manifest_checksum(json.dumps(self._state).encode()), **self._state}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.folder / _STATE)
        self._saved = monotonic()

    def records(self, log: str) -> Iterator[tuple[dict[str, Tensor], Any]]:
        """The records of a log in order, each with its note."""
        with open(self.folder / log, "rb") as file:
            while head := file.read(_HEAD.size):
                length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, None)
                raw = file.read(min(length, self._state["sizes"][log]))
                if crc32(raw) != checksum:
                    raise self._damaged(log)
                raw_tensors = load(raw)
                tensors = {name: x.clone() for name, x in raw_tensors.items()}  # aligned, as kernels round by alignment
                yield tensors, json.loads(bytes(tensors.pop(_NOTE).tolist()))

    def close(self) -> None:
        """Close the files, as they are."""
        logs, self._logs = self._logs, {}
        for file in logs.values():
            with suppress(OSError):  # what was not saved does not count
                file.close()

    def after_error(self, error: HooklineError) -> None:
        """Delete the folder, unless the same harvest could continue with its layers, or an earlier process began it."""
        may_continue = isinstance(error, StoreError | HookError) and self.stage > 1
        if self._is_new and not may_continue:
            self.delete()

    def delete(self) -> None:
        """Delete the folder."""
        self.close()
        shutil.rmtree(self.folder)


def _own(x: Tensor) -> Tensor:
    """A copy on the CPU with memory of its own, as safetensors wants it."""
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def batch_record(batch: Batch, before: Progress, after: Progress) -> tuple[dict[str, Tensor], Any]:
    """A batch as a record of a log."""
    tensors = {f"input {name}": x for name, x in batch.kwargs.items()}
    tensors |= {"example": batch.example, "position": batch.position, "token": batch.token}
    tensors |= {} if batch.index is None else {"index": batch.index}
    note = {"shape": batch.shape, "before": [before.examples, before.sum], "after": [after.examples, after.sum]}
    return tensors, note


def batch_in(tensors: dict[str, Tensor], note: Any) -> tuple[Batch, Progress, Progress]:
    """The batch in a record, and the progress before and after it."""
    kwargs = {name.removeprefix("input "): x for name, x in tensors.items() if name.startswith("input ")}
    rows = {name: tensors[name] for name in ("example", "position", "token")}
    batch = Batch(args=(), kwargs=kwargs, shape=tuple(note["shape"]), index=tensors.get("index"), **rows)
    return batch, Progress(*note["before"]), Progress(*note["after"])
