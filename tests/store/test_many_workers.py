"""Many workers harvest into one store: the rows of one process, whoever does what, dies or sleeps."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import objects
import pytest
import torch
from stores import POINTS, edit_manifest, files, harvested, same_rows, texts

import hookline
from hookline.errors import HooklineError, StoreError
from hookline.store import HarvestWorker, LocalStore, leases, many_workers, open_store
from hookline.store.folders import LocalFolder
from hookline.store.harvesting import Harvest
from hookline.store.leases import Leases
from hookline.store.units import recorded_units
from hookline.store.workers import environment, worker_of

COUNT = 40


@pytest.fixture(scope="module")
def models() -> list[hookline.HookedModel]:
    """One for each thread."""
    return [hookline.load("tinyworld") for _ in range(3)]


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    harvested(models[0], path, COUNT)
    return path


def together(models, where: Any, count: int = COUNT, **changes: Any) -> list[BaseException | None]:
    """Harvest with a worker in each of several threads; returns their errors."""
    errors: list[BaseException | None] = [None] * len(models)

    def work(rank: int) -> None:
        try:
            options = {"shard": HarvestWorker(rank, len(models), unit=2, lease=1), **changes}
            harvested(models[rank], where, count, **options)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(models))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return errors


def shards_of(path: Path) -> dict[str, bytes]:
    return {name: raw for name, raw in files(path).items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("count", [2, 3])
def test_workers_store_the_rows_of_one_process(count, models, plain, tmp_path) -> None:
    assert together(models[:count], tmp_path / "many") == [None] * count
    assert same_rows(tmp_path / "many", plain)
    harvested(models[0], tmp_path / "one", COUNT, shard=HarvestWorker(0, 1, unit=2))
    assert files(tmp_path / "many") == files(tmp_path / "one")
    assert not [name for name in files(tmp_path / "many") if name.endswith((".lease", ".part"))]


@pytest.mark.parametrize("exclusive", [True, False])
def test_an_object_store(exclusive, models, plain, monkeypatch) -> None:
    monkeypatch.setattr(objects.Objects, "exclusive", exclusive)
    where = f"objects://store-{exclusive}"
    assert together(models, where) == [None] * 3
    store, expected = open_store(where), LocalStore(plain)
    assert store.verify().is_sound
    assert store.is_complete
    rows, others = store.rows(), expected.rows()
    assert torch.equal(rows.example, others.example)
    assert all(torch.equal(x, others[name]) for name, x in rows.activations.items())


def test_memory(models, plain) -> None:
    """fsspec's own file system in memory is not safe for threads, so the workers come one after the other."""
    for rank in (1, 0):
        store = harvested(models[0], "memory://many", COUNT, shard=(rank, 2))
    assert torch.equal(store[POINTS[0]][:], LocalStore(plain)[POINTS[0]][:])


@pytest.mark.parametrize("limit", [1, 100, 101, 10_000])
def test_max_rows(limit, models, tmp_path) -> None:
    assert together(models, tmp_path / "many", max_rows=limit) == [None] * 3
    harvested(models[0], tmp_path / "plain", COUNT, max_rows=limit)
    assert same_rows(tmp_path / "many", tmp_path / "plain")


@pytest.mark.parametrize(
    ("options", "unit"),
    [({"sample": 0.3}, 2), ({"positions": hookline.last}, 2), ({"positions": [9]}, 2), ({"positions": [17]}, 1)],
)
def test_units_without_rows(options, unit, models, tmp_path) -> None:
    """Some texts have no tenth or eighteenth token, so some units are empty. All workers want the same units."""
    changes = {**options, "batch_size": 1}
    works = together(models, tmp_path / "many", **changes, shard=HarvestWorker(0, 1, unit=unit))
    assert works == [None] * 3
    harvested(models[0], tmp_path / "plain", COUNT, **changes)
    assert same_rows(tmp_path / "many", tmp_path / "plain")


def test_no_rows_at_all(models, tmp_path) -> None:
    errors = together(models[:2], tmp_path, positions=[500])
    assert [type(each) for each in errors] == [StoreError] * 2
    assert all("no rows to store" in str(each) for each in errors)
    with pytest.raises(StoreError, match=r"rows.*store"):
        hookline.harvest(models[0], [], POINTS, tmp_path / "none", shard=(0, 2), progress=False)


