"""Plots of maps over images, and of many channels as one image. Needs matplotlib."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from hookline.experiments.images import drawing
from hookline.experiments.images.placed import PlacedImage
from hookline.experiments.networks.image_result import ImageResult
from hookline.experiments.results.plotting import Panels, color_norm, colors, drawable
from hookline.vision.grid import ImageGrid

_MOST_CHANNELS = 400


def plot_images(
    result: ImageResult,
    *,
    title: str | None = None,
    alpha: float = 1.0,
    cmap: str = "RdBu",
    vmin: float | None = None,
    vmax: float | None = None,
) -> Figure:
    """Draw a result with height and width: over its images if it has any, otherwise all its channels side by side."""
    if "row" in result.axes:
        return _ranked(result, title)
    maps, titles, rows = result.panels()
    if result.images is None:
        figure = _side_by_side(result, maps, cmap, vmin, vmax)
    else:
        norm = color_norm(maps, 0.0, vmin, vmax)
        placed = [_placed(image) for image in result.images]
        figure, axes = drawing.panels(placed[0], len(maps), cmap=cmap, norm=norm, label=result.name)
        for values, ax, row, name in zip(maps, axes, rows, titles, strict=True):
            drawing.ground(ax, placed[row], is_shade=True, title=name or None)
            tints = drawing.tints(values.numpy(), norm, colors(cmap), alpha, 0.0)
            ax.imshow(tints, extent=(0, 1, 1, 0), aspect=placed[row].aspect, interpolation="nearest")
    figure.suptitle(drawable(title or _heading(result), cut=False), fontsize=10, x=0.01, ha="left")
    return figure


def _ranked(result: ImageResult, title: str | None) -> Figure:
    """The images of rows that were chosen, with their values."""
    assert result.images is not None
    size = min(2.0 * len(result.images), 16.0)
    figure, grid = pyplot.subplots(1, len(result.images), figsize=(size, 2.4), squeeze=False, FigureClass=Panels)
    for ax, image, row, value in zip(grid.flat, result.images, result.coords["row"], result.values, strict=True):
        drawing.ground(ax, _placed(image), title=f"row {row}: {float(value):.3g}")
    figure.suptitle(drawable(title or _heading(result), cut=False), fontsize=10, x=0.01, ha="left")
    return figure


def _heading(result: ImageResult) -> str:
    about = str(result.info.get("about", result.name))
    return f"{about} at {result.info['at']}" if "at" in result.info else about


def _placed(image: Tensor) -> PlacedImage:
    """An image to draw on, with its colors stretched over the whole range."""
    low, high = image.min(), image.max()
    pixels = ((image - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8).expand(3, *image.shape[1:])
    whole = ImageGrid(torch.zeros(1, dtype=torch.long), torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.zeros(1, 1).long())
    return PlacedImage(whole, Image.fromarray(pixels.permute(1, 2, 0).numpy()), image.shape[1] / image.shape[2])


def _side_by_side(result: ImageResult, maps: Tensor, cmap: str, vmin: float | None, vmax: float | None) -> Figure:
    """The channels of each row of the batch side by side, with lines between them."""
    count = len(result.coords["batch"]) if "batch" in result.axes else 1
    per_row = maps.unflatten(0, (count, -1))[:, :_MOST_CHANNELS]
    norm = color_norm(per_row, 0.0, vmin, vmax)
    figure, grid = pyplot.subplots(
        1, count, figsize=(min(4.0 * count, 16.0), 4.2), layout="constrained", squeeze=False, FigureClass=Panels
    )
    for number, (ax, channels) in enumerate(zip(grid.flat, per_row, strict=True)):
        drawn = ax.imshow(_mosaic(channels), cmap=colors(cmap), norm=norm, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        left_out = "" if per_row.shape[1] == maps.shape[0] // count else f", the first {per_row.shape[1]} channels"
        ax.set_title(
            f"batch {result.coords['batch'][number]}{left_out}" if "batch" in result.axes else left_out[2:],
            fontsize=8,
            loc="left",
        )
    figure.colorbar(drawn, ax=grid, shrink=0.8, pad=0.01)
    return figure


def _mosaic(channels: Tensor) -> np.ndarray:
    """Channels as one image, with one empty line between them."""
    columns = math.ceil(math.sqrt(len(channels)))
    rows = math.ceil(len(channels) / columns)
    height, width = channels.shape[1:]
    mosaic = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1), np.nan)
    for at, channel in enumerate(channels.numpy()):
        top, left = at // columns * (height + 1), at % columns * (width + 1)
        mosaic[top : top + height, left : left + width] = channel
    return mosaic
