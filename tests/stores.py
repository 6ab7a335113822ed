"""What several test files of stores use: a tiny model, some texts, and two stores compared by their bytes or rows."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import hookline
from hookline import HookedModel
from hookline.store import LocalStore, Store

POINTS = ["blocks.0.hook_resid_pre", "blocks.2.attn.hook_z", "blocks.3.hook_resid_post"]
OPTIONS: dict[str, Any] = {"batch_size": 3, "shard_rows": 40, "dtype": torch.bfloat16, "progress": False}


@cache
def tinyworld() -> HookedModel:
    """One model for all tests: none may change its weights."""
    return hookline.load("tinyworld")


def changes_to_tinyworld() -> int:
    """How often the weights of the shared model have been written to."""
    if not tinyworld.cache_info().currsize:
        return 0
    return sum(weight._version for weight in tinyworld().module.parameters())


def texts(count: int = 30) -> list[str]:
    """Of different lengths, one of them empty."""
    names = ["Mary", "John", "Tom", "Lily"]
    some = [" and ".join(f"{names[i % 4]} went to the garden" for _ in range(i % 3 + 1)) for i in range(count)]
    some[min(4, count - 1)] = ""
    return some


def harvested(model: HookedModel, path: Path | str, count: int = 30, **changes: Any) -> Store:
    return hookline.harvest(model, texts(count), POINTS, path, **{**OPTIONS, **changes})


def copied(path: Path) -> Path:
    """A store of the tiny model at a path, as `harvested` makes it: made once, and copied."""
    for name, content in _harvested_once().items():
        path.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return path


@cache
def _harvested_once() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        harvested(tinyworld(), Path(folder) / "store")
        return {each.name: each.read_bytes() for each in (Path(folder) / "store").iterdir()}


def files(path: Path) -> dict[str, bytes]:
    """Everything in a store's folder but the lock."""
    return {each.name: each.read_bytes() for each in sorted(path.iterdir()) if each.name != ".lock"}


def same_rows(one: Path | str, other: Path | str) -> bool:
    """Whether two stores have the same rows of the same data, in the same order, wherever their shards end."""
    stores = [LocalStore(path) for path in (one, other)]
    assert all(store.verify().is_sound for store in stores)
    rows, others = (store.rows() for store in stores)
    pairs = [(getattr(rows, name), getattr(others, name)) for name in ("example", "position", "token")]
    pairs += [(x, others[name]) for name, x in rows.activations.items()]
    ends = [(store.examples, store.is_complete, store.manifest.shards[-1].data_after) for store in stores]
    return ends[0] == ends[1] and all(torch.equal(*pair) for pair in pairs)


def edit_manifest(path: Path, change: Any) -> None:
    """Change the manifest, with a sum that is right."""
    from hookline.store.manifest import manifest_checksum

    fields = json.loads((path / "manifest.json").read_text())
    fields.pop("sum")
    change(fields)
    (path / "manifest.json").write_text(json.dumps({"sum": manifest_checksum(json.dumps(fields).encode()), **fields}))
