"""Vision-language model families: which image region each token and each tower patch covers, and in which order.

A model receives one or more rectangles of an image (the whole image, a crop, tiles), each as a grid of tokens. To
support a new family, add a row to `FAMILIES` and one to the tests, which change pixels and compare the regions with the
tokens that change.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.text.image_tokens import mask_in
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
    inputs: Mapping[str, Any]

    @cached_property
    def columns(self) -> list[Int[Tensor, " _"]]:
        """The image-token positions of each row."""
        if not isinstance(self.inputs.get("input_ids"), Tensor):
            raise HooklineError(f"these inputs have no input_ids, only {', '.join(self.inputs)}")
        return [row.nonzero().flatten() for row in mask_in(self.inputs["input_ids"], self.config).cpu()]

    @property
    def n_tokens(self) -> int:
        """Image tokens in the prompts, for all images together."""
        return sum(map(len, self.columns))

    @property
    def patches(self) -> Size:
        """Rows and columns of patches that the vision tower computes for one image or tile."""
        patch = getattr(self.config, "vision_config", self.config).patch_size
        high, wide = patch if isinstance(patch, list | tuple) else (patch, patch)
        height, width = self.inputs["pixel_values"].shape[-2:]
        return height // high, width // wide

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
        of_kind = getattr(getattr(self.processor, "valid_processor_kwargs", None), "_defaults", {})
        # The attribute is what transformers has from 5.23 on; `_defaults` overrides it, as in the processor itself.
        defaults = getattr(self.processor, "images_kwargs", {}) | of_kind.get("images_kwargs", {})
        return defaults[name] if name in defaults else getattr(self.image_processor, name)

    @property
    def has_sizes(self) -> bool:
        """Whether the sizes of the original images are known."""
        return getattr(self.inputs, "sizes", None) is not None

    @property
    def sizes(self) -> list[Size]:
        """Height and width of every image, in order."""
        if not self.has_sizes:
            raise HooklineError(
                "image regions depend on the image sizes: pass the inputs that model.to_inputs(prompt, images=…) "
                "returned, or pass images=… along with other inputs"
            )
        return [size for row in self.inputs.sizes for size in row]  # type: ignore[attr-defined]

    def check_number(self, n: int) -> None:
        """Raise if the images passed along with the inputs are not as many as those in the inputs."""
        if self.has_sizes and len(self.sizes) != n:
            raise HooklineError(
                f"got {len(self.sizes)} images, but the inputs were made from {n}: pass the same images"
            )


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
        crop_size = dict(processor.crop_size)
        crop_h, crop_w = crop_size["height"], crop_size["width"]
        top, left = (new_h - crop_h) // 2, (new_w - crop_w) // 2
    per_x, per_y = canvas_w / new_w, canvas_h / new_h
    return (
        (left * per_x - x) / width,
        (top * per_y - y) / height,
        ((left + crop_w) * per_x - x) / width,
        ((top + crop_h) * per_y - y) / height,
    )


def _resized(processor: Any, size: Size) -> Size:
    target_size = {name: value for name, value in dict(processor.size).items() if value}
    if {*target_size} == {"height", "width"}:
        return target_size["height"], target_size["width"]
    if {*target_size} == {"shortest_edge"}:
        height, width = size
        short, long = target_size["shortest_edge"], int(target_size["shortest_edge"] * max(size) / min(size))
        return (short, long) if height <= width else (long, short)
    raise HooklineError(f"image regions are not supported for an image processor with size={target_size}")


def single_grids(inputs: LayoutInputs, before: int) -> list[Layout]:
    """One grid of patches per image, after `before` positions that cover no region."""
    n = len(inputs.inputs["pixel_values"])
    inputs.check_number(n)
    return [single_grid(region, *inputs.patches, before) for region in _regions(inputs, n)]


def _regions(inputs: LayoutInputs, n: int) -> list[Box]:
    """The region of each of `n` images that the model receives."""
    processor = inputs.image_processor
    if not inputs.has_sizes and not processor.do_center_crop and {*dict(processor.size)} >= {"height", "width"}:
        return [WHOLE] * n  # independent of the image sizes
    return [visible_region(processor, size) for size in inputs.sizes]


def _plain(inputs: LayoutInputs) -> list[Layout]:
    """LLaVA and PaliGemma: one grid per image, a token per patch, possibly after a class token."""
    rows, cols = inputs.patches
    has_class_token = inputs.n_tokens // len(inputs.inputs["pixel_values"]) == rows * cols + 1
    return single_grids(inputs, int(has_class_token))


def _merged(inputs: LayoutInputs) -> list[Layout]:
    """Qwen: one grid at the native resolution; several patches are merged into one token."""
    merge = inputs.config.vision_config.spatial_merge_size
    return [
        single_grid(WHOLE, high // merge, wide // merge) for _, high, wide in inputs.inputs["image_grid_thw"].tolist()
    ]


def _pooled(inputs: LayoutInputs) -> list[Layout]:
    """Gemma 3: one grid of pooled patches."""
    side = math.isqrt(inputs.config.mm_tokens_per_image)
    return [single_grid(region, side, side) for region in _regions(inputs, len(inputs.inputs["pixel_values"]))]


def _shuffled(inputs: LayoutInputs) -> list[Layout]:
    """Idefics 3 and SmolVLM: tiles row by row, then the whole image; or the whole image only."""
    from PIL import Image

    layouts = []
    for height, width in inputs.sizes:  # the image processor itself says how it tiles a blank image of this size
        blank = [[Image.new("RGB", (width, height))]]
        made = inputs.image_processor(images=blank, return_row_col_info=True, return_tensors="pt")
        layouts.append(tiles(made["rows"][0][0], made["cols"][0][0], inputs.patches[0] // inputs.config.scale_factor))
    return layouts


def _cropped(inputs: LayoutInputs) -> list[Layout]:
    """InternVL: tiles row by row, then the whole image; or the whole image only."""
    side = math.isqrt(inputs.config.image_seq_length)
    processor = inputs.image_processor
    if not (inputs.option("crop_to_patches") and processor.max_patches > 1):
        return [single_grid(WHOLE, side, side) for _ in inputs.inputs["pixel_values"]]
    canvas = vars(sys.modules[type(processor).__module__])["get_optimal_tiled_canvas"]
    tile = (dict(processor.size)["height"], dict(processor.size)["width"])
    shapes = [canvas(size, tile, processor.min_patches, processor.max_patches) for size in inputs.sizes]
    return [tiles(rows, cols, side) for cols, rows in shapes]


def _anyres(inputs: LayoutInputs) -> list[Layout]:
    """LLaVA-NeXT and LLaVA-OneVision: the whole image, then all tiles as one grid, unpadded, with a newline per row."""
    sizes = [tuple(size) for size in inputs.inputs["image_sizes"].tolist()]
    inputs.check_number(len(sizes))
    if inputs.has_sizes and inputs.sizes != sizes:
        made, passed = (
            ", ".join(f"{width} × {height}" for height, width in image_sizes) for image_sizes in (sizes, inputs.sizes)
        )
        raise HooklineError(f"the inputs were made from images of {made} pixels, not {passed}")
    alone = [True] * len(sizes)
    if "batch_num_images" in inputs.inputs:  # several images in one prompt are not tiled
        alone = [n == 1 for n in inputs.inputs["batch_num_images"].tolist() for _ in range(n)]
    return [_cut(inputs, size) if cut else _square(inputs, size) for size, cut in zip(sizes, alone, strict=True)]


def _square(inputs: LayoutInputs, size: Size) -> Layout:
    """The image padded to a square, followed by one newline token."""
    rows, cols = inputs.patches
    height, width = size
    side = max(size)
    x, y = (side - width) // 2, (side - height) // 2
    layout = single_grid((-x / width, -y / height, (side - x) / width, (side - y) / height), rows, cols)
    return Layout(torch.cat([layout.boxes, nowhere()]), layout.main)


def _cut(inputs: LayoutInputs, size: Size) -> Layout:
    from transformers.image_processing_utils import select_best_resolution

    side, _ = inputs.patches
    pixels = inputs.inputs["pixel_values"].shape[-1]
    canvas_h, canvas_w = select_best_resolution(size, inputs.config.image_grid_pinpoints)
    grid_h, grid_w = canvas_h // pixels * side, canvas_w // pixels * side
    off_y, off_x = _padding(size, (grid_h, grid_w))
    x0, y0, x1, y1 = _region_on(size, (canvas_h, canvas_w))
    per_x, per_y = (x1 - x0) / grid_w, (y1 - y0) / grid_h
    region = (x0 + off_x * per_x, y0 + off_y * per_y, x1 - off_x * per_x, y1 - off_y * per_y)
    rows, cols = _at_most(inputs.config, grid_h - 2 * off_y, grid_w - 2 * off_x, side)
    fine = cells(region, rows, cols).view(rows, cols, 4)
    fine = torch.cat([fine, nowhere(rows)[:, None]], 1).flatten(0, 1)
    main = torch.arange(rows * (cols + 1)).view(rows, cols + 1)[:, :cols] + side * side
    if not rows or not cols:  # unpadding removes every fine cell of a very long or wide image
        main = torch.arange(side * side).view(side, side)
    return Layout(torch.cat([cells(WHOLE, side, side), fine]), main)


def _region_on(size: Size, canvas: Size) -> Box:
    """The canvas in image coordinates, after the image is fitted into it and padded on two sides."""
    (height, width), (canvas_h, canvas_w) = size, canvas
    scale_w, scale_h = canvas_w / width, canvas_h / height
    new_h = min(math.ceil(height * scale_w), canvas_h) if scale_w < scale_h else canvas_h
    new_w = canvas_w if scale_w < scale_h else min(math.ceil(width * scale_h), canvas_w)
    x, y = (canvas_w - new_w) // 2, (canvas_h - new_h) // 2
    return -x / new_w, -y / new_h, (canvas_w - x) / new_w, (canvas_h - y) / new_h


def _padding(size: Size, grid: Size) -> Size:
    """Rows and columns of padding tokens that the model removes on each side."""
    (height, width), (rows, cols) = size, grid
    if width / height > cols / rows:
        return (rows - int(round(height * (cols / width), 7))) // 2, 0
    return 0, (cols - int(round(width * (rows / height), 7))) // 2


def _at_most(config: Any, rows: int, cols: int, side: int) -> Size:
    """The grid after LLaVA-OneVision has shrunk it to its maximum number of tokens."""
    limit = getattr(config, "vision_aspect_ratio", None)
    if limit is None:
        return rows, cols
    ratio = math.sqrt(rows * cols / (int(limit.removeprefix("anyres_max_")) * side**2))
    return (int(rows // ratio), int(cols // ratio)) if ratio > 1.1 else (rows, cols)


@dataclass(frozen=True)
class Family:
    """Where a model family puts the parts of an image: in the prompt, and in the stream of its vision tower."""

    tokens: Callable[[LayoutInputs], list[Layout]] | None = None
    """Returns the layout of each image's tokens in the prompt; None for a vision encoder, which has no prompt."""
    patches: Literal["rows", "groups"] | None = None
    """Order of the tower's patches: "rows", one row per image; "groups", all images in one row, by merge group."""
    before: int | None = None
    """For a vision encoder: the number of stream positions before the first patch."""


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
    """The row of a family; an empty row if the family is unknown."""
    return FAMILIES.get(model_type, Family())


