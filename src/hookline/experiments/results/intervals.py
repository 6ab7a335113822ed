"""Spread and intervals of means over examples, for many cells at once. NaN is a cell without that example."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.results import student_t

IntervalMethod: TypeAlias = Literal["bootstrap", "normal"]
Examples: TypeAlias = Float[Tensor, "*cell example"]
Cells: TypeAlias = Float[Tensor, "*cell"]

RESAMPLES = 2000
FEW = 8
"""With fewer examples, resamples are too alike: means of two examples have three values."""
_SEED = 0
_ROOM = 2**23
"""Means of resamples that are held at a time."""


def finite(examples: Examples) -> Float[Tensor, "*cell example"]:
    """The examples in double precision. A cell with an infinite example has no spread: all of its examples are NaN."""
    values = examples.double()
    return values.masked_fill(values.isinf().any(-1, keepdim=True), torch.nan)


def std(examples: Examples) -> Cells:
    """The standard deviation over examples (ddof 1); NaN with fewer than two, or with an infinite one."""
    scaled, scale = _scaled(finite(examples))
    count = counts(scaled)
    return torch.where(count > 1, scaled.square().nansum(-1) / (count - 1).clamp(min=1), torch.nan).sqrt() * scale


def sem(examples: Examples) -> Cells:
    """The standard error of the mean."""
    return std(examples) / counts(examples).sqrt()


def counts(examples: Examples) -> Cells:
    """The number of examples of each cell."""
    return (~examples.isnan()).double().sum(-1)


def _scaled(values: Float[Tensor, "*cell example"]) -> tuple[Float[Tensor, "*cell example"], Cells]:
    """Distances from the mean, as parts of the largest one of the cell: squares and float32 have room for them."""
    distances = values - values.nanmean(-1, keepdim=True)
    largest = distances.abs().nan_to_num(0.0).amax(-1)
    return distances / torch.where(largest > 0, largest, 1.0)[..., None], largest


def interval(examples: Examples, level: float, method: IntervalMethod) -> tuple[Cells, Cells]:
    """The bounds of the mean of each cell; NaN with fewer than two examples, or with an infinite one."""
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise HooklineError(f"level is the share of intervals that contain the true mean, such as 0.95, got {level!r}")
    if method not in ("bootstrap", "normal"):
        raise HooklineError(f'method is "bootstrap" or "normal", got {method!r}')
    values = finite(examples)
    mean, error, count = values.nanmean(-1), sem(values), counts(values)
    if method == "normal":
        reach = torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64)) * error
        return mean - reach, mean + reach
    reach = student_t.quantile(0.5 + level / 2, count - 1) * error
    low, high = _bootstrapped(values, level)
    return torch.where(count < FEW, mean - reach, mean + low), torch.where(count < FEW, mean + reach, mean + high)


def _bootstrapped(values: Float[Tensor, "*cell example"], level: float) -> tuple[Cells, Cells]:
    """The bounds by bootstrap, as distances from the mean."""
    scaled, scale = _scaled(values)
    flat = scaled.float().reshape(-1, scaled.shape[-1])
    draws = _draws(flat.shape[-1])
    parts = [_quantiles(part, draws, level) for part in flat.split(max(1, _ROOM // RESAMPLES))]
    low, high = (torch.cat(bounds).double().reshape(scale.shape) * scale for bounds in zip(*parts, strict=True))
    return low, high


def _draws(n: int) -> Float[Tensor, "resample example"]:
    """How often each example is in each resample: the same resamples for every cell, and in every call."""
    drawn = torch.randint(n, (RESAMPLES, n), generator=torch.Generator().manual_seed(_SEED))
    return torch.zeros(RESAMPLES, n).scatter_add_(1, drawn, torch.ones(RESAMPLES, n))


def _quantiles(
    examples: Float[Tensor, "cell example"], draws: Float[Tensor, "resample example"], level: float
) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
    """The lower and the upper quantile of the means of resamples.

    Percentiles of a bootstrap are too narrow for few examples, since resamples vary by n - 1 in place of n, and since
    their quantiles are those of a normal distribution. So the percentiles are those at which the interval of normal
    data is that of Student's t (Hesterberg's expanded percentiles).
    """
    is_missing = examples.isnan()
    means = examples.nan_to_num(0.0) @ draws.T
    means = means / (draws.sum(1) if not bool(is_missing.any()) else (~is_missing).to(draws) @ draws.T)
    count = (~is_missing).double().sum(1)
    reach = student_t.quantile(0.5 + level / 2, count - 1) * (count / (count - 1).clamp(min=1)).sqrt()
    share = torch.special.ndtr(-reach).nan_to_num(0.0)
    done = means.isfinite()
    ordered = torch.where(done, means, torch.inf).sort(1).values
    last = (done.double().sum(1) - 1).clamp(min=0)
    return _at(ordered, share * last), _at(ordered, (1 - share) * last)


def _at(ordered: Float[Tensor, "cell resample"], place: Float[Tensor, " cell"]) -> Float[Tensor, " cell"]:
    """The values at fractional places, linearly interpolated."""
    below = place.floor().long()
    above = (below + 1).clamp(max=ordered.shape[1] - 1)
    part = (place - below).to(ordered)
    low, high = (ordered.gather(1, at[:, None])[:, 0] for at in (below, above))
    return torch.where(part > 0, low + part * (high - low), low)
