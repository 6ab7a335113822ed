"""Statistics of one tensor, as tensors on its device: nothing here waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TensorMoments(NamedTuple):
    """What was measured of one tensor. Every field but `size` is a tensor without axes."""

    size: int
    mean: Tensor
    spread: Tensor
    """The L2 norm of the differences from the mean."""
    nonzero: Tensor
    low: Tensor
    high: Tensor
    nonfinite: Tensor


@dataclass(frozen=True)
class Statistics:
    """The statistics of a point at one step: over all calls of its module, if there were several."""

    mean: float
    std: float
    norm: float
    zeros: float
    max: float
    nonfinite: int

    @property
    def is_finite(self) -> bool:
        """Whether no value was NaN or infinite."""
        return not self.nonfinite


def is_measurable(x: Tensor) -> bool:
    """Whether a tensor has numbers that these statistics are about."""
    return x.is_floating_point() and x.numel() > 0 and not x.is_nested and x.layout is torch.strided


@torch.no_grad()
def moments_of(x: Tensor) -> TensorMoments:
    """Return the moments of a tensor."""
    wide = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
    is_on_host = wide.device.type == "cpu"
    if is_on_host:  # where a second pass costs a tenth of what Welford's update does
        mean = wide.mean()
        spread = torch.linalg.vector_norm(wide - mean)
    else:
        variance, mean = torch.var_mean(wide, correction=0)
        spread = (variance * x.numel()).sqrt()
    low, high = torch.aminmax(wide)
    is_finite = is_on_host and bool(mean.isfinite())  # no need to wait for it there
    nonfinite = (
        torch.zeros(()) if is_finite else (wide - wide).count_nonzero()
    )  # 0 for finite values, NaN for all others
    return TensorMoments(x.numel(), mean, spread, wide.count_nonzero(), low, high, nonfinite)


@torch.no_grad()
def active_units(x: Tensor, axis: int) -> Tensor:
    """Whether each unit along an axis has a value that is not 0."""
    other_axes = [other for other in range(x.ndim) if other != axis % x.ndim]
    return torch.count_nonzero(x.detach(), dim=other_axes) > 0


def combined(calls: Iterable[tuple[int, Sequence[float]]]) -> Statistics:
    """The statistics of several calls: the number of values of each, and the other fields of its `TensorMoments`."""
    count, mean, squares, nonzero, largest, nonfinite = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    for size, (call_mean, spread, call_nonzero, low, high, call_nonfinite) in calls:
        total, difference = count + size, call_mean - mean
        squares += spread * spread + difference * difference * count * size / total
        mean += difference * size / total
        nonzero += call_nonzero
        largest = math.nan if math.isnan(low + largest) else max(largest, -low, high)
        count, nonfinite = total, nonfinite + call_nonfinite
    return Statistics(
        mean=mean,
        std=math.sqrt(squares / (count - 1)) if count > 1 else math.nan,
        norm=math.sqrt(squares + count * mean * mean),
        zeros=1 - nonzero / count,
        max=largest,
        nonfinite=round(nonfinite),
    )
