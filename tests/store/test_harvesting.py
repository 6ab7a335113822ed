"""What is harvested: the right values at the right places, whatever the data set and the options."""

import io
import os
import threading

import pytest
import torch
import tqdm.auto
from networks import MLP, InPlace, Twice
from stores import OPTIONS, POINTS, files, harvested, texts, tinyworld
from tiny_models import causal_lm, encoder, seq2seq
from torch import nn

import hookline
from hookline import HooklineError
from hookline.errors import HooklineWarning, StoreError
from hookline.store import LocalStore, RemoteStore


@pytest.fixture(scope="module")
def model():
    return tinyworld()


def alone(model, text: str, point: str) -> torch.Tensor:
    """What a point has on one text by itself, [pos, …]."""
    return model.run_with_cache(text, names_filter=point)[1][point][0]


def test_rows_are_what_the_model_computes(model, tmp_path) -> None:
    store = harvested(model, tmp_path, dtype=None)
    for number, text in enumerate(texts()):
        rows = store.example(number)
        if not text:
            assert len(rows) == 0
            continue
        assert rows.token.tolist() == model.to_tokens(text)[0].tolist()
        assert rows.position.tolist() == list(range(len(rows)))
        assert (rows.example == number).all()
        for point in POINTS:
            torch.testing.assert_close(rows[point], alone(model, text, point), atol=1e-5, rtol=1e-4)
    assert len(store) == sum(len(model.to_tokens(text)[0]) for text in texts() if text)
    assert store.is_complete
    assert store.examples == 30


def test_the_way_the_data_comes_does_not_matter(model, tmp_path) -> None:
    ids = [model.to_tokens(text)[0] if text else torch.empty(0, dtype=torch.long) for text in texts(12)]
    width = max(map(len, ids))
    left = [torch.cat([torch.zeros(width - len(row), dtype=torch.long), row]) for row in ids]
    masks = [torch.cat([torch.zeros(width - len(row)), torch.ones(len(row))]) for row in ids]
    ways = {
        "list": texts(12),
        "generator": (text for text in texts(12)),
        "ids": ids,
        "lists": [row.tolist() for row in ids],
        "padded": [{"input_ids": row, "attention_mask": mask} for row, mask in zip(left, masks, strict=True)],
    }
    stores = {name: hookline.harvest(model, data, POINTS, tmp_path / name, **OPTIONS) for name, data in ways.items()}
    columns = [{"id": number, "text": text} for number, text in enumerate(texts(12))]
    stores["column"] = hookline.harvest(model, columns, POINTS, tmp_path / "column", column="text", **OPTIONS)
    first = stores["list"].rows()
    for store in stores.values():
        rows = store.rows()
        assert torch.equal(rows.token, first.token)
        assert torch.equal(rows.example, first.example)
        assert all(torch.equal(rows[point], first[point]) for point in POINTS)


def test_a_tensor_of_tokens_remembers_its_padding(model, tmp_path) -> None:
    some = ["Mary went to the garden", "John"]
    store = hookline.harvest(model, model.to_tokens(some), POINTS, tmp_path, **OPTIONS)
    assert len(store) == sum(len(model.to_tokens(text)[0]) for text in some)


def test_tokens_that_look_padded_are_warned_of(model, tmp_path) -> None:
    padded = model.to_tokens(["Mary went to the garden", "John"]).clone()
    with pytest.warns(HooklineWarning, match="looks padded"):
        hookline.harvest(model, padded, POINTS, tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    ("positions", "places"),
    [
        (hookline.last, lambda n: [n - 1]),
        (-1, lambda n: [n - 1]),
        (2, lambda n: [2] if n > 2 else []),
        ([0, -1], lambda n: sorted({0, n - 1})),
        (slice(1, None, 2), lambda n: list(range(n))[1::2]),
        (lambda ids: torch.arange(len(ids)) % 3 == 0, lambda n: list(range(0, n, 3))),
        (torch.arange(40).expand(30, 40) == 1, lambda n: [1] if n > 1 else []),
    ],
)
def test_positions(model, tmp_path, positions, places) -> None:
    store = harvested(model, tmp_path / "some", positions=positions, hooks_tag="v1")
    everything = harvested(model, tmp_path / "all")
    for number, text in enumerate(texts()):
        rows, every = store.example(number), everything.example(number)
        wanted = places(len(every)) if text else []
        assert rows.position.tolist() == wanted
        for point in POINTS:
            assert torch.equal(rows[point], every[point][wanted])


