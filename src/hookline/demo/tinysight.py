"""The images that tinysight, the vision-language model in the package, was taught to see.

An image has 48×48 pixels: one to three shapes on a grey, slightly noisy ground. The model cuts it into 6×6 patches of
8×8 pixels, row by row, and each patch becomes one image token.

    shapes, image = random_image(seed=3)
    image = draw([Shape("circle", "red", x=14, y=20, size=15)])
    patches_of(shapes[0])               # the patches, and so the image tokens, in which that shape is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 48
"""Pixels of an image from left to right, and from top to bottom."""
PATCH = 8
"""Pixels of a patch, likewise."""
GRID = SIDE // PATCH
"""Patches of an image, likewise."""
KINDS = ("circle", "square", "triangle", "cross", "diamond")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 220, 50),
    "purple": (150, 50, 190),
    "orange": (240, 140, 30),
}
SIZES = range(11, 18)
"""How wide a shape of a random image is; no shape reaches over more than 3×3 patches."""
MOST_SHAPES = 3


@dataclass(frozen=True)
class Shape:
    """A coloured shape around the pixel (`x`, `y`), as high as it is wide; y grows downwards."""

    kind: str
    colour: str
    x: int
    y: int
    size: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HooklineError(f"There is no kind {self.kind!r} of shape. Take one of: {', '.join(KINDS)}.")
        if self.colour not in COLOURS:
            raise HooklineError(f"There is no colour {self.colour!r}. Take one of: {', '.join(COLOURS)}.")
        if self.size < 1 or min(self.box) < 0 or max(self.box) > SIDE:
            raise HooklineError(f"{self} does not fit into an image of {SIDE}×{SIDE} pixels. Move it, or shrink it.")

    @property
    def box(self) -> tuple[int, int, int, int]:
        """The pixels at its left, top, right and bottom end; the last two are the first ones outside."""
        left, top = self.x - self.size // 2, self.y - self.size // 2
        return left, top, left + self.size, top + self.size

    def mask(self) -> NDArray[np.bool_]:
        """Which pixels are in it: [y, x]."""
        left, top, right, bottom = self.box
        middle = (self.size - 1) / 2
        found = np.zeros((SIDE, SIDE), dtype=bool)
        down, across = np.ogrid[: self.size, : self.size]
        found[top:bottom, left:right] = _inside(self.kind, across - middle, down - middle, self.size / 2)
        return found


def _inside(kind: str, x: NDArray, y: NDArray, radius: float) -> NDArray[np.bool_]:
    """Where a shape of that radius around the origin is."""
    if kind == "circle":
        return x**2 + y**2 <= radius**2
    if kind == "square":
        return np.maximum(abs(x), abs(y)) <= radius
    if kind == "triangle":
        return 2 * abs(x) <= y + radius
    if kind == "cross":
        return np.minimum(abs(x), abs(y)) <= radius / 3
    return abs(x) + abs(y) <= radius


def pixels(shapes: Sequence[Shape], seed: int = 0) -> NDArray[np.uint8]:
    """The shapes as an image: [y, x, red-green-blue]. A later shape lies over an earlier one.

    The seed decides the ground's grey, the noise on every pixel, and a slight shift of the first, second … shape's
    colour, whatever the shapes are: two images of one seed differ where their shapes do and nowhere else.
    """
    rng = np.random.default_rng(seed)
    grey = rng.uniform(60, 190)
    noise = rng.normal(0, 8, (SIDE, SIDE, 3))
    drawn = np.full((SIDE, SIDE, 3), grey)
    for shape in shapes:
        drawn[shape.mask()] = np.array(COLOURS[shape.colour]) + rng.uniform(-12, 12, 3)
    return (drawn + noise).clip(0, 255).astype(np.uint8)


def draw(shapes: Sequence[Shape], seed: int = 0) -> Image:
    """The same as an image of Pillow, which is what processors like best."""
    from PIL import Image  # an extra, and only needed here

    return Image.fromarray(pixels(shapes, seed))


def random_image(seed: int, count: int | None = None) -> tuple[tuple[Shape, ...], Image]:
    """Random shapes, and the image of them; the same for the same seed. For `count` see `random_shapes`."""
    shapes = random_shapes(Random(seed), count)
    return shapes, draw(shapes, seed)


def random_shapes(rng: Random, count: int | None = None) -> tuple[Shape, ...]:
    """So many shapes (one to three, if you do not say) of different kinds and colours, no two in the same patch."""
    if count is not None and not 1 <= count <= MOST_SHAPES:
        raise HooklineError(f"A random image has 1 to {MOST_SHAPES} shapes, not {count}.")
    count = count or rng.randint(1, MOST_SHAPES)
    looks = list(zip(rng.sample(KINDS, count), rng.sample(list(COLOURS), count), strict=True))
    while True:
        shapes = tuple(_anywhere(rng, kind, colour) for kind, colour in looks)
        taken = [patch for shape in shapes for patch in _patches_around(shape)]
        if len(set(taken)) == len(taken):
            return shapes


def _anywhere(rng: Random, kind: str, colour: str) -> Shape:
    size = rng.choice(SIZES)
    near, far = size // 2, SIDE - size + size // 2
    return Shape(kind, colour, rng.randint(near, far), rng.randint(near, far), size)


def _patches_around(shape: Shape) -> list[int]:
    """The patches of the square around it, which is more than a shape with a missing corner covers."""
    left, top, right, bottom = shape.box
    rows, columns = (range(low // PATCH, (high - 1) // PATCH + 1) for low, high in ((top, bottom), (left, right)))
    return [row * GRID + column for row in rows for column in columns]


def patches_of(shape: Shape) -> list[int]:
    """The patches with at least one of its pixels, in order: patch `row * GRID + column`, from the top left."""
    patches = shape.mask().reshape(GRID, PATCH, GRID, PATCH).any(axis=(1, 3))
    return [int(patch) for patch in patches.flatten().nonzero()[0]]
