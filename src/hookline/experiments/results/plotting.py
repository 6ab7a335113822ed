"""Plots of results: heat maps, curves and bars with readable labels at every size. Needs matplotlib."""

from __future__ import annotations

import math
from functools import cache
from io import BytesIO
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps, font_manager, pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PatchCollection
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, MaxNLocator, NullLocator
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label
from hookline.experiments.result import Result
from hookline.experiments.results.plot_layout import (
    LOG_AXES,
    SEQUENCES,
    curve_axis,
    error_range,
    least_positive,
    plot_parts,
    value_range,
    within_noise,
)

_FONT = 8.0  # of labels, in points
_LONGEST = 18  # characters of a label
_EMPTY = "0.86"  # missing cells
_INK, _FAINT = "#2b5f94", "0.45"
_HATCH, _ERROR = "0.6", "0.25"
_WITH_INTERVALS = " · with 95 % intervals"
_WITH_HATCHES = " · hatched: within noise (95 %)"
_DIVERGING, _SEQUENTIAL = "RdBu", "Blues"
_FINEST = 900  # cells of a heat map along one axis; more are thinner than a pixel


class Panels(Figure):
    """A figure with several panels. A notebook shows it once, whether or not the cell ends with it."""

    def _ipython_display_(self) -> None:
        from IPython.display import Image, display

        drawn = BytesIO()
        self.savefig(drawn, format="png", bbox_inches="tight")
        display(Image(drawn.getvalue()))
        pyplot.close(self)  # which would show it again when the cell ends


def plot(
    result: Result,
    ax: Axes | None = None,
    *,
    panels: str | None = None,
    title: str | None = None,
    center: float | None = None,
    **kwargs: Any,
) -> Axes | Figure:
    """Draw a result: one axis as a line or bars, two as a heat map, and one panel for each label of a third.

    Layers, positions and counts are joined by a line; labels such as heads or points are categories and are drawn as
    bars. A result over a count or a size, as returned by `ablation.cumulative` and `circuits.faithfulness`, is drawn as
    curves; sizes are on a logarithmic axis, which `ax.set_xscale("linear")` changes. There is one panel per metric
    if there are several, otherwise per label of the first of three axes, or of the axis that `panels` names.

    Colors are blue above and red below `center`, on a symmetric scale; `center` defaults to the value of the run
    that was changed, or 0. Values without such a run that are never negative, such as attention or probabilities,
    are drawn in one color, from 0 up. The color bar shows the range of the values. Panels of metrics have their own
    scales, other panels share one. Bars start at the value of the run that was changed, or 0. A heat map or bar
    chart with more than 60 categories on an axis shows the 40 with the strongest cells, and its title says so.
    Means over several examples have their 95 % interval, as a band around a line or a whisker on a bar; cells of a heat
    map whose interval contains the value of the run that was changed (or `center`) are hatched.
    Other keywords are passed to matplotlib's `imshow`, `plot` or `bar` (`cmap`, `vmin`, `vmax`, `norm`; `color`,
    `marker`). A title that `ax` has already is kept, unless `title` is given. Returns the Axes, or the Figure if
    there are panels.
    """
    split, result, automatic = plot_parts(result, panels)
    if center is not None and (len(result.axes) - (split is not None) == 1 or {"norm", "vmin", "vmax"} & kwargs.keys()):
        raise HooklineError(
            "center is the middle of a heat map's colors: omit it for lines, and with norm, vmin or vmax"
        )
    heading = drawable(automatic if title is None else title, cut=False)
    if split is not None:
        return _panels(result, split, ax, heading, center, kwargs)
    if ax is None:
        ax = pyplot.subplots(figsize=_size(result), layout="constrained")[1]
    scale = _scale(result, center, kwargs)
    heading += _draw(result, ax, kwargs, scale)
    if title is None and ax.get_title(loc="left"):
        return ax  # a result drawn before has given the title
    ax.set_title(_wrapped(heading, ax.figure.get_figwidth()), fontsize=_FONT + 2, loc="left")  # type: ignore[union-attr]
    return ax


def _wrapped(heading: str, inches: float) -> str:
    """Wrap a heading into lines that fit a figure of that width."""
    letters = 72 * inches / (0.6 * (_FONT + 2))
    return fill(heading, max(int(letters) - 6, 20), break_long_words=False)


