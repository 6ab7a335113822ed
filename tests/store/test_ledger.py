"""Shards that are written at the same time become part of the store in their order, whichever is finished first."""

import errno
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import POINTS, edit_manifest, files, harvested, tinyworld

from hookline.errors import StoreError
from hookline.store import LocalStore, writer
from hookline.store.folders import LocalFolder
from hookline.store.manifest import MANIFEST, About, Manifest, Progress, Shard
from hookline.store.writer import Buffer, Ledger

COUNT = 8


def shards() -> list[Shard]:
    made = list[Shard]()
    for number in range(COUNT):
        before = made[-1] if made else None
        made.append(Shard.after(before, 3, Progress(number + 1, f"{number}"), is_last=number == COUNT - 1))
    return [replace(each, bytes=1, seal="0") for each in made]


def without_gaps(path: Path) -> int:
    """How many shards have their names, of which there must be none without those before it."""
    names = [each for each in LocalFolder(path).names() if each != MANIFEST]
    assert names == [shard.name for shard in shards()[: len(names)]]
    return len(names)


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(COUNT)))
def test_a_shard_waits_for_those_before_it(order) -> None:
    with TemporaryDirectory() as path:
        folder, known = LocalFolder(path), shards()
        ledger = Ledger(folder, Manifest(About({}, {}, {})))
        for done, number in enumerate(order):
            folder.stage(known[number].name, [b"x"])
            ledger.enter(known[number])
            entered = {*order[: done + 1]}
            wanted = next(each for each in range(COUNT + 1) if each not in entered)
            assert without_gaps(Path(path)) == len(ledger.manifest.shards) == wanted
        assert Manifest.from_bytes(Path(path, MANIFEST).read_bytes(), path) == ledger.manifest
        assert ledger.manifest.shards == tuple(known)


def test_many_threads_enter_at_once(tmp_path) -> None:
    folder = LocalFolder(tmp_path)
    ledger = Ledger(folder, Manifest(About({}, {}, {})))

    def written(shard: Shard) -> int:
        folder.stage(shard.name, [b"x"])
        ledger.enter(shard)
        return without_gaps(tmp_path)

    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(written, random.sample(shards(), COUNT)))
    assert ledger.manifest.shards == tuple(shards())
    assert without_gaps(tmp_path) == COUNT


def test_what_cannot_be_placed_is_dropped(tmp_path) -> None:
    folder = LocalFolder(tmp_path)
    ledger = Ledger(folder, Manifest(About({}, {}, {})))
    for shard in (shards()[0], *shards()[2:]):
        folder.stage(shard.name, [b"x"])
        ledger.enter(shard)
    assert len(list(tmp_path.glob("*.part"))) == COUNT - 2
    ledger.discard()
    assert not list(tmp_path.glob("*.part"))
    assert without_gaps(tmp_path) == len(ledger.manifest.shards) == 1


def test_a_harvest_whose_shards_are_finished_in_any_order(tmp_path, monkeypatch) -> None:
    harvested(tinyworld(), tmp_path / "one")
    stage, finished = LocalFolder.stage, list[str]()

    def sometimes_slow(folder, name, parts) -> None:
        stage(folder, name, parts)
        time.sleep(0.2 if name in ("000001.safetensors", "000004.safetensors") else 0)
        finished.append(name)

    monkeypatch.setattr(LocalFolder, "stage", sometimes_slow)
    harvested(tinyworld(), tmp_path / "other")
    assert files(tmp_path / "one") == files(tmp_path / "other")
    in_order = [name for name in finished if name != MANIFEST]
    assert in_order != sorted(in_order)


@pytest.mark.parametrize("failing", [0, 3, 8])
def test_a_shard_that_fails_while_later_ones_are_written(tmp_path, monkeypatch, failing) -> None:
    harvested(tinyworld(), tmp_path / "one")
    stage = LocalFolder.stage

    def failing_late(folder, name, parts) -> None:
        if name == f"{failing:06d}.safetensors":
            time.sleep(0.3)
            raise OSError(errno.ENOSPC, "No space left on device")
        stage(folder, name, parts)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "stage", failing_late)
        with pytest.raises(StoreError, match="space left"):
            harvested(tinyworld(), tmp_path / "other")
    assert not list((tmp_path / "other").glob("*.part"))
    store = LocalStore(tmp_path / "other")
    assert store.verify().is_sound
    assert len(list((tmp_path / "other").glob("*.safetensors"))) == failing
    harvested(tinyworld(), tmp_path / "other")
    assert files(tmp_path / "one") == files(tmp_path / "other")


def test_several_shards_that_the_manifest_does_not_tell_of_are_taken_up(tmp_path) -> None:
    harvested(tinyworld(), tmp_path)
    before = files(tmp_path)
    edit_manifest(tmp_path, lambda fields: fields.update(shards=fields["shards"][:-3]))
    found = LocalStore(tmp_path).verify()
    assert found.is_sound
    assert str(found).count("next harvest adds it") == 3
    harvested(tinyworld(), tmp_path)
    assert files(tmp_path) == before


def test_a_slow_disk_makes_the_model_wait(tmp_path, monkeypatch) -> None:
    made, stage = list[int](), LocalFolder.stage

    class Counted(Buffer):
        def __init__(self, *args, **kwargs) -> None:
            made.append(1)
            super().__init__(*args, **kwargs)

    def slow(folder, name, parts) -> None:
        time.sleep(0.1)
        stage(folder, name, parts)

    monkeypatch.setattr(writer, "Buffer", Counted)
    monkeypatch.setattr(LocalFolder, "stage", slow)
    store = harvested(tinyworld(), tmp_path, count=60)
    assert len(store.manifest.shards) > 2 * writer.THREADS
    assert 2 <= len(made) <= writer.THREADS + 1
    assert store.verify().is_sound
    assert len(store.rows()[POINTS[0]]) == len(store)
