"""Pictures of results: heat maps and lines whose labels can be read at every size. Needs matplotlib."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib import colormaps, font_manager, pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator

from hookline.errors import HooklineError
from hookline.experiments.labels import Label
from hookline.experiments.result import Result

_FONT = 8.0  # of labels, in points
_LONGEST = 18  # characters of a label
_MOST_PANELS = 48
_EMPTY = "0.86"  # cells that were not done
_INK, _FAINT = "#2b5f94", "0.45"


def plot(
    result: Result,
    ax: Axes | None = None,
    *,
    panels: str | None = None,
    title: str | None = None,
    centre: float | None = None,
    **kwargs: Any,
) -> Axes | Figure:
    """Draw a result: one axis as a line, two as a heat map, and a panel for each label of a further one.

    Panels are for the metrics where there are several, else for the first of three axes, or for the axis that
    `panels` names. Colours are blue above and red below `centre`, equally far on both sides: unless told, the value of
    the run that was changed, or 0. Panels of metrics have scales of their own, others share one. What else is given
    goes to matplotlib's `imshow` or `plot` (`cmap`, `vmin`, `vmax`, `norm`; `color`, `marker`). Gives the Axes, or the
    Figure where there are panels.
    """
    split = _split_axis(result, panels)
    rest = [axis for axis in result.axes if axis != split]
    if len(rest) not in (1, 2):
        raise HooklineError(
            f"a picture shows one or two axes, and panels for one more: this result has "
            f"{', '.join(map(repr, result.axes)) or 'none'}. Take a part with sel(…), or average with mean(…)"
        )
    if centre is not None and (len(rest) == 1 or {"norm", "vmin", "vmax"} & kwargs.keys()):
        raise HooklineError("centre is for the colours of a heat map, where no norm, vmin or vmax sets them already")
    heading = drawable(_heading(result) if title is None else title, cut=False)
    if split is not None:
        return _panels(result, split, ax, heading, centre, kwargs)
    if ax is None:
        ax = pyplot.subplots(figsize=_size(result), layout="constrained")[1]
    _draw(result, ax, centre, kwargs)
    ax.set_title(heading, fontsize=_FONT + 2, loc="left")
    return ax


def _split_axis(result: Result, panels: str | None) -> str | None:
    """The axis whose labels get a panel each."""
    if panels is not None:
        return result._axis(panels)
    if "metric" in result.axes and len(result.axes) > 1:
        return "metric"
    return result.axes[0] if len(result.axes) == 3 else None


def _heading(result: Result) -> str:
    done = int((~result.values.isnan()).sum())
    share = "" if result.complete else f" (incomplete: {done} of {result.values.numel()} cells)"
    is_share = ", normalised" if result.info.get("normalised") else ""
    return f"{result.name}{is_share}{share}"


def _size(result: Result) -> tuple[float, float]:
    """Width and height in inches that give every cell some room."""
    if len(result.axes) == 1:
        return 6.4, 3.2
    rows, columns = result.shape
    room = 0.9 if all(isinstance(x, str) for x in result.coords[result.axes[1]]) else 0.5
    return min(max(0.34 * columns + 1.8, 4.2), 12.0), min(max(0.24 * rows + 0.6, 1.8), 8.0) + room


def _panels(result: Result, split: str, ax: Axes | None, heading: str, centre: float | None, kwargs: Any) -> Figure:
    labels = result.coords[split]
    if ax is not None:
        raise HooklineError(f"{len(labels)} panels need a figure of their own: leave out ax, or take one with sel(…)")
    if len(labels) > _MOST_PANELS:
        raise HooklineError(
            f"{len(labels)} panels for {split!r} are too many to read: choose with sel({split}=[…]), or another axis "
            f"with panels=…"
        )
    parts = [result.isel(**{split: at}) for at in range(len(labels))]
    columns = {1: 1, 2: 2, 3: 3, 4: 2}.get(len(labels), math.ceil(math.sqrt(len(labels))))
    rows = math.ceil(len(labels) / columns)
    width, height = _size(parts[0])
    is_own = split == "metric"
    is_lines = len(parts[0].axes) == 1
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(min(width * columns, 16.0), min(height * rows, 13.0)),
        layout="constrained",
        squeeze=False,
        sharey=is_lines and not is_own,
    )
    shared = kwargs if is_own or is_lines else {"norm": _norm(result, centre, kwargs), **_rest(kwargs)}
    images = []
    for at, (part, label, each) in enumerate(zip(parts, labels, grid.flat, strict=False)):
        images.append(_draw(part, each, centre, shared, bar=is_own))
        each.set_title(
            drawable(label if isinstance(label, str) else f"{split} {label}"), fontsize=_FONT + 1, loc="left"
        )
        _label_edges(each, is_left=at % columns == 0, is_lowest=at + columns >= len(parts), is_own=is_own)
    for each in grid.flat[len(parts) :]:
        each.set_visible(False)
    if not is_own and images[0] is not None:
        plain_bar(figure.colorbar(images[0], ax=grid, shrink=0.8, pad=0.01))
    figure.suptitle(heading, fontsize=_FONT + 3, x=0.01, ha="left")
    return figure


def _label_edges(ax: Axes, *, is_left: bool, is_lowest: bool, is_own: bool) -> None:
    """Leave out what the panel to the left or below says already."""
    if not is_lowest:
        ax.tick_params(axis="x", labelbottom=False)
        ax.set_xlabel("")
    if not is_left:
        ax.set_ylabel("")
        ax.tick_params(axis="y", labelleft=is_own)


def _draw(
    result: Result, ax: Axes, centre: float | None, kwargs: dict[str, Any], *, bar: bool = True
) -> AxesImage | None:
    if len(result.axes) == 1:
        _line(result, ax, kwargs)
        return None
    return _heat(result, ax, centre, kwargs, bar=bar)


def _heat(result: Result, ax: Axes, centre: float | None, kwargs: dict[str, Any], *, bar: bool) -> AxesImage:
    options = {"aspect": "auto", "interpolation": "nearest", **_rest(kwargs), "norm": _norm(result, centre, kwargs)}
    options["cmap"] = colours(options.get("cmap", "RdBu"))
    image = ax.imshow(np.ma.masked_invalid(result.numpy()), **options)
    down, across = result.axes
    _label_axis(ax.yaxis, down, result.coords[down])
    _label_axis(ax.xaxis, across, result.coords[across])
    ax.tick_params(length=2, color=_FAINT)
    for side in ax.spines.values():
        side.set_visible(False)
    if bar:
        plain_bar(ax.figure.colorbar(image, ax=ax, pad=0.02, aspect=25))
    return image


def _norm(result: Result, centre: float | None, kwargs: dict[str, Any]) -> Any:
    """The scale of the colours: as far below the centre as above it, unless told otherwise."""
    if "norm" in kwargs:
        return kwargs["norm"]
    centre = result.origin if centre is None else centre
    done = result.values[result.values.isfinite()]
    reach = float((done - centre).abs().max()) if len(done) else 0.0
    low, high = kwargs.get("vmin", centre - (reach or 1.0)), kwargs.get("vmax", centre + (reach or 1.0))
    if not low < high:
        raise HooklineError(f"the colours would go from {low} to {high}: give a vmin below vmax, both or neither")
    return Normalize(low, high)


def _rest(kwargs: dict[str, Any]) -> dict[str, Any]:
    if "norm" in kwargs and {"vmin", "vmax"} & kwargs.keys():
        raise HooklineError("a norm has its own vmin and vmax: give the one or the others")
    return {key: value for key, value in kwargs.items() if key not in ("norm", "vmin", "vmax")}


def colours(cmap: str | Colormap) -> Colormap:
    """Matplotlib's colours by their name."""
    if isinstance(cmap, str) and cmap not in colormaps:
        raise HooklineError(f"matplotlib has no colours {cmap!r}: for instance 'RdBu', 'PiYG', 'viridis'")
    return (colormaps[cmap] if isinstance(cmap, str) else cmap).with_extremes(bad=_EMPTY)


