"""Look into a picture: which of its tokens decide an answer, what is written in them, and who reads them.

Two pictures differ in the colour of a circle. Patching the circle's tokens from one into the other gives the other's
answer, and patching all the rest of the picture does nothing. The logit lens reads the colour at the circle's tokens
after a layer or two. From where the answer is made, some head looks at the circle and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import hookline
from hookline.demo.tinysight import SIDE, Shape, picture
from hookline.experiments import images, metrics, patching
from hookline.experiments.result import Cell, Result

QUESTION = "<image> What colour is the circle?"
SQUARE = Shape("square", "blue", x=36, y=35, size=13)


class Found(NamedTuple):
    """What was seen."""

    shape: Result
    """What patching the circle's tokens does at each layer: 1 is all that the other picture does."""
    ground: Result
    """The same of the rest of the picture."""
    token: str
    """What the lens reads in the middle of the circle at the end."""
    head: Cell
    """The head that looks most at the circle, and how much."""


def circle(colour: str) -> Shape:
    """The circle of both pictures."""
    return Shape("circle", colour, x=14, y=14, size=15)


def main(folder: Path = Path("out")) -> Found:
    """Print and return what is found, and draw it into three files."""
    model = hookline.load("tinysight")
    image = picture([circle("red"), SQUARE])
    red = model.to_inputs(QUESTION, images=[image])
    green = model.to_inputs(QUESTION, images=[picture([circle("green"), SQUARE])])
    lead = metrics.logit_diff(" red", " green")
    left, top, right, bottom = (side / SIDE for side in circle("red").box)
    box = (left, top, right, bottom)

    shape = images.patch(model, red, green, lead, box=box).normalized
    ground = images.patch(model, red, green, lead, box=box, others=True).normalized
    for layer, (here, rest) in enumerate(zip(shape.values.tolist(), ground.values.tolist(), strict=True)):
        print(f"before layer {layer}: the circle's tokens {here:5.2f}, the rest of the picture {rest:5.2f}")

    lens = images.lens(model, red, image)
    token, prob = lens.at(3, 14 / SIDE, 14 / SIDE)[0]
    print(f"read in the middle of the circle after the last layer: {token!r}, {prob:.2f}")

    attention = images.attention(model, red, image)
    head = attention.top(1, box=box)[0]
    print(f"head {head.labels['head']} of layer {head.labels['layer']} looks at the circle with {head.value:.2f} of it")

    folder.mkdir(parents=True, exist_ok=True)
    swept = patching.sweep(model, red, green, lead).normalized
    images.overlay(swept, images.sight(model, red, image)).savefig(folder / "sweep.png", dpi=150)
    lens.plot().savefig(folder / "lens.png", dpi=150)
    attention.plot(int(head.labels["layer"])).savefig(folder / "attention.png", dpi=150)
    return Found(shape, ground, token, head)


if __name__ == "__main__":
    main()
