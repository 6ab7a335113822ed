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
from autoencoders import random_sae as make
from damage import DAMAGES, flips, forged
from safetensors import safe_open
from safetensors.torch import save_file
from stores import edit_manifest, tinyworld

import hookline
from hookline import ActivationCache, HooklineError, token
from hookline.compat.mi_crow.store import LocalStore as Runs
from hookline.edits import add, mean, noise, replace, scale, zero
from hookline.edits import load as load_edits
from hookline.edits import save as save_edits
from hookline.errors import StoreError
from hookline.experiments import steering
from hookline.experiments.result import Result
from hookline.files.tensorfile import read_tensors, write_tensors
from hookline.positions import step
from hookline.sae import SparseAutoencoder
from hookline.store import LocalStore, shards

POINT = "blocks.1.hook_resid_post"


def raw(x: torch.Tensor) -> tuple[Any, ...]:
    return (x.dtype, tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())


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
    others = (repr(store.example(0)), store.examples, repr(store), str(store.verify()))
    return store.manifest, list(map(raw, columns)), others


def save_runs(folder: Path) -> None:
    runs = Runs(folder)
    runs.put_tensor("directions/mean", torch.randn(4))
    runs.put_detector_metadata("first", 0, {"layer": {"n": 1}}, {"layer": {"x": torch.randn(2)}})


def seen_runs(folder: Path) -> Any:
    runs = Runs(folder)
    table, tensors = runs.get_detector_metadata("first", 0)
    kept = [(layer, key, raw(x)) for layer, some in tensors.items() for key, x in some.items()]
    return raw(runs.get_tensor("directions/mean")), table, kept


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
    "runs": Kind(save_runs, seen_runs, ("metadata.json",)),
}


def refusal(do: Callable[[], Any]) -> str:
    """What an error of ours says; nothing if there is none. Any other is raised."""
    try:
        do()
    except HooklineError as error:
        return str(error)
    return ""


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
            why = refusal(lambda: kind.see(tmp_path))
            assert len(why) > 20, (path.name, name)
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(whole)
    kind.see(tmp_path)


# Contents that are not what they should be, with checksums that are right.


def forge_edits(folder: Path) -> tuple[Any, Callable[[Any], Any]]:
    path = folder / "edits.json"
    table = json.loads(path.read_text())
    del table["sum"]
    return table | {"version": 1}, lambda new: path.write_text(json.dumps(new))


def forge_sae(folder: Path) -> tuple[Any, Callable[[Any], Any]]:
    path = folder / "sae_weights.safetensors"
    weights, _ = read_tensors(path, "sae", called="", writer=None)
    save_file(weights | {"scaling_factor": torch.ones(20)}, path)  # as SAELens writes them
    fields = json.loads((folder / "cfg.json").read_text())
    older = {"finetuning_scaling_factor": False, "hook_point": POINT, "activation_fn_kwargs": {"k": fields["k"]}}
    return fields | older, lambda new: (folder / "cfg.json").write_text(json.dumps(new))


def forge_manifest(folder: Path) -> tuple[Any, Callable[[Any], Any]]:
    fields = json.loads((folder / "manifest.json").read_text())
    del fields["sum"]

    def write(new: Any) -> None:
        edit_manifest(folder, lambda old: (old.clear(), old.update(new)))

    return fields, write


def forge_shard(folder: Path) -> tuple[Any, Callable[[Any], Any]]:
    path = folder / "000000.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    fields = json.loads(whole[8 : 8 + length])
    about = fields["__metadata__"]
    about |= {name: json.loads(about[name]) for name in ("about", "shard", "sums", "versions")} | {"seal": "0" * 8}
    (folder / "manifest.json").unlink()

    def write(new: Any) -> None:
        inside = new.get("__metadata__")
        if isinstance(inside, dict):
            texts = {key: x if isinstance(x, str) else json.dumps(x) for key, x in inside.items()}
            new = new | {"__metadata__": texts}
        text = json.dumps(new, separators=(",", ":")).encode()
        header = struct.pack("<Q", len(text)) + text
        sealed = shards._UNSEALED.replace(b"00000000", shards.manifest_checksum(header).encode())
        path.write_bytes(header.replace(shards._UNSEALED, sealed) + whole[8 + length :])

    return fields, write