def test_a_token_by_its_text(model, tmp_path) -> None:
    store = harvested(model, tmp_path, positions=hookline.token(" garden", nth=0))
    assert len(store) == sum(bool(text) for text in texts())
    assert {model.to_string([token]) for token in store.rows().token.tolist()} == {" garden"}


def test_sampling_depends_on_the_seed_and_the_example_only(model, tmp_path) -> None:
    one = harvested(model, tmp_path / "one", sample=0.3, seed=1).rows()
    other = harvested(model, tmp_path / "other", sample=0.3, seed=1, batch_size=7, shard_rows=11).rows()
    third = harvested(model, tmp_path / "third", sample=0.3, seed=2).rows()
    total = len(harvested(model, tmp_path / "all"))
    assert 0.15 * total < len(one) < 0.45 * total
    places = [list(zip(rows.example.tolist(), rows.position.tolist(), strict=True)) for rows in (one, other, third)]
    assert places[0] == places[1] != places[2]


def test_max_rows_ends_in_the_middle(model, tmp_path) -> None:
    every = harvested(model, tmp_path / "all").rows()
    some = harvested(model, tmp_path / "some", max_rows=50)
    assert len(some) == 50
    assert torch.equal(some.rows()[POINTS[0]], every[POINTS[0]][:50])
    assert some.is_complete
    assert len(harvested(model, tmp_path / "some", max_rows=50)) == 50


def test_long_texts_raise_or_are_cut(model, tmp_path) -> None:
    long = ["Mary went to the garden", "Mary and " * (model.cfg.n_ctx or 0)]
    with pytest.raises(HooklineError, match=r"example 1: .*max_tokens"):
        hookline.harvest(model, long, POINTS, tmp_path / "a", **OPTIONS)
    store = hookline.harvest(model, long, POINTS, tmp_path / "b", max_tokens=4, **OPTIONS)
    assert store.example(1).position.tolist() == [0, 1, 2, 3]


def test_names_in_any_dialect_are_stored_under_one(model, tmp_path) -> None:
    store = hookline.harvest(model, texts(4), [("z", 2), 3], tmp_path, **OPTIONS)
    assert list(store.points) == ["blocks.2.attn.hook_z", "blocks.3.hook_resid_post"]
    again = hookline.harvest(model, texts(4), [POINTS[1], POINTS[2]], tmp_path, **OPTIONS)
    assert len(again) == len(store)


def test_integers_keep_their_dtype(model, tmp_path) -> None:
    store = hookline.harvest(model, texts(4), ["hook_tokens", POINTS[0]], tmp_path, **OPTIONS)
    assert store.points["hook_tokens"].dtype == "int64"
    rows = store.rows()
    assert rows["hook_tokens"].tolist() == rows.token.tolist()


def test_hooks_take_effect_and_are_recorded(model, tmp_path) -> None:
    def silence(z, hook):
        z[:] = 0

    with model.hooks(fwd_hooks=[(POINTS[1], silence)]):
        store = harvested(model, tmp_path, hooks_tag="v1")
    assert not store[POINTS[1]][:].any()
    with pytest.raises(StoreError, match="hooks: "):
        harvested(model, tmp_path, hooks_tag="v1")


def test_the_same_edit_with_another_vector_is_another_harvest(model, tmp_path) -> None:
    def steered(vector) -> None:
        remove = model.add_hook(POINTS[2], hookline.edits.add(vector))
        try:
            harvested(model, tmp_path, 6)
        finally:
            remove()

    one = torch.ones(model.cfg.d_model)
    steered(one)
    steered(one.clone())
    with pytest.raises(StoreError, match="hooks: "):
        steered(2 * one)


