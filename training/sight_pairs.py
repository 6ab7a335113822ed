"""Pairs of images with the same layout, and mixtures of their image tokens.

A vision transformer may write information about a shape to any token, and the decoder may read it there. To keep it
where the shape is, training swaps image tokens between the two images of a pair: if those of a whole shape are
swapped, the answer is that of the other image; if those of the background are swapped, the answer stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import sight_tasks

from hookline.demo.tinysight import COLOURS, GRID, KINDS, MOST_SHAPES, Shape, patches_of, pixels, random_shapes

UNMIXED = 0.4


@dataclass(frozen=True)
class Pair:
    """Two images with the same layout: all colors differ, and sometimes one kind."""

    first: tuple[Shape, ...]
    second: tuple[Shape, ...]
    seed: int

    def pixels(self) -> np.ndarray:
        """Return both images: [image, channel, y, x]."""
        return np.stack([pixels(shapes, self.seed) for shapes in (self.first, self.second)]).transpose(0, 3, 1, 2)

    def labels(self) -> np.ndarray:
        """Return labels of the patches, [image, kind or color, patch], counted from 1; 0 is the background."""
        found = np.zeros((2, 2, GRID**2), dtype=np.int64)
        for of_one, shapes in zip(found, (self.first, self.second), strict=True):
            for shape in shapes:
                of_one[0, patches_of(shape)] = 1 + KINDS.index(shape.kind)
                of_one[1, patches_of(shape)] = 1 + list(COLOURS).index(shape.colour)
        return found

    def patches(self, at: int) -> set[int]:
        """Return the patches of a shape in either image."""
        return {*patches_of(self.first[at]), *patches_of(self.second[at])}


def pair(rng: Random) -> Pair:
    """Return a pair whose mixtures never contain two shapes that are held out together."""
    count = rng.randint(1, MOST_SHAPES)
    while True:
        first = random_shapes(rng, count)
        second = _other(rng, first)
        if sight_tasks.is_seen(first + second):
            return Pair(first, second, seed=rng.getrandbits(32))


def _other(rng: Random, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Return the same layout in colors that the image does not have, so that no mixture repeats a color."""
    unused = [colour for colour in COLOURS if colour not in {shape.colour for shape in shapes}]
    others = [replace(shape, colour=new) for shape, new in zip(shapes, rng.sample(unused, len(shapes)), strict=True)]
    if rng.random() < 0.5:
        at = rng.randrange(len(others))
        others[at] = replace(others[at], kind=rng.choice([k for k in KINDS if k not in {s.kind for s in shapes}]))
    return tuple(others)


def mix(rng: Random, pair: Pair) -> tuple[tuple[Shape, ...], list[bool]]:
    """Return a mixture: its shapes, and for each image token whether it is from the second image."""
    is_second = [False] * GRID**2
    if rng.random() < UNMIXED:
        return pair.first, is_second
    share = rng.choice((0.0, 1.0, rng.random()))
    is_second = [rng.random() < share for _ in is_second]
    shapes = []
    for at, both in enumerate(zip(pair.first, pair.second, strict=True)):
        exchanged = rng.random() < 0.5
        shapes.append(both[exchanged])
        for patch in pair.patches(at):
            is_second[patch] = exchanged
    return tuple(shapes), is_second
