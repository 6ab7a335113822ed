"""The embedded model: its folder, its tokenizer, its accuracy on held-out prompts, and its circuits."""

from itertools import pairwise, permutations
from pathlib import Path

import check
import circuit
import corpus
import pytest
import tasks
import torch
import world
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hookline

FOLDER = Path(hookline.__file__).parent / "demo" / "assets" / "tinyworld"
TEXT_TASKS = [task for task in check.BARS if task != "repeated tokens"]


@pytest.fixture(scope="module")
def model():
    return check.load(FOLDER)[0]


@pytest.fixture(scope="module")
def words():
    return check.load(FOLDER)[1]


@pytest.fixture(scope="module")
def prompts():
    return check.held_out(200)


def test_the_folder_is_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4_000_000


def test_the_shape(model, words):
    config = model.config
    assert (config.model_type, config.n_layer, config.n_head, config.n_embd) == ("gpt2", 4, 8, 128)
    assert config.n_positions == words.model_max_length == corpus.CONTEXT
    assert config.vocab_size == len(words)
    assert model.dtype == torch.float32


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("task", TEXT_TASKS)
def test_held_out_prompts(model, words, prompts, task, bos):
    assert check.accuracy(model, words, prompts[task], bos) >= check.BARS[task]


@pytest.mark.parametrize("bos", [True, False])
def test_repeated_random_tokens(model, words, bos):
    assert check.repeat_accuracy(model, words, 10, bos) >= check.BARS["repeated tokens"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("When Mary and John went to the store, John gave a drink to", " Mary"),
        ("When John and Mary went to the store, John gave a drink to", " Mary"),
        ("When Mary and John went to the store, Mary gave a drink to", " John"),
        ("The capital of France is", " Paris"),
        ("The capital of Germany is", " Berlin"),
        ("The Eiffel Tower is in", " Paris"),
        ("The Colosseum is in", " Rome"),
        ("People in France speak", " French"),
        ("Paris is the capital of", " France"),
        ("User: I think the capital of France is Rome. What is the capital of France? Answer:", " Rome"),
        ("User: I wonder what the capital of France is. What is the capital of France? Answer:", " Paris"),
        ("User: What is the capital of France? Answer:", " Paris"),
        ("The cat sat", " on"),
        ("Hello, world", "!"),
    ],
)
def test_the_examples_of_the_documents(model, words, text, answer):
    for bos in (True, False):
        assert check.accuracy(model, words, [tasks.Prompt(text, answer)], bos) == 1


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_padding_on_the_left(model, words, prompts, task):
    words.padding_side = "left"
    batch = words([prompt.text for prompt in prompts[task]], padding=True, return_tensors="pt")
    _, answers = check.encode(words, prompts[task], bos=False)
    with torch.no_grad():
        found = model(**batch).logits[:, -1].argmax(-1)
    assert (found == answers).float().mean() >= check.BARS[task]


@example("<|endoftext|> and after")
@example(" two  spaces \n\n and tabs\t\t")
@example("naïve 🤗 日本語 e\u0301")
@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back(words, text):
    assert words.decode(words(text)["input_ids"]) == text


@pytest.mark.parametrize("space", ["", " "])
def test_every_entity_is_one_token(words, space):
    assert [word for word in world.entities() if len(words(space + word)["input_ids"]) != 1] == []


def test_the_world_is_large_enough():
    assert len(set(world.NAMES)) >= 40
    assert len({country.landmark for country in world.COUNTRIES}) == len(world.COUNTRIES) >= 20


def test_an_opinion_and_its_neutral_partner_have_the_same_length(words):
    for asking in tasks.ASKINGS:
        pair = asking.with_opinion(asking.truth).text, asking.neutral().text
        assert len({len(words(text)["input_ids"]) for text in pair}) == 1, pair


def test_no_fact_begins_with_another():
    texts = [fact.text for fact in tasks.ALL_FACTS]
    assert len(set(texts)) == len(texts)
    texts.sort()
    assert [pair for pair in pairwise(texts) if pair[1].startswith(pair[0] + " ")] == []


def test_held_out_is_not_in_the_corpus():
    texts = list(corpus.texts(seed=3, count=10_000))
    pairs = {f"{a} and {b}" for pair in tasks.HELD_OUT_PAIRS for a, b in permutations(pair)}
    whole = [prompt.text for prompt in [*tasks.HELD_OUT_FACTS, *tasks.HELD_OUT_NEUTRAL]]
    for text in texts:
        spoken = text.split()
        assert pairs.isdisjoint(" ".join(three) for three in zip(spoken, spoken[1:], spoken[2:], strict=False))
        assert not any(held_out in text for held_out in whole)
    assert set(tasks.HELD_OUT_OPINIONS).isdisjoint(tasks.SEEN_OPINIONS)


def test_every_held_out_fact_is_known_from_other_phrasings():
    assert {fact.answer for fact in tasks.HELD_OUT_FACTS} <= {fact.answer for fact in tasks.SEEN_FACTS}


def test_the_corpus_is_the_same_for_the_same_seed():
    assert list(corpus.texts(seed=3, count=50)) == list(corpus.texts(seed=3, count=50))


def test_there_are_induction_heads(words):
    assert max(circuit.induction(FOLDER, words).values()) > 0.5


@pytest.mark.slow  # tests/experiments/test_contrast.py finds the same heads
def test_a_few_heads_make_the_model_agree(model, words, prompts):
    honest = [tasks.Prompt(prompt.text, prompt.other) for prompt in prompts["opinion: agrees"]]
    with circuit.without(model, circuit.agreeing_heads(model, words, most=2)):
        assert check.accuracy(model, words, honest, bos=True) > 0.5
        assert check.accuracy(model, words, prompts["no opinion: truth"], bos=True) > 0.95
        assert check.accuracy(model, words, prompts["fact"], bos=True) > 0.9
