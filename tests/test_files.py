"""Files of every kind: whatever happens to them, they load as they were saved or are refused with one error of ours."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DAMAGES, flips, forged
from safetensors import safe_open
from safetensors.torch import save_file
from stores import edit_manifest, tinyworld
from test_sae_autoencoder import make

import hookline
from hookline import ActivationCache, HooklineError, StoreError, load_edits, save_edits, step, token
from hookline.compat.mi_crow.store import LocalStore as Runs
from hookline.experiments import Result, steering
from hookline.files import read_tensors, write_tensors
from hookline.hooks.edits import add, mean, noise, replace, scale, zero
from hookline.sae import SparseAutoencoder
from hookline.store import LocalStore, shards

POINT = "blocks.1.hook_resid_post"


def raw(x: torch.Tensor) -> tuple[Any, ...]:
    return (x.dtype, tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


# What there is to save, and all that can be seen of it again.


def save_cache(folder: Path) -> None:
    tensors = {"fc1": torch.randn(2, 3), "fc1_grad": torch.randn(2, 3).bfloat16(), "é": torch.tensor([-torch.inf])}
    cache = hookline.hook(torch.nn.Linear(3, 3)).cache(torch.randn(2, 3))._with(tensors)
    cache.positions = "last"
    cache.save(folder / "cache")


def seen_cache(folder: Path) -> Any:
    cache = ActivationCache.load(folder / "cache")
    return [(name, raw(x)) for name, x in cache.items()], cache.has_batch_dim, cache.positions, len(repr(cache))


def save_result(folder: Path) -> None:
    coords = {"layer": [0, 1], "pos": ["0: a", "1: b"]}
    inner = Result(torch.tensor([1.0, 2.0]), ("layer",), {"layer": [0, 1]}, "clean")
    info = {"clean": inner, "direction": "noise", "n": [1, {"x": None}]}
    Result(torch.randn(2, 2), ("layer", "pos"), coords, "logit é", info).save(folder / "result")


def seen_result(folder: Path) -> Any:
    result = Result.load(folder / "result")
    return json.dumps(result.to_dict()), raw(result.values), repr(result)


def save_directions(folder: Path) -> None:
    steering.Directions(torch.randn(2, 4), [1, 3], "attn_out", {"model": "tiny"}).save(folder / "directions")


def seen_directions(folder: Path) -> Any:
    found = steering.Directions.load(folder / "directions")
    return raw(found.vectors), found.layers, found.kind, found.info, repr(found)


EDITS = [
    (POINT, add(torch.randn(3), 4.0, pos=range(2))),
    ("blocks.*.attn.hook_z", zero(head=[1, 2], pos=slice(1, None), mask=torch.tensor([True, False]))),
    (("q", 3), noise(0.5, seed=7, pos=token(" Paris", nth=0))),
    (2, scale(0.5, pos=step(3))),
    ("x", mean(torch.randn(1, 2, 3), over=torch.tensor([[True, False]]), pos=torch.tensor([4, 6]))),
    ("y", replace(float("-1.5"), neuron=3, pos=-1)),
]


def seen_edits(folder: Path) -> Any:
    return load_edits(folder), repr(load_edits(folder))


def save_sae(folder: Path) -> None:
    make("topk", dtype="float32", hook_name=POINT).save(folder)


def seen_sae(folder: Path) -> Any:
    sae = SparseAutoencoder.load(folder)
    sae.encode(torch.ones(2, sae.d_in))
    return sae.cfg, [(name, raw(x)) for name, x in sae.state_dict().items()]


def save_store(folder: Path) -> None:
    texts = ["Mary went to the garden", "Tom", "Lily and John"]
    hookline.harvest(tinyworld(), texts, [POINT], folder, batch_size=1, shard_rows=4, progress=False)
    (folder / ".lock").unlink()


def seen_store(folder: Path) -> Any:
    store = LocalStore(folder)
    rows = store.rows()
    columns = [rows.example, rows.position, rows.token, *(rows[name] for name in store.points)]
    store.example(0), store.examples, repr(store), store.verify()  # noqa: B018 (none of it may fail otherwise)
    return store.manifest, list(map(raw, columns))


def save_runs(folder: Path) -> None:
    runs = Runs(folder)
    runs.put_tensor("directions/mean", torch.randn(4))
    runs.put_run_detector_metadata("first", {"layer": {"n": 1}}, {"layer": {"x": torch.randn(2)}})
    runs.put_run_metadata("first", {"n": 3})


def seen_runs(folder: Path) -> Any:
    runs = Runs(folder)
    table, tensors = runs.get_detector_metadata("first", 0)
    kept = [(layer, key, raw(x)) for layer, some in tensors.items() for key, x in some.items()]
    return raw(runs.get_tensor("directions/mean")), table, kept, runs.get_run_metadata("first")


@dataclass(frozen=True)
class Kind:
    """One kind of thing in files."""

    save: Callable[[Path], Any]
    see: Callable[[Path], Any]
    unsummed: tuple[str, ...] = ()
    """Files that have no checksum, being JSON that other libraries write too."""


KINDS = {
    "cache": Kind(save_cache, seen_cache),
    "result": Kind(save_result, seen_result),
    "directions": Kind(save_directions, seen_directions),
    "edits": Kind(lambda folder: save_edits(folder, EDITS), seen_edits),
    "sae": Kind(save_sae, seen_sae),
    "store": Kind(save_store, seen_store),
    "runs": Kind(save_runs, seen_runs, ("metadata.json", "meta.json")),
}


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=KINDS)
def kind(request, tmp_path) -> Kind:
    KINDS[request.param].save(tmp_path)
    return KINDS[request.param]


def count_flips(kind: Kind, folder: Path, every: int) -> dict[str, int]:
    total = {"refused": 0, "the same": 0, "other": 0}
    for path in files_of(folder):
        if path.name not in kind.unsummed:
            found = flips(path, lambda: kind.see(folder), range(0, path.stat().st_size * 8, every))
            total = {name: total[name] + found[name] for name in total}
    return total


def test_flipped_bits_are_noticed(kind, tmp_path) -> None:
    size = sum(path.stat().st_size for path in files_of(tmp_path))
    found = count_flips(kind, tmp_path, every=size * 8 // 120 | 1)
    assert found["other"] == 0, found
    assert found["refused"] > 50, found


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(kind, tmp_path) -> None:
    found = count_flips(kind, tmp_path, every=1 if sum(p.stat().st_size for p in files_of(tmp_path)) < 10_000 else 7)
    print(found)
    assert found["other"] == 0, found
    # What is the same has the hexadecimal digits of an escape in capitals, or "1E-05" for "1e-05".
    assert found["the same"] < 0.001 * found["refused"], found


def test_damaged_files_are_refused(kind, tmp_path) -> None:
    for path in files_of(tmp_path):
        whole = path.read_bytes()
        for name, damage in DAMAGES.items():
            damage(path)
            with pytest.raises(HooklineError) as caught:
                kind.see(tmp_path)
                pytest.fail(f"{path.name}, {name}: it was read")
            assert len(str(caught.value)) > 20, (path.name, name)
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(whole)
    kind.see(tmp_path)