def _size(result: Result) -> tuple[float, float]:
    """Width and height of a figure in inches, by the number of cells."""
    if curve_axis(result) is not None:
        return 6.4, 3.2
    rows, columns = result.shape
    room = 0.9 if all(isinstance(x, str) for x in result.coords[result.axes[1]]) else 0.5
    return min(max(0.34 * columns + 1.8, 4.2), 12.0), min(max(0.24 * rows + 0.6, 1.8), 8.0) + room


def _panels(result: Result, split: str, ax: Axes | None, heading: str, center: float | None, kwargs: Any) -> Figure:
    labels = result.coords[split]
    if ax is not None:
        raise HooklineError(f"{len(labels)} panels need a figure of their own: omit ax, or select one with sel(…)")
    parts = [result.isel(**{split: at}) for at in range(len(labels))]
    columns = {1: 1, 2: 2, 3: 3, 4: 2}.get(len(labels), math.ceil(math.sqrt(len(labels))))
    rows = math.ceil(len(labels) / columns)
    width, height = _size(parts[0])
    is_own, is_lines = split == "metric", curve_axis(parts[0]) is not None
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(min(width * columns, 16.0), min(height * rows, 13.0)),
        layout="constrained",
        squeeze=False,
        sharey=is_lines and not is_own,
        FigureClass=Panels,
    )
    shared = None if is_own else _scale(result, center, kwargs)
    notes: dict[str, None] = {}
    for at, (part, label, panel) in enumerate(zip(parts, labels, grid.flat, strict=False)):
        notes[_draw(part, panel, kwargs, shared or _scale(part, center, kwargs), bar=is_own)] = None
        panel.set_title(
            drawable(label if isinstance(label, str) else f"{split} {label}"), fontsize=_FONT + 1, loc="left"
        )
        _label_edges(panel, is_left=at % columns == 0, is_lowest=at + columns >= len(parts), is_own=is_own)
    for panel in grid.flat[len(parts) :]:
        panel.set_visible(False)
    if shared is not None and not is_lines:
        plain_bar(figure.colorbar(grid[0, 0].images[0], ax=grid, shrink=0.8, pad=0.01), shared.shown)
    heading += "".join(notes)
    figure.suptitle(_wrapped(heading, figure.get_figwidth()), fontsize=_FONT + 3, x=0.01, ha="left")
    return figure


def _label_edges(ax: Axes, *, is_left: bool, is_lowest: bool, is_own: bool) -> None:
    """Remove labels that the panel to the left or below already has."""
    if not is_lowest:
        ax.tick_params(axis="x", labelbottom=False)
        ax.set_xlabel("")
    if not is_left:
        ax.set_ylabel("")
        ax.tick_params(axis="y", labelleft=is_own)


def _draw(result: Result, ax: Axes, kwargs: dict[str, Any], scale: _Scale, *, bar: bool = True) -> str:
    """Draw one panel; returns what its heading has to say about intervals."""
    along = curve_axis(result)
    if along is None:
        _heat(result, ax, scale, bar=bar)
        return _hatched(result, ax, scale)
    if len(result.axes) == 1:
        _line(result, ax, kwargs)
    else:
        (other,) = (axis for axis in result.axes if axis != along)
        for at, label in enumerate(result.coords[other]):
            _line(result.isel(**{other: at}), ax, {"color": f"C{at}", "label": drawable(str(label)), **kwargs})
    return "" if result.by_example is None else _WITH_INTERVALS


def _hatched(result: Result, ax: Axes, scale: _Scale) -> str:
    """Hatch the cells whose interval contains the middle of the colors."""
    noise = within_noise(result, scale.center)
    if noise is None or not bool(noise.any()):
        return ""
    cells = [Rectangle((column - 0.5, row - 0.5), 1, 1) for row, column in noise.nonzero().tolist()]
    ax.add_collection(PatchCollection(cells, facecolor="none", edgecolor=_HATCH, linewidth=0, hatch="////"))
    return _WITH_HATCHES


def _heat(result: Result, ax: Axes, scale: _Scale, *, bar: bool) -> None:
    rows, columns = result.shape
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)  # ticks keep their places if cells are merged
    options = {"aspect": "auto", "interpolation": "nearest", **scale.options, "extent": extent}
    image = ax.imshow(np.ma.masked_invalid(_merged(result, scale.origin)), **options)
    for axis, name in zip((ax.yaxis, ax.xaxis), result.axes, strict=True):
        _label_axis(axis, name, result.coords[name])
    ax.tick_params(length=2, color=_FAINT)
    for side in ax.spines.values():
        side.set_visible(False)
    if bar:
        plain_bar(ax.figure.colorbar(image, ax=ax, pad=0.02, aspect=25), scale.shown)


