"""Reading a store: by row, by example, by point, in batches; by safetensors itself; from the command line."""

import json
import pickle
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors import safe_open
from stores import POINTS, files, harvested, texts, tinyworld
from tiny_models import causal_lm, encoder
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import hookline
from hookline import HooklineError, UnknownPointError
from hookline.cli import app
from hookline.errors import StoreError
from hookline.store import LocalStore, Rows
from hookline.store.harvesting import column_of, names_of
from hookline.store.manifest import Column

TENSORS_ON_CPU = True


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    harvested(tinyworld(), folder)
    return folder


@pytest.fixture
def store(path) -> LocalStore:
    return LocalStore(path)


def places(rows: Rows) -> list[tuple[int, int]]:
    return list(zip(rows.example.tolist(), rows.position.tolist(), strict=True))


def test_ranges_across_shards(store) -> None:
    every = store.rows()
    assert len(store.manifest.shards) > 3
    for start, stop in [(0, 1), (35, 95), (len(store) - 3, None), (-5, None), (7, 7), (0, 10**9)]:
        rows = store.rows(start, stop, POINTS[:2])
        assert list(rows.activations) == POINTS[:2]
        assert places(rows) == places(every)[start:stop]
        for point in POINTS[:2]:
            assert torch.equal(rows[point], every[point][start:stop])
            assert torch.equal(store[point][start:stop], every[point][start:stop])
    assert torch.equal(store[POINTS[0]][-1], every[POINTS[0]][-1])
    assert store[POINTS[1]].shape == (len(store), *every[POINTS[1]].shape[1:])


def test_examples_are_all_rows_once(store) -> None:
    found = [place for number in range(store.examples) for place in places(store.example(number))]
    assert found == places(store.rows())


def test_globs_and_bad_names(store) -> None:
    assert list(store.rows(0, 2, "blocks.*.hook_resid_*").activations) == [POINTS[0], POINTS[2]]
    with pytest.raises(UnknownPointError, match="you mean"):
        store.rows(0, 2, "blocks.0.hook_resid_pree")
    with pytest.raises(UnknownPointError):
        store["nothing"]
    with pytest.raises(UnknownPointError):
        store.rows(0, 2)["nothing"]
    with pytest.raises(StoreError, match="example 30"):
        store.example(30)
    with pytest.raises(IndexError):
        store[POINTS[0]][10**9]


def test_what_is_read_may_be_written_to(store) -> None:
    before = store[POINTS[0]][:3].clone()
    store[POINTS[0]][:3].zero_()
    store.rows(0, 3)[POINTS[0]].zero_()
    assert torch.equal(store[POINTS[0]][:3], before)


def test_batches_in_order(store) -> None:
    batches = list(store.batches(32))
    assert [len(batch) for batch in batches[:-1]] == [32] * (len(batches) - 1)
    assert [place for batch in batches for place in places(batch)] == places(store.rows())


@pytest.mark.parametrize("pool_rows", [1, 64, 65536])
def test_shuffled_batches_have_every_row_once(store, pool_rows, monkeypatch) -> None:
    monkeypatch.setattr("hookline.store.stored_rows._RUN", 16)
    every, batches = store.rows(), list(store.batches(20, POINTS[0], shuffle=True, seed=3, pool_rows=pool_rows))
    assert all(len(batch) == 20 for batch in batches[:-1])
    found = [place for batch in batches for place in places(batch)]
    assert sorted(found) == places(every) != found
    at = {place: row for row, place in enumerate(places(every))}
    for batch in batches:
        assert torch.equal(batch[POINTS[0]], every[POINTS[0]][[at[place] for place in places(batch)]])


def test_the_order_depends_on_seed_and_epoch(store) -> None:
    def order(**options) -> list[tuple[int, int]]:
        return [place for batch in store.batches(50, shuffle=True, **options) for place in places(batch)]

    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert order(seed=1, epoch=1) != order(seed=1)
    batches = store.batches(50, shuffle=True, seed=1)
    batches.set_epoch(1)
    assert [place for batch in batches for place in places(batch)] == order(seed=1, epoch=1)