def families_with(patches: str) -> list[str]:
    """The families whose towers order patches in this way."""
    return [name for name, row in FAMILIES.items() if row.patches == patches]


def rows_before(config: Any) -> int | None:
    """Number of positions before the patches in a tower of kind "rows"; None for any other tower."""
    if family(config.model_type).patches != "rows":
        return None
    return family(getattr(config, "vision_config", config).model_type).before


def layouts_of(inputs: LayoutInputs) -> list[Layout]:
    """The layout of each image's tokens in the prompt, in order; raises if the counts do not match the prompt."""
    kind = inputs.config.model_type
    tokens = family(kind).tokens
    if tokens is None:
        supported = [name for name, row in FAMILIES.items() if row.tokens is not None]
        raise HooklineError(
            f"the image regions of tokens are not known for {kind!r} models, only for {', '.join(supported)}. "
            "model.image_token_mask(inputs) returns the positions of image tokens"
        )
    layouts = tokens(inputs)
    inputs.check_number(len(layouts))
    expected = sum(len(layout.boxes) for layout in layouts)
    if expected != inputs.n_tokens:
        raise HooklineError(
            f"the prompt has {inputs.n_tokens} image tokens, but this model's processor would produce {expected}: "
            "these inputs may come from another processor, other options, or other images"
        )
    return layouts


