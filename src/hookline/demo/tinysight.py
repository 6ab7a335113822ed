"""Images for tinysight, the vision-language model that ships with the package.

An image has 48×48 pixels: one to three shapes on a gray, slightly noisy background. The model splits it into 6×6
patches of 8×8 pixels, row by row, and each patch becomes one image token.

    shapes, image = random_image(seed=3)
    image = draw([Shape("circle", "red", x=14, y=20, size=15)])
    patches_of(shapes[0])               # the patches (image tokens) that contain the shape
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 48
"""Width and height of an image in pixels."""
PATCH = 8
"""Width and height of a patch in pixels."""
GRID = SIDE // PATCH
"""Patches per row and per column."""
_INSIDE: dict[str, Callable[[NDArray, NDArray, float], NDArray[np.bool_]]] = {
    "circle": lambda x, y, radius: x**2 + y**2 <= radius**2,
    "square": lambda x, y, radius: np.maximum(abs(x), abs(y)) <= radius,
    "triangle": lambda x, y, radius: 2 * abs(x) <= y + radius,
    "cross": lambda x, y, radius: np.minimum(abs(x), abs(y)) <= radius / 3,
    "diamond": lambda x, y, radius: abs(x) + abs(y) <= radius,
}
"""Whether points are inside a shape of that radius around the origin."""
KINDS = tuple(_INSIDE)
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 220, 50),
    "purple": (150, 50, 190),
    "orange": (240, 140, 30),
}
SIZES = range(11, 18)
"""Sizes of random shapes; no shape covers more than 3×3 patches."""
MOST_SHAPES = 3


@dataclass(frozen=True)
class Shape:
    """A colored shape centered at the pixel (`x`, `y`), as high as it is wide; y points down."""

    kind: str
    colour: str
    x: int
    y: int
    size: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HooklineError(f"unknown shape {self.kind!r}: use one of {', '.join(KINDS)}")
        if self.colour not in COLOURS:
            raise HooklineError(f"unknown color {self.colour!r}: use one of {', '.join(COLOURS)}")
        if self.size < 1 or min(self.box) < 0 or max(self.box) > SIDE:
            raise HooklineError(f"{self} does not fit into an image of {SIDE}×{SIDE} pixels: move or shrink it")

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom pixel; right and bottom are exclusive."""
        left, top = self.x - self.size // 2, self.y - self.size // 2
        return left, top, left + self.size, top + self.size

    def mask(self) -> NDArray[np.bool_]:
        """Mask of its pixels: [y, x]."""
        left, top, right, bottom = self.box
        middle = (self.size - 1) / 2
        mask = np.zeros((SIDE, SIDE), dtype=bool)
        down, across = np.ogrid[: self.size, : self.size]
        mask[top:bottom, left:right] = _INSIDE[self.kind](across - middle, down - middle, self.size / 2)
        return mask


def pixels(shapes: Sequence[Shape], seed: int = 0) -> NDArray[np.uint8]:
    """The shapes as an array: [y, x, RGB]. Later shapes cover earlier ones.

    The seed determines the gray of the background, the noise of every pixel, and a slight shift of the first, second, …
    shape's color, independent of the shapes: two images with the same seed differ only where their shapes differ.
    """
    rng = np.random.default_rng(seed)
    drawn = np.full((SIDE, SIDE, 3), rng.uniform(60, 190))
    noise = rng.normal(0, 8, drawn.shape)
    for shape in shapes:
        drawn[shape.mask()] = np.array(COLOURS[shape.colour]) + rng.uniform(-12, 12, 3)
    return (drawn + noise).clip(0, 255).astype(np.uint8)


def draw(shapes: Sequence[Shape], seed: int = 0) -> Image:
    """The shapes as a PIL image."""
    from PIL import Image  # optional dependency

    return Image.fromarray(pixels(shapes, seed))


def first_images() -> tuple[Image, Image]:
    """A red circle beside a blue square, and the same with a green circle: the explorer begins with them."""
    square = Shape("square", "blue", x=35, y=35, size=15)
    red, green = (Shape("circle", colour, x=15, y=15, size=17) for colour in ("red", "green"))
    return draw([red, square]), draw([green, square])


def random_image(seed: int, count: int | None = None) -> tuple[tuple[Shape, ...], Image]:
    """Random shapes and their image, determined by the seed. For `count` see `random_shapes`."""
    shapes = random_shapes(Random(seed), count)
    return shapes, draw(shapes, seed)


def random_shapes(rng: Random, count: int | None = None) -> tuple[Shape, ...]:
    """`count` shapes (by default one to three) of different kinds and colors, no two in the same patch."""
    if count is not None and not 1 <= count <= MOST_SHAPES:
        raise HooklineError(f"a random image has 1 to {MOST_SHAPES} shapes, not {count}")
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
    """The patches of its bounding box."""
    left, top, right, bottom = shape.box
    rows, columns = (range(low // PATCH, (high - 1) // PATCH + 1) for low, high in ((top, bottom), (left, right)))
    return [row * GRID + column for row in rows for column in columns]


def patches_of(shape: Shape) -> list[int]:
    """The patches that contain at least one of its pixels, in order: `row * GRID + column`, from the top left."""
    patches = shape.mask().reshape(GRID, PATCH, GRID, PATCH).any(axis=(1, 3))
    return [int(patch) for patch in patches.flatten().nonzero()[0]]