def test_generators_of_unknown_length(models, plain, tmp_path) -> None:
    """Each worker reads its own generator once, and takes what is free."""
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            data = (text for text in texts(COUNT))
            options: dict[str, Any] = {"batch_size": 3, "shard_rows": 40, "dtype": torch.bfloat16, "progress": False}
            worker = HarvestWorker(rank, 3, unit=1, lease=1)
            hookline.harvest(models[rank], data, POINTS, tmp_path, shard=worker, **options)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert same_rows(tmp_path, plain)


class Stop(Exception):  # noqa: N818 - not an error
    pass


def stopped_after(count: int, data: list[str]) -> Iterator[str]:
    yield from data[:count]
    raise Stop


class Broken(list):  # type: ignore[type-arg]
    """A data set that can be read several times, up to some example."""

    def __iter__(self) -> Iterator[str]:
        return stopped_after(26, [*super().__iter__()])


def part_of(model, path, **changes: Any) -> None:
    """A worker that is stopped within the data, so that some units are done."""
    options = {"batch_size": 3, "shard_rows": 40, "dtype": torch.bfloat16, "progress": False, **changes}
    with pytest.raises(Stop):
        hookline.harvest(model, Broken(texts(COUNT)), POINTS, path, **options)


def test_another_number_of_workers_goes_on(models, plain, tmp_path) -> None:
    part_of(models[0], tmp_path, shard=HarvestWorker(1, 5, unit=1))
    store = LocalStore(tmp_path)
    assert not store.is_complete
    assert "missing units: 0, 2, 3, 4, 5, all from 7 on" in repr(store)
    found = store.verify()
    assert found.is_sound
    assert "missing units: 0" in str(found)
    assert "comes after a missing unit" in str(found)
    header, first, *_ = str(found).splitlines()
    assert header.index(" state") == first.index(" sound"), "columns are as wide as the longest name"
    assert together(models, tmp_path, shard=None) == [None] * 3  # a process without rank goes on as well
    assert same_rows(tmp_path, plain)
    assert harvested(models[0], tmp_path, COUNT).is_complete  # once more


def test_a_finished_prefix_can_be_read(models, plain, tmp_path) -> None:
    part_of(models[0], tmp_path, shard=HarvestWorker(0, 1, unit=1))
    store = LocalStore(tmp_path)
    assert store.examples == 21
    assert torch.equal(store[POINTS[0]][:], LocalStore(plain)[POINTS[0]][: len(store)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 4}, "batch_size is 4 here, but 3 in the store"),
        ({"dtype": None}, "dtype is None here"),
        ({"shard": HarvestWorker(1, 2, unit=5)}, "unit is 5 here, but 1 in the store"),
        ({"max_tokens": 4}, "max_tokens is 4 here"),
    ],
)
def test_other_arguments_are_refused(changes, said, models, tmp_path) -> None:
    part_of(models[0], tmp_path, shard=HarvestWorker(0, 2, unit=1))
    with pytest.raises(StoreError, match=said):
        harvested(models[0], tmp_path, COUNT, **{"shard": (1, 2), **changes})


def test_another_model_is_refused(models, tmp_path) -> None:
    part_of(models[0], tmp_path, shard=HarvestWorker(0, 2, unit=1))
    other = hookline.load("tinyworld")
    with torch.no_grad():
        next(iter(other.module.parameters())).mul_(1.5)
    with pytest.raises(StoreError, match="weights is"):
        harvested(other, tmp_path, COUNT, shard=(1, 2))


def test_functions_need_a_tag(models, tmp_path) -> None:
    with pytest.raises(StoreError, match="hooks_tag"):
        harvested(models[0], tmp_path, positions=lambda ids: ids > 0, shard=(0, 2))
    harvested(models[0], tmp_path, positions=lambda ids: ids > 0, shard=(0, 2), hooks_tag="v1")


def test_other_data_is_refused_by_unit(models, tmp_path) -> None:
    part_of(models[0], tmp_path, shard=HarvestWorker(0, 2, unit=1))
    data = texts(COUNT)
    data[14] = "Lily"
    options = {"batch_size": 3, "shard_rows": 40, "dtype": torch.bfloat16, "progress": False}
    with pytest.raises(StoreError, match=r"unit 4.* 12 to 14.*000004"):
        hookline.harvest(models[0], data, POINTS, tmp_path, shard=(1, 2), **options)


