"""Drawing on images: the image itself, a color over each region, a word in each region. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.images.placed import PlacedImage
from hookline.experiments.results.plotting import Panels, colors, drawable, plain_bar, width

_FONT = 8.0
_MOST_PANELS = 48
_SMALLEST, _LARGEST = 3.5, 10.0  # fonts of words, in points
_LONGEST = 10  # characters of a word
_SHADE = 0.45  # opacity of the darkest pixel of an image, over colors
_BRIGHTNESS = np.array([0.3, 0.59, 0.11])  # of red, green, blue


def panels(
    placed: PlacedImage,
    count: int,
    *,
    width: float = 2.2,
    columns: int | None = None,
    cmap: str | Colormap,
    norm: Normalize,
    label: str = "",
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels of one image, and a color bar."""
    if count > _MOST_PANELS:
        raise HooklineError(f"{count} panels are too many to read: select some of the layers, heads or steps")
    columns = columns or {1: 1, 2: 2, 3: 3, 4: 4}.get(count, math.ceil(math.sqrt(1.6 * count)))
    rows = math.ceil(count / columns)
    width = min(width, 16.0 / columns, 12.0 / (rows * placed.aspect))
    size = max(width * columns, 2.0) + (0.85 if label else 0.7), (width * placed.aspect + 0.25) * rows + 0.2
    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, FigureClass=Panels)
    for ax in grid.flat[count:]:
        ax.set_visible(False)
    bar = ScalarMappable(norm, colors(cmap))
    shrink = min(1.0, 5.0 / size[1])
    drawn = figure.colorbar(bar, ax=grid, shrink=shrink, pad=0.01, aspect=25, fraction=0.5 / size[0])
    drawn.set_label(label, fontsize=_FONT)
    plain_bar(drawn)
    return figure, list(grid.flat[:count])


def ground(ax: Axes, placed: PlacedImage, *, is_shade: bool = False, title: str | None = None) -> None:
    """Draw the image with its corners at 0 and 1, or an empty square; `is_shade` draws it in gray on top."""
    empty = np.full((1, 1, 3), 0.96)
    pixels = empty if placed.image is None else np.asarray(placed.image, dtype=float) / 255
    pixels = _shades(pixels) if is_shade else pixels
    options: dict[str, Any] = {"interpolation": "nearest", "zorder": 3 if is_shade else 0}
    ax.imshow(pixels, extent=(0, 1, 1, 0), aspect=placed.aspect, **options)
    ax.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
    for side in ax.spines.values():
        side.set(color="0.7", linewidth=0.6)
    if title is not None:
        ax.set_title(drawable(title, cut=False), fontsize=_FONT, loc="left", pad=3)


def _shades(pixels: np.ndarray) -> np.ndarray:
    """Black with an opacity that grows with the darkness of the pixel."""
    bright = pixels @ _BRIGHTNESS
    low, high = bright.min(), bright.max()
    covers = _SHADE * (high - bright) / max(high - low, 0.2)
    return np.concatenate([np.zeros_like(pixels), covers[..., None]], -1)


def heat(
    ax: Axes,
    placed: PlacedImage,
    values: Tensor,
    *,
    norm: Normalize,
    cmap: str | Colormap,
    alpha: float,
    clear: float = 0.0,
    smooth: bool = False,
) -> None:
    """Draw a color over each region of the image, for the value of its position.

    Values near `clear` are transparent; the largest opacity is `alpha`.
    """
    shades = colors(cmap)
    if smooth:
        x0, y0, x1, y1 = placed.grid.extent
        between = tints(_between(placed, values), norm, shades, alpha, clear)
        ax.imshow(between, extent=(x0, x1, y1, y0), aspect=placed.aspect, interpolation="nearest")
        ax.set(xlim=(0, 1), ylim=(1, 0))
        return
    cells, boxes = _cells(placed)
    drawn = PatchCollection(boxes, edgecolor=(0.5, 0.5, 0.5, 0.25), linewidth=0.4)
    drawn.set(facecolor=tints(values[cells].numpy(), norm, shades, alpha, clear))
    ax.add_collection(drawn)


