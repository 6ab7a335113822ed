"""What a harvest makes of rows with columns, of padding, and of what is no example."""

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from stores import OPTIONS, tinyworld
from tiny_models import causal_lm, encoder, seq2seq

import hookline
from hookline import HooklineError
from hookline.errors import HooklineWarning
from hookline.store.examples import Examples, as_text

POINT = "blocks.1.hook_resid_post"
TEXTS = ["Mary went to the garden.", "John", "Mary gave the ball to John."]


@pytest.fixture(scope="module")
def model():
    return tinyworld()


@pytest.fixture(scope="module")
def padded(model):
    return model.tokenizer(TEXTS, padding="max_length", max_length=20)


def rows_of(encoding):
    return [dict(zip(encoding, row, strict=True)) for row in zip(*encoding.values(), strict=True)]


def test_the_mask_beside_the_tokens_is_used(model, padded, tmp_path) -> None:
    wanted = hookline.harvest(model, TEXTS, POINT, tmp_path / "texts", **OPTIONS).rows()
    ways = {
        "rows": (rows_of(padded), None),
        "column": (rows_of(padded), "input_ids"),
        "encoding": (padded, None),
        "tensors": (padded.convert_to_tensors("pt"), None),
    }
    for name, (data, column) in ways.items():
        rows = hookline.harvest(model, data, POINT, tmp_path / name, column=column, **OPTIONS).rows()
        assert rows.token.tolist() == wanted.token.tolist()
        assert torch.equal(rows[POINT], wanted[POINT])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_noticed_in_each_row(model, tmp_path, batch_size, side) -> None:
    ids = [model.to_tokens(text)[0].tolist() for text in TEXTS]
    pads = [[model.tokenizer.pad_token_id] * (20 - len(row)) for row in ids]
    data = torch.tensor([a + b if side == "right" else b + a for a, b in zip(ids, pads, strict=True)])
    options = {**OPTIONS, "batch_size": batch_size}
    with pytest.warns(HooklineWarning, match="example 0.*padded") as told:
        hookline.harvest(model, data, POINT, tmp_path / "bare", **options)
    assert len(told) == 1
    rows = [{"input_ids": row} for row in data.tolist()]
    with pytest.warns(HooklineWarning, match="example 0.*padded"):
        hookline.harvest(model, rows, POINT, tmp_path / "rows", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = [{"input_ids": row, "attention_mask": [1] * 20} for row in data.tolist()]
        store = hookline.harvest(model, rows, POINT, tmp_path / "masked", **options)
    assert len(store) == 60


def test_one_token_that_ends_a_text_is_no_padding(tmp_path) -> None:
    model = hookline.load("tinyworld")
    model.tokenizer.pad_token = model.tokenizer.eos_token
    ids = [*model.to_tokens(TEXTS[0])[0].tolist(), model.tokenizer.eos_token_id]
    hookline.harvest(model, [ids], POINT, tmp_path, **OPTIONS)  # warnings are errors


def test_what_has_a_number_for_each_token_is_passed_on(tmp_path) -> None:
    model = hookline.hook(encoder("bert"))
    point = "encoder.1.hook_resid_post"
    data = [
        {"input_ids": [5, 6, 7, 8], "token_type_ids": [0, 0, 1, 1]},
        {"input_ids": [5, 6], "token_type_ids": [0, 0]},
        {"input_ids": [5, 6, 7]},
        {"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1], "token_type_ids": [0, 0, 1, 0], "id": 3},
    ]
    types = [[0, 0, 1, 1], [0, 0], [0, 0, 0], [0, 1, 0]]
    for size in (1, 4):
        store = hookline.harvest(model, data, point, tmp_path / str(size), batch_size=size, progress=False)
        for number, kinds in enumerate(types):
            ids = torch.tensor([data[number]["input_ids"]])
            ids = ids[ids > 0][None]
            cache = model.cache(ids, token_type_ids=torch.tensor([kinds]), names_filter=point)
            torch.testing.assert_close(store.example(number)[point], cache[point][0], atol=1e-5, rtol=1e-4)


def test_positions_are_passed_on_and_belong_to_the_data(model, tmp_path) -> None:
    ids = model.to_tokens(TEXTS[0])[0]
    where = torch.arange(5, 5 + len(ids))
    store = hookline.harvest(model, [{"input_ids": ids, "position_ids": where}], POINT, tmp_path, progress=False)
    cache = model.cache(ids[None], position_ids=where[None], names_filter=POINT)
    torch.testing.assert_close(store.rows()[POINT], cache[POINT][0])
    with pytest.raises(hookline.errors.StoreError, match="other data"):
        hookline.harvest(model, [{"input_ids": ids, "position_ids": where + 1}], POINT, tmp_path, progress=False)
    mixed = [{"input_ids": ids, "position_ids": where}, {"input_ids": ids}]
    with pytest.raises(HooklineError, match="example 0 has position_ids"):
        hookline.harvest(model, mixed, POINT, tmp_path / "mixed", progress=False)


@pytest.mark.parametrize(
    ("kind", "row", "why"),
    [
        ("t5", {"decoder_input_ids": [1, 2, 3]}, "decoder_input_ids"),
        ("t5", {"decoder_input_ids": [1, 2]}, "decoder_input_ids"),
        ("gpt2", {"token_type_ids": [0, 1, 1]}, "token_type_ids"),
        ("gpt2", {"inputs_embeds": torch.zeros(3, 32)}, "inputs_embeds"),
    ],
)
def test_what_the_model_would_take_and_is_not_passed_on_is_refused(tmp_path, kind, row, why) -> None:
    model = hookline.hook((seq2seq if kind == "t5" else causal_lm)(kind))
    point = "encoder.0.hook_resid_post" if kind == "t5" else POINT
    with pytest.raises(HooklineError, match=f"example 0 has {why}"):
        hookline.harvest(model, [{"input_ids": [5, 6, 7], **row}], point, tmp_path, progress=False)


def test_what_the_model_does_not_take_does_not_matter(tmp_path) -> None:
    model = hookline.hook(causal_lm("gpt2"))
    row = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "token_type_ids": [0, 0, 0], "text": "a b", "id": 1, "x": None}
    store = hookline.harvest(model, [row], POINT, tmp_path, progress=False)
    torch.testing.assert_close(store.rows()[POINT], model.cache(torch.tensor([[5, 6, 7]]))[POINT][0])


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (["a", None], "example 1: .*not None"),
        (["a", (3, "Mary")], "example 1: .*column=0"),
        ([["a", "b"]], "example 0: .*list of 2"),
        ([[[1, 2], [3]]], "example 0: .*list of 2"),
        ([[{"role": "user", "content": "x"}]], "example 0: .*chat_template"),
        ([b"x"], "example 0: .*decode"),
        ([{"id": 1, "text": "a"}], "example 0: .*several columns"),
        ({"train": ["a"], "test": ["b"]}, "pass one of them"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1, 1]]}, "different lengths"),
    ],
)
def test_what_is_no_example_is_refused_with_its_number(model, tmp_path, dataset, why) -> None:
    with pytest.raises(HooklineError, match=why):
        hookline.harvest(model, dataset, POINT, tmp_path, **OPTIONS)


