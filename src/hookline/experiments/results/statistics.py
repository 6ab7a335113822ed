"""Statistics of a result over its examples: spread, intervals, effects, and comparisons with another result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import HooklineError, how_many
from hookline.experiments.core.labels import number_text
from hookline.experiments.results import intervals, paired_tests
from hookline.experiments.results.comparisons import Comparison
from hookline.experiments.results.control_ranges import range_rescaled
from hookline.experiments.results.intervals import IntervalMethod

if TYPE_CHECKING:
    from hookline.experiments.result import Result

BASELINES = ("clean", "corrupted")
EXAMPLE_AXES = ("example", "sample")
"""Axes of repeated measurements: prompts, or samples of noise."""


def mean_of_examples(result: Result) -> Result:
    """The mean over the last axis, with the examples beside it if there are several."""
    *axes, last = result.axes
    coords = {axis: result.coords[axis] for axis in axes}
    info = result._info_along([last], lambda value, shared: value.mean(*shared))
    inner = result if result.shape[-1] > 1 else None
    values = result.values.nanmean(-1)
    return replace(result, values=values, axes=tuple(axes), coords=coords, info=info, by_example=inner)


def std_of_cells(result: Result) -> Result:
    """The standard deviation of each cell."""
    return _of_cells(result, intervals.std(_examples(result, "std").values), "std")


def sem_of_cells(result: Result) -> Result:
    """The standard error of the mean of each cell."""
    return _of_cells(result, intervals.sem(_examples(result, "sem").values), "sem")


def interval_of_cells(result: Result, level: float, method: IntervalMethod) -> tuple[Result, Result]:
    """The bounds of the mean of each cell."""
    low, high = intervals.interval(_examples(result, "interval").values, level, method)
    return _of_cells(result, low, "low"), _of_cells(result, high, "high")


def effect_of_cells(result: Result) -> Result:
    """The values minus those of the run that was changed, with those of each example."""
    inner = None if result.by_example is None else _minus_origin(result.by_example)
    return replace(_minus_origin(result), by_example=inner)


def _minus_origin(result: Result) -> Result:
    origin = result._origin()
    info = {key: value for key, value in result.info.items() if key not in BASELINES}
    zero = result._baseline(origin)
    info |= range_rescaled(result, zero, torch.ones_like(zero))
    return replace(result, values=result.values - zero, name=f"{result.name} − {origin}", info=info, by_example=None)


def compared(result: Result, other: Result | float, test: str) -> Comparison:
    """The difference from another result of the same examples, or from a number, and a paired test of it."""
    ours = _examples(result, "compare")
    if isinstance(other, int | float):
        differences, name = ours.values - float(other), f" − {number_text(float(other))}" if other else ""
    else:
        theirs, name = _examples(other, "compare"), f" − {other.name}"
        _check_paired(ours, theirs)
        differences = paired_tests.paired_differences(ours.values, ours._aligned(theirs, other.name))
    chosen = paired_tests.test_for(differences.shape[-1], test)
    every = replace(ours, values=differences, name=f"{result.name}{name}", info=_info_of_cells(ours))
    p = _of_cells(result, paired_tests.p_values(differences, chosen), "p")
    return Comparison(mean_of_examples(every), p, chosen)


def _examples(result: Result, method: str) -> Result:
    """The result with the value of each example, as its last axis."""
    examples = result if result.axes[-1:] and result.axes[-1] in EXAMPLE_AXES else result.by_example
    if examples is None or examples.shape[-1] < 2:
        raise HooklineError(
            f"{method} needs the values of two or more examples, and this result has none: pass several prompts to "
            f"the experiment, and a metric that is one number per prompt; if they were too many to keep, pass "
            f"per_example=True"
        )
    return examples


def _of_cells(result: Result, values: Tensor, name: str) -> Result:
    """A number for each cell, in the result's shape without its examples."""
    axes = tuple(axis for axis in result.axes if axis not in EXAMPLE_AXES)
    coords = {axis: result.coords[axis] for axis in axes}
    shape: dict[str, Any] = {"axes": axes, "coords": coords, "info": _info_of_cells(result), "by_example": None}
    return replace(result, values=values, name=f"{name} of {result.name}", **shape)


def _info_of_cells(result: Result) -> dict[str, Any]:
    """What is also true of a statistic of the values: all but baselines and other values of the metric."""
    return {key: value for key, value in result.info.items() if key in ("about", "model", "hooks", "prompts")}


def _check_paired(ours: Result, theirs: Result) -> None:
    """Raise unless two results, each with an axis of examples, are of the same ones."""
    if not is_paired(ours, theirs):
        counts = [how_many(result.shape[-1], result.axes[-1]) for result in (ours, theirs)]
        raise HooklineError(
            f"a comparison is paired by example, but these results are not of the same prompts ({counts[0]} and "
            f"{counts[1]}): run both experiments with the same prompts, in the same order"
        )


def is_paired(ours: Result, theirs: Result) -> bool:
    """Whether two results, each with an axis of examples, are of the same ones."""
    axis = ours.axes[-1]
    is_same = axis == theirs.axes[-1] and ours.coords[axis] == theirs.coords[axis]
    return is_same and ours.info.get("prompts") == theirs.info.get("prompts")
