"""Image tokens: which of them determine an answer, what the logit lens reads there, and which heads attend to them.

Two images differ in the color of a circle. Patching the circle's tokens from one into the other changes the answer,
and patching the rest of the image has no effect. The logit lens reads the color at the circle's tokens after a layer
or two. From the last position, one head attends almost only to the circle.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import hookline
from hookline.demo.tinysight import SIDE, Shape, draw
from hookline.experiments import images, metrics, patching
from hookline.experiments.result import Cell, Result

QUESTION = "<image> What color is the circle?"
SQUARE = Shape("square", "blue", x=36, y=35, size=13)


class Found(NamedTuple):
    """The results."""

    shape: Result
    """The effect of patching the circle's tokens at each layer; 1 is the full effect of the other image."""
    ground: Result
    """The same for the rest of the image."""
    token: str
    """The token that the logit lens reads at the center of the circle after the last layer."""
    head: Cell
    """The head with the most attention on the circle."""


def circle(color: str) -> Shape:
    """The circle in both images."""
    return Shape("circle", color, x=14, y=14, size=15)


def main(folder: Path = Path("out")) -> Found:
    """Print and return the results, and save three figures."""
    model = hookline.load("tinysight")
    image = draw([circle("red"), SQUARE])
    red = model.to_inputs(QUESTION, images=[image])
    green = model.to_inputs(QUESTION, images=[draw([circle("green"), SQUARE])])
    metric = metrics.logit_diff(" red", " green")
    left, top, right, bottom = (side / SIDE for side in circle("red").box)
    box = (left, top, right, bottom)

    shape = images.patch(model, red, green, metric, box=box).normalized
    ground = images.patch(model, red, green, metric, box=box, others=True).normalized
    for layer, (here, rest) in enumerate(zip(shape.values.tolist(), ground.values.tolist(), strict=True)):
        print(f"before layer {layer}: the circle's tokens {here:5.2f}, the rest of the image {rest:5.2f}")

    lens = images.lens(model, red, image)
    token, prob = lens.at(3, 14 / SIDE, 14 / SIDE)[0]
    print(f"logit lens at the center of the circle after the last layer: {token!r}, {prob:.2f}")

    attention = images.attention(model, red, image)
    head = attention.top(1, box=box)[0]
    where = f"head {head.labels['head']} of layer {head.labels['layer']}"
    print(f"{where} has {head.value:.2f} of its attention on the circle")

    folder.mkdir(parents=True, exist_ok=True)
    swept = patching.sweep(model, red, green, metric).normalized
    images.overlay(swept, images.place_image(model, red, image)).savefig(folder / "sweep.png", dpi=150)
    lens.plot().savefig(folder / "lens.png", dpi=150)
    attention.plot(int(head.labels["layer"])).savefig(folder / "attention.png", dpi=150)
    return Found(shape, ground, token, head)


if __name__ == "__main__":
    main()
