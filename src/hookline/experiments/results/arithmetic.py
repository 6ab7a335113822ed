"""Arithmetic of results: sums, products, and rescaling by the baselines, of the means and of each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import number_text
from hookline.experiments.core.random_changes import CONTROL
from hookline.experiments.results.control_ranges import range_combined, range_rescaled, without_control
from hookline.experiments.results.statistics import BASELINES, is_paired

if TYPE_CHECKING:
    from hookline.experiments.result import Result

Operation: TypeAlias = Literal["−", "+", "×", "/"]
_FUNCTIONS: Mapping[Operation, Callable[[Tensor, Tensor], Tensor]] = {
    "−": torch.sub,
    "+": torch.add,
    "×": torch.mul,
    "/": torch.div,
}


def absolute_cells(result: Result) -> Result:
    """The absolute values of the means; examples change their sign with their mean."""
    same = without_control(result * 1.0)  # which ends it would have is not known
    name, inner = f"|{result.name}|", same.by_example
    if inner is not None:
        inner = replace(inner, values=inner.values * result.values.sign()[..., None], name=name)
    return replace(same, values=result.values.abs(), name=name, by_example=inner)


def combined_cells(result: Result, other: Result | float, operation: Operation) -> Result:
    """The sum, difference, product or quotient, cell by cell."""
    info = {key: value for key, value in result.info.items() if key not in (*BASELINES, *CONTROL)}
    if isinstance(other, int | float):
        values, label, complete = torch.tensor(other), number_text(other), True
        info |= _combined_range(result, other, operation)
    else:
        info = {key: value for key, value in info.items() if value == other.info.get(key)}
        values, label, complete = result._aligned(other, other.name), other.name, other.complete
    means = replace(
        result,
        values=_FUNCTIONS[operation](result.values, values),
        name=f"{result.name} {operation} {label}",
        info=info,
        complete=result.complete and complete,
        by_example=None,
    )
    return replace(means, by_example=_combined_examples(result, other, operation, means))


def _combined_examples(result: Result, other: Result | float, operation: Operation, means: Result) -> Result | None:
    """The examples of a combination; of products and quotients, to first order in their distance from the means."""
    ours = result.by_example
    theirs = None if isinstance(other, int | float) else other.by_example
    if ours is None or (theirs is not None and not is_paired(ours, theirs)):
        return None
    mean = torch.tensor(other) if isinstance(other, int | float) else result._aligned(other, other.name)[..., None]
    values = _FUNCTIONS[operation](ours.values, mean)
    if theirs is not None:
        own_mean = result.values[..., None]
        one = torch.ones_like(own_mean)
        slope = {"−": -one, "+": one, "×": own_mean, "/": -own_mean / mean**2}[operation]
        values = values + slope * (ours._aligned(theirs, theirs.name) - mean)
    info = {key: value for key, value in ours.info.items() if key in means.info and key not in CONTROL}
    if isinstance(other, int | float):
        info |= _combined_range(ours, other, operation)
    return replace(ours, values=values, name=means.name, info=info, complete=means.complete)


def _combined_range(result: Result, number: float, operation: Operation) -> dict[str, Any]:
    return range_combined(result, number, _FUNCTIONS[operation], lambda end: combined_cells(end, number, operation))


def normalized_cells(result: Result) -> Result:
    """The values rescaled so that 0 is the value of the corrupted run and 1 that of the clean run."""
    if missing := [key for key in BASELINES if key not in result.info]:
        raise HooklineError(
            f"normalized needs the metric of a clean and of a corrupted run, but this result has no "
            f"{' and no '.join(missing)} run: use result.effect, or set result.info[{missing[0]!r}]"
        )
    clean, corrupted = (result._baseline(key) for key in BASELINES)
    span = clean - corrupted
    flat = ~(span.abs() > 1e-6 * torch.maximum(clean.abs(), corrupted.abs()))
    if bool(flat.any()):
        at = result._labels(int(flat.expand(result.values.shape).flatten().nonzero()[0]))
        where = {axis: label for axis, label in at.items() if flat.shape[result.axes.index(axis)] > 1}
        raise HooklineError(
            f"the clean and the corrupted run have the same {result.name}{f' at {where}' if where else ''} (or "
            f"NaN), so the effect cannot be normalized: use prompts or a metric for which they differ"
        )
    values = (result.values - corrupted) / span
    ends = range_rescaled(result, corrupted, span)
    between = {"clean": 1.0, "corrupted": 0.0, "normalized": True}
    inner = result.by_example
    if inner is not None:  # to first order, as the quotient of two means
        clean_each, corrupted_each = (inner._baseline(key) for key in BASELINES)
        change = inner.values - corrupted_each - values[..., None] * (clean_each - corrupted_each)
        shares = values[..., None] + change / span[..., None]
        inner = without_control(inner)  # it would be another one for each cell
        inner = replace(inner, values=shares, info={**inner.info, **between})
    return replace(result, values=values, info={**result.info, **ends, **between}, by_example=inner)