@pytest.mark.parametrize("other", [COUNT - 1, COUNT + 1, COUNT + 12])
def test_workers_with_different_data_end_in_an_error(other, models, tmp_path) -> None:
    """One that begins when the other is done, and has fewer or more examples."""
    harvested(models[0], tmp_path, COUNT, shard=HarvestWorker(0, 2, unit=2))
    with pytest.raises(StoreError, match="other data"):
        harvested(models[1], tmp_path, other, shard=HarvestWorker(1, 2, unit=2))


def test_different_data_at_the_same_time(models, tmp_path) -> None:
    """Neither sees what the other has before it is done; nobody gets a mixed store."""
    said: list[str] = []

    def work(rank: int) -> None:
        data = [f"{name} {rank}" for name in texts(COUNT)]
        options = {"batch_size": 3, "progress": False, "shard": HarvestWorker(rank, 2, unit=1, lease=1)}
        try:
            hookline.harvest(models[rank], data, POINTS, tmp_path, **options)
        except StoreError as error:
            said.append(str(error))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(said) in (1, 2)  # one may have done everything before the other began
    assert all("data" in each for each in said)
    if len(said) == 2:
        assert not json.loads((tmp_path / "manifest.json").read_text())["shards"]


def test_a_store_of_one_process_and_one_of_many_do_not_mix(models, tmp_path, monkeypatch) -> None:
    options = {"batch_size": 3, "shard_rows": 40, "dtype": torch.bfloat16, "progress": False}
    with pytest.raises(Stop):
        hookline.harvest(models[0], Broken(texts(COUNT)), POINTS, tmp_path, **options)
    with pytest.raises(StoreError, match=r"shard=\(0, 1\)"):
        harvested(models[0], tmp_path, COUNT, shard=(0, 2))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert harvested(models[0], tmp_path, COUNT, shard=(0, 1)).is_complete


def test_a_worker_that_sleeps_longer_than_its_lease(models, plain, tmp_path, monkeypatch) -> None:
    """Its unit is taken over; when it wakes up, nothing is stored twice."""
    awake, asleep = threading.Event(), threading.Event()
    sleeper, other = models[:2]
    activations = Harvest.activations

    def sleeping(self: Harvest, batch: Any) -> dict[str, torch.Tensor]:
        if self.model is sleeper and not asleep.is_set():
            asleep.set()
            awake.wait(60)
        return activations(self, batch)

    monkeypatch.setattr(Harvest, "activations", sleeping)
    monkeypatch.setattr(leases.Leases, "_keep", lambda self: None)  # its thread sleeps as well
    options = {"unit": 2, "lease": 0.3}
    work = threading.Thread(
        target=harvested, args=(sleeper, tmp_path, COUNT), kwargs={"shard": HarvestWorker(0, 2, **options)}
    )
    work.start()
    asleep.wait(60)
    assert harvested(other, tmp_path, COUNT, shard=HarvestWorker(1, 2, **options)).is_complete
    before = files(tmp_path)
    awake.set()
    work.join()
    assert files(tmp_path) == before
    assert same_rows(tmp_path, plain)


def test_a_lease_is_free_when_it_does_not_change(tmp_path) -> None:
    folder = LocalFolder(tmp_path)
    with Leases(folder, 0.4) as one, Leases(folder, 0.4) as two:
        assert one.take("7")
        assert not two.take("7")
        time.sleep(1)  # the first one keeps it
        assert not two.is_free("7")
        one._over.set()
        one._thread.join()
        assert not two.is_free("7")
        deadline = time.monotonic() + 20
        while not two.take("7"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        one.give_up("7")  # which is not its own any more
        while not (content := (tmp_path / "7.lease").read_text()):  # the thread of the second one is writing it again
            assert time.monotonic() < deadline
        assert json.loads(content)["owner"] == two.owner
    assert not list(tmp_path.glob("*.lease"))


def test_a_lease_of_a_dead_process_of_this_machine_is_free(tmp_path) -> None:
    import socket

    (tmp_path / "7.lease").write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "owner": "x"}))
    with Leases(LocalFolder(tmp_path), 100) as mine:
        assert mine.take("7")


