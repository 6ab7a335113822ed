"""Patches: what of a picture each position of the vision tower looks at, in the tower's own order."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.vision.families import check_number, families_with, family, looks_in_one_piece, rows_before
from hookline.vision.layouts import WHOLE, Seen, cells


def patch_boxes(seen: Seen) -> Float[Tensor, "row patch 4"]:
    """The box of each position of the points under `vision.`; NaN for one that stands for no place."""
    kind = seen.config.model_type
    if family(kind).patches == "groups":
        grids = seen.inputs["image_grid_thw"].tolist()
        check_number(seen, len(grids))
        return torch.cat([_grouped(seen.config.vision_config, *grid) for grid in grids])[None]
    before = rows_before(seen.config)
    if before is None:
        known = ", ".join((*families_with("groups"), *families_with("rows")))
        raise HooklineError(
            f"what the patches of a {kind!r} model's tower look at is not known: it is of {known}. "
            "model.image_grid(inputs) is about positions of the prompt"
        )
    return torch.stack([look.boxes for look in looks_in_one_piece(seen, before)])


def _grouped(config: Any, frames: int, rows: int, cols: int) -> Float[Tensor, "patch 4"]:
    """One picture of Qwen: squares of patches that are merged, row by row; in Qwen2.5-VL window by window."""
    side = config.spatial_merge_size
    boxes = cells(WHOLE, rows, cols).view(rows // side, side, cols // side, side, 4).transpose(1, 2)
    groups = boxes.reshape(rows // side, cols // side, side * side, 4)
    if getattr(config, "window_size", None) is None:
        return groups.flatten(0, 2).repeat(frames, 1)
    wide = config.window_size // side // config.patch_size
    windows = [window for band in groups.split(wide) for window in band.split(wide, 1)]
    return torch.cat([window.flatten(0, 2) for window in windows]).repeat(frames, 1)
