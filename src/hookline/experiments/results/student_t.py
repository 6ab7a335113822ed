"""Student's t distribution: tail probabilities and quantiles, for any numbers of degrees of freedom at once."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_STEPS, _TINY = 400, 1e-300


def two_sided(t: Float[Tensor, "*cell"], freedom: Float[Tensor, "*cell"]) -> Float[Tensor, "*cell"]:
    """The probability that |T| is at least |t|; NaN where there is no degree of freedom."""
    t, freedom = torch.broadcast_tensors(t.double(), freedom.double())
    share = freedom / (freedom + t**2)  # 0 where t is infinite
    p = _incomplete_beta(share, freedom.clamp(min=1) / 2)
    return torch.where((freedom > 0) & ~t.isnan(), p, torch.nan)


def quantile(probability: float, freedom: Float[Tensor, "*cell"]) -> Float[Tensor, "*cell"]:
    """The t below which T lies with a probability of more than one half, by bisection of log(1 + t)."""
    low, high = torch.zeros_like(freedom, dtype=torch.float64), torch.full_like(freedom, 60.0, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        is_below = two_sided(middle.expm1(), freedom) / 2 > 1 - probability
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return torch.where(freedom > 0, high.expm1(), torch.nan)


def _incomplete_beta(x: Tensor, a: Tensor) -> Tensor:
    """The regularized incomplete beta function I_x(a, 1/2), by its continued fraction where that converges fast."""
    b, is_high = torch.full_like(a, 0.5), x > (a + 1) / (a + 2.5)
    first, second = torch.where(is_high, b, a), torch.where(is_high, a, b)
    y = torch.where(is_high, 1 - x, x)
    log_beta = torch.lgamma(first) + torch.lgamma(second) - torch.lgamma(first + second)
    front = (torch.xlogy(first, y) + torch.special.xlog1py(second, -y) - log_beta).exp() / first
    value = front * _fraction(y, first, second)
    return torch.where(is_high, 1 - value, value).clamp(0.0, 1.0)


def _fraction(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The continued fraction of the incomplete beta function, by the modified Lentz method."""
    c = torch.ones_like(x)
    d = 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            d = 1 / _nonzero(1 + coefficient * d)
            c = _nonzero(1 + coefficient / c)
            value = value * c * d
        if not value.numel() or bool(((c * d - 1).abs() < 1e-14).all()):
            break
    return value


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _TINY, _TINY, x)