@pytest.mark.parametrize(
    "damage", ["record", "shard", "lost shard", "manifest", "no manifest", "another unit's record"]
)
def test_damage_while_it_is_not_complete(damage, models, plain, tmp_path) -> None:
    part_of(models[0], tmp_path, shard=HarvestWorker(0, 1, unit=1))
    shard = next(iter(shards_of(tmp_path)))
    match damage:
        case "record":
            (tmp_path / "000000.json").write_bytes((tmp_path / "000000.json").read_bytes()[:-9])
        case "shard":
            raw = bytearray((tmp_path / shard).read_bytes())
            raw[-5] ^= 1
            (tmp_path / shard).write_bytes(raw)
        case "lost shard":
            (tmp_path / shard).unlink()
        case "manifest":
            (tmp_path / "manifest.json").write_text("{}")
        case "no manifest":
            (tmp_path / "manifest.json").unlink()
        case _:
            (tmp_path / "000000.json").write_bytes((tmp_path / "000001.json").read_bytes())
    assert not LocalStore(tmp_path).verify().is_sound
    if damage == "shard":
        return  # found by `verify` and by reading, as in a store of one process
    if "manifest" in damage:
        with pytest.raises(StoreError, match="--rebuild"):
            harvested(models[0], tmp_path, COUNT, shard=(0, 2))
        assert LocalStore(tmp_path).verify(rebuild=True).is_sound
        harvested(models[0], tmp_path, COUNT, shard=(0, 2))
    else:
        with pytest.warns(match="unit 0"):
            harvested(models[0], tmp_path, COUNT, shard=(0, 2))
    assert same_rows(tmp_path, plain)


def test_a_complete_store_is_rebuilt(models, plain, tmp_path) -> None:
    harvested(models[0], tmp_path, COUNT, shard=HarvestWorker(0, 2, unit=2))
    whole = files(tmp_path)
    (tmp_path / "manifest.json").unlink()
    assert LocalStore(tmp_path).verify(rebuild=True).is_sound
    assert files(tmp_path) == whole


def test_a_file_that_nobody_listed_is_named(models, tmp_path) -> None:
    harvested(models[0], tmp_path, COUNT, shard=HarvestWorker(0, 2, unit=2))
    name, raw = next(iter(shards_of(tmp_path).items()))
    (tmp_path / name.replace(name[-20:-12], "00000000")).write_bytes(raw)
    found = LocalStore(tmp_path).verify()
    assert found.is_sound
    assert "can be deleted" in str(found)


def test_a_name_in_a_record_cannot_lead_elsewhere(models, tmp_path) -> None:
    part_of(models[0], tmp_path, shard=HarvestWorker(0, 1, unit=1))
    fields = json.loads((tmp_path / "000000.json").read_text())
    fields.pop("sum")
    fields["shards"][0]["seal"] = "/../../x"
    raw = json.dumps(fields).encode()
    from hookline.store.manifest import manifest_checksum

    (tmp_path / "000000.json").write_text(json.dumps({"sum": manifest_checksum(raw), **fields}))
    assert "described as" in str(LocalStore(tmp_path).verify())


def test_a_full_disk_is_an_error_and_leaves_what_is_done(models, plain, tmp_path, monkeypatch) -> None:
    import errno

    place, calls = LocalFolder.place, []

    def full(self: LocalFolder, names) -> None:
        calls.append(names)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "no space")
        place(self, names)

    monkeypatch.setattr(LocalFolder, "place", full)
    with pytest.raises(StoreError, match="written to"):
        harvested(models[0], tmp_path, COUNT, shard=HarvestWorker(0, 2, unit=1))
    monkeypatch.setattr(LocalFolder, "place", place)
    assert LocalStore(tmp_path).verify().is_sound
    harvested(models[0], tmp_path, COUNT, shard=HarvestWorker(1, 2))
    assert same_rows(tmp_path, plain)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (1, 2)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4)),
        ({"SLURM_ARRAY_TASK_ID": "11", "SLURM_ARRAY_TASK_COUNT": "10", "SLURM_ARRAY_TASK_MIN": "10"}, (1, 10)),
        (
            {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            (5, 6),
        ),
        ({"SLURM_ARRAY_TASK_ID": "90", "SLURM_ARRAY_TASK_COUNT": "3"}, (0, 3)),
        ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "3", "RANK": "1", "WORLD_SIZE": "2"}, (3, 6)),
    ],
)
def test_the_environment(variables, expected) -> None:
    assert environment(variables) == expected


