"""Families: which rectangles of a picture a model looks at, and in which order its tokens come.

What a family's image processor cuts, and how its tokens follow each other, is written here; a new family is a row in
`FAMILIES`, and one in the tests, which compare it with what moves the model's tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hookline.errors import HooklineError
from hookline.vision.grid import Box
from hookline.vision.layouts import WHOLE, Layout, Seen, Size, cells, nowhere, one_look, region_seen, tiles


def patches(seen: Seen) -> Size:
    """Rows and columns of patches that the vision tower makes of one picture or tile."""
    patch = getattr(seen.config, "vision_config", seen.config).patch_size
    high, wide = patch if isinstance(patch, list | tuple) else (patch, patch)
    height, width = seen.inputs["pixel_values"].shape[-2:]
    return height // high, width // wide


def _plain(seen: Seen) -> list[Layout]:
    """One look at each picture, patch by patch; a token for the whole of it may come first."""
    rows, cols = patches(seen)
    n = len(seen.inputs["pixel_values"])
    before = seen.n_tokens // n - rows * cols
    if before not in (0, 1):
        raise _cannot(seen, rows * cols * n)
    return [one_look(region, rows, cols, before) for region in regions(seen, n)]


def regions(seen: Seen, n: int) -> list[Box]:
    """The part of each of `n` pictures that is looked at."""
    looks = seen.looks
    if seen.sizes is None and not looks.do_center_crop and {*dict(looks.size)} >= {"height", "width"}:
        return [WHOLE] * n  # whatever their sizes were
    return [region_seen(looks, size) for size in seen.flat_sizes]


def _merged(seen: Seen) -> list[Layout]:
    """Qwen: one look at its own resolution, of patches that are merged into tokens."""
    merge = seen.config.vision_config.spatial_merge_size
    return [one_look(WHOLE, high // merge, wide // merge) for _, high, wide in seen.inputs["image_grid_thw"].tolist()]


def _pooled(seen: Seen) -> list[Layout]:
    """Gemma 3: one look, its patches pooled."""
    side = math.isqrt(seen.config.mm_tokens_per_image)
    return [one_look(region, side, side) for region in regions(seen, len(seen.inputs["pixel_values"]))]


def _shuffled(seen: Seen) -> list[Layout]:
    """Idefics 3 and SmolVLM: tiles row by row, then the whole; or the whole alone."""
    rows, _ = patches(seen)
    side = rows // seen.config.scale_factor
    return [tiles(*_rows_and_cols(seen.looks, size), side) for size in seen.flat_sizes]


def _rows_and_cols(looks: Any, size: Size) -> tuple[int, int]:
    """Into how many tiles a picture is cut, as the image processor itself says of a blank one."""
    from PIL import Image

    made = looks(images=[[Image.new("RGB", (size[1], size[0]))]], return_row_col_info=True, return_tensors="pt")
    return made["rows"][0][0], made["cols"][0][0]


def _cropped(seen: Seen) -> list[Layout]:
    """InternVL: tiles row by row, then the whole; or the whole alone."""
    side = math.isqrt(seen.config.image_seq_length)
    looks = seen.looks
    if not (seen.option("crop_to_patches") and looks.max_patches > 1):
        return [one_look(WHOLE, side, side) for _ in seen.inputs["pixel_values"]]
    canvas = vars(sys.modules[type(looks).__module__])["get_optimal_tiled_canvas"]
    tile = (dict(looks.size)["height"], dict(looks.size)["width"])
    layouts = []
    for size in seen.flat_sizes:
        cols, rows = canvas(size, tile, looks.min_patches, looks.max_patches)
        layouts.append(tiles(rows, cols, side))
    return layouts


def _anyres(seen: Seen) -> list[Layout]:
    """LLaVA-NeXT and LLaVA-OneVision: the whole, then tiles as one grid without its padding, each row with an end."""
    sizes = [tuple(size) for size in seen.inputs["image_sizes"].tolist()]
    check_number(seen, len(sizes))
    if seen.sizes is not None and seen.flat_sizes != sizes:
        raise HooklineError(f"the inputs are of pictures of {_shown(sizes)} pixels, not of {_shown(seen.flat_sizes)}")
    alone = [True] * len(sizes)
    if "batch_num_images" in seen.inputs:  # several pictures in a prompt are not cut
        alone = [n == 1 for n in seen.inputs["batch_num_images"].tolist() for _ in range(n)]
    return [_cut(seen, size) if cut else _square(seen, size) for size, cut in zip(sizes, alone, strict=True)]


def _square(seen: Seen, size: Size) -> Layout:
    """The picture on a square, and one token more."""
    rows, cols = patches(seen)
    height, width = size
    side = max(size)
    x, y = (side - width) // 2, (side - height) // 2
    look = one_look((-x / width, -y / height, (side - x) / width, (side - y) / height), rows, cols)
    return Layout(torch.cat([look.boxes, nowhere()]), look.main)


def _cut(seen: Seen, size: Size) -> Layout:
    from transformers.image_processing_utils import select_best_resolution

    side, _ = patches(seen)
    pixels = seen.inputs["pixel_values"].shape[-1]
    canvas_h, canvas_w = select_best_resolution(size, seen.config.image_grid_pinpoints)
    grid_h, grid_w = canvas_h // pixels * side, canvas_w // pixels * side
    off_y, off_x = _padding(size, (grid_h, grid_w))
    x0, y0, x1, y1 = _region_on(size, (canvas_h, canvas_w))
    per_x, per_y = (x1 - x0) / grid_w, (y1 - y0) / grid_h
    region = (x0 + off_x * per_x, y0 + off_y * per_y, x1 - off_x * per_x, y1 - off_y * per_y)
    rows, cols = _at_most(seen.config, grid_h - 2 * off_y, grid_w - 2 * off_x, side)
    fine = cells(region, rows, cols).view(rows, cols, 4)
    fine = torch.cat([fine, nowhere(rows)[:, None]], 1).flatten(0, 1)
    main = torch.arange(rows * (cols + 1)).view(rows, cols + 1)[:, :cols] + side * side
    if not rows or not cols:  # of a very long or wide image the model drops every fine cell with the padding
        main = torch.arange(side * side).view(side, side)
    return Layout(torch.cat([cells(WHOLE, side, side), fine]), main)


def _region_on(size: Size, canvas: Size) -> Box:
    """What of the picture the canvas shows that it is fitted into: all of it, with padding at two sides."""
    (height, width), (canvas_h, canvas_w) = size, canvas
    scale_w, scale_h = canvas_w / width, canvas_h / height
    new_h = min(math.ceil(height * scale_w), canvas_h) if scale_w < scale_h else canvas_h
    new_w = canvas_w if scale_w < scale_h else min(math.ceil(width * scale_h), canvas_w)
    x, y = (canvas_w - new_w) // 2, (canvas_h - new_h) // 2
    return -x / new_w, -y / new_h, (canvas_w - x) / new_w, (canvas_h - y) / new_h


def _padding(size: Size, grid: Size) -> Size:
    """How many rows and columns of tokens the model takes away at each side, as all padding."""
    (height, width), (rows, cols) = size, grid
    if width / height > cols / rows:
        return (rows - int(round(height * (cols / width), 7))) // 2, 0
    return 0, (cols - int(round(width * (rows / height), 7))) // 2


def _at_most(config: Any, rows: int, cols: int, side: int) -> Size:
    """LLaVA-OneVision shrinks a grid of too many tokens."""
    limit = getattr(config, "vision_aspect_ratio", None)
    if limit is None:
        return rows, cols
    ratio = math.sqrt(rows * cols / (int(limit.removeprefix("anyres_max_")) * side**2))
    return (int(rows // ratio), int(cols // ratio)) if ratio > 1.1 else (rows, cols)


@dataclass(frozen=True)
class Family:
    """How one family of models places the parts of an image: in the prompt, and in the stream of its vision tower."""

    tokens: Callable[[Seen], list[Layout]] | None = None
    """The layout of the tokens that each image takes in the prompt; None for a vision encoder, which has no prompt."""
    patches: Literal["rows", "groups"] | None = None
    """Patches in the tower: each image in a row of its own, row by row; all in one row, by groups merged later."""
    before: int | None = None
    """Of a vision encoder: how many positions of its stream come before the patches."""


FAMILIES: dict[str, Family] = {
    "vit": Family(patches="rows", before=1),
    "clip_vision_model": Family(patches="rows", before=1),
    "siglip_vision_model": Family(patches="rows", before=0),
    "dinov2": Family(patches="rows", before=1),
    "llava": Family(_plain, patches="rows"),
    "paligemma": Family(_plain, patches="rows"),
    "gemma3": Family(_pooled, patches="rows"),
    "qwen2_vl": Family(_merged, patches="groups"),
    "qwen2_5_vl": Family(_merged, patches="groups"),
    "qwen3_vl": Family(_merged, patches="groups"),
    "qwen3_vl_moe": Family(_merged, patches="groups"),
    "llava_next": Family(_anyres),
    "llava_onevision": Family(_anyres),
    "idefics3": Family(_shuffled),
    "smolvlm": Family(_shuffled),
    "internvl": Family(_cropped),
}
"""By `config.model_type`."""


def family(model_type: str) -> Family:
    """What is known of a family; nothing, of one that has no row."""
    return FAMILIES.get(model_type, Family())


def families_with(patches: str) -> list[str]:
    """The families whose towers place patches in this way."""
    return [name for name, each in FAMILIES.items() if each.patches == patches]


def rows_before(config: Any) -> int | None:
    """How many positions come before the patches in the stream of a tower of rows; None if that is not known."""
    if family(config.model_type).patches != "rows":
        return None
    return family(getattr(config, "vision_config", config).model_type).before


def layouts_of_encoder(seen: Seen) -> list[Layout]:
    """The same of a model without text, whose tokens are those of its stream."""
    return looks_in_one_piece(seen, rows_before(seen.config) or 0)


def looks_in_one_piece(seen: Seen, before: int) -> list[Layout]:
    """One look of the tower at each picture, patch by patch; `before` positions come first and stand for no place."""
    rows, cols = patches(seen)
    n = len(seen.inputs["pixel_values"])
    check_number(seen, n)
    return [one_look(region, rows, cols, before) for region in regions(seen, n)]


def layouts_of(seen: Seen) -> list[Layout]:
    """The layout of each picture, in order; an error if they do not add up to the tokens that there are."""
    kind = seen.config.model_type
    tokens = family(kind).tokens
    if tokens is None:
        known = [name for name, each in FAMILIES.items() if each.tokens is not None]
        raise HooklineError(
            f"what the tokens of a picture look at is not known of a {kind!r} model: it is of {', '.join(known)}. "
            "model.image_token_mask(inputs) says where they are"
        )
    layouts = tokens(seen)
    check_number(seen, len(layouts))
    expected = sum(len(layout.boxes) for layout in layouts)
    if expected != seen.n_tokens:
        raise _cannot(seen, expected)
    return layouts


def check_number(seen: Seen, n: int) -> None:
    """Pictures that are given beside inputs must be as many as those in them."""
    if seen.sizes is not None and len(seen.flat_sizes) != n:
        raise HooklineError(
            f"{len(seen.flat_sizes)} pictures are given beside inputs that were made of {n}: give the same ones"
        )


def _shown(sizes: list[Size]) -> str:
    return ", ".join(f"{width} × {height}" for height, width in sizes)


def _cannot(seen: Seen, expected: int) -> HooklineError:
    return HooklineError(
        f"the prompt has {seen.n_tokens} tokens for pictures, but by the processor that the model was wrapped with "
        f"there would be {expected}: were these inputs made by another, with other options, or of other pictures?"
    )
