"""Sight: one picture of a prompt, with the position that looks at each part of it, to be drawn on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.vision.families import families_with, rows_before
from hookline.vision.grid import Box, ImageGrid
from hookline.vision.images import Picture, picture_of
from hookline.vision.layouts import one_look

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Sight:
    """One picture of a prompt: which position looks at which part, and the picture itself, if it is there to draw on.

    sight = seen.sight(model, inputs, image)      # of inputs = model.to_inputs(prompt, images=[image])
    sight.grid.box(7)
    """

    grid: ImageGrid
    picture: Image | None
    aspect: float
    """The picture's height by its width."""


def sight(model: HookedModel, inputs: Mapping[str, Any], picture: Picture | None = None, *, which: int = 0) -> Sight:
    """The picture number `which` of one prompt, on the positions of the prompt.

    `inputs` is what `model.to_inputs(prompt, images=[…])` gives; `picture` is that picture again, to be drawn on.
    """
    image = None if picture is None else picture_of(picture)
    grids = _grids(model, inputs, image)
    _check_which(which, len(grids))
    size = _size(inputs, which)
    if image is not None and size is not None and (image.height, image.width) != size:
        raise HooklineError(
            f"the picture to draw on is {image.width} × {image.height} pixels, but picture {which} of these inputs "
            f"was {size[1]} × {size[0]}: give the same one"
        )
    rows, cols = grids[which].shape
    height, width = (image.height, image.width) if image is not None else size if size is not None else (rows, cols)
    return Sight(grids[which], image, height / width)


def tower_sight(
    model: HookedModel, inputs: Mapping[str, Any], picture: Picture | None = None, *, which: int = 0
) -> Sight:
    """The same on the patches of the vision tower; a position for the picture as a whole may come before them."""
    config: Any = model.module.config
    before = rows_before(config)
    if before is None:
        raise HooklineError(
            f"how the patches of a {config.model_type!r} model's tower lie in the picture is not known here: it is of "
            f"{', '.join(families_with('rows'))}. model.run_with_cache has vision.blocks.*.attn.hook_pattern"
        )
    found = sight(model, inputs, picture, which=which)
    side = getattr(config, "vision_config", config).patch_size
    rows, cols = (pixels // side for pixels in inputs["pixel_values"].shape[-2:])
    look = one_look(found.grid.extent, rows, cols)
    boxes = found.grid.boxes[found.grid.main.flatten()] if found.grid.shape == (rows, cols) else look.boxes
    return Sight(ImageGrid(torch.arange(before, before + rows * cols), boxes, look.main), found.picture, found.aspect)


def positions(
    model: HookedModel, inputs: Mapping[str, Any], box: Box | None = None, *, which: int = 0, others: bool = False
) -> list[int]:
    """The positions of a prompt that look at a part of its picture; without a box, at any of it.

        there = seen.positions(model, inputs, (0.0, 0.0, 0.5, 0.5))       # the upper left quarter

    A box is left, top, right, bottom, as fractions of the picture. With `others` it is the picture's other positions.
    """
    grid = sight(model, inputs, which=which).grid
    every = grid.positions.tolist()
    inside = every if box is None else grid.positions_in(box)
    found = [each for each in every if each not in inside] if others else inside
    if not found:
        raise HooklineError(
            f"no position looks at {'anything else' if others else box}: of this picture the model sees "
            f"{tuple(round(each, 3) for each in grid.extent)}, as {grid.shape[0]} × {grid.shape[1]} parts"
        )
    return found


def _grids(model: HookedModel, inputs: Mapping[str, Any], image: Image | None) -> list[ImageGrid]:
    if not isinstance(inputs, Mapping):
        raise HooklineError(
            f"inputs are what model.to_inputs(prompt, images=[…]) gives, not {type(inputs).__name__}: a picture's "
            "positions depend on the picture"
        )
    if image is None or getattr(inputs, "sizes", None) is not None:
        rows = model.image_grid(inputs)
    else:
        rows = model.image_grid(inputs, images=[[image]])
    if "input_ids" in inputs and len(rows) != 1:
        raise HooklineError(f"this is about one prompt, not about {len(rows)}: make the inputs of each by itself")
    grids = [grid for row in rows for grid in row]
    if not grids:
        raise HooklineError("this prompt has no picture: make inputs with model.to_inputs(prompt, images=[…])")
    return grids


def _size(inputs: Mapping[str, Any], which: int) -> tuple[int, int] | None:
    sizes = getattr(inputs, "sizes", None)
    return None if sizes is None else [size for row in sizes for size in row][which]


def _check_which(which: int, n: int) -> None:
    if isinstance(which, bool) or not isinstance(which, int) or which not in range(-n, n):
        raise HooklineError(f"picture {which!r} is asked for (which=…), but the prompt has {n}")
