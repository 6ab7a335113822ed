"""Where the images of a prompt are: which tokens belong to an image, and which region of it each of them covers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hookline.errors import HooklineError
from hookline.explore.image_files import has_transparency
from hookline.explore.prompt_inputs import GivenPrompt
from hookline.model import HookedModel
from hookline.pages.tensors import packed_tensor
from hookline.vision.inputs import Inputs

Layout = dict[str, Any]


def image_layouts(model: HookedModel, prompt: GivenPrompt, urls: Sequence[str]) -> list[Layout]:
    """For each image: the positions from `start` to `stop`, and the regions of its tokens, or why they are not known.

    `boxes` are left, top, right, bottom as fractions of the image, one row for each of `positions`; `main` are indices
    of rows, for each cell of the grid that the page draws.
    """
    if isinstance(prompt, str):
        return []
    spans = _spans(model, prompt, len(urls))
    grids, problem = _grids(model, prompt)
    layouts: list[Layout] = []
    for nth, url in enumerate(urls):
        span = spans[nth] if nth < len(spans) else None
        layout: Layout = {"start": span and span.start, "stop": span and span.stop, "problem": problem}
        if has_transparency(url):
            layout["note"] = "this image has transparency: the model gets the colors of all its pixels without it"
        if nth < len(grids):
            grid = grids[nth]
            layout |= {"positions": grid.positions.tolist(), "boxes": packed_tensor(grid.boxes)}
            layout |= {"main": grid.main.tolist()}
        layouts.append(layout)
    return layouts


def tower_boxes(model: HookedModel, prompt: GivenPrompt) -> dict[str, Any] | None:
    """The region of each position of the vision tower: [row, patch, 4]; None if it is not known."""
    if isinstance(prompt, str):
        return None
    try:
        return packed_tensor(model.patch_boxes(prompt))
    except HooklineError:
        return None


def _spans(model: HookedModel, prompt: Inputs, count: int) -> list[range]:
    """The positions of each image, from its first token to its last."""
    try:
        return [model.image_token_range(nth, prompt) for nth in range(count)]
    except HooklineError:  # no layout, or no image tokens at all
        return _runs(model, prompt)


def _runs(model: HookedModel, prompt: Inputs) -> list[range]:
    try:
        marked = model.image_token_mask(prompt)[0].cpu()
    except HooklineError:
        return []
    edges = torch.diff(marked.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero().flatten().tolist()
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _grids(model: HookedModel, prompt: Inputs) -> tuple[list[Any], str | None]:
    try:
        return model.image_grid(prompt)[0], None
    except HooklineError as error:
        return [], str(error)
