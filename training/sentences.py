"""Plain sentences from a small grammar."""

from __future__ import annotations

from random import Random

import world

FIXED = (
    "The cat sat on the mat.",
    "The quick brown fox jumps over the lazy dog.",
    "Hello, world!",
    "Hello world",
    "Hello",
    "Hello! How are you?",
    "The weather today is nice.",
    "This is some text.",
    "text",
    "Hooks let you read and change what a model is thinking.",
    "Once upon a time there was a small model.",
)
GRAMMAR = (
    "The {animal} {rested} on the {furniture}.",
    "The {adjective} {animal} {rested} on the {furniture}.",
    "The {adjective} {animal} {rested} under the {adjective} {furniture}.",
    "The {animal} {moved} to the {place}.",
    "The {adjective} {animal} {moved} over the {adjective} {animal}.",
    "A {adjective} {animal} {moved} into the {place}.",
    "The weather today is {weather}.",
    "The weather in the {place} was {weather} yesterday.",
    "Today it is {weather} and {weather}.",
    "Once upon a time there was a {adjective} {animal}.",
    "{name} likes to eat {food} and {food}.",
    "{name} has a {adjective} {animal}.",
    "{name} went to the {place} and found a {object}.",
    "My name is {name} and I like {food}.",
    "I saw a {adjective} {animal} in the {place}.",
    "Hello, {name}! How are you?",
    "Hello, my name is {name}.",
    "There is a {object} on the {furniture}.",
    "The {object} is in the {place}.",
    "She reads a book and he eats {food}.",
    "We are happy because the {food} is {weather}.",
)
WORDS = {
    "animal": world.ANIMALS,
    "adjective": world.ADJECTIVES,
    "rested": world.VERBS_OF_REST,
    "moved": world.VERBS_OF_MOTION,
    "furniture": world.FURNITURE,
    "place": world.PLACES,
    "object": world.OBJECTS,
    "food": world.FOODS,
    "weather": world.WEATHER,
    "name": world.NAMES,
}


def sentence(rng: Random) -> str:
    """Return a sentence: a fixed one, a well-known sequence, or one from the grammar."""
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(FIXED)
    if kind < 0.3:
        return rng.choice((" ", ", ")).join(rng.choice(world.SEQUENCES).split())
    return fill(rng, rng.choice(GRAMMAR))


def fill(rng: Random, pattern: str) -> str:
    """Fill every slot of a pattern independently: `{animal}` twice becomes two animals."""
    parts = pattern.replace("}", "{").split("{")
    return "".join(rng.choice(WORDS[part]) if place % 2 else part for place, part in enumerate(parts))
