"""Places: where in the prompts the pictures are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.text.image_tokens import mask_in
from hookline.vision.families import family, layouts_of, layouts_of_encoder
from hookline.vision.grid import ImageGrid
from hookline.vision.layouts import Seen, Size


def grids_in(
    config: Any, processor: Any, inputs: Mapping[str, Any], sizes: list[list[Size]] | None
) -> list[list[ImageGrid]]:
    """The grid of each picture, in a list for each prompt."""
    if family(config.model_type).before is not None:
        looks = layouts_of_encoder(Seen(config, processor, dict(inputs), sizes, 0))
        return [[ImageGrid(torch.arange(len(look.boxes)), look.boxes, look.main)] for look in looks]
    columns = _columns(inputs, config)
    if "pixel_values" not in inputs and "image_grid_thw" not in inputs:
        raise HooklineError("there is no picture in these inputs: give model.to_inputs(prompt, images=[…])")
    seen = Seen(config, processor, dict(inputs), sizes, sum(map(len, columns)))
    layouts = layouts_of(seen)
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
    """The positions of each picture, in a list for each prompt."""
    if family(config.model_type).tokens is not None and processor is not None:
        return [[grid.positions for grid in row] for row in grids_in(config, processor, inputs, sizes)]
    return [_runs(row) for row in _columns(inputs, config)]


def _columns(inputs: Mapping[str, Any], config: Any) -> list[Int[Tensor, " _"]]:
    """The positions of all pictures of each row."""
    if not isinstance(inputs.get("input_ids"), Tensor):
        raise HooklineError(f"there are no input_ids among these inputs, which are {', '.join(inputs)}")
    return [row.nonzero().flatten() for row in mask_in(inputs["input_ids"], config).cpu()]


def _shared(pictures: list[int], rows: list[int]) -> list[list[int]]:
    """Which pictures are whose: they come in order, and each row has as many tokens as its pictures."""
    left, shares = list(pictures), []
    for total in rows:
        mine: list[int] = []
        while left and sum(mine) < total:
            mine.append(left.pop(0))
        if sum(mine) != total:
            raise HooklineError(
                f"the pictures take {pictures} tokens, but the rows of the prompt have {rows} for them: a prompt was "
                "cut off, or the pictures are not in the order of the prompts"
            )
        shares.append(mine)
    return shares


def _runs(row: Tensor) -> list[Tensor]:
    """Positions split where they are not next to each other."""
    breaks = (torch.diff(row) > 1).nonzero().flatten() + 1
    return [part for part in row.tensor_split(breaks.tolist()) if len(part)]
