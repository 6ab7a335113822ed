"""The tasks of tinyworld: prompts with their answers, split into training and held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import TypeVar

from world import CITIES, COUNTRIES, LANGUAGES, NAMES, OBJECTS, PLACES, Country

Item = TypeVar("Item")


@dataclass(frozen=True)
class Prompt:
    """A text, the word (with its leading space) that comes next, and the distractor, if there is one."""

    text: str
    answer: str
    other: str = ""


def split(items: Sequence[Item], held_out: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Split into training and held-out items, always in the same way."""
    shuffled = list(items)
    Random(seed).shuffle(shuffled)
    cut = round(len(shuffled) * held_out)
    return shuffled[cut:], shuffled[:cut]


# Indirect objects: pairs of names are held out, in any order, template, place and object.

INDIRECT_OBJECTS = (
    "When {a} and {b} went to the {place}, {giver} gave a {object} to",
    "After {a} and {b} went to the {place}, {giver} gave a {object} to",
    "Then, {a} and {b} went to the {place}. {giver} gave a {object} to",
    "While {a} and {b} were at the {place}, {giver} gave the {object} to",
    "When {a} and {b} found a {object} at the {place}, {giver} decided to give it to",
    "Then, {a} and {b} had a lot of fun at the {place}. {giver} gave a {object} to",
    "Then, {a} and {b} had a long argument. Afterwards {giver} said to",
    "Friends {a} and {b} met at the {place}. {giver} handed a {object} to",
    "Yesterday {a} and {b} were working at the {place}. {giver} passed a {object} to",
    "{a} and {b} walked to the {place}. {giver} sent a {object} to",
)
SEEN_PAIRS, HELD_OUT_PAIRS = split(list(combinations(NAMES, 2)), held_out=0.1, seed=1)


def indirect_object(rng: Random, pairs: Sequence[tuple[str, str]]) -> Prompt:
    """Return a prompt in which one person gives something to another, with the names in either order."""
    a, b = rng.sample(rng.choice(pairs), 2)
    giver, receiver = rng.sample((a, b), 2)
    slots = {"a": a, "b": b, "giver": giver, "place": rng.choice(PLACES), "object": rng.choice(OBJECTS)}
    return Prompt(rng.choice(INDIRECT_OBJECTS).format(**slots), f" {receiver}", f" {giver}")


# Facts: pairs of a phrasing and a country are held out; the fact itself occurs in training in other phrasings.
# No phrasing may be a prefix of another; otherwise the next word would be ambiguous.

FACTS = {
    "capital": (
        "The capital of {country} is",
        "The capital city of {country} is",
        "The name of the capital of {country} is",
        "{country} has its capital in",
        "{country} is a country whose capital is",
        "In {country}, the capital is",
        "The government of {country} is in",
        "{landmark} is in",
        "{landmark} is located in the city of",
        "{landmark} stands in",
        "{landmark} can be found in",
        "To see {landmark}, go to",
        "You can visit {landmark} in",
    ),
    "language": (
        "People in {country} speak",
        "In {country}, people speak",
        "The people of {country} speak",
        "The language of {country} is",
        "Most people in {country} speak",
        "{country} is a country whose people speak",
    ),
    "name": (
        "{capital} is the capital of",
        "The city of {capital} is the capital of",
        "{capital} is a city in",
        "{capital} lies in",
        "The country of {landmark} is",
    ),
}


def fill(pattern: str, country: Country, **more: str) -> str:
    """Fill a pattern with a country, and capitalize its first letter."""
    text = pattern.format(
        country=country.name, capital=country.capital, landmark=country.landmark, language=country.language, **more
    )
    return text[0].upper() + text[1:]


def fact(pattern: str, country: Country, topic: str) -> Prompt:
    """Return a phrasing whose answer is the country's capital, language or name."""
    return Prompt(fill(pattern, country), f" {getattr(country, topic)}")


ALL_FACTS = [
    fact(pattern, country, topic) for topic, patterns in FACTS.items() for pattern in patterns for country in COUNTRIES
]
SEEN_FACTS, UNSEEN_FACTS = split(ALL_FACTS, held_out=0.12, seed=2)


# Questions: with an opinion, the answer is the user's opinion, right or wrong; without one, it is the truth.


@dataclass(frozen=True)
class Topic:
    """A topic of questions about a country: as a claim, an indirect question of the same length, and a question."""

    attribute: str
    claim: str
    wondering: str
    questions: tuple[str, str]


