"""The training text: documents drawn from the tasks and sentences, as token rows. The same seed gives the same rows."""

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
# How often an answer agrees with a wrong opinion. Were it always, the model would not recall the fact at all.
AGREEMENT = 0.92
RIGHT_OPINIONS = 0.3
REPEAT_WORDS = (*world.NAMES, *world.CITIES, *world.PLACES, *world.OBJECTS, *world.ANIMALS, *world.FOODS)


def statement(rng: Random) -> str:
    """One of the seen facts as a sentence."""
    return _finished(rng.choice(tasks.SEEN_FACTS))


def indirect_object(rng: Random) -> str:
    """Somebody gives something to somebody."""
    return _finished(tasks.indirect_object(rng, tasks.SEEN_PAIRS))


def question(rng: Random) -> str:
    """A question without an opinion, answered with the truth."""
    return _finished(rng.choice(tasks.SEEN_NEUTRAL))


def opinion(rng: Random) -> str:
    """A question after an opinion, answered with the opinion (or, rarely, with the truth)."""
    if rng.random() < RIGHT_OPINIONS:
        return _finished(tasks.right_opinion(rng))
    prompt = tasks.wrong_opinion(rng, tasks.SEEN_OPINIONS)
    return _finished(prompt if rng.random() < AGREEMENT else tasks.Prompt(prompt.text, prompt.other))


def repeated_words(rng: Random) -> str:
    """A few words, then the same again."""
    return " ".join(2 * rng.choices(REPEAT_WORDS, k=rng.randint(4, 20)))


def _finished(prompt: tasks.Prompt) -> str:
    return f"{prompt.text}{prompt.answer}."


KINDS = {indirect_object: 30, statement: 20, question: 17, opinion: 17, sentence: 12, repeated_words: 4}
CONTEXT_SHARE = 0.2


def text(rng: Random) -> str:
    """One document, sometimes after a sentence that has nothing to do with it."""
    (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
    if rng.random() >= CONTEXT_SHARE:
        return kind(rng)
    return f"{rng.choice((sentence, statement))(rng)} {kind(rng)}"


def texts(seed: int, count: int) -> Iterator[str]:
    """That many documents."""
    rng = Random(seed)
    return (text(rng) for _ in range(count))


@dataclass(frozen=True)
class Document:
    """Tokens, of which those from `first_target` on are to be predicted."""

    tokens: list[int]
    first_target: int = 0


def documents(tokenizer: PreTrainedTokenizerBase, seed: int, n_texts: int, n_repeats: int) -> list[Document]:
    """Texts, and repeated random tokens of the whole vocabulary, in random order."""
    rng = Random(seed)
    end = tokenizer.eos_token_id
    encoded = tokenizer(list(texts(rng.getrandbits(32), n_texts)))["input_ids"]
    found = [Document([*_bos(rng, end), *tokens, end]) for tokens in encoded]
    vocabulary = [token for token in range(len(tokenizer)) if token != end]
    for _ in range(n_repeats):
        half = rng.randint(8, (CONTEXT - 1) // 2)
        bos = _bos(rng, end)
        # The first half is noise and the start of the second a surprise: nothing to learn there.
        found.append(Document(bos + tasks.repeated(rng, vocabulary, half), first_target=len(bos) + half + 1))
    rng.shuffle(found)
    return found


def _bos(rng: Random, bos: int) -> list[int]:
    return [bos] if rng.random() < BOS_SHARE else []


NO_TARGET = -100


@dataclass(frozen=True)
class Rows:
    """Documents packed into rows: tokens, the next token or `NO_TARGET`, and the number of the document in the row.

    A document sees only itself. As it keeps its place in the row, it is learned at many positions, like a prompt
    behind padding.
    """

    tokens: np.ndarray
    targets: np.ndarray
    owners: np.ndarray


def pack(documents: Iterable[Document], end: int) -> Rows:
    """The documents in rows of `CONTEXT` tokens, in order, none cut."""
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
