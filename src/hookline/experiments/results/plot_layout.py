"""What a plot of a result shows: panels, curves or heat maps, headings and ranges, however it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import NamedTuple

from jaxtyping import Bool
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label
from hookline.experiments.result import Result
from hookline.experiments.results.statistics import BASELINES

SEQUENCES = ("layer", "pos", "count", "size", "step", "coefficient")
"""Axes whose neighbors are joined by a line. Labels of other axes are categories, drawn as bars."""
LOG_AXES = ("size",)
"""Axes of shares from 0 to 1, most of which are small: drawn on a logarithmic scale, but for 0."""
_CURVES = ("count", "size")
"""Axes of counts: a result over one of these and another axis is drawn as curves."""
_READABLE = 60  # categories on one axis of a heat map
_SHOWN = 40  # drawn if there are more
_MOST_PANELS = 48
_HATCHED = 4096  # cells; hatching of more cannot be seen


def plot_parts(result: Result, panels: str | None) -> tuple[str | None, Result, str]:
    """The axis with one panel per label, the result with as many categories as can be read, and its heading."""
    split = _split_axis(result, panels)
    rest = [axis for axis in result.axes if axis != split]
    if len(rest) not in (1, 2):
        raise HooklineError(
            f"a plot shows one or two axes, and panels for one more: this result has "
            f"{', '.join(map(repr, result.axes)) or 'none'}. Select with sel(…), or average with mean(…)"
        )
    count = 1 if split is None else len(result.coords[split])
    if count > _MOST_PANELS:
        raise HooklineError(
            f"{count} panels for {split!r} are too many to read: select some with sel({split}=[…]), or another axis "
            f"with panels=…"
        )
    shown, note = _readable(result, split)
    return split, shown, _heading(shown) + note


def _split_axis(result: Result, panels: str | None) -> str | None:
    """The axis with one panel per label."""
    if panels is not None:
        return result._axis(panels)
    if "metric" in result.axes and len(result.axes) > 1:
        return "metric"
    return result.axes[0] if len(result.axes) == 3 else None


def _heading(result: Result) -> str:
    done = int((~result.values.isnan()).sum())
    share = "" if result.complete else f" (incomplete: {done} of {result.values.numel()} cells)"
    is_share = ", normalized" if result.info.get("normalized") else ""
    about = f": {result.info['about']}" if isinstance(result.info.get("about"), str) else ""
    model = f" · {result.info['model']}" if isinstance(result.info.get("model"), str) else ""
    return f"{result.name}{is_share}{about}{model}{share}"


def _readable(result: Result, split: str | None) -> tuple[Result, str]:
    """The result with at most a readable number of categories, those with the strongest cells; and a note on them."""
    notes = []
    axes = [axis for axis in result.axes if axis != split]
    for axis in axes:
        labels = result.coords[axis]
        if len(labels) <= _READABLE or axis in SEQUENCES or not all(isinstance(label, str) for label in labels):
            continue
        far = (result.values - result.origin).abs().nan_to_num(0.0)
        strength = far.movedim(result.axes.index(axis), 0).reshape(len(labels), -1).amax(1)
        result = result.isel(**{axis: strength.topk(_SHOWN).indices.sort().values.tolist()})
        notes.append(f"{_SHOWN} of {len(labels)} {axis}s")
    return result, f" (strongest: {', '.join(notes)})" if notes else ""


def curve_axis(result: Result) -> str | None:
    """The x axis if the result is drawn as lines or bars; None if it is drawn as a heat map."""
    return result.axes[0] if len(result.axes) == 1 else next((x for x in result.axes if x in _CURVES), None)


def least_positive(labels: Sequence[Label]) -> float | None:
    """The smallest positive number on an axis; None if a logarithmic scale from there to the largest shows nothing."""
    positive = sorted(float(label) for label in labels if float(label) > 0)
    return positive[0] if len(positive) > 1 else None


def log_places(labels: Sequence[Label]) -> list[float]:
    """Where numbers are on a logarithmic axis with 0 on its left."""
    smallest = least_positive(labels)
    if smallest is None:
        return [float(label) for label in labels]
    return [1 + log10(float(label) / smallest) if float(label) > 0 else 0.0 for label in labels]


def error_range(result: Result) -> tuple[Result, Result] | None:
    """The interval of each value on a curve or bar; None without examples."""
    return None if result.by_example is None else result.interval()


def within_noise(result: Result, center: float | None) -> Bool[Tensor, "row column"] | None:
    """The cells of a heat map whose interval contains the middle of its colors; None if none can be told or seen.

    The middle is the value of the run that was changed, example by example, unless `center` is given.
    """
    is_one_sided = value_range(result, center).is_one_sided
    if result.by_example is None or is_one_sided or result.values.numel() > _HATCHED:
        return None
    has_origin = center is None and result._origin() in result.info
    low, high = (result.effect if has_origin else result - (center or 0.0)).interval()
    return (low.values <= 0) & (high.values >= 0) & (low.values < high.values)


class ValueRange(NamedTuple):
    """The range of the colors: the middle, the lowest and highest value, and whether there is one color, from 0 up."""

    origin: float
    low: float
    high: float
    is_one_sided: bool


def value_range(result: Result, center: float | None) -> ValueRange:
    """The range of a heat map: one color for values that have no center, such as attention; otherwise two."""
    done, origin = result.values[result.values.isfinite()], result.origin if center is None else center
    low, high = (float(done.min()), float(done.max())) if len(done) else (origin, origin)
    is_one_sided = center is None and not any(key in result.info for key in BASELINES) and 0 <= low < high
    return ValueRange(origin, low, high, is_one_sided)
