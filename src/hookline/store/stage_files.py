"""The files of a harvest by layer: what one stage hands on to the next, and how far each has come."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from hookline.engine.tensorfile import BAD_CONTENT
from hookline.errors import StoreError
from hookline.store.manifest import Progress, differences
from hookline.store.selection import Batch

_STATE = "state.json"
_NOTE = "@note"


class StageFiles:
    """A folder with one log per stage, and a file that says how much of them is complete.

    What is noted as complete has been synced to disk before. After a kill, anything longer than that is cut off.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], flush_every: float) -> None:
        self.folder, self._flush_every = folder, flush_every
        self._state: dict[str, Any] = {"about": json.loads(json.dumps(about)), "stage": 0, "done": 0, "sizes": {}}
        self._logs: dict[str, Any] = {}
        self._saved = monotonic()
        self._open()

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            found = json.loads((self.folder / _STATE).read_text())
            if found["about"] != self._state["about"]:
                different = differences(self._state["about"], found["about"])
                raise StoreError(
                    f"{self.folder} has the unfinished layers of a different harvest: {'; '.join(different)}. Delete "
                    f"it, or harvest into another store"
                )
            self._state = found
        except FileNotFoundError:
            pass
        except BAD_CONTENT as error:
            raise StoreError(f"{self.folder / _STATE} is damaged: delete {self.folder}, and harvest again") from error
        for file in self.folder.iterdir():
            size = self._state["sizes"].get(file.name, 0)
            if file.name != _STATE and size:
                os.truncate(file, size)
            elif file.name != _STATE:
                file.unlink()

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

    def append(self, log: str, tensors: Mapping[str, Tensor], note: Any = None) -> None:
        """Add a record to a log."""
        if log not in self._logs:
            self._logs[log] = open(self.folder / log, "ab")  # noqa: SIM115 - see `close`
        note_bytes = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
        raw = save({**{name: _own(x) for name, x in tensors.items()}, _NOTE: note_bytes})
        self._logs[log].write(struct.pack("<Q", len(raw)))
        self._logs[log].write(raw)

    def count(self) -> None:
        """Count a batch of the current stage as done; now and then this is saved."""
        self._state["sizes"] |= {name: file.tell() for name, file in self._logs.items()}
        self._state["done"] += 1
        if monotonic() - self._saved >= self._flush_every:
            self.save()

    def finish(self, stage: int) -> None:
        """End the current stage, and begin this one."""
        self._state |= {"stage": stage, "done": 0}
        self.save()
        self.close()

    def save(self) -> None:
        """Sync the logs, and note that everything so far is complete."""
        for file in self._logs.values():
            file.flush()
            os.fsync(file.fileno())
        part = self.folder / f"{_STATE}.part"
        with open(part, "w") as file:
            json.dump(self._state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.folder / _STATE)
        self._saved = monotonic()

    def records(self, log: str) -> Iterator[tuple[dict[str, Tensor], Any]]:
        """The records of a log in order, each with its note."""
        with open(self.folder / log, "rb") as file:
            while head := file.read(8):
                found = load(file.read(struct.unpack("<Q", head)[0]))
                tensors = {name: x.clone() for name, x in found.items()}  # aligned, as kernels round by alignment
                yield tensors, json.loads(bytes(tensors.pop(_NOTE).tolist()))

    def drop(self, log: str) -> None:
        """Delete a log that is no longer needed."""
        self._state["sizes"].pop(log, None)
        (self.folder / log).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files, as they are."""
        for file in self._logs.values():
            file.close()
        self._logs = {}

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