def tints(values: np.ndarray, norm: Normalize, colours: Colormap, alpha: float, clear: float) -> np.ndarray:
    """RGBA colors of values."""
    placed, middle = norm(np.ma.masked_invalid(values)), float(norm(clear))
    rgba: np.ndarray = colours(placed)
    away = np.abs(np.ma.filled(placed, middle) - middle) / max(middle, 1 - middle)
    rgba[..., 3] = alpha * np.clip(away, 0, 1) ** 0.5
    return rgba


def _between(placed: PlacedImage, values: Tensor, times: int = 24) -> np.ndarray:
    """The values interpolated linearly between the centers of their regions.

    Rows and columns that lie outside the image are omitted.
    """
    grid = placed.grid
    boxes, cells = grid.boxes[grid.main], grid.as_map(values)
    is_inside = ~boxes.isnan().any(-1)
    down, across = is_inside.any(1), is_inside.any(0)
    middles, inner_values = boxes[down][:, across].numpy(), cells[down][:, across].numpy()
    x0, y0, x1, y1 = grid.extent
    high, wide = (times * n for n in inner_values.shape)
    x = x0 + (x1 - x0) * (np.arange(wide) + 0.5) / wide
    y = y0 + (y1 - y0) * (np.arange(high) + 0.5) / high
    rows = np.stack([np.interp(x, middles[0, :, 0::2].mean(-1), row) for row in inner_values])
    return np.stack([np.interp(y, middles[:, 0, 1::2].mean(-1), column) for column in rows.T], 1)


def words(ax: Axes, placed: PlacedImage, texts: Sequence[str], fills: np.ndarray, *, alpha: float, wide: float) -> None:
    """Write a word into each region, in a font size that fits, on a background of its color; `wide` is in points."""
    cells, boxes = _cells(placed)
    ax.add_collection(PatchCollection(boxes, facecolor="none", edgecolor=(1, 1, 1, 0.6), linewidth=0.5))
    labels = PatchCollection([_label(box) for box in boxes], linewidth=0)
    labels.set_facecolor([(*fills[cell][:3], alpha) for cell in cells])
    ax.add_collection(labels)
    for box, cell in zip(boxes, cells, strict=True):
        ink = "white" if _is_dark(fills[cell]) else "black"
        x, y = box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2
        word = _word(texts[cell])
        size = _letters(word, wide * box.get_width(), wide * placed.aspect * box.get_height())
        ax.text(x, y, word, fontsize=size, ha="center", va="center_baseline", color=ink, clip_on=True)


def _label(box: Rectangle) -> Rectangle:
    """The background of a word inside its region."""
    wide, high = box.get_width(), box.get_height()
    return Rectangle((box.get_x() + 0.04 * wide, box.get_y() + 0.26 * high), 0.92 * wide, 0.48 * high)


def room_for_words(placed: PlacedImage) -> float:
    """Panel width in inches that leaves room for a readable word in each region."""
    return min(max(0.52 * placed.grid.shape[1], 2.6), 9.0)


def _cells(placed: PlacedImage) -> tuple[list[int], list[Rectangle]]:
    """The tokens of the main grid that cover a region, and their regions."""
    grid = placed.grid
    cells = [cell for cell in grid.main.flatten().tolist() if not bool(grid.boxes[cell].isnan().any())]
    corners = grid.boxes[cells].tolist()
    return cells, [Rectangle((x0, y0), x1 - x0, y1 - y0) for x0, y0, x1, y1 in corners]


def _word(text: str) -> str:
    """A token shortened for a small region, without its leading space."""
    bare = text.strip() or repr(text)
    return drawable(bare if len(bare) <= _LONGEST else bare[: _LONGEST - 1] + "…", cut=False)


def width_of(ax: Axes) -> float:
    """Width of a panel in points, after layout."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    return float(ax.get_window_extent().width * 72 / figure.dpi)


def _letters(word: str, wide: float, high: float) -> float:
    """The font size with which a word fits into a region, all in points."""
    return max(min(0.86 * wide / max(width(word, 1.0), 0.3), 0.42 * high, _LARGEST), _SMALLEST)


def _is_dark(colour: np.ndarray) -> bool:
    return bool(colour[:3] @ _BRIGHTNESS < 0.5)