def test_what_cannot_be_rows_is_refused(model, tmp_path) -> None:
    for point, why in (("blocks.0.attn.hook_pattern", "axes"), ("blocks.0.attn.hook_attn_scores", "axes")):
        with pytest.raises(StoreError, match=why):
            hookline.harvest(model, texts(3), point, tmp_path, **OPTIONS)
    with pytest.raises(HooklineError, match="no point"):
        hookline.harvest(model, texts(3), "blocks.9.hook_resid_post", tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"sample": 0}, "sample"),
        ({"sample": 1.5}, "sample"),
        ({"max_rows": -1}, "max_rows"),
        ({"shard_rows": 0}, "shard_rows"),
        ({"dtype": torch.int8}, "dtype"),
        ({"positions": hookline.positions.new_tokens}, "generate"),
        ({"positions": "last"}, "positions"),
        ({"positions": torch.tensor([1, 2])}, "mask"),
        ({"positions": lambda ids: ids, "hooks_tag": "v1"}, "mask"),
        ({"column": "text"}, "no column"),
    ],
)
def test_bad_options_raise(model, tmp_path, options, why) -> None:
    with pytest.raises(HooklineError, match=why):
        harvested(model, tmp_path, **options)


@pytest.mark.parametrize(
    "dataset", ["one text", {"text": ["a"]}, 3, [], [""], [3.5], [{"id": 1, "text": "a"}], torch.ones(3)]
)
def test_bad_data_raises(model, tmp_path, dataset) -> None:
    with pytest.raises(HooklineError):
        hookline.harvest(model, dataset, POINTS, tmp_path, **OPTIONS)


def test_values_too_large_for_the_dtype_raise(tmp_path) -> None:
    module = causal_lm("gpt2")
    module.transformer.wte.weight.data *= 1e6
    model = hookline.hook(module)
    data = torch.randint(0, 60, (4, 5))
    with pytest.raises(StoreError, match="overflow torch"):
        hookline.harvest(model, data, "blocks.0.hook_resid_pre", tmp_path / "a", dtype=torch.float16)
    hookline.harvest(model, data, "blocks.0.hook_resid_pre", tmp_path / "b", dtype=torch.bfloat16)


