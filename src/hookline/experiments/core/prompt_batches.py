"""Batches: prompts run together, or one by one where the rows at a point are images, not prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.prompts import Prompts
from hookline.rerun.image_inputs import in_one_row


def batches(prompts: Prompts, points: Iterable[HookPoint]) -> list[Prompts]:
    """The batches in which the prompts are run for these points."""
    if len(prompts) == 1 or not any(point.stream == "image" for point in points):
        return [prompts]
    return [prompts.only(row) for row in range(len(prompts))]


def gathered(parts: Sequence[Tensor], point: HookPoint, prompts: Prompts) -> Tensor:
    """The activations of the runs on `batches` at a point, as one tensor with one row per prompt."""
    if point.stream == "image":
        parts = [in_one_row(x, point) for x in parts]
    elif len(parts) > 1:
        parts = [_padded(x, point, prompts, row) for row, x in enumerate(parts)]
    if len({x.shape[1:] for x in parts}) > 1:
        raise HooklineError(
            f"the prompts have the shapes {[list(x.shape[1:]) for x in parts]} at {point.name!r}: use images of one "
            f"size, the same number in each prompt, or one prompt at a time"
        )
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def scattered(x: Tensor, point: HookPoint, prompts: Prompts, shape: torch.Size, run: int | None) -> Tensor:
    """The inverse of `gathered`: the part of one run, in which the point has this shape."""
    if run is None:
        return x.view(shape)
    part = x[run]
    if point.stream != "image":
        for axis in _text_axes(point, part.shape, prompts.width):
            part = part.narrow(axis, prompts.span(run).start, len(prompts.span(run)))
    return part.reshape(shape)


def _padded(x: Tensor, point: HookPoint, prompts: Prompts, row: int) -> Tensor:
    """The activation of one prompt, with zeros at the padding that it has in the batch of all."""
    span = prompts.span(row)
    for axis in _text_axes(point, x.shape[1:], len(span)):
        wide = x.new_zeros([prompts.width if at == axis + 1 else size for at, size in enumerate(x.shape)])
        x = wide.index_copy(axis + 1, torch.arange(span.start, span.stop, device=x.device), x)
    return x


def _text_axes(point: HookPoint, shape: Sequence[int], length: int) -> list[int]:
    """The axes after the batch that are positions in the text."""
    letters = point.axes.split()[1:]
    return [at for at, letter in enumerate(letters) if letter in "pk" and shape[at] == length]
