"""PlacedImage: one image of a prompt together with the token position of each region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.vision.families import families_with, rows_before, single_grid
from hookline.vision.grid import Box, ImageGrid
from hookline.vision.images import ImageLike, as_image

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """One image of a prompt: the token position of each region, and the image itself if it was passed.

    placed = images.place_image(model, inputs, image)      # inputs = model.to_inputs(prompt, images=[image])
    placed.grid.box(7)
    """

    grid: ImageGrid
    image: Image | None
    aspect: float
    """Height divided by width."""

    def positions_in(self, box: Box) -> list[int]:
        """The positions that cover a box; an error if there are none."""
        region = self.grid.positions_in(box)
        return region if region else self._nothing(box)

    def _nothing(self, what: Any) -> NoReturn:
        raise HooklineError(
            f"no position covers {what}: the model receives {tuple(round(edge, 3) for edge in self.grid.extent)} of "
            f"this image as {self.grid.shape[0]} × {self.grid.shape[1]} tokens"
        )


def place_image(
    model: HookedModel, inputs: Mapping[str, Any], image: ImageLike | None = None, *, which: int = 0
) -> PlacedImage:
    """Image number `which` of one prompt, with its positions in the prompt.

    `inputs` are those of `model.to_inputs(prompt, images=[…])`; `image` is the same image, to draw on.
    """
    pil = None if image is None else as_image(image)
    grids, sizes = _grids(model, inputs, pil), getattr(inputs, "sizes", None)
    if isinstance(which, bool) or not isinstance(which, int) or which not in range(-len(grids), len(grids)):
        raise HooklineError(f"which={which!r} is out of range: the prompt has {len(grids)} images")
    size = None if sizes is None else [size for row in sizes for size in row][which]
    if pil is not None and size is not None and (pil.height, pil.width) != size:
        raise HooklineError(
            f"the image to draw on has {pil.width} × {pil.height} pixels, but image {which} of these inputs has "
            f"{size[1]} × {size[0]}: pass the same image"
        )
    height, width = (pil.height, pil.width) if pil is not None else size or grids[which].shape
    return PlacedImage(grids[which], pil, height / width)


def place_image_in_tower(
    model: HookedModel, inputs: Mapping[str, Any], image: ImageLike | None = None, *, which: int = 0
) -> PlacedImage:
    """Image number `which` with its positions in the vision tower, where a class token may come first."""
    config: Any = model.module.config
    before = rows_before(config)
    if before is None:
        raise HooklineError(
            f"the image regions of vision-tower patches are not known here for {config.model_type!r} models, only for "
            f"{', '.join(families_with('rows'))}. Cache vision.blocks.*.attn.hook_pattern instead"
        )
    placed = place_image(model, inputs, image, which=which)
    side = getattr(config, "vision_config", config).patch_size
    rows, cols = (pixels // side for pixels in inputs["pixel_values"].shape[-2:])
    layout = single_grid(placed.grid.extent, rows, cols)
    boxes = placed.grid.boxes[placed.grid.main.flatten()] if placed.grid.shape == (rows, cols) else layout.boxes
    grid = ImageGrid(torch.arange(before, before + rows * cols), boxes, layout.main)
    return PlacedImage(grid, placed.image, placed.aspect)


def positions(
    model: HookedModel, inputs: Mapping[str, Any], box: Box | None = None, *, which: int = 0, others: bool = False
) -> list[int]:
    """The positions of a prompt that cover a region of its image; without a box, all positions of the image.

        upper_left = images.positions(model, inputs, (0.0, 0.0, 0.5, 0.5))

    A box is (left, top, right, bottom), as fractions of the image. With `others`, returns the image's other positions.
    """
    placed = place_image(model, inputs, which=which)
    every = placed.grid.positions.tolist()
    inside = every if box is None else placed.positions_in(box)
    image_positions = [position for position in every if position not in inside] if others else inside
    return image_positions if image_positions else placed._nothing("anything else")


def _grids(model: HookedModel, inputs: Mapping[str, Any], image: Image | None) -> list[ImageGrid]:
    if not isinstance(inputs, Mapping):
        raise HooklineError(
            f"inputs must come from model.to_inputs(prompt, images=[…]), not {type(inputs).__name__}: the positions of "
            "an image depend on the image"
        )
    images: Any = None if image is None or getattr(inputs, "sizes", None) is not None else [[image]]
    rows = model.image_grid(inputs, images)
    if "input_ids" in inputs and len(rows) != 1:
        raise HooklineError(f"expected one prompt, got {len(rows)}: make the inputs of each prompt separately")
    grids = [grid for row in rows for grid in row]
    if not grids:
        raise HooklineError("this prompt has no image: use model.to_inputs(prompt, images=[…])")
    return grids
