"""The range of a result's control, which changes with its values: sums, products, and rescaling by the baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from hookline.experiments.core.labels import number_text
from hookline.experiments.core.random_changes import CONTROL

if TYPE_CHECKING:
    from hookline.experiments.result import Result

End: TypeAlias = "Result | float"
"""One end of the range: a number, or one for each cell of some axes."""


def has_control(result: Result) -> bool:
    """Whether the result has the range of a control."""
    return all(key in result.info for key in CONTROL)


def range_under(result: Result, change: Callable[[End], End]) -> dict[str, Any]:
    """The entries of `info` about the control, after a change of the values that keeps or reverses their order."""
    if not has_control(result):
        return {}
    low, high = change(result.control.low), change(result.control.high)
    if isinstance(low, float) or isinstance(high, float):
        low, high = sorted((low, high))  # type: ignore[type-var]
    else:
        ends = torch.stack([low.values, high.values])
        low, high = replace(low, values=ends.amin(0)), replace(high, values=ends.amax(0))
    return {"control_low": low, "control_high": high, "control_draws": result.control.draws}


def range_combined(
    result: Result, number: float, combine: Callable[[Tensor, Tensor], Tensor], of_result: Callable[[Result], Result]
) -> dict[str, Any]:
    """The entries of `info` about the control, combined with a number as the values are."""
    return range_under(
        result,
        lambda end: (
            float(combine(torch.tensor(end), torch.tensor(number))) if isinstance(end, int | float) else of_result(end)
        ),
    )


def range_rescaled(result: Result, zero: Tensor, span: Tensor) -> dict[str, Any]:
    """The entries of `info` about the control, rescaled as the values are."""

    def rescaled(end: End) -> End:
        if isinstance(end, int | float):
            return float((end - zero) / span)
        gone = [dim for dim, axis in enumerate(result.axes) if axis not in end.axes]
        return replace(end, values=((result._aligned(end, "control") - zero) / span).squeeze(gone))

    return range_under(result, rescaled)


def without_control(result: Result) -> Result:
    """The result, and that of its examples, without the range of a control."""
    inner = None if result.by_example is None else without_control(result.by_example)
    info = {key: value for key, value in result.info.items() if key not in CONTROL}
    return replace(result, info=info, by_example=inner)


def control_line(result: Result) -> str:
    """The range in words."""
    low, high, draws, of = result.control
    ends = [low, high] if isinstance(low, float | int) else [float(low.values.min()), float(high.values.max())]
    return f"control {number_text(ends[0])} to {number_text(ends[1])}: {draws} {of}"
