"""Plots of results as pages: the same heat maps, curves and bars as `plotting`, drawn in a browser."""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal

import torch

from hookline.errors import HooklineError
from hookline.experiments.result import Result
from hookline.experiments.results.plot_layout import (
    LOG_AXES,
    SEQUENCES,
    curve_axis,
    error_range,
    log_places,
    plot_parts,
    value_range,
    within_noise,
)
from hookline.experiments.results.statistics import BASELINES
from hookline.pages.html_page import HtmlPage, figure
from hookline.pages.tensors import packed_tensor


def html_plot(
    result: Result,
    *,
    panels: str | None = None,
    title: str | None = None,
    center: float | None = None,
    theme: Literal["light", "dark"] | None = None,
) -> HtmlPage:
    """Draw a result as a page, by the rules of `plotting.plot`."""
    split, shown, heading = plot_parts(result, panels)
    if center is not None and curve_axis(shown if split is None else shown.isel(**{split: 0})) is not None:
        raise HooklineError("center is the middle of a heat map's colors: omit it for lines and bars")
    heading = heading if title is None else title
    if split is None:
        return figure([_panel(shown, "", shown, center)], heading, theme)
    drawn = []
    for at, label in enumerate(shown.coords[split]):
        part = shown.isel(**{split: at})
        name = label if isinstance(label, str) else f"{split} {label}"
        drawn.append(
            {**_panel(part, name, part if split == "metric" else shown, center), "narrow": part.shape[-1] <= 14}
        )
    return figure(drawn, heading, theme)


def _panel(result: Result, title: str, scale_of: Result, center: float | None) -> dict[str, Any]:
    """One panel; its colors go as far as those of `scale_of`."""
    along = curve_axis(result)
    if along is None:
        return _heat(result, title, scale_of, center)
    labels = result.coords[along]
    marks = {key: value for key in BASELINES if _is_number(value := result.info.get(key))}
    if len(result.axes) == 1 and along not in SEQUENCES:
        bars = {"values": packed_tensor(result.values), "origin": result.origin, **_bounds(result)}
        return {"kind": "bars", "title": title, "axis": along, "labels": labels, "marks": marks, **bars}
    others = [axis for axis in result.axes if axis != along]
    series = [str(label) for label in result.coords[others[0]]] if others else [result.name]
    values = result.values.movedim(result.axes.index(along), -1).reshape(len(series), len(labels))
    is_scale = not any(isinstance(label, str) for label in labels)
    return {
        "kind": "curves",
        "title": title,
        "axis": along,
        "labels": labels,
        "places": (log_places(labels) if along in LOG_AXES else [float(x) for x in labels]) if is_scale else None,
        "series": series,
        "marks": marks,
        "values": packed_tensor(values),
        **_bounds(result, along),
    }


def _bounds(result: Result, along: str | None = None) -> dict[str, Any]:
    """The intervals of curves or bars, laid out as their values."""
    bounds = error_range(result)
    if bounds is None:
        return {}
    low, high = (
        x.values if along is None else x.values.movedim(x.axes.index(along), -1).reshape(-1, len(x.coords[along]))
        for x in bounds
    )
    return {"low": packed_tensor(low), "high": packed_tensor(high)}


def _heat(result: Result, title: str, scale_of: Result, center: float | None) -> dict[str, Any]:
    origin, low, high, is_one_sided = value_range(scale_of, center)
    origin = 0.0 if is_one_sided else origin
    rows, columns = result.axes
    noise = within_noise(result, center)
    hatches = {} if noise is None or not bool(noise.any()) else {"noise": packed_tensor(noise.float())}
    return {
        "kind": "heat",
        "title": title,
        "caption": f"{rows} × {columns}",
        "names": [rows, columns],
        "rows": result.coords[rows],
        "columns": result.coords[columns],
        "values": packed_tensor(torch.where(result.values.isfinite(), result.values, torch.nan)),
        "center": origin,
        "scale": "one" if is_one_sided else "zero",
        "most": max(abs(low - origin), abs(high - origin)) or 1.0,
        **hatches,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
