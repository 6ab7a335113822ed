"""Overlay: one value per image position, drawn as colors over the image."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label, listed, needed
from hookline.experiments.images.placed import PlacedImage
from hookline.experiments.result import Result


def overlay(
    values: Result | Any,
    on: PlacedImage,
    *,
    center: float | None = None,
    smooth: bool = False,
    alpha: float = 1.0,
    cmap: str = "RdBu",
    vmin: float | None = None,
    vmax: float | None = None,
    title: str | None = None,
) -> Any:
    """Draw one value per image position as colors over the image. Returns the matplotlib Figure.

        swept = patching.sweep(model, clean, corrupted, metric)          # over layer and pos
        images.overlay(swept.normalized, images.place_image(model, clean, image))  # one panel per layer
        images.overlay(swept.sel(layer=2), images.place_image(model, clean, image), smooth=True)

    `values` is a Result of one prompt with an axis `pos` or `patch`, where other axes become panels; or an array whose
    last axis has one entry per image token. Colors are blue above and red below `center`, on a symmetric scale;
    `center` defaults to the value of the unpatched run for a Result, and to 0 for an array. `vmin` and `vmax` set the
    scale instead. If the model receives an image twice, the finer grid is drawn.
    """
    needed("matplotlib", "overlay", "plot")
    from hookline.experiments.images import drawing
    from hookline.experiments.results.plotting import color_norm

    rows, labels = _rows(values, on)
    if center is not None and (vmin is not None or vmax is not None):
        raise HooklineError("pass either center, or vmin and vmax, not both")
    if center is None:
        center = values.origin if isinstance(values, Result) else 0.0
    norm = color_norm(rows, center, vmin, vmax)
    clear = float(np.clip(center, norm.vmin, norm.vmax))
    name = ""
    if isinstance(values, Result):
        name = values.name + (", normalized" if values.info.get("normalized") else "")
    figure, axes = drawing.panels(on, len(rows), cmap=cmap, norm=norm, label=name.replace("$", r"\$"))
    for row, label, ax in zip(rows, labels, axes, strict=True):
        drawing.ground(ax, on, is_shade=True, title=label)
        drawing.heat(ax, on, row, norm=norm, cmap=cmap, alpha=alpha, clear=clear, smooth=smooth)
    if title:
        figure.suptitle(title.replace("$", r"\$"), fontsize=10, x=0.01, ha="left")
    return figure


def _rows(values: Result | Any, on: PlacedImage) -> tuple[Tensor, list[str | None]]:
    """One row of values per panel, with one value per image token; and the titles of the panels."""
    if not isinstance(values, Result):
        tensor = torch.as_tensor(values).detach().float().cpu()
        if not 1 <= tensor.ndim <= 2 or tensor.shape[-1] != len(on.grid):
            raise HooklineError(
                f"values have shape {list(tensor.shape)}, but the image has {len(on.grid)} tokens: index values for "
                "the whole prompt as values[…, placed.grid.positions]"
            )
        return tensor.reshape(-1, len(on.grid)), [None] * (tensor.numel() // len(on.grid))
    axis = next((axis for axis in ("pos", "patch") if axis in values.axes), None)
    if axis is None:
        raise HooklineError(f"overlay needs an axis 'pos' or 'patch'; this result has {listed(values.axes)}")
    outer = [name for name in values.axes if name != axis]
    last = values.values.movedim(values.axes.index(axis), -1)
    rows = last.reshape(-1, last.shape[-1])[:, _places(values.coords[axis], axis, on)]
    parts = list(product(*(values.coords[name] for name in outer)))
    labels = [" ".join(f"{name} {label}" for name, label in zip(outer, part, strict=True)) or None for part in parts]
    return rows.float(), list(labels)


def _places(labels: list[Label], axis: str, on: PlacedImage) -> list[int]:
    """Indices of the image's positions on an axis."""
    numbers = [_number(label, axis) for label in labels]
    missing = [position for position in on.grid.positions.tolist() if position not in numbers]
    if missing:
        raise HooklineError(
            f"the image includes position {missing[0]}, which is not on the axis {axis!r}: it goes from "
            f"{labels[0]!r} to {labels[-1]!r}"
        )
    return [numbers.index(position) for position in on.grid.positions.tolist()]


def _number(label: Label, axis: str) -> int:
    """The position of a label: "3: Mary" on an axis of one prompt; a number on an axis of patches."""
    if axis == "patch" and isinstance(label, int):
        return label
    number, colon, _ = str(label).partition(": ")
    if not isinstance(label, str) or not colon or not number.isdigit():
        raise HooklineError(
            f"the positions of this result are labeled {label!r}, …: they belong to several prompts or to the vision "
            "tower, not to one prompt. Select the image's patches yourself and pass an array: "
            "images.overlay(result.values[…, which], placed)"
        )
    return int(number)