@pytest.mark.slow
def test_the_script_in_the_docs(tmp_path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```py\n(# harvest_together.py\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "harvest_together.py").write_text(script, encoding="utf-8")
    (line,) = re.findall(r"^torchrun (.*harvest_together.py)$", page, re.MULTILINE)
    command = [sys.executable, "-m", "torch.distributed.run", *line.split()]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    rows = len(LocalStore(tmp_path / "activations"))
    assert said.count(f"{rows} True") == 2
    assert LocalStore(tmp_path / "activations").verify().is_sound


def test_a_worker_is_checked(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert worker_of(None) == HarvestWorker(1, 4)
    assert worker_of(None, team=2) == HarvestWorker(0, 2)
    assert worker_of(None, team=4) is None
    assert worker_of((0, 1)) is None
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(HooklineError, match="RANK='first'"):
        worker_of(None)
    for wrong in [(2, 2), (-1, 2), (0, 0), (0.5, 2), (True, 2), 3, "01x", (1,)]:
        with pytest.raises(HooklineError, match="shard"):
            worker_of(wrong)
    with pytest.raises(HooklineError, match="lease"):
        HarvestWorker(0, 1, lease=0)


def test_a_data_set_is_divided_by_its_length() -> None:
    worker = HarvestWorker(0, 2)
    assert [worker.batches_per_unit(total, 10) for total in (None, 5, 700, 6400, 10**6)] == [32, 1, 1, 10, 32]
    assert HarvestWorker(0, 2, unit=3).batches_per_unit(10**6, 10) == 3
    assert HarvestWorker(0, 2).lease > many_workers.LONGEST_WAIT


class ReadOnce:
    """Not an iterator, but empty when it is read a second time."""

    def __init__(self, data: list[str]) -> None:
        self._left = iter(data)

    def __iter__(self) -> Iterator[str]:
        return self._left


class Reversing:
    """In another order each time."""

    def __init__(self, data: list[str]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[str]:
        self._data = self._data[::-1]
        return iter(self._data)


@pytest.mark.parametrize("kind", [ReadOnce, Reversing])
def test_data_that_changes_when_it_is_read_again(kind, models, tmp_path) -> None:
    worker = HarvestWorker(0, 2, unit=2, lease=1)
    with pytest.raises(StoreError, match=r"changes.*example 0"):
        hookline.harvest(models[0], kind(texts(COUNT)), POINTS, tmp_path, shard=worker, batch_size=3, progress=False)


@pytest.mark.parametrize("lease", [0, -1, float("nan"), float("inf"), 1e12, 10**400, "60", None])
def test_the_time_of_a_lease_is_checked(lease) -> None:
    with pytest.raises(HooklineError, match="lease"):
        HarvestWorker(0, 1, lease=lease)


@pytest.mark.parametrize("unit", [0, -1, True, 2.0, "abc", [1], 10**30])
def test_a_manifest_with_impossible_units(unit, models, tmp_path) -> None:
    part_of(models[0], tmp_path, shard=HarvestWorker(0, 2, unit=2))
    edit_manifest(tmp_path, lambda fields: fields["options"].update(unit=unit))
    with pytest.raises(StoreError, match=r"work.*batches"):
        harvested(models[0], tmp_path, COUNT)


@pytest.mark.parametrize("name", ["000001.lease", "000001.json"])
def test_a_folder_in_place_of_a_file(name, models, tmp_path) -> None:
    (tmp_path / name).mkdir()
    warned = pytest.warns(match="unit 1") if name.endswith("json") else nullcontext()
    with warned, pytest.raises(StoreError, match="written to"):
        harvested(models[0], tmp_path, COUNT, shard=HarvestWorker(0, 2, unit=2, lease=1))


def test_only_the_names_of_records_are_records() -> None:
    assert recorded_units(["000001.json", "1000000.json", "0000002.json", "٠٠٠٠٠٣.json", "4.json"]) == [1, 1_000_000]
