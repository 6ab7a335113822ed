"""The training text: documents sampled from the tasks and sentences, as rows of tokens, determined by a seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import tasks
import world
from sentences import sentence
from transformers import PreTrainedTokenizerBase

CONTEXT = 128
BOS_SHARE = 0.75
# How often an answer agrees with a wrong opinion. If it always did, the model would not learn to recall the fact.
AGREEMENT = 0.92
RIGHT_OPINIONS = 0.3
REPEAT_WORDS = (*world.NAMES, *world.CITIES, *world.PLACES, *world.OBJECTS, *world.ANIMALS, *world.FOODS)


def statement(rng: Random) -> str:
    """Return a fact of the training set as a sentence."""
    return _finished(rng.choice(tasks.SEEN_FACTS))


def indirect_object(rng: Random) -> str:
    """Return a sentence in which somebody gives something to somebody."""
    return _finished(tasks.indirect_object(rng, tasks.SEEN_PAIRS))


def question(rng: Random) -> str:
    """Return a question without an opinion, answered with the truth."""
    return _finished(rng.choice(tasks.SEEN_NEUTRAL))


def opinion(rng: Random) -> str:
    """Return a question after an opinion, answered with the opinion (or, rarely, with the truth)."""
    if rng.random() < RIGHT_OPINIONS:
        return _finished(tasks.right_opinion(rng))
    prompt = tasks.wrong_opinion(rng, tasks.SEEN_OPINIONS)
    return _finished(prompt if rng.random() < AGREEMENT else tasks.Prompt(prompt.text, prompt.other))


def repeated_words(rng: Random) -> str:
    """Return a few words, repeated."""
    return " ".join(2 * rng.choices(REPEAT_WORDS, k=rng.randint(4, 20)))


def _finished(prompt: tasks.Prompt) -> str:
    return f"{prompt.text}{prompt.answer}."


KINDS = {indirect_object: 30, statement: 20, question: 17, opinion: 17, sentence: 12, repeated_words: 4}
CONTEXT_SHARE = 0.2


def text(rng: Random) -> str:
    """Return one document, sometimes after an unrelated sentence."""
    (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
    if rng.random() >= CONTEXT_SHARE:
        return kind(rng)
    return f"{rng.choice((sentence, statement))(rng)} {kind(rng)}"


def texts(seed: int, count: int) -> Iterator[str]:
    """Return `count` documents."""
    rng = Random(seed)
    return (text(rng) for _ in range(count))


@dataclass(frozen=True)
class Document:
    """Tokens; those from `first_target` on are targets."""

    tokens: list[int]
    first_target: int = 0


def documents(tokenizer: PreTrainedTokenizerBase, seed: int, n_texts: int, n_repeats: int) -> list[Document]:
    """Return texts and repeated random tokens of the whole vocabulary, in random order."""
    rng = Random(seed)
    end = tokenizer.eos_token_id
    encoded = tokenizer(list(texts(rng.getrandbits(32), n_texts)))["input_ids"]
    found = [Document([*_bos(rng, end), *tokens, end]) for tokens in encoded]
    vocabulary = [token for token in range(len(tokenizer)) if token != end]
    for _ in range(n_repeats):
        half = rng.randint(8, (CONTEXT - 1) // 2)
        bos = _bos(rng, end)
        # The first half and the start of the second half are random: there is nothing to learn.
        found.append(Document(bos + tasks.repeated(rng, vocabulary, half), first_target=len(bos) + half + 1))
    rng.shuffle(found)
    return found


def _bos(rng: Random, bos: int) -> list[int]:
    return [bos] if rng.random() < BOS_SHARE else []


NO_TARGET = -100


@dataclass(frozen=True)
class Rows:
    """Documents packed into rows: tokens, the next token or `NO_TARGET`, and the index of the document in the row.

    A document attends only to itself. Since it keeps its position in the row, the model learns documents at many
    positions, like prompts after padding.
    """

    tokens: np.ndarray
    targets: np.ndarray
    owners: np.ndarray


def pack(documents: Iterable[Document], end: int) -> Rows:
    """Pack the documents into rows of `CONTEXT` tokens, in order, without splitting any."""
    rows: list[tuple[list[int], list[int], list[int]]] = [([], [], [])]
    for number, document in enumerate(documents):
        if len(rows[-1][0]) + len(document.tokens) > CONTEXT:
            rows.append(([], [], []))
        tokens, targets, owners = rows[-1]
        following = [*document.tokens[1:], NO_TARGET]
        tokens += document.tokens
        targets += [token if place + 1 >= document.first_target else NO_TARGET for place, token in enumerate(following)]
        owners += [number] * len(document.tokens)
    return Rows(
        *(np.array([_padded(row[part], fill) for row in rows]) for part, fill in enumerate((end, NO_TARGET, -1)))
    )


def _padded(row: list[int], fill: int) -> list[int]:
    return row + [fill] * (CONTEXT - len(row))