def seen_shard(folder: Path) -> Any:
    (folder / "manifest.json").unlink(missing_ok=True)
    LocalStore(folder).rebuild()
    return seen_store(folder)


def forge_result(folder: Path) -> tuple[Any, Callable[[Any], Any]]:
    tensors, about = read_tensors(folder / "result", "result", called="a result", writer="")
    fields = {**about, "content": json.loads(about["content"])}
    return fields, lambda new: write_tensors(folder / "result", "result", tensors, as_text(new))


def forge_cache(folder: Path) -> tuple[Any, Callable[[Any], Any]]:
    tensors, about = read_tensors(folder / "cache", "activations", called="", writer="")
    fields = {**about, "names": json.loads(about["names"])}
    return fields, lambda new: write_tensors(folder / "cache", "activations", tensors, as_text(new))


def as_text(fields: dict[str, Any]) -> dict[str, str]:
    return {key: x if isinstance(x, str) else json.dumps(x) for key, x in fields.items()}


FORGED = {
    "edits": (forge_edits, seen_edits),
    "sae": (forge_sae, seen_sae),
    "store": (forge_manifest, seen_store),
    "shard": (forge_shard, seen_shard),
    "result": (forge_result, seen_result),
    "cache": (forge_cache, seen_cache),
}


def refused(name: str, folder: Path, every: int) -> int:
    """How many of the forged files are refused; what is raised must be an error of ours."""
    KINDS["store" if name == "shard" else name].save(folder)
    forge, see = FORGED[name]
    fields, write = forge(folder)
    count = 0
    for number, (what, new) in enumerate(forged(fields)):
        if number % every:
            continue
        try:
            write(new)
            see(folder)
        except HooklineError:
            count += 1
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return count


@pytest.mark.parametrize("name", FORGED)
def test_forged_fields_are_read_or_refused(name, tmp_path) -> None:
    assert refused(name, tmp_path, every=29) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGED)
def test_all_forged_fields_are_read_or_refused(name, tmp_path) -> None:
    count = refused(name, tmp_path, every=1)
    print(name, count)
    assert count > 15


# Writing: whole or not at all, and never through a link.