def test_drop_last(store) -> None:
    assert {len(batch) for batch in store.batches(32, shuffle=True, drop_last=True)} == {32}
    with pytest.raises(HooklineError, match="batch_size"):
        store.batches(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders(store, workers, monkeypatch) -> None:
    monkeypatch.setattr("hookline.store.stored_rows._RUN", 16)
    loader = DataLoader(store.batches(20, POINTS[0], shuffle=True), batch_size=None, num_workers=workers)
    assert sorted(place for batch in loader for place in places(batch)) == places(store.rows())
    rows = DataLoader(store.dataset(POINTS[0]), batch_size=7, num_workers=workers)
    assert torch.equal(torch.cat([batch[POINTS[0]] for batch in rows]), store[POINTS[0]][:])
    assert store.dataset()[-1]["position"] == store.rows().position[-1]


def test_a_store_can_be_pickled(store) -> None:
    before = store.rows(0, 5)
    assert places(pickle.loads(pickle.dumps(store)).rows(0, 5)) == places(before)


def test_more_shards_than_are_kept_open(path, monkeypatch) -> None:
    monkeypatch.setattr("hookline.store.store._OPEN", 2)
    store = LocalStore(path)
    assert len(store.manifest.shards) > 2
    rows = store.rows()
    assert torch.equal(rows[POINTS[0]], torch.cat([batch[POINTS[0]] for batch in store.batches(9)]))
    assert len(store._open) == 2


def test_shards_are_plain_safetensors(path, store) -> None:
    for shard in store.manifest.shards:
        with safe_open(path / shard.name, "pt") as file:
            assert file.metadata()["hookline"] == "shard"
            for name in ("@example", "@token", *POINTS):
                tensor = file.get_tensor(name)
                assert len(tensor) == shard.rows
            part = file.get_slice(POINTS[0])[1:3]
        assert torch.equal(part, store[POINTS[0]][shard.first_row + 1 : shard.first_row + 3])


def test_a_store_without_rows_yet(tmp_path) -> None:
    with pytest.raises(StoreError, match=r"harvest.*first"):
        LocalStore(tmp_path).rows()


def test_moving_rows(store) -> None:
    rows = store.rows(0, 4, POINTS[0])
    assert places(rows.to("cpu")) == places(rows)
    assert "4 of examples" in repr(rows)
    assert "complete" in repr(store)


def test_commands(path) -> None:
    runner = CliRunner()
    found = runner.invoke(app, ["store", "verify", str(path)])
    assert found.exit_code == 0, found.output
    assert "sound" in found.output
    told = runner.invoke(app, ["store", "info", str(path)])
    assert told.exit_code == 0
    for word in (*POINTS, "bfloat16", "tinyworld", f"{len(texts())} examples"):
        assert word in told.output
    assert runner.invoke(app, ["store", "info", str(path / "nowhere")]).exit_code == 3
    assert runner.invoke(app, ["store", "verify", str(path / "nowhere")]).exit_code == 3


def test_reading_changes_nothing(path, store) -> None:
    before = files(path)
    store.rows()
    store.verify()
    assert files(path) == before


def test_a_view_is_read_as_a_tensor_is(store) -> None:
    view, every = store[POINTS[2]], store[POINTS[2]][:]
    count = len(every)
    mask = torch.arange(count) % 7 == 0
    order = [5, 2, 300, 5, -1]
    for which in (order, torch.tensor(order), torch.tensor(order).numpy(), mask, slice(None, None, 2), slice(9, 2, -3)):
        rows = list(range(count))[which] if isinstance(which, slice) else which
        assert torch.equal(view[which], every[rows])
    assert torch.equal(view[3:9, :2], every[3:9, :2])
    assert torch.equal(view[3, 1], every[3, 1])
    assert torch.equal(view[torch.tensor(4)], every[4])
    assert view[[]].shape == (0, *every.shape[1:])
    for bad in ([10**9], [-count - 1]):
        with pytest.raises(IndexError, match="there are"):
            view[bad]
    for bad in (mask[:-1], torch.ones(2), torch.ones(2, 2, dtype=torch.long)):
        with pytest.raises(HooklineError, match=r"number.*mask"):
            view[bad]


def test_a_store_is_asked_by_name(store) -> None:
    assert POINTS[0] in store
    assert "nothing" not in store
    assert 0 not in store
    with pytest.raises(StoreError, match="not by 0"):
        store[0]
    with pytest.raises(StoreError, match="not by 0"):
        iter(store).__next__()
    with pytest.raises(StoreError, match="not by 1"):
        store.rows(0, 1, 1)
    with pytest.raises(StoreError, match="matches 2 points"):
        store["blocks.*.hook_resid_*"]
    assert torch.equal(store.example(-1)[POINTS[0]], store.example(29)[POINTS[0]])


def test_points_go_by_the_name_they_were_harvested_by(tmp_path) -> None:
    model, name = hookline.hook(encoder("bert")), "blocks.1.hook_resid_post"
    store = hookline.harvest(model, [[5, 6, 7], [8, 9]], name, tmp_path, progress=False)
    rows, stored = store.rows(0, 4, name), "encoder.1.hook_resid_post"
    assert list(store.points) == [stored]
    assert torch.equal(rows[name], rows[stored])
    assert torch.equal(rows.pick(slice(1, 3))[name], rows[name][1:3])
    for batch in (next(iter(store.batches(2, name))), next(iter(store.batches(2, name, shuffle=True)))):
        assert torch.equal(batch[name], batch[stored])
    assert torch.equal(store.dataset(name)[0][name], rows[name][0])
    assert torch.equal(store.dataset()[0][stored], rows[name][0])
    assert name in store


def test_points_have_their_other_names(tmp_path) -> None:
    model = hookline.hook(causal_lm("gpt2"))
    assert "transformer.h.1" in names_of(model, "blocks.1.hook_resid_post")
    assert "transformer.h.1.input" in names_of(model, "transformer.h.1.input") + names_of(
        model, "blocks.1.hook_resid_pre"
    )
    for name in (*model.hook_dict, "transformer.h.0.mlp.act", "transformer.h.0.attn.c_proj.input"):
        assert all(model.index.canonical_name(other) == name for other in names_of(model, name))
    column = column_of(torch.zeros(2, 4), "a", "b", None, ["c", "b", "a"])
    assert (column.asked, column.also) == ("a", ("c",))
    again = Column.from_json(json.loads(json.dumps(asdict(column))))
    assert again.also == ("c",)
    assert Column.from_json({"dtype": "float32", "shape": [4], "asked": ""}).also == ()


def test_a_folder_in_a_shards_place(store, tmp_path) -> None:
    path = tmp_path / "store"
    shutil.copytree(store.path, path)
    (path / "000001.safetensors").unlink()
    (path / "000001.safetensors").mkdir()
    with pytest.raises(StoreError, match=r"000001.*opened"):
        LocalStore(path).rows()
    assert "cannot be opened" in str(LocalStore(path).verify())
