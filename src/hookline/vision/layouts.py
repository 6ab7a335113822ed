"""Layouts: which region of an image each of its tokens covers.

A model receives one or more rectangles of an image (the whole image, a crop, tiles), each as a grid of tokens.
`families.py` says which ones, and in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.vision.grid import Box

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)
Size = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """The tokens of one image, in order: the box of each token, and the token of each cell of the main grid."""

    boxes: Float[Tensor, "token 4"]
    main: Int[Tensor, "rows cols"]


@dataclass(frozen=True)
class LayoutInputs:
    """What the layout of image tokens depends on: config, processor, model inputs and image sizes."""

    config: Any
    processor: Any
    inputs: dict[str, Any]
    sizes: list[list[Size]] | None
    n_tokens: int
    """Image tokens in the prompt, for all images together."""

    @property
    def image_processor(self) -> Any:
        """The image processor, which is the processor itself for a model without text."""
        if self.processor is None:
            raise HooklineError(
                "image regions depend on the processor: wrap the model as hookline.hook(model, processor)"
            )
        return getattr(self.processor, "image_processor", self.processor)

    def option(self, name: str) -> Any:
        """The value of an option of the image processor; the processor's own default takes precedence."""
        of_kind = getattr(self.processor, "valid_processor_kwargs", None)
        defaults = {} if of_kind is None else of_kind._defaults.get("images_kwargs", {})
        return defaults[name] if name in defaults else getattr(self.image_processor, name)

    @property
    def flat_sizes(self) -> list[Size]:
        """Height and width of every image, in order."""
        if self.sizes is None:
            raise HooklineError(
                "image regions depend on the image sizes: pass the inputs that model.to_inputs(prompt, images=…) "
                "returned, or pass images=… along with other inputs"
            )
        return [size for row in self.sizes for size in row]


def cells(region: Box, rows: int, cols: int) -> Float[Tensor, "token 4"]:
    """The boxes of a region split into a grid, row by row; NaN for a cell that lies outside the image."""
    x0, y0, x1, y1 = region
    xs = torch.linspace(x0, x1, cols + 1, dtype=torch.float64)
    ys = torch.linspace(y0, y1, rows + 1, dtype=torch.float64)
    left, top = xs[:-1].expand(rows, cols), ys[:-1, None].expand(rows, cols)
    right, bottom = xs[1:].expand(rows, cols), ys[1:, None].expand(rows, cols)
    boxes = torch.stack([left, top, right, bottom], -1).flatten(0, 1)
    clipped = boxes.clamp(0, 1)
    is_outside = (clipped[:, 2] <= clipped[:, 0]) | (clipped[:, 3] <= clipped[:, 1])
    return clipped.masked_fill(is_outside[:, None], torch.nan).float()


def nowhere(n: int = 1) -> Float[Tensor, "token 4"]:
    """Boxes of `n` tokens that cover no region: NaN."""
    return torch.full((n, 4), torch.nan)


def single_grid(region: Box, rows: int, cols: int, before: int = 0) -> Layout:
    """One grid of tokens, after `before` tokens that cover no region."""
    boxes = torch.cat([nowhere(before), cells(region, rows, cols)])
    return Layout(boxes, torch.arange(rows * cols).view(rows, cols) + before)


def tiles(rows: int, cols: int, side: int) -> Layout:
    """Tiles of the image, row by row, each a square grid of tokens; then the whole image if there are several."""
    if rows * cols <= 1:
        return single_grid(WHOLE, side, side)
    regions = [(c / cols, r / rows, (c + 1) / cols, (r + 1) / rows) for r in range(rows) for c in range(cols)]
    boxes = torch.cat([cells(region, side, side) for region in [*regions, WHOLE]])
    main = torch.arange(rows * cols * side * side).view(rows, cols, side, side)
    return Layout(boxes, main.transpose(1, 2).reshape(rows * side, cols * side))


def visible_region(processor: Any, size: Size) -> Box:
    """The region of an image that remains after the image processor has padded, resized and center-cropped it."""
    height, width = size
    x, y, canvas_h, canvas_w = 0.0, 0.0, float(height), float(width)  # position of the image, size of the canvas
    if getattr(processor, "do_pad", None) and hasattr(processor, "pad_to_square"):
        side = max(height, width)
        x, y, canvas_h, canvas_w = (side - width) // 2, (side - height) // 2, side, side
    new_h, new_w = _resized(processor, (int(canvas_h), int(canvas_w))) if processor.do_resize else (canvas_h, canvas_w)
    top, left, crop_h, crop_w = 0, 0, new_h, new_w
    if processor.do_center_crop:
        wanted = dict(processor.crop_size)
        crop_h, crop_w = wanted["height"], wanted["width"]
        top, left = (new_h - crop_h) // 2, (new_w - crop_w) // 2
    per_x, per_y = canvas_w / new_w, canvas_h / new_h
    return (
        (left * per_x - x) / width,
        (top * per_y - y) / height,
        ((left + crop_w) * per_x - x) / width,
        ((top + crop_h) * per_y - y) / height,
    )


def _resized(processor: Any, size: Size) -> Size:
    wanted = {name: value for name, value in dict(processor.size).items() if value}
    if {*wanted} == {"height", "width"}:
        return wanted["height"], wanted["width"]
    if {*wanted} == {"shortest_edge"}:
        height, width = size
        short, long = wanted["shortest_edge"], int(wanted["shortest_edge"] * max(size) / min(size))
        return (short, long) if height <= width else (long, short)
    raise HooklineError(f"image regions are not supported for an image processor with size={wanted}")
