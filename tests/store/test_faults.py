"""What can go wrong with a store: damage, other models, other data, a full disk, an interrupt."""

import errno
import json
import os
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stores import OPTIONS, POINTS, copied, edit_manifest, files, harvested, same_rows, texts, tinyworld
from tiny_models import causal_lm
from typer.testing import CliRunner

import hookline
from hookline import HooklineError
from hookline.cli import app
from hookline.errors import HooklineWarning, StoreError
from hookline.store import LocalStore, folders
from hookline.store.writer import Writer


@pytest.fixture(scope="module")
def model():
    return tinyworld()


@pytest.fixture
def path(tmp_path):
    return copied(tmp_path / "store")


SHARD = "000001.safetensors"


def flip(path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def reads(path) -> None:
    LocalStore(path).rows()


def named_and_refused(path, name: str) -> str:
    """The problem that `verify` tells of that file, and of no other; the reader refuses it."""
    found = LocalStore(path).verify()
    assert [problem.split(":")[0] for problem in found.problems] == [name]
    with pytest.raises(StoreError, match=name):
        reads(path)
    told = CliRunner().invoke(app, ["store", "verify", str(path)])
    assert told.exit_code == 1
    assert found.problems[0].split(": ", 1)[1][:40] in told.output
    return found.problems[0]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9999])
def test_a_flipped_byte(path, share) -> None:
    size = (path / SHARD).stat().st_size
    flip(path / SHARD, int(share * size))
    named_and_refused(path, SHARD)


def test_a_byte_of_data_is_named_by_its_point(path) -> None:
    flip(path / SHARD, (path / SHARD).stat().st_size - 1)
    assert POINTS[2] in named_and_refused(path, SHARD)
    LocalStore(path).rows(points=POINTS[0])  # what is not asked for is not looked at
    LocalStore(path, check=False).rows()


@pytest.mark.parametrize("cut", [1, 1000, 10**9])
def test_a_truncated_shard(path, cut) -> None:
    raw = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(raw[: max(0, len(raw) - cut)])
    named_and_refused(path, SHARD)


def test_a_shard_that_is_too_long(path) -> None:
    with open(path / SHARD, "ab") as file:
        file.write(b"more")
    assert "too long" in named_and_refused(path, SHARD)


def test_a_deleted_shard(path) -> None:
    (path / SHARD).unlink()
    assert "missing" in named_and_refused(path, SHARD)


def test_the_last_shard_deleted(path) -> None:
    last = sorted(path.glob("*.safetensors"))[-1]
    last.unlink()
    assert "missing" in named_and_refused(path, last.name)


def test_a_shard_in_another_ones_place(path) -> None:
    (path / SHARD).write_bytes((path / "000000.safetensors").read_bytes())
    assert "number 0" in named_and_refused(path, SHARD)


def test_a_shard_of_another_harvest(model, path, tmp_path) -> None:
    harvested(model, tmp_path / "other", batch_size=5)
    (path / SHARD).write_bytes((tmp_path / "other" / SHARD).read_bytes())
    assert "batch_size" in named_and_refused(path, SHARD)


def test_a_shard_of_other_data(model, path, tmp_path) -> None:
    hookline.harvest(model, texts()[::-1], POINTS, tmp_path / "other", **OPTIONS)
    (path / SHARD).write_bytes((tmp_path / "other" / SHARD).read_bytes())
    named_and_refused(path, SHARD)


def test_a_stranger_among_the_shards(model, path, tmp_path) -> None:
    harvested(model, tmp_path / "other", batch_size=5)
    (path / "000099.safetensors").write_bytes((tmp_path / "other" / SHARD).read_bytes())
    (problem,) = LocalStore(path).verify().problems
    assert "000099" in problem
    with pytest.raises(StoreError, match="000099"):
        harvested(model, path)


def test_a_manifest_of_another_model(path) -> None:
    edit_manifest(path, lambda fields: fields["model"].update(id="gpt2", weights="0" * 32))
    found = LocalStore(path).verify()
    assert len(found.problems) == len(list(path.glob("*.safetensors")))
    assert "different harvest" in found.problems[0]
    assert "gpt2" in found.problems[0]
    with pytest.raises(StoreError, match="gpt2"):
        reads(path)


@pytest.mark.parametrize("at", [5, 400, -10])
def test_a_damaged_manifest(path, at) -> None:
    before = (path / "manifest.json").read_bytes()
    flip(path / "manifest.json", at)
    with pytest.raises(StoreError, match="manifest"):
        reads(path)
    assert not LocalStore(path).verify().is_sound
    assert LocalStore(path).verify(rebuild=True).is_sound
    assert (path / "manifest.json").read_bytes() == before


def test_a_lost_manifest_is_rebuilt(model, path) -> None:
    before = files(path)
    (path / "manifest.json").unlink()
    with pytest.raises(StoreError, match="--rebuild"):
        reads(path)
    with pytest.raises(StoreError, match="--rebuild"):
        harvested(model, path)
    told = CliRunner().invoke(app, ["store", "verify", str(path), "--rebuild"])
    assert told.exit_code == 0, told.output
    assert files(path) == before