def plain_bar(bar: Any) -> None:
    """A bar of colours without a frame, its numbers small."""
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=_FONT, length=2, color=_FAINT)


def _line(result: Result, ax: Axes, kwargs: dict[str, Any]) -> None:
    (axis,) = result.axes
    labels = result.coords[axis]
    is_scale = not any(isinstance(label, str) for label in labels)
    places: Any = labels if is_scale else range(len(labels))
    dots = {} if len(labels) > 60 else {"marker": "o", "markersize": 3.5}
    style: dict[str, Any] = (
        {"linewidth": 1.4, **dots} | ({} if {"color", "c"} & kwargs.keys() else {"color": _INK}) | kwargs
    )
    ax.plot(places, result.numpy(), **style)
    ax.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
    for key, dash in (("clean", "--"), ("corrupted", ":")):
        value = result.info.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            ax.axhline(value, color=_FAINT, linewidth=1.0, linestyle=dash, label=key, zorder=1)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=_FONT, frameon=False)
    if is_scale:
        ax.xaxis.set_major_locator(MaxNLocator(integer=all(isinstance(label, int) for label in labels)))
        ax.set_xlabel(axis, fontsize=_FONT + 1)
        ax.tick_params(labelsize=_FONT)
    else:
        ax.set_xlim(-0.5, len(labels) - 0.5)
        _label_axis(ax.xaxis, axis, labels)
    ax.tick_params(axis="y", labelsize=_FONT)
    ax.spines[["top", "right"]].set_visible(False)