def patch_boxes(inputs: LayoutInputs) -> Float[Tensor, "row patch 4"]:
    """The region of each position of the `vision.` points, in the tower's order; NaN where there is none."""
    kind = inputs.config.model_type
    if family(kind).patches == "groups":
        grids = inputs.inputs["image_grid_thw"].tolist()
        inputs.check_number(len(grids))
        return torch.cat([_grouped(inputs.config.vision_config, *grid) for grid in grids])[None]
    before = rows_before(inputs.config)
    if before is None:
        supported = ", ".join((*families_with("groups"), *families_with("rows")))
        raise HooklineError(
            f"the image regions of vision-tower patches are not known for {kind!r} models, only for {supported}. "
            "model.image_grid(inputs) returns the regions of prompt positions"
        )
    return torch.stack([layout.boxes for layout in single_grids(inputs, before)])


def _grouped(config: Any, frames: int, rows: int, cols: int) -> Float[Tensor, "patch 4"]:
    """One image in Qwen's tower: merge groups row by row; in Qwen2.5-VL window by window."""
    side = config.spatial_merge_size
    boxes = cells(WHOLE, rows, cols).view(rows // side, side, cols // side, side, 4).transpose(1, 2)
    groups = boxes.reshape(rows // side, cols // side, side * side, 4)
    if getattr(config, "window_size", None) is None:
        return groups.flatten(0, 2).repeat(frames, 1)
    wide = config.window_size // side // config.patch_size
    windows = [window for band in groups.split(wide) for window in band.split(wide, 1)]
    return torch.cat([window.flatten(0, 2) for window in windows]).repeat(frames, 1)