def test_a_manifest_is_not_rebuilt_from_damaged_shards(path) -> None:
    (path / "manifest.json").unlink()
    flip(path / SHARD, -1)
    with pytest.raises(StoreError, match=SHARD):
        LocalStore(path).rebuild()


def test_a_shard_that_the_manifest_does_not_tell_of_yet_is_taken_up(model, path) -> None:
    before = files(path)
    edit_manifest(path, lambda fields: fields["shards"].pop())
    found = LocalStore(path).verify()
    assert found.is_sound
    assert "next harvest adds it" in str(found)
    harvested(model, path)
    assert files(path) == before


def test_what_an_interrupted_write_left_does_no_harm(model, path) -> None:
    before = files(path)
    (path / "000009.safetensors.part").write_bytes(b"half")
    assert LocalStore(path).verify().is_sound
    assert harvested(model, path).is_complete
    (path / "000009.safetensors.part").unlink()
    assert files(path) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": None}, "dtype is None here, but 'bfloat16'"),
        ({"batch_size": 4}, "batch_size"),
        ({"sample": 0.5}, "sample"),
        ({"sample": 0.5, "seed": 1}, "seed"),
        ({"positions": hookline.last}, "positions"),
        ({"max_rows": 9}, "max_rows"),
        ({"shard_rows": 50}, "shard_rows"),
        ({"prepend_bos": False}, "prepend_bos"),
    ],
)
def test_other_options_are_refused(model, path, change, why) -> None:
    before = files(path)
    with pytest.raises(StoreError, match=why):
        harvested(model, path, **change)
    assert files(path) == before


def test_other_points_models_and_data_are_refused(model, path, tmp_path) -> None:
    with pytest.raises(StoreError, match="points"):
        hookline.harvest(model, texts(), POINTS[:2], path, **OPTIONS)
    for data in (texts()[:-1], [*texts(), "more"], ["other", *texts()[1:]], texts()[::-1]):
        with pytest.raises(StoreError, match="data"):
            hookline.harvest(model, data, POINTS, path, **OPTIONS)
    tokens = torch.randint(3, 60, (6, 5))
    one, other = hookline.hook(causal_lm("gpt2")), hookline.hook(causal_lm("gpt2"))
    other.module.transformer.h[0].mlp.c_fc.weight.data.mul_(1.01)
    hookline.harvest(one, tokens, "blocks.0.hook_resid_post", tmp_path / "gpt2")
    with pytest.raises(StoreError, match="weights"):
        hookline.harvest(other, tokens, "blocks.0.hook_resid_post", tmp_path / "gpt2")


def test_another_version_is_warned_of(model, path) -> None:
    edit_manifest(path, lambda fields: fields["versions"].update(torch="1.0"))
    with pytest.warns(HooklineWarning, match=r"torch.*'1\.0'"):
        harvested(model, path)


class StopError(Exception):
    pass


def interrupted(at: int, error: type[BaseException] = StopError):
    """The texts, with an error on the way."""
    for number, text in enumerate(texts()):
        if number == at:
            raise error
        yield text


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
def test_an_interrupt_leaves_a_store_that_goes_on(model, path, tmp_path, error) -> None:
    for at in (3, 10, 11, 20, 29):
        with pytest.raises(error):
            hookline.harvest(model, interrupted(at, error), POINTS, tmp_path / "other", **OPTIONS)
        store = LocalStore(tmp_path / "other")
        assert store.verify().is_sound
        assert not store.is_complete
        assert len(store.rows()) == len(store)
        assert store.examples == at // 3 * 3, "every batch that was finished is kept"
    harvested(model, tmp_path / "other")
    assert same_rows(tmp_path / "other", path)


def test_an_interrupt_after_the_last_row_is_completed_by_the_next_harvest(model, tmp_path) -> None:
    some = texts()[:9]

    def data():
        yield from some
        raise StopError

    with pytest.raises(StopError):
        hookline.harvest(model, data(), POINTS, tmp_path / "one", **OPTIONS)
    assert not LocalStore(tmp_path / "one").is_complete
    for _ in range(2):
        store = hookline.harvest(model, some, POINTS, tmp_path / "one", **OPTIONS)
        assert store.is_complete
    whole = hookline.harvest(model, some, POINTS, tmp_path / "whole", **OPTIONS)
    assert same_rows(store.path, whole.path)
    assert sum(map(len, store.batches(7))) == len(whole)
    assert len(store.example(8)) == len(whole.example(8)) > 0


def test_an_interrupt_when_there_are_rows_enough(model, tmp_path, monkeypatch) -> None:
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        harvested(model, tmp_path / "one", max_rows=50)
    monkeypatch.undo()
    assert len(LocalStore(tmp_path / "one")) == 50
    assert harvested(model, tmp_path / "one", max_rows=50).is_complete
    assert same_rows(tmp_path / "one", harvested(model, tmp_path / "whole", max_rows=50).path)