def test_the_only_column_is_taken(model, tmp_path) -> None:
    store = hookline.harvest(model, [{"text": text} for text in TEXTS], POINT, tmp_path, **OPTIONS)
    assert model.to_string(store.example(0).token) == TEXTS[0]


def test_hints_fit_the_mistake(model, tmp_path) -> None:
    with pytest.raises(HooklineError, match="range") as error:
        hookline.harvest(model, [[300000]], POINT, tmp_path, **OPTIONS)
    assert "max_tokens" not in str(error.value)
    long, room = ["Mary and " * 2000], model.cfg.n_ctx
    for options in ({}, {"max_tokens": room + 1}):
        with pytest.raises(HooklineError, match=f"example 0: .*max_tokens={room}"):
            hookline.harvest(model, long, POINT, tmp_path, **OPTIONS, **options)


def test_positions_may_be_a_list_of_bools(model, tmp_path) -> None:
    first = lambda ids: [True] + [False] * (len(ids) - 1)  # noqa: E731
    store = hookline.harvest(model, TEXTS, POINT, tmp_path, positions=first, hooks_tag="first")
    assert store.rows().position.tolist() == [0, 0, 0]


def test_a_path_stays_where_it_was(model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    store = hookline.harvest(model, TEXTS, POINT, "here", **OPTIONS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.refresh()
    assert len(store) == len(hookline.store.LocalStore("~/here"))


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "hookline", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "store" in done.stdout


def batches_of(data: Any, size: Any = "auto", max_tokens: int | None = None) -> list[tuple[int, int, int]]:
    """The first example of each batch, how many it has, and how many have been counted when it is yielded."""
    examples = Examples(data, None, as_text)
    return [
        (before.examples, len(some), examples.progress.examples) for before, some in examples.batches(size, max_tokens)
    ]


def test_automatic_batches_have_about_as_many_tokens() -> None:
    assert batches_of(torch.zeros(70, 128, dtype=torch.long)) == [(0, 64, 64), (64, 6, 70)]
    texts = ["a" * 40] * 300 + ["a" * 8000] * 3 + ["b"] * 2 + ["a" * 40000] * 2
    assert batches_of(texts) == [
        (0, 256, 256),
        (256, 44, 300),
        (300, 4, 304),
        (304, 1, 305),
        (305, 1, 306),
        (306, 1, 307),
    ]
    assert batches_of(texts, max_tokens=100) == [(0, 256, 256), (256, 51, 307)]
    assert batches_of(iter(["a", "b", "c"]), 2) == [(0, 2, 2), (2, 1, 3)]
    assert batches_of([]) == []


def test_a_full_batch_does_not_wait_for_the_next_example() -> None:
    def stream():
        yield from ("a", "b")
        raise AssertionError("read too far")

    examples = Examples(stream(), None, as_text)
    assert len(next(examples.batches(2))[1]) == 2


@pytest.mark.parametrize("size", [None, "all", 0, 1.5])
def test_a_batch_size_that_is_none(model, tmp_path, size) -> None:
    with pytest.raises(HooklineError, match="batch_size"):
        hookline.harvest(model, TEXTS, POINT, tmp_path, **{**OPTIONS, "batch_size": size})
