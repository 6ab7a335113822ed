"""Questions and answers about images, and which shapes never occur together in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from random import Random

from hookline.demo.tinysight import COLOURS, KINDS, SIDE, Shape

# Pairs of shapes, by kind and color. Every shape occurs in training, but some pairs do not.
Look = tuple[str, str]
ALL_PAIRS = [
    frozenset((one, other))
    for one, other in combinations(product(KINDS, COLOURS), 2)
    if one[0] != other[0] and one[1] != other[1]
]
HELD_OUT: frozenset[frozenset[Look]] = frozenset(Random(8).sample(ALL_PAIRS, k=24))
NUMBERS = ("one", "two", "three")
PLACES = ("left", "right", "top", "bottom")
# A question about a place requires that the shape is clearly farther from the center in one direction.
CLEARLY = 5


@dataclass(frozen=True)
class Question:
    """A question about an image, and its answer, which is one word."""

    text: str
    answer: str


def colour(shape: Shape) -> list[Question]:
    """Return questions about the color of a shape."""
    texts = (
        f"What colour is the {shape.kind}?",
        f"What color is the {shape.kind}?",
        f"The colour of the {shape.kind} is",
    )
    return [Question(text, shape.colour) for text in texts]


def kind(shape: Shape) -> list[Question]:
    """Return questions about the shape with a color."""
    texts = (f"What shape is {shape.colour}?", f"The {shape.colour} shape is a")
    return [Question(text, shape.kind) for text in texts]


def place(shape: Shape) -> list[Question]:
    """Return questions about the place of a shape; none if it is ambiguous."""
    across, down = shape.x - SIDE // 2, shape.y - SIDE // 2
    if abs(abs(across) - abs(down)) < CLEARLY:
        return []
    answer = PLACES[across > 0] if abs(across) > abs(down) else PLACES[2 + (down > 0)]
    return [Question(text, answer) for text in (f"Where is the {shape.kind}?", f"The {shape.kind} is at the")]


def count(shapes: Sequence[Shape]) -> list[Question]:
    """Return questions about the number of shapes."""
    texts = ("How many shapes are there?", "The number of shapes is")
    return [Question(text, NUMBERS[len(shapes) - 1]) for text in texts]


OF_ONE_SHAPE: dict[str, Callable[[Shape], list[Question]]] = {"colour": colour, "shape": kind, "place": place}
TASKS = (*OF_ONE_SHAPE, "count")


def questions(task: str, shapes: Sequence[Shape], asked: Shape) -> list[Question]:
    """Return all questions of a task about a shape, or about all shapes."""
    return count(shapes) if task == "count" else OF_ONE_SHAPE[task](asked)


def question(rng: Random, shapes: Sequence[Shape]) -> Question:
    """Return a random question about this image."""
    (task,) = rng.choices(TASKS, weights=(4, 3, 2, 1))
    found = questions(task, shapes, rng.choice(shapes))
    return rng.choice(found) if found else question(rng, shapes)


def prompt(text: str) -> str:
    """Return the prompt for a question."""
    return f"<image> {text}"


def chat(text: str) -> str:
    """Return the prompt in the format of the chat template."""
    return f"USER: <image>\n{text} ASSISTANT:"


def is_seen(shapes: Sequence[Shape]) -> bool:
    """Return whether no two of these shapes are held out together."""
    looks = [(shape.kind, shape.colour) for shape in shapes]
    return HELD_OUT.isdisjoint(frozenset(pair) for pair in combinations(looks, 2))


def words() -> Iterator[str]:
    """Yield every prompt and answer, for the vocabulary of the tokenizer."""
    for each_kind in KINDS:
        for each_colour in COLOURS:
            shape = Shape(each_kind, each_colour, 10, 24, 11)
            for task in TASKS:
                for asked in questions(task, [shape], shape):
                    yield from (prompt(asked.text), chat(asked.text), f" {asked.answer}")
    yield " " + " ".join((*NUMBERS, *PLACES))