def test_a_model_with_dropout_is_refused(tmp_path) -> None:
    model = hookline.hook(causal_lm("gpt2").train())
    with pytest.raises(HooklineError, match="training mode"):
        hookline.harvest(model, torch.ones(2, 5, dtype=torch.long), "blocks.0.hook_resid_pre", tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma2", "mamba", "mixtral", "bert", "roberta", "t5"])
def test_other_models_with_padding(kind, tmp_path) -> None:
    module = {"bert": encoder, "roberta": encoder, "t5": seq2seq}.get(kind, causal_lm)(kind)
    module.config.decoder_start_token_id = 0
    model = hookline.hook(module)
    prefix = "encoder" if kind in ("bert", "roberta", "t5") else "blocks"
    points = [f"{prefix}.0.hook_resid_pre", f"{prefix}.1.hook_resid_post"]
    points = [name if name in model.hook_dict else name.replace("encoder", "blocks") for name in points]
    data = [torch.arange(3, 3 + length) for length in (7, 2, 5, 7)]
    store = hookline.harvest(model, data, points, tmp_path, batch_size=3)
    for number, ids in enumerate(data):
        cache = model.cache(ids[None], names_filter=points)
        for point in points:
            torch.testing.assert_close(store.example(number)[point], cache[point][0], atol=2e-5, rtol=1e-4)


def test_a_decoder_behind_an_encoder_is_refused(tmp_path) -> None:
    model = hookline.hook(seq2seq("t5"))
    with pytest.raises(StoreError, match="encoder"):
        hookline.harvest(model, torch.ones(2, 5, dtype=torch.long), "decoder.0.hook_resid_pre", tmp_path)


def test_native_points(tmp_path) -> None:
    model = hookline.hook(causal_lm("gpt2"))
    data = torch.randint(3, 60, (5, 6))
    store = hookline.harvest(model, data, ["transformer.h.1.mlp.c_fc", "blocks.0.hook_resid_pre"], tmp_path)
    cache = model.cache(data, names_filter="transformer.h.1.mlp.c_fc")
    wanted = cache["transformer.h.1.mlp.c_fc"].flatten(0, 1)
    torch.testing.assert_close(store["transformer.h.1.mlp.c_fc"][:], wanted)
    assert torch.equal(store["transformer.h.1.mlp.c_fc"][:], store["blocks.1.mlp.hook_pre"][:])


def test_any_network(tmp_path) -> None:
    data = torch.randn(11, 4)
    net = hookline.hook(MLP())
    store = hookline.harvest(net, data, ["fc1", "output"], tmp_path, batch_size=4, shard_rows=5)
    torch.testing.assert_close(store["fc1"][:], net.cache(data)["fc1"])
    assert store.rows().example.tolist() == list(range(11))
    assert set(store.rows().token.tolist()) == {-1}
    with pytest.raises(HooklineError, match=r"apply.*texts"):
        hookline.harvest(net, data, "fc1", tmp_path, positions=hookline.last)


def test_a_module_that_runs_several_times_has_a_column_for_each(tmp_path) -> None:
    data = torch.randn(5, 4)
    net = hookline.hook(Twice())
    store = hookline.harvest(net, data, "cell", tmp_path)
    assert list(store.points) == ["cell#0", "cell#1", "cell#2"]
    torch.testing.assert_close(store["cell#2"][:], net(data))


class Moody(nn.Module):
    """Calls its module once more for every time that it is called."""

    def __init__(self, widens: bool = False) -> None:
        super().__init__()
        self.cell, self.calls, self.widens = nn.Identity(), 0, widens

    def forward(self, x):
        self.calls += 1
        for _ in range(1 if self.widens else self.calls):
            self.cell(x.repeat(1, self.calls) if self.widens else x)
        return x


@pytest.mark.parametrize("widens", [True, False])
def test_a_network_that_gives_something_else_each_time_is_refused(tmp_path, widens) -> None:
    net = hookline.hook(Moody(widens))
    with pytest.raises(StoreError, match="different batches"):
        hookline.harvest(net, torch.randn(6, 1), "cell", tmp_path, batch_size=2)


def test_what_a_model_writes_over_is_stored_as_it_was(tmp_path) -> None:
    net, data = hookline.hook(InPlace()), torch.randn(5, 4)
    store = hookline.harvest(net, data, ["fc1", "relu.input"], tmp_path, batch_size=5)
    cache = net.cache(data)
    assert torch.equal(store["fc1"][:], cache["fc1"])
    assert torch.equal(store["relu.input"][:], cache["relu.input"])


def test_a_network_whose_rows_are_not_samples_is_refused(tmp_path) -> None:
    net = hookline.hook(nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)))
    with pytest.raises(StoreError, match=r"row.*sample"):
        hookline.harvest(net, torch.randn(6, 4), "1", tmp_path)


def test_a_store_elsewhere(model, tmp_path) -> None:
    there = harvested(model, "memory://there", max_rows=100)
    here = harvested(model, tmp_path, max_rows=100)
    assert isinstance(there, RemoteStore)
    assert torch.equal(there[POINTS[0]][:], here[POINTS[0]][:])
    assert torch.equal(there.example(7).token, here.example(7).token)
    assert there.verify().is_sound
    assert len(harvested(model, "memory://there", max_rows=100)) == 100
    with pytest.raises(StoreError, match="RemoteStore"):
        LocalStore("memory://there")
    assert isinstance(hookline.store.open_store(f"file://{tmp_path}"), LocalStore)


def test_two_harvests_at_once_are_refused(model, tmp_path) -> None:
    for place in (tmp_path / "here", "memory://busy"):
        entered, leave = threading.Event(), threading.Event()

        def slow(entered=entered, leave=leave):
            yield from texts(3)
            entered.set()
            leave.wait(30)
            yield from texts(3)

        def run(place=place, slow=slow):
            hookline.harvest(model, slow(), POINTS, place, **OPTIONS)

        thread = threading.Thread(target=run)
        thread.start()
        assert entered.wait(30)
        with pytest.raises(StoreError, match=f"another harvest.*{os.getpid()}"):
            hookline.harvest(model, texts(3), POINTS, place, **OPTIONS)
        leave.set()
        thread.join()
        assert hookline.store.open_store(place).is_complete


