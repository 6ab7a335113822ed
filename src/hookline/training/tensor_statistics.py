"""Statistics of one tensor, as tensors on its device: nothing here waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TensorMoments(NamedTuple):
    """What was measured of one tensor. Every field but `size` is a tensor without axes."""

    size: int
    mean: Tensor
    variance: Tensor
    zeros: Tensor
    largest: Tensor
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
def moments_of(x: Tensor, unit_axis: int = -1) -> tuple[TensorMoments, Tensor]:
    """Return the moments of a tensor, and how many values of each unit are not zero."""
    x = x.detach()
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    variance, mean = torch.var_mean(wide, correction=0)
    other_axes = [axis for axis in range(x.ndim) if axis != unit_axis % max(1, x.ndim)]
    nonzero = torch.linalg.vector_norm(wide, 0, dim=other_axes) if other_axes else (wide != 0).to(wide.dtype)
    total = nonzero.sum(dtype=torch.float32 if x.device.type == "mps" else torch.float64)
    largest = torch.linalg.vector_norm(wide, torch.inf)
    nonfinite = torch.linalg.vector_norm(wide - wide, 0)  # 0 for finite numbers, NaN for all others
    return TensorMoments(x.numel(), mean, variance, 1 - total / x.numel(), largest, nonfinite), nonzero


def combined(calls: Iterable[tuple[int, list[float]]]) -> Statistics:
    """The statistics of several calls: the number of values of each, and the other fields of its `TensorMoments`."""
    count, mean, squares, zeros, largest, nonfinite = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    for n, (call_mean, variance, call_zeros, call_largest, call_nonfinite) in calls:
        total, difference = count + n, call_mean - mean
        squares += variance * n + difference * difference * count * n / total
        mean += difference * n / total
        zeros += call_zeros * n
        largest = call_largest if call_largest > largest or math.isnan(call_largest) else largest
        count, nonfinite = total, nonfinite + call_nonfinite
    return Statistics(
        mean=mean,
        std=math.sqrt(squares / (count - 1)) if count > 1 else math.nan,
        norm=math.sqrt(squares + count * mean * mean),
        zeros=zeros / count,
        max=largest,
        nonfinite=round(nonfinite),
    )