class _Thinned(Locator):
    """Ticks at places 0, 1, …, as many of them as there is room for when the picture is drawn."""

    def __init__(self, count: int, points: float) -> None:
        self.count, self.points = count, points  # the room that one label needs

    def __call__(self) -> list[int]:
        step = math.ceil(self.points / _spacing(self.axis))  # type: ignore[arg-type]
        return list(range(0, self.count, max(1, step)))

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """The places between two bounds."""
        return [place for place in self() if min(vmin, vmax) <= place <= max(vmin, vmax)]


def _spacing(axis: Axis) -> float:
    """How far two neighbouring places are apart, in points."""
    box, figure = axis.axes.get_window_extent(), axis.get_figure(root=True)
    length = (box.width if axis.axis_name == "x" else box.height) * 72 / figure.dpi  # type: ignore[union-attr,attr-defined]
    low, high = axis.get_view_interval()
    return max(length, 1.0) / max(abs(high - low), 1e-9)


def _label_axis(axis: Axis, name: str, labels: list[Label]) -> None:
    texts = [drawable(str(label)) for label in labels]
    widest = max(TextPath((0, 0), text.replace(r"\$", "$") or " ", size=_FONT).get_extents().width for text in texts)
    is_across = axis.axis_name == "x"  # type: ignore[attr-defined]
    is_words = any(isinstance(label, str) for label in labels)
    is_upright = is_across and is_words and widest + _FONT > 0.8 * _spacing(axis)
    room = widest + _FONT if is_across and not is_upright else 1.25 * _FONT
    axis.set_major_locator(_Thinned(len(labels), room))
    axis.set_major_formatter(FuncFormatter(lambda at, _: texts[round(at)] if 0 <= round(at) < len(texts) else ""))
    axis.set_tick_params(labelsize=_FONT, labelrotation=90 if is_upright else 0)
    axis.set_label_text(name, fontsize=_FONT + 1)


def drawable(text: str, *, cut: bool = True) -> str:
    """A text that can be drawn: no formulas, no line breaks, no letters that the font lacks, not too long."""
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    known = "".join(
        x if x.isprintable() and font.get_char_index(ord(x)) else x.encode("unicode_escape").decode() for x in text
    )
    short = known if not cut or len(known) <= _LONGEST else known[: _LONGEST - 1] + "…"
    return short.replace("$", r"\$")
