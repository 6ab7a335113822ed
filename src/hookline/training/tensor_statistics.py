"""Statistics of one tensor, as tensors on its device: nothing here waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST_EXACT_COUNT = 2**24  # in float32


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
def nonzero_counts(x: Tensor, axis: int | None = None) -> Tensor:
    """How many values are not 0: for each unit along an axis, or of the whole tensor."""
    other_axes = [other for other in range(x.ndim) if axis is None or other != axis % x.ndim]
    wide = _wide(x)
    units = 1 if axis is None else x.shape[axis]
    if x.numel() // units > _LARGEST_EXACT_COUNT:
        return torch.count_nonzero(wide, dim=other_axes)
    if _is_on_host(x):  # where a norm of order 0 takes ten times as long
        return wide.clone().ne_(0).sum(dim=other_axes)
    return torch.linalg.vector_norm(wide, 0, dim=other_axes)


@torch.no_grad()
def moments_of(x: Tensor, counts: Tensor) -> TensorMoments:
    """Return the moments of a tensor, of which the nonzero values have been counted."""
    wide = _wide(x)
    if _is_on_host(x):  # where a second pass costs a tenth of what Welford's update does
        mean = wide.mean()
        spread = torch.linalg.vector_norm(wide - mean)
    else:
        variance, mean = torch.var_mean(wide, correction=0)
        spread = (variance * x.numel()).sqrt()
    low, high = torch.aminmax(wide)
    is_finite = _is_on_host(x) and bool(mean.isfinite())  # no need to wait for it there
    # The difference is 0 for finite values, NaN for all others.
    nonfinite = torch.zeros(()) if is_finite else nonzero_counts(wide - wide)
    return TensorMoments(x.numel(), mean, spread, counts.sum(dtype=torch.int64), low, high, nonfinite)


def _wide(x: Tensor) -> Tensor:
    """The values in a dtype in which sums do not overflow."""
    return x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()


def _is_on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


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
