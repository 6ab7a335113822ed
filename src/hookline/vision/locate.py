"""Positions of images in prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.vision.families import LayoutInputs, family, layouts_of, single_grids
from hookline.vision.grid import ImageGrid


def grids_in(inputs: LayoutInputs) -> list[list[ImageGrid]]:
    """The grid of each image: one list per prompt."""
    before = family(inputs.config.model_type).before
    if before is not None:  # a vision encoder: its positions are those of its stream
        layouts = single_grids(inputs, before)
        return [[ImageGrid(torch.arange(len(layout.boxes)), layout.boxes, layout.main)] for layout in layouts]
    columns = inputs.columns
    if "pixel_values" not in inputs.inputs and "image_grid_thw" not in inputs.inputs:
        raise HooklineError("these inputs have no image: pass model.to_inputs(prompt, images=[…])")
    left, grids = layouts_of(inputs), []
    sizes = [len(layout.boxes) for layout in left]
    for row in columns:  # images are in the order of the prompts, and each row has as many tokens as its images need
        counts: list[int] = []
        while sum(counts) < len(row) and len(counts) < len(left):
            counts.append(len(left[len(counts)].boxes))
        if sum(counts) != len(row):
            raise HooklineError(
                f"the images need {sizes} tokens, but the rows of the batch have {list(map(len, columns))}: a prompt "
                "was truncated, or the images are not in the order of the prompts"
            )
        mine, left = left[: len(counts)], left[len(counts) :]
        grids.append(
            [ImageGrid(at, layout.boxes, layout.main) for at, layout in zip(row.split(counts), mine, strict=True)]
        )
    return grids


def places_in(inputs: LayoutInputs) -> list[list[Tensor]]:
    """The positions of each image: one list per prompt."""
    if family(inputs.config.model_type).tokens is not None and inputs.processor is not None:
        return [[grid.positions for grid in row] for row in grids_in(inputs)]
    return [_runs(row) for row in inputs.columns]


def _runs(row: Tensor) -> list[Tensor]:
    """Runs of consecutive positions."""
    breaks = (torch.diff(row) > 1).nonzero().flatten() + 1
    return [part for part in row.tensor_split(breaks.tolist()) if len(part)]