@pytest.fixture
def unwritable(tmp_path) -> Any:
    """A folder that this process may neither read nor write; root has to become somebody else for that."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield folder
    if is_root:
        os.seteuid(0)
    folder.chmod(0o700)


def test_folders_that_cannot_be_written_to(unwritable) -> None:
    for name, kind in KINDS.items():
        assert "Permission denied" in refusal(lambda kind=kind: kind.save(unwritable)), name
        assert refusal(lambda kind=kind: kind.see(unwritable)), name


def test_places_that_cannot_be_written_to(tmp_path) -> None:
    (tmp_path / "file").write_text("kept")
    for kind in KINDS.values():
        with pytest.raises(HooklineError):
            kind.save(tmp_path / "file")
    cache = hookline.hook(torch.nn.Linear(3, 3)).cache(torch.randn(2, 3))
    for path in (tmp_path, tmp_path / "file" / "cache", tmp_path / "no" / "cache", "a\0b", "/dev/null"):
        with pytest.raises(HooklineError, match=r"activations.*written"):
            cache.save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path) -> None:
    save_cache(tmp_path)
    before = (tmp_path / "cache").read_bytes()
    cache = ActivationCache.load(tmp_path / "cache")
    for bad in (torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex128)):
        with pytest.raises(HooklineError, match=r"activations.*: x is "):
            cache._with({"x": bad}).save(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert (tmp_path / "cache").read_bytes() == before


def test_a_conjugate_is_saved_as_what_it_is(tmp_path) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    write_tensors(tmp_path / "x", "w", {"conj": x.conj(), "imag": x.conj().imag}, {})
    found, _ = read_tensors(tmp_path / "x", "w", called="w", writer="w")
    assert torch.equal(found["conj"], x.conj().resolve_conj())
    assert torch.equal(found["imag"], -x.imag)


@pytest.mark.parametrize("name", KINDS)
def test_links_are_replaced_and_not_followed(name, tmp_path) -> None:
    kind, victim = KINDS[name], tmp_path / "victim"
    folder = tmp_path / "folder"
    folder.mkdir()
    kind.save(folder)
    places = [path.relative_to(folder) for path in files_of(folder)]
    other = tmp_path / "other"
    for place in places:
        victim.write_text("precious")
        for suffix in ("", ".part", f".{os.getpid()}"):
            link = other / place.with_name(("." if suffix[1:].isdigit() else "") + place.name + suffix)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not (name == "store" and not suffix):  # a manifest that is there is read first
                link.symlink_to(victim)
    kind.save(other)
    assert victim.read_text() == "precious"
    kind.see(other)


def test_a_lock_that_is_a_link_is_refused(tmp_path) -> None:
    (tmp_path / "victim").write_text("precious")
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match="link"):
        save_store(folder)
    (folder / ".lock").unlink()
    os.mkfifo(folder / ".lock")
    with pytest.raises(StoreError, match="written to"):
        save_store(folder)
    assert (tmp_path / "victim").read_text() == "precious"


# Files from before there were checksums.


def test_files_without_checksums_are_read(tmp_path) -> None:
    tensors = {"fc1": torch.randn(2, 3)}
    about = {"hookline": "activations", "version": "0.1", "has_batch_dim": "False", "names": '["fc1"]'}
    save_file(tensors, tmp_path / "cache", about)
    cache = ActivationCache.load(tmp_path / "cache")
    assert torch.equal(cache["fc1"], tensors["fc1"])
    assert not cache.has_batch_dim
    save_file(
        {"vectors": torch.ones(1, 2), "layers": torch.tensor([3])},
        tmp_path / "v",
        {"hookline": "directions", "kind": "mlp_out"},
    )
    assert steering.Directions.load(tmp_path / "v").layers == [3]
    save_edits(tmp_path, EDITS)
    table = json.loads((tmp_path / "edits.json").read_text()) | {"version": 1}
    del table["sum"]
    (tmp_path / "edits.json").write_text(json.dumps(table))
    assert load_edits(tmp_path) == EDITS


def test_a_result_of_the_first_version_is_read_if_its_sum_is_right(tmp_path) -> None:
    save_result(tmp_path)
    same = seen_result(tmp_path)
    tensors, about = read_tensors(tmp_path / "result", "result", called="", writer="")
    from hookline.experiments.core.labels import first_sum

    old = {"hookline": "result", "version": "1", "content": about["content"]}
    save_file(tensors, tmp_path / "result", old | {"sum": first_sum(about["content"], tensors)})
    assert seen_result(tmp_path) == same
    save_file(tensors, tmp_path / "result", old | {"sum": "00000000"})
    with pytest.raises(HooklineError, match="is damaged"):
        Result.load(tmp_path / "result")


def test_a_newer_format_says_so(tmp_path) -> None:
    from hookline.files.tensorfile import checksum

    about = {"hookline": "activations", "hookline_format": "3"}
    save_file(
        {"x": torch.ones(1)}, tmp_path / "cache", about | {"hookline_checksum": checksum({"x": torch.ones(1)}, about)}
    )
    with pytest.raises(HooklineError, match="format 3"):
        ActivationCache.load(tmp_path / "cache")


def test_a_table_of_edits_changed_by_hand(tmp_path) -> None:
    save_edits(tmp_path, [("fc1", scale(2.0))])
    table = json.loads((tmp_path / "edits.json").read_text())
    table["edits"][0]["factor"] = 3.0
    (tmp_path / "edits.json").write_text(json.dumps(table))
    with pytest.raises(HooklineError, match='"version": 1'):
        load_edits(tmp_path)
    del table["sum"]
    (tmp_path / "edits.json").write_text(json.dumps(table | {"version": 1}))
    assert load_edits(tmp_path) == [("fc1", scale(3.0))]


def test_values_that_are_not_finite_are_kept_in_caches(tmp_path) -> None:
    cache = hookline.hook(torch.nn.Linear(3, 3)).cache(torch.full((2, 3), torch.nan))
    cache.save(tmp_path / "cache")
    assert ActivationCache.load(tmp_path / "cache")["output"].isnan().all()


def test_the_checksum_is_in_metadata_that_others_ignore(tmp_path) -> None:
    save_sae(tmp_path)
    with safe_open(tmp_path / "sae_weights.safetensors", "pt") as file:
        assert {*file.metadata()} == {"hookline", "hookline_format", "hookline_checksum", "cfg"}
        assert {*file.keys()} == {"W_enc", "W_dec", "b_enc", "b_dec"}
    assert "hookline" not in (tmp_path / "cfg.json").read_text()