def _merged(result: Result, origin: float) -> np.ndarray:
    """The cells to draw. Where they would be thinner than a pixel, several are drawn as the strongest of them."""
    values = result.numpy()
    for axis, size in enumerate(values.shape):
        group, strongest = math.ceil(size / _FINEST), []
        for block in np.split(values, range(group, size, group), axis) if group > 1 else ():
            at = np.nan_to_num(np.abs(block - origin), nan=-1.0).argmax(axis, keepdims=True)
            strongest.append(np.take_along_axis(block, at, axis))
        values = np.concatenate(strongest, axis) if strongest else values
    return values


class _Scale(NamedTuple):
    """The colors of a heat map: options of `imshow`, the value in the middle, and the range that the bar shows."""

    options: dict[str, Any]
    origin: float
    shown: tuple[float, float] | None
    center: float | None = None
    """The middle, if the caller gave it."""


def _scale(result: Result, center: float | None, kwargs: dict[str, Any]) -> _Scale:
    """The colors of a result: one color from 0 up for values that have no center, such as attention; else two."""
    scale_options = {"norm", "vmin", "vmax"} & kwargs.keys()
    if "norm" in scale_options and len(scale_options) > 1:
        raise HooklineError("a norm has its own vmin and vmax: pass either norm, or vmin and vmax")
    origin, low, high, is_one_sided = value_range(result, center)
    options = {"cmap": _SEQUENTIAL if is_one_sided else _DIVERGING, "norm": None, **kwargs}
    vmin, vmax = options.pop("vmin", 0.0 if is_one_sided else None), options.pop("vmax", None)
    options["norm"] = options["norm"] or color_norm(result.values, origin, vmin, vmax)
    options["cmap"] = colors(options["cmap"])
    low, high = min(low, origin), max(high, origin)
    return _Scale(options, origin, (low, high) if low < high and not scale_options else None, center)


def color_norm(values: Tensor, center: float, vmin: float | None, vmax: float | None) -> Normalize:
    """A scale that goes as far below the center as above it, unless `vmin` or `vmax` is given."""
    done = values[values.isfinite()]
    reach = (float((done - center).abs().max()) if len(done) else 0.0) or 1.0
    low, high = center - reach if vmin is None else vmin, center + reach if vmax is None else vmax
    if not low < high:
        raise HooklineError(f"the colors would go from {low} to {high}: pass a vmin below vmax, both or neither")
    return Normalize(low, high)


def colors(cmap: str | Colormap) -> Colormap:
    """A colormap by its name, gray for missing values."""
    if isinstance(cmap, str) and cmap not in colormaps:
        raise HooklineError(f"matplotlib has no colormap {cmap!r}: use 'RdBu', 'PiYG', 'viridis', …")
    return (colormaps[cmap] if isinstance(cmap, str) else cmap).with_extremes(bad=_EMPTY)


def plain_bar(bar: Any, shown: tuple[float, float] | None = None) -> None:
    """Style a color bar: no frame, small numbers, and only the range `shown`."""
    if shown is not None:
        bar.ax.set_ylim(*shown)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=_FONT, length=2, color=_FAINT)


