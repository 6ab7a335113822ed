"""Activations on disk: written by `harvest`, read by a `Store`."""

from hookline.errors import StoreError
from hookline.store.harvesting import harvest
from hookline.store.integrity import Verification
from hookline.store.manifest import Manifest
from hookline.store.store import LocalStore, RemoteStore, Store, open_store
from hookline.store.stored_rows import Batches, RowDataset, Rows
from hookline.store.workers import HarvestWorker

__all__ = [
    "harvest",
    "open_store",
    "LocalStore",
    "RemoteStore",
    "Store",
    "Rows",
    "Batches",
    "RowDataset",
    "Manifest",
    "HarvestWorker",
    "Verification",
    "StoreError",
]


def __dir__() -> list[str]:
    return sorted(__all__)
