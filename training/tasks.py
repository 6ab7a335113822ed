"""The tasks of the micro-world: prompts with the answer that follows, split into seen and held-out ones."""

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
    """A text, the one word (with its leading space) that comes next, and where there is one, the tempting other."""

    text: str
    answer: str
    other: str = ""


def split(items: Sequence[Item], held_out: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Seen items and held-out ones, the same at every call."""
    shuffled = list(items)
    Random(seed).shuffle(shuffled)
    cut = round(len(shuffled) * held_out)
    return shuffled[cut:], shuffled[:cut]


# Indirect objects: pairs of names are held out, whatever their order, template, place and object.

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
    """Two people, of whom one gives something to the other: either order of the names, either giver."""
    a, b = rng.sample(rng.choice(pairs), 2)
    giver, receiver = rng.sample((a, b), 2)
    slots = {"a": a, "b": b, "giver": giver, "place": rng.choice(PLACES), "object": rng.choice(OBJECTS)}
    return Prompt(rng.choice(INDIRECT_OBJECTS).format(**slots), f" {receiver}", f" {giver}")


# Facts: pairs of a phrasing and a country are held out; the fact itself is seen in other phrasings.
# No phrasing may begin with another, or two words could come next.

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
    """The pattern about a country, its first letter a capital."""
    text = pattern.format(
        country=country.name, capital=country.capital, landmark=country.landmark, language=country.language, **more
    )
    return text[0].upper() + text[1:]


def fact(pattern: str, country: Country, topic: str) -> Prompt:
    """A phrasing completed by the country's capital, language or name."""
    return Prompt(fill(pattern, country), f" {getattr(country, topic)}")


ALL_FACTS = [
    fact(pattern, country, topic) for topic, patterns in FACTS.items() for pattern in patterns for country in COUNTRIES
]
SEEN_FACTS, UNSEEN_FACTS = split(ALL_FACTS, held_out=0.12, seed=2)


# Questions: with an opinion the answer is the user's, right or wrong; without one it is the truth.


@dataclass(frozen=True)
class Topic:
    """What can be asked about a country: as a claim, as an indirect question of the same length, and as a question."""

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
# Each opening of an opinion beside a neutral one of as many tokens.
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
    """A way to ask about a country: the topic, its wording, the openings, and the order."""

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
        """The user holds an opinion, and the answer agrees with it."""
        claim = self.topic.claim if self.order == CLAIM_FIRST else "it is {opinion}"
        return Prompt(self._text(self.openings[0], claim, opinion), f" {opinion}", f" {self.truth}")

    def neutral(self) -> Prompt:
        """As many tokens, but no opinion: the answer is the truth."""
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
    """A prompt with one of these wrong opinions; the tempting other answer is the truth."""
    name, opinion = rng.choice(opinions)
    attribute = "capital" if opinion in CITIES else "language"
    return rng.choice(ASKINGS_ABOUT[name, attribute]).with_opinion(opinion)


def right_opinion(rng: Random) -> Prompt:
    """A prompt with an opinion that is true."""
    asking = rng.choice(ASKINGS)
    return asking.with_opinion(asking.truth)


def bare_questions() -> list[Prompt]:
    """Every question with nothing before it, and the short neutral phrasing that has no partner of equal length."""
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

# "Paris is the capital of" lies within "The city of Paris is the capital of", and "Wat Arun is in" within an opinion:
# whatever is part of something longer that was seen counts as seen.
SEEN_WORDINGS = [seen.text.lower() for seen in SEEN_FACTS] + [
    fill(topic.claim, country, opinion="").lower() for topic in TOPICS for country in COUNTRIES
]
HELD_OUT_FACTS = [unseen for unseen in UNSEEN_FACTS if not any(unseen.text.lower() in seen for seen in SEEN_WORDINGS)]


# Repeated sequences: a fresh one at every call, so nothing needs holding out but the seed.


def repeated(rng: Random, items: Sequence[int], half: int) -> list[int]:
    """Uniformly random items, then the same again."""
    return 2 * rng.choices(items, k=half)