def test_rows_that_cannot_be_kept_at_an_interrupt_are_told_of(model, tmp_path, monkeypatch) -> None:
    Disk(monkeypatch, 20_000)  # enough for the manifest
    options = OPTIONS | {"shard_rows": 10**6}
    with pytest.raises(KeyboardInterrupt) as caught:
        hookline.harvest(model, interrupted(9, KeyboardInterrupt), POINTS, tmp_path, **options)
    assert "rows could not be stored" in caught.value.__notes__[0]
    assert "No space left" in caught.value.__notes__[0]
    monkeypatch.undo()
    assert len(LocalStore(tmp_path)) == 0
    assert hookline.harvest(model, texts(), POINTS, tmp_path, **options).is_complete


def test_rows_are_written_after_a_while(model, path, tmp_path) -> None:
    """What a kill -9 at the end would find there."""
    first = tmp_path / "other" / "000000.safetensors"

    def data():
        yield from texts()[:-3]
        while not first.exists():  # a thread writes it while the harvest goes on
            sleep(0.001)
        yield from texts()[-3:]

    options = OPTIONS | {"shard_rows": 10**6}
    store = hookline.harvest(model, data(), POINTS, tmp_path / "other", **options, flush_every=0)
    assert len(store.manifest.shards) == 10, "one for each batch"
    hookline.harvest(model, texts(), POINTS, tmp_path / "whole", **options)
    assert same_rows(tmp_path / "other", tmp_path / "whole")
    assert len(LocalStore(tmp_path / "whole").manifest.shards) == 1


@pytest.mark.parametrize("seconds", [-1, True, "a minute", float("nan")])
def test_a_time_to_flush_that_is_none(model, tmp_path, seconds) -> None:
    with pytest.raises(HooklineError, match="flush_every"):
        harvested(model, tmp_path, flush_every=seconds)


@settings(max_examples=10, deadline=None)
@example(stops=[4], batch=1, rows=1)
@example(stops=[4, 9], batch="auto", rows=20)
@given(stops=st.lists(st.integers(0, 14), max_size=3), batch=st.integers(1, 9), rows=st.integers(1, 90))
def test_any_interrupts_come_to_the_same(stops, batch, rows) -> None:
    model, options = tinyworld(), {**OPTIONS, "batch_size": batch, "shard_rows": rows, "sample": 0.7}
    with TemporaryDirectory() as folder:
        one, other = Path(folder, "one"), Path(folder, "other")
        for at in stops:
            with pytest.raises(StopError):
                hookline.harvest(model, interrupted(at), POINTS, one, **options)
        for place in (one, other):
            hookline.harvest(model, texts()[:15], POINTS, place, **options)
        assert same_rows(one, other)


class Disk:
    """Stands in for a disk that has room for so many bytes, or for so many calls of `what`."""

    def __init__(self, monkeypatch, room: int, what: str = "write") -> None:
        self.left, real = room, getattr(os, what)

        def limited(*args):
            self.left -= len(args[1]) if what == "write" else 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        monkeypatch.setattr(folders.os, what, limited)


def sizes(path) -> list[int]:
    return [each.stat().st_size for each in sorted(path.glob("*.safetensors"))]


@pytest.mark.parametrize(
    ("what", "room"),
    [
        *(("write", room) for room in (0, 10, 2_000, 30_000, 100_000, 101_500, 130_000, 200_000)),
        *(("fsync", room) for room in range(0, 11, 2)),
        *(("replace", room) for room in range(5)),
    ],
)
def test_a_full_disk_leaves_what_can_be_read_and_goes_on(model, path, tmp_path, what, room) -> None:
    full = tmp_path / "full"
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, room, what)
        with pytest.raises(StoreError, match="space left"):
            harvested(model, full)
    assert not list(full.glob("*.part"))
    if (full / "manifest.json").exists():
        store = LocalStore(full)
        assert store.verify().is_sound
        rows = store.rows()
        assert torch.equal(rows[POINTS[0]], LocalStore(path).rows(0, len(rows))[POINTS[0]])
    harvested(model, full)
    assert files(full) == files(path)


def test_a_full_disk_is_told_of_while_the_data_goes_on(model, tmp_path, monkeypatch) -> None:
    Disk(monkeypatch, 30_000)
    with pytest.raises(StoreError, match="space left"):
        hookline.harvest(model, cycle(texts()), POINTS, tmp_path, **OPTIONS)


def test_a_harvest_does_not_go_on_without_what_was_stored(model, tmp_path) -> None:
    with pytest.raises(StopError):
        hookline.harvest(model, interrupted(20), POINTS, tmp_path, **OPTIONS)
    (tmp_path / SHARD).unlink()
    with pytest.raises(StoreError, match=f"lost {SHARD}"):
        harvested(model, tmp_path)


def test_a_damaged_shard_is_made_again_with_all_after_it(model, path) -> None:
    before = files(path)
    flip(path / SHARD, -1)
    for shard in sorted(path.glob("*.safetensors"))[1:]:
        shard.unlink()
    LocalStore(path).rebuild()
    harvested(model, path)
    assert files(path) == before


def test_nothing_in_a_store_is_pickled(path) -> None:
    json.loads((path / "manifest.json").read_text())
    for shard in path.glob("*.safetensors"):
        raw = shard.read_bytes()
        json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