def test_a_lock_of_a_process_that_is_gone_does_not_count(model) -> None:
    import json
    import socket
    import subprocess
    import sys

    import fsspec

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    files = fsspec.filesystem("memory")
    lock = json.dumps({"pid": gone.pid, "host": socket.gethostname()})
    files.pipe_file("/stale/.lock", lock.encode())
    assert harvested(model, "memory://stale").is_complete
    assert not files.exists("/stale/.lock")


def test_the_same_twice_is_the_same_bytes(model, tmp_path) -> None:
    harvested(model, tmp_path / "a")
    harvested(model, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_names_are_lazy_but_there() -> None:
    assert hookline.harvest is hookline.store.harvest
    assert hookline.store.LocalStore is LocalStore


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path) -> None:
    model = hookline.hook(causal_lm("llama").cuda())
    data = [torch.arange(3, 3 + length) for length in (7, 2, 5, 7, 7, 3)] * 20
    points = ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_post"]
    for name, options in (("same", {}), ("cast", {"dtype": torch.bfloat16})):
        store = hookline.harvest(model, data, points, tmp_path / name, batch_size=3, shard_rows=40, **options)
        for number, ids in enumerate(data):
            cache = model.cache(ids[None], names_filter=points)
            for point in points:
                wanted = cache[point][0].cpu().to(store[point].dtype)
                torch.testing.assert_close(store.example(number)[point], wanted, atol=2e-2, rtol=2e-2)
        assert store.verify().is_sound
    hookline.harvest(model, data, points, tmp_path / "again", batch_size=3, shard_rows=40)
    assert files(tmp_path / "again") == files(tmp_path / "same")


def test_a_hook_that_stays_for_a_position_that_some_texts_have_not(model, tmp_path) -> None:
    """As in a context: it is told when the harvest is over."""
    texts = ["Mary went to the garden.", "John went."]
    model.add_hook("blocks.0.hook_resid_post", hookline.edits.zero(pos=4))
    try:
        with pytest.warns(hookline.NeverFiredWarning, match="position 4"):
            one = hookline.harvest(model, texts, 1, tmp_path / "one", progress=False)
    finally:
        model.reset_hooks()
    with (
        pytest.warns(hookline.NeverFiredWarning, match="position 4"),
        model.hooks([("blocks.0.hook_resid_post", hookline.edits.zero(pos=4))]),
    ):
        two = hookline.harvest(model, texts, 1, tmp_path / "two", progress=False)
    point = "blocks.1.hook_resid_post"
    assert torch.equal(one[point][:], two[point][:])


def test_whole_numbers_of_numpy(model, tmp_path) -> None:
    import numpy

    some = hookline.harvest(
        model, ["Mary went"] * 3, 1, tmp_path, positions=numpy.int64(0), shard_rows=numpy.int64(1), progress=False
    )
    again = hookline.harvest(model, ["Mary went"] * 3, 1, tmp_path, positions=0, shard_rows=1, progress=False)
    assert len(some) == len(again) == 3


@pytest.mark.parametrize(("options", "unit", "total"), [({"max_rows": 50}, " rows", 50), ({}, " examples", 30)])
def test_the_bar_counts_what_ends_the_harvest(tmp_path, monkeypatch, options, unit, total) -> None:
    bars = []

    class Bar(tqdm.auto.tqdm):
        """A bar that can be asked afterwards."""

        def __init__(self, **given) -> None:
            super().__init__(**given | {"delay": 0, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    harvested(tinyworld(), tmp_path, **options, progress=True)
    (bar,) = bars
    assert (bar.unit, bar.total, bar.n) == (unit, total, total)


def test_rows_that_are_not_finite_are_counted(model, tmp_path) -> None:
    def broken(z, hook):
        z[:, 1] = torch.nan

    points, said = (
        ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"],
        "infinite were stored: 2 rows of blocks.1.attn.hook_z",
    )
    with model.hooks(fwd_hooks=[(points[1], broken)]), pytest.warns(HooklineWarning, match=said):
        hookline.harvest(model, torch.ones(2, 5).long(), points, tmp_path, hooks_tag="v1", progress=False)


def test_a_seed_without_a_sample(model, tmp_path) -> None:
    with pytest.raises(HooklineError, match=r"seed=3.*sample="):
        hookline.harvest(model, texts(3), "z0", tmp_path, seed=3)
