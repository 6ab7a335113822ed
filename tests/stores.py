"""What several test files of stores use: a tiny model, some texts, and two stores compared byte by byte."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hookline
from hookline import HookedModel
from hookline.store import Store

POINTS = ["blocks.0.hook_resid_pre", "blocks.2.attn.hook_z", "blocks.3.hook_resid_post"]
OPTIONS: dict[str, Any] = {"batch_size": 3, "shard_rows": 40, "dtype": torch.bfloat16, "progress": False}


@cache
def tinyworld() -> HookedModel:
    return hookline.load("tinyworld")


def texts(count: int = 30) -> list[str]:
    """Of different lengths, one of them empty."""
    names = ["Mary", "John", "Tom", "Lily"]
    some = [" and ".join(f"{names[i % 4]} went to the garden" for _ in range(i % 3 + 1)) for i in range(count)]
    some[min(4, count - 1)] = ""
    return some


def harvested(model: HookedModel, path: Path | str, count: int = 30, **changes: Any) -> Store:
    return hookline.harvest(model, texts(count), POINTS, path, **{**OPTIONS, **changes})


def files(path: Path) -> dict[str, bytes]:
    """Everything in a store's folder but the lock."""
    return {each.name: each.read_bytes() for each in sorted(path.iterdir()) if each.name != ".lock"}


def edit_manifest(path: Path, change: Any) -> None:
    """Change the manifest, with a sum that is right."""
    from hookline.store.manifest import _sum

    fields = json.loads((path / "manifest.json").read_text())
    fields.pop("sum")
    change(fields)
    (path / "manifest.json").write_text(json.dumps({"sum": _sum(fields), **fields}))
