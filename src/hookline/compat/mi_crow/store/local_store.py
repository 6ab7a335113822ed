"""LocalStore: a folder of runs, with activations as hookline stores them, and the rest as JSON and safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.compat.mi_crow.store.saved_batches import SavedBatches
from hookline.errors import StoreError
from hookline.files.tensorfile import make_folder, read_json, read_tensors, taking_apart, write_bytes, write_tensors

if TYPE_CHECKING:
    from hookline import store as stores

TensorMetadata = dict[str, dict[str, Tensor]]
_PLAIN = "tensors"
"""The layer under which plain tensors are kept."""


class LocalStore:
    """A folder of runs, by name, under `base_path/runs`.

    store = LocalStore(base_path="./store")
    store.open_run("first")["transformer.h.0"][:100]     # activations saved by lm.activations
    """

    def __init__(self, base_path: str | Path = "", runs_prefix: str = "runs") -> None:
        self.base_path, self.runs_prefix = Path(base_path), runs_prefix

    def run_path(self, run_id: str) -> Path:
        """The folder of a run."""
        if not isinstance(run_id, str) or run_id in ("", ".", "..") or set(run_id) & set("/\\\0"):
            raise StoreError(f"a run's name must be usable as the name of a folder, not {run_id!r}")
        return self.base_path / self.runs_prefix / run_id

    def list_runs(self) -> list[str]:
        """The names of the runs."""
        return sorted(_folders_in(self.base_path / self.runs_prefix))

    def open_run(self, run_id: str) -> stores.LocalStore:
        """The activations saved in a run, as a `hookline.store.LocalStore`."""
        from hookline.store import LocalStore as Activations

        path = self.run_path(run_id) / "activations"
        if not os.path.isdir(path):
            raise StoreError(f"no activations were saved in run {run_id!r}; the runs are {self.list_runs()}")
        return Activations(path)

    def delete_run(self, run_id: str) -> None:
        """Delete a run and everything in it."""
        path = self.run_path(run_id)
        if not os.path.isdir(path):
            raise StoreError(f"there is no run {run_id!r}; the runs are {self.list_runs()}")
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise StoreError(f"the run {run_id!r} cannot be deleted: {error.strerror or error}") from error

    def put_tensor(self, key: str, tensor: Tensor) -> None:
        """Write a tensor to its own file; the key is its path in the store."""
        path = self._file(key)
        make_folder(path.parent, f"the tensor {key!r}")
        write_tensors(path, "tensor", {"tensor": tensor}, {})

    def get_tensor(self, key: str) -> Tensor:
        """Read a tensor written by `put_tensor`."""
        path = self._file(key)
        if not os.path.isfile(path):
            raise StoreError(f"no tensor was found for {key!r}: the file {path} does not exist")
        tensors, _ = read_tensors(path, "tensor", called="a tensor", writer=None)
        if list(tensors) != ["tensor"]:
            raise StoreError(f"{path} has the tensors {', '.join(tensors)}, not one called 'tensor'")
        return tensors["tensor"]

    def _file(self, key: str) -> Path:
        parts = key.split("/") if isinstance(key, str) else []
        if not parts or any(part in ("", ".", "..") or set(part) & set("\\\0") for part in parts):
            raise StoreError(f"a tensor's key must be a path inside the store, such as 'directions/mean', not {key!r}")
        return self.base_path / key

    def put_run_detector_metadata(self, run_id: str, metadata: dict[str, Any], tensor_metadata: TensorMetadata) -> str:
        """Write the recordings of detectors as the next batch of the run."""
        number = max(self.list_run_batches(run_id), default=-1) + 1
        return self.put_detector_metadata(run_id, number, metadata, tensor_metadata)

    def put_run_metadata(self, run_id: str, meta: dict[str, Any]) -> str:
        """Write the metadata of a run as JSON; returns its path in the store."""
        return self._key(_write_json(self.run_path(run_id) / "meta.json", meta))

    def get_run_metadata(self, run_id: str) -> dict[str, Any]:
        """The metadata of a run; empty if none was written."""
        path = self.run_path(run_id) / "meta.json"
        metadata = read_json(path) if os.path.exists(path) else {}
        if not isinstance(metadata, dict):
            raise StoreError(f"{path} should contain the metadata of a run, but contains {metadata!r:.60}")
        return metadata

    def put_detector_metadata(
        self, run_id: str, batch_index: int, metadata: dict[str, Any], tensor_metadata: TensorMetadata
    ) -> str:
        """Write the recordings of detectors in one batch, by layer; returns its path in the store."""
        folder = self._batch(run_id, batch_index)
        names = {
            f"{i}.{key}": (layer, key) for i, layer in enumerate(tensor_metadata) for key in tensor_metadata[layer]
        }
        tensors = {name: tensor_metadata[layer][key].cpu().contiguous() for name, (layer, key) in names.items()}
        make_folder(folder, "the recordings of detectors")
        write_tensors(folder / "tensors.safetensors", "detectors", tensors, {})
        _write_json(folder / "metadata.json", {"metadata": metadata, "tensors": names})
        return self._key(folder)

    def get_detector_metadata(self, run_id: str, batch_index: int) -> tuple[dict[str, Any], TensorMetadata]:
        """The recordings of detectors in one batch: the metadata and the tensors, each by layer.

        Of a run of `lm.activations`, the activations of the batch, padded with 0.
        """
        folder = self._batch(run_id, batch_index)
        if not os.path.exists(folder / "metadata.json"):
            saved = self._saved(run_id)
            if saved is not None and batch_index < len(saved):
                return {layer: {} for layer in saved.points}, saved.tensors(batch_index)
            raise StoreError(f"run {run_id!r} has no batch {batch_index}; it has {self.list_run_batches(run_id)}")
        table, path = read_json(folder / "metadata.json"), folder / "tensors.safetensors"
        tensors, _ = read_tensors(path, "detectors", called="recordings of detectors", writer=None)
        by_layer: TensorMetadata = {}
        with taking_apart(str(folder)):
            for name, (layer, key) in table["tensors"].items():
                by_layer.setdefault(layer, {})[key] = tensors[name]
            return table["metadata"], by_layer

    def get_detector_metadata_by_layer_by_key(self, run_id: str, batch_index: int, layer: str, key: str) -> Tensor:
        """One tensor of one layer."""
        _, tensors = self.get_detector_metadata(run_id, batch_index)
        if key not in tensors.get(layer, {}):
            available = [
                f"{layer_name} {name}" for layer_name, layer_tensors in tensors.items() for name in layer_tensors
            ]
            raise StoreError(f"batch {batch_index} of run {run_id!r} has no {key!r} of {layer!r}; it has {available}")
        return tensors[layer][key]

    def list_run_batches(self, run_id: str) -> list[int]:
        """The numbers of the batches of recordings, activations or tensors."""
        parts = (name.partition("batch_") for name in _folders_in(self.run_path(run_id)))
        numbers = {int(number) for before, _, number in parts if not before and number.isdecimal()}
        return sorted(numbers | set(range(len(self._saved(run_id) or ()))))

    def get_run_batch(self, run_id: str, batch_index: int) -> dict[str, Tensor]:
        """The tensors of a batch: of one layer as "activations", of several with the layer after that."""
        _, tensors = self.get_detector_metadata(run_id, batch_index)
        if _PLAIN in tensors:
            return tensors[_PLAIN]
        layers = {
            layer: layer_tensors["activations"]
            for layer, layer_tensors in tensors.items()
            if "activations" in layer_tensors
        }
        one = len(layers) == 1
        return {"activations" if one else f"activations_{layer}": value for layer, value in layers.items()}

    def put_run_batch(self, run_id: str, batch_index: int, tensors: dict[str, Tensor] | list[Tensor]) -> str:
        """Write tensors as a batch of a run; a list gets the names item_0, item_1, …"""
        named = tensors if isinstance(tensors, dict) else {f"item_{i}": tensor for i, tensor in enumerate(tensors)}
        return self.put_detector_metadata(run_id, batch_index, {}, {_PLAIN: named})

    def iter_run_batches(self, run_id: str) -> Iterator[dict[str, Tensor]]:
        """All batches of a run, one after another."""
        return self.iter_run_batch_range(run_id)

    def iter_run_batch_range(
        self, run_id: str, start: int = 0, stop: int | None = None, step: int = 1
    ) -> Iterator[dict[str, Tensor]]:
        """Some batches of a run, one after another."""
        return (self.get_run_batch(run_id, number) for number in self.list_run_batches(run_id)[start:stop:step])

    def point_of(self, run_id: str, layer_signature: str | int) -> str:
        """The stored point of a layer whose activations were saved in a run."""
        saved = self._saved(run_id)
        points = {} if saved is None else saved.points
        if str(layer_signature) not in points:
            raise StoreError(f"run {run_id!r} has no activations of {layer_signature!r}; it has {list(points)}")
        return points[str(layer_signature)]

    def _saved(self, run_id: str) -> SavedBatches | None:
        """The activations saved in a run, as batches."""
        about = self.get_run_metadata(run_id)
        is_saved = "points" in about and os.path.isdir(self.run_path(run_id) / "activations")
        return SavedBatches(self.open_run(run_id), about) if is_saved else None

    def _key(self, path: Path) -> str:
        return path.relative_to(self.base_path).as_posix()

    def _batch(self, run_id: str, index: int) -> Path:
        if not isinstance(index, int) or index < 0:
            raise StoreError(f"the number of a batch must be an integer from 0 on, not {index!r}")
        return self.run_path(run_id) / f"batch_{index}"

    def __repr__(self) -> str:
        return f"LocalStore({str(self.base_path)!r}, {len(self.list_runs())} runs)"


def _folders_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"{folder} cannot be read: {error.strerror or error}") from error


def _write_json(path: Path, value: Any) -> Path:
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"metadata must be serializable as JSON: {error}") from error
    make_folder(path.parent, "metadata")
    write_bytes(path, text.encode(), "the metadata")
    return path
