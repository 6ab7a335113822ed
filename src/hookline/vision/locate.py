"""Positions of images in prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.text.image_tokens import mask_in
from hookline.vision.families import family, layouts_of, single_grids
from hookline.vision.grid import ImageGrid
from hookline.vision.layouts import LayoutInputs, Size


def grids_in(
    config: Any, processor: Any, inputs: Mapping[str, Any], sizes: list[list[Size]] | None
) -> list[list[ImageGrid]]:
    """The grid of each image: one list per prompt."""
    before = family(config.model_type).before
    if before is not None:  # a vision encoder: its positions are those of its stream
        layouts = single_grids(LayoutInputs(config, processor, dict(inputs), sizes, 0), before)
        return [[ImageGrid(torch.arange(len(layout.boxes)), layout.boxes, layout.main)] for layout in layouts]
    columns = _columns(inputs, config)
    if "pixel_values" not in inputs and "image_grid_thw" not in inputs:
        raise HooklineError("these inputs have no image: pass model.to_inputs(prompt, images=[…])")
    given = LayoutInputs(config, processor, dict(inputs), sizes, sum(map(len, columns)))
    layouts = layouts_of(given)
    shares = _shared([len(layout.boxes) for layout in layouts], [len(row) for row in columns])
    grids: list[list[ImageGrid]] = []
    for row, counts in zip(columns, shares, strict=True):
        mine = [layouts.pop(0) for _ in counts]
        parts = row.split(counts)
        grids.append([ImageGrid(part, own.boxes, own.main) for part, own in zip(parts, mine, strict=True)])
    return grids


def places_in(
    config: Any, processor: Any, inputs: Mapping[str, Any], sizes: list[list[Size]] | None
) -> list[list[Tensor]]:
    """The positions of each image: one list per prompt."""
    if family(config.model_type).tokens is not None and processor is not None:
        return [[grid.positions for grid in row] for row in grids_in(config, processor, inputs, sizes)]
    return [_runs(row) for row in _columns(inputs, config)]


def _columns(inputs: Mapping[str, Any], config: Any) -> list[Int[Tensor, " _"]]:
    """The image-token positions of each row."""
    if not isinstance(inputs.get("input_ids"), Tensor):
        raise HooklineError(f"these inputs have no input_ids, only {', '.join(inputs)}")
    return [row.nonzero().flatten() for row in mask_in(inputs["input_ids"], config).cpu()]


def _shared(images: list[int], rows: list[int]) -> list[list[int]]:
    """Assign images to rows: they come in order, and each row has as many image tokens as its images need."""
    left, shares = list(images), []
    for total in rows:
        mine: list[int] = []
        while left and sum(mine) < total:
            mine.append(left.pop(0))
        if sum(mine) != total:
            raise HooklineError(
                f"the images need {images} tokens, but the rows of the batch have {rows}: a prompt was truncated, or "
                "the images are not in the order of the prompts"
            )
        shares.append(mine)
    return shares


def _runs(row: Tensor) -> list[Tensor]:
    """Runs of consecutive positions."""
    breaks = (torch.diff(row) > 1).nonzero().flatten() + 1
    return [part for part in row.tensor_split(breaks.tolist()) if len(part)]