def _line(result: Result, ax: Axes, kwargs: dict[str, Any]) -> None:
    (axis,) = result.axes
    labels = result.coords[axis]
    is_scale = not any(isinstance(label, str) for label in labels) and axis in SEQUENCES
    places: Any = labels if is_scale else range(len(labels))
    ink: dict[str, Any] = {} if {"color", "c"} & kwargs.keys() else {"color": _INK}
    bounds = error_range(result)
    if axis in SEQUENCES:
        dots = {} if len(labels) > 60 else {"marker": "o", "markersize": 3.5}
        style: dict[str, Any] = {"linewidth": 1.4, **dots, **ink, **kwargs}
        (line,) = ax.plot(places, result.numpy(), **style)
        if bounds is not None:
            low, high = (bound.numpy() for bound in bounds)
            ax.fill_between(places, low, high, color=line.get_color(), alpha=0.18, linewidth=0, zorder=1)
    else:
        bars = {key: value for key, value in kwargs.items() if key not in ("marker", "linestyle")}
        ax.bar(places, result.numpy() - result.origin, **{"width": 0.7, "bottom": result.origin} | ink | bars)
        if bounds is not None:
            reach = np.stack([result.numpy() - bounds[0].numpy(), bounds[1].numpy() - result.numpy()]).clip(min=0.0)
            ax.errorbar(places, result.numpy(), reach, fmt="none", ecolor=_ERROR, elinewidth=1.0, capsize=2.0)
    ax.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
    for key, dash in (("clean", "--"), ("corrupted", ":")):
        value = result.info.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in _legend(ax):
            ax.axhline(value, color=_FAINT, linewidth=1.0, linestyle=dash, label=key, zorder=1)
    if _legend(ax):
        beside: dict[str, Any] = (
            {} if axis in SEQUENCES else {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        )  # bars hide it
        ax.legend(fontsize=_FONT, frameon=False, **beside)
    if is_scale and axis in LOG_AXES and (smallest := least_positive(labels)) is not None:
        ax.set_xscale("symlog", linthresh=smallest, linscale=0.5)
        ax.set_xlim(-0.3 * smallest, 1.2 * max(float(label) for label in labels))
        powers = [10.0**power for power in range(math.ceil(math.log10(smallest)), 1)]
        ax.xaxis.set_major_locator(FixedLocator([0.0, *powers]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))
    elif is_scale:
        ax.xaxis.set_major_locator(MaxNLocator(integer=all(isinstance(label, int) for label in labels)))
    if is_scale:
        ax.set_xlabel(axis, fontsize=_FONT + 1)
        ax.tick_params(labelsize=_FONT)
    else:
        ax.set_xlim(-0.5, len(labels) - 0.5)
        _label_axis(ax.xaxis, axis, labels)
    ax.tick_params(axis="y", labelsize=_FONT)
    ax.spines[["top", "right"]].set_visible(False)


def _legend(ax: Axes) -> list[str]:
    return list(ax.get_legend_handles_labels()[1])


class _Thinned(Locator):
    """Ticks at 0, 1, …, as many as there is room for when the figure is drawn."""

    def __init__(self, count: int, points: float) -> None:
        self.count, self.points = count, points  # `points` is the room that one label needs

    def __call__(self) -> list[int]:
        step = math.ceil(self.points / _spacing(self.axis))  # type: ignore[arg-type]
        return list(range(0, self.count, max(1, step)))

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """The ticks between two bounds."""
        return [place for place in self() if min(vmin, vmax) <= place <= max(vmin, vmax)]


def _spacing(axis: Axis) -> float:
    """The distance between two neighboring ticks, in points."""
    box, figure = axis.axes.get_window_extent(), axis.get_figure(root=True)
    length = (box.width if axis.axis_name == "x" else box.height) * 72 / figure.dpi  # type: ignore[union-attr,attr-defined]
    low, high = axis.get_view_interval()
    return max(length, 1.0) / max(abs(high - low), 1e-9)


def _label_axis(axis: Axis, name: str, labels: list[Label]) -> None:
    texts = [drawable(str(label)) for label in labels]
    widest = max(width(text) for text in sorted(set(texts), key=len)[-5:])
    is_across = axis.axis_name == "x"  # type: ignore[attr-defined]
    is_words = any(isinstance(label, str) for label in labels)
    is_upright = is_across and is_words and widest + _FONT > 0.8 * _spacing(axis)
    room = widest + _FONT if is_across and not is_upright else 1.25 * _FONT
    axis.set_major_locator(_Thinned(len(labels), room))
    axis.set_major_formatter(FuncFormatter(lambda at, _: texts[round(at)] if 0 <= round(at) < len(texts) else ""))
    axis.set_tick_params(labelsize=_FONT, labelrotation=90 if is_upright else 0)
    axis.set_label_text(name, fontsize=_FONT + 1)


@cache
def width(text: str, size: float = _FONT) -> float:
    """The width of a text in points; dollar signs are drawn as such."""
    font = font_manager.FontProperties(size=size)
    return float(text_to_path.get_text_width_height_descent(text.replace(r"\$", "$") or " ", font, ismath=False)[0])


def drawable(text: str, *, cut: bool = True) -> str:
    """A text as it can be drawn: no formulas, no line breaks, no characters that the font lacks, shortened."""
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    printable_text = "".join(
        x if x.isprintable() and font.get_char_index(ord(x)) else x.encode("unicode_escape").decode() for x in text
    )
    short = printable_text if not cut or len(printable_text) <= _LONGEST else printable_text[: _LONGEST - 1] + "…"
    return short.replace("$", r"\$")