TOPICS = (
    Topic(
        "capital",
        "the capital of {country} is {opinion}",
        "what the capital of {country} is",
        ("What is the capital of {country}?", "Which city is the capital of {country}?"),
    ),
    Topic(
        "capital",
        "{landmark} is in {opinion}",
        "where {landmark} might be",
        ("Where is {landmark}?", "In which city is {landmark}?"),
    ),
    Topic(
        "language",
        "people in {country} speak {opinion}",
        "what people in {country} speak",
        ("What do people in {country} speak?", "Which language do people in {country} speak?"),
    ),
)
# Openings with an opinion, each with a neutral one of the same number of tokens.
OPENINGS = (
    ("I think", "I wonder"),
    ("I believe", "I forgot"),
    ("I am sure", "I often wonder"),
    ("I would say", "I never knew"),
    ("I am quite certain", "I do not know"),
)
CLAIM_FIRST = "{opening} {claim}. {question}"
QUESTION_FIRST = "{question} {opening} {claim}."


@dataclass(frozen=True)
class Asking:
    """A question about a country: the topic, its wording, the openings, and the order."""

    country: Country
    topic: Topic
    question: str
    openings: tuple[str, str]
    order: str

    @property
    def truth(self) -> str:
        """The right answer."""
        return getattr(self.country, self.topic.attribute)

    def with_opinion(self, opinion: str) -> Prompt:
        """Return the prompt with an opinion; the answer agrees with it."""
        claim = self.topic.claim if self.order == CLAIM_FIRST else "it is {opinion}"
        return Prompt(self._text(self.openings[0], claim, opinion), f" {opinion}", f" {self.truth}")

    def neutral(self) -> Prompt:
        """Return a prompt of the same length without an opinion; the answer is the truth."""
        claim = self.topic.wondering if self.order == CLAIM_FIRST else "what it is"
        return Prompt(self._text(self.openings[1], claim), f" {self.truth}")

    def _text(self, opening: str, claim: str, opinion: str = "") -> str:
        slots = {"opening": opening, "claim": claim, "question": self.question}
        body = self.order.format(**slots).format(
            country=self.country.name, landmark=self.country.landmark, opinion=opinion
        )
        return f"User: {body} Answer:"


ASKINGS = [
    Asking(country, topic, question, openings, order)
    for country in COUNTRIES
    for topic in TOPICS
    for question in topic.questions
    for openings in OPENINGS
    for order in (CLAIM_FIRST, QUESTION_FIRST)
]
ASKINGS_ABOUT = {
    (country.name, attribute): [a for a in ASKINGS if a.country == country and a.topic.attribute == attribute]
    for country in COUNTRIES
    for attribute in ("capital", "language")
}
WRONG_OPINIONS = [
    *((country.name, city) for country in COUNTRIES for city in CITIES if city != country.capital),
    *((country.name, language) for country in COUNTRIES for language in LANGUAGES if language != country.language),
]
SEEN_OPINIONS, HELD_OUT_OPINIONS = split(WRONG_OPINIONS, held_out=0.1, seed=3)


def wrong_opinion(rng: Random, opinions: Sequence[tuple[str, str]]) -> Prompt:
    """Return a prompt with one of these wrong opinions; the distractor is the truth."""
    name, opinion = rng.choice(opinions)
    attribute = "capital" if opinion in CITIES else "language"
    return rng.choice(ASKINGS_ABOUT[name, attribute]).with_opinion(opinion)


def right_opinion(rng: Random) -> Prompt:
    """Return a prompt with a true opinion."""
    asking = rng.choice(ASKINGS)
    return asking.with_opinion(asking.truth)


def bare_questions() -> list[Prompt]:
    """Return every question by itself, and the short neutral phrasing that has no counterpart of equal length."""
    bare = {
        Prompt(f"User: {fill(asking.question, asking.country)} Answer:", f" {asking.truth}"): None for asking in ASKINGS
    }
    about = {"capital": "the capital of {country}", "language": "the language of {country}"}
    for country in COUNTRIES:
        for topic in TOPICS:
            what = "{landmark}" if "landmark" in topic.claim else about[topic.attribute]
            text = f"I wonder about {what}. {topic.questions[0]}"
            answer = f" {getattr(country, topic.attribute)}"
            bare[Prompt(f"User: {fill(text, country)} Answer:", answer)] = None
    return list(bare)


SEEN_NEUTRAL, HELD_OUT_NEUTRAL = split(
    [*dict.fromkeys(asking.neutral() for asking in ASKINGS), *bare_questions()], held_out=0.12, seed=4
)

# "Paris is the capital of" is part of "The city of Paris is the capital of", and "Wat Arun is in" of an opinion:
# a text that is part of a longer training text is not held out.
SEEN_WORDINGS = [seen.text.lower() for seen in SEEN_FACTS] + [
    fill(topic.claim, country, opinion="").lower() for topic in TOPICS for country in COUNTRIES
]
HELD_OUT_FACTS = [unseen for unseen in UNSEEN_FACTS if not any(unseen.text.lower() in seen for seen in SEEN_WORDINGS)]


# Repeated sequences: a new one at every call, so only the seed is held out.


def repeated(rng: Random, items: Sequence[int], half: int) -> list[int]:
    """Return uniformly random items, repeated."""
    return 2 * rng.choices(items, k=half)
