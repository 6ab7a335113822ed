"""Linear classifiers of activations: ridge regression, logistic regression, class means, and k dimensions.

Each fits several problems at once, which differ only in the labels: those that were given, and shuffled ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_STEPS, _TOLERANCE = 2000, 1e-5
_SMALLEST = 1e-12
"""Directions in which the rows vary less than this, relative to the most, are left out."""


@dataclass(frozen=True, eq=False)
class Linear:
    """Linear classifiers, one for each problem: `x @ weights.mT + bias` are the scores of the classes."""

    weights: Float[Tensor, "problem class d"]
    bias: Float[Tensor, "problem class"]
    is_converged: bool = True

    def scores(self, x: Float[Tensor, "row d"]) -> Float[Tensor, "problem row class"]:
        """The scores of all classes."""
        return x @ self.weights.mT + self.bias[:, None]


@dataclass(frozen=True, eq=False)
class Axes:
    """Standardized rows in the coordinates of their principal axes, where every quadratic problem is diagonal."""

    rows: Float[Tensor, "row axis"]
    variance: Float[Tensor, " axis"]
    basis: Float[Tensor, "d axis"]
    mean: Float[Tensor, " d"]
    std: Float[Tensor, " d"]

    @classmethod
    def of(cls, x: Float[Tensor, "row d"], share: Float[Tensor, " row"]) -> Axes:
        """The axes of rows with these shares, which add up to 1."""
        mean = share @ x
        std = (share @ (x - mean) ** 2).sqrt()
        std = torch.where(std > _SMALLEST * std.max().clamp_min(1e-30), std, torch.inf)
        scaled = (x - mean) / std
        weighted = scaled * share.sqrt()[:, None]
        is_wide = x.shape[0] < x.shape[1]
        variance, vectors = torch.linalg.eigh(weighted @ weighted.T if is_wide else weighted.T @ weighted)
        is_varying = variance > _SMALLEST * variance[-1].clamp_min(1e-30)
        variance, vectors = variance[is_varying], vectors[:, is_varying]
        basis = weighted.T @ vectors / variance.sqrt() if is_wide else vectors
        return cls(scaled @ basis, variance, basis, mean, std)

    def linear(
        self, weights: Float[Tensor, "problem axis class"], bias: Float[Tensor, "problem class"], is_converged: bool
    ) -> Linear:
        """Classifiers of these coordinates as classifiers of activations."""
        activation_weights = (self.basis @ weights).mT / self.std
        return Linear(activation_weights, bias - activation_weights @ self.mean, is_converged)


def ridge(
    x: Float[Tensor, "row d"], share: Float[Tensor, " row"], labels: Float[Tensor, "problem row class"], penalty: float
) -> Linear:
    """Least squares on the indicators of the classes, with an L2 penalty on the weights of standardized rows."""
    axes = Axes.of(x, share)
    prior = share @ labels
    products = axes.rows.T @ (share[:, None] * (labels - prior[:, None]))
    return axes.linear(products / (axes.variance + penalty)[:, None], prior, True)


def logistic(
    x: Float[Tensor, "row d"], share: Float[Tensor, " row"], labels: Float[Tensor, "problem row class"], penalty: float
) -> Linear:
    """Multinomial logistic regression: the mean cross-entropy plus `penalty` / 2 times the squared weights.

    The Hessian of the cross-entropy is at most half that of least squares (Böhning 1992), which is diagonal along the
    principal axes. So steps of the gradient divided by that bound always descend; with momentum, restarted wherever it
    points uphill, they converge in some hundred steps without a line search.
    """
    axes = Axes.of(x, share)
    rows = torch.cat([axes.rows, axes.rows.new_ones(len(x), 1)], 1)
    decay = torch.full_like(rows[0], penalty)
    decay[-1] = 0.0  # the bias
    bound = torch.cat([axes.variance, axes.variance.new_ones(1)]) / 2 + decay
    weights = rows.new_zeros(len(labels), rows.shape[1], labels.shape[2])
    ahead, times = weights, rows.new_ones(len(labels), 1, 1)
    is_converged = False
    for _ in range(_STEPS):
        error = (rows @ ahead).softmax(-1) - labels
        gradient = rows.T @ (share[:, None] * error) + decay[:, None] * ahead
        new = ahead - gradient / bound[:, None]
        is_uphill = ((gradient * (new - weights)).sum((1, 2), keepdim=True)) > 0
        grown = torch.where(is_uphill, 1.0, (1 + (1 + 4 * times**2).sqrt()) / 2)
        ahead = new + torch.where(is_uphill, 0.0, (times - 1) / grown) * (new - weights)
        weights, times = new, grown
        if float((gradient**2 / bound[:, None]).sum((1, 2)).max()) < _TOLERANCE**2:
            is_converged = True
            break
    return axes.linear(weights[:, :-1], weights[:, -1], is_converged)


def class_means(
    x: Float[Tensor, "row d"], share: Float[Tensor, " row"], labels: Float[Tensor, "problem row class"]
) -> Linear:
    """The nearest class mean; for two classes, the direction is the difference of their means."""
    means = means_of(x, share, labels)
    weights = means - means.mean(1, keepdim=True)
    return Linear(weights, -(means**2).sum(-1) / 2)


def means_of(
    x: Float[Tensor, "row d"], share: Float[Tensor, " row"], labels: Float[Tensor, "problem row class"]
) -> Float[Tensor, "problem class d"]:
    """The mean activation of each class; of all rows for a class that has none."""
    counts = share @ labels
    means = (labels * share[:, None]).mT @ x / counts.clamp_min(1e-30)[..., None]
    return torch.where((counts > 0)[..., None], means, share @ x)


def sparse(
    x: Float[Tensor, "row d"],
    share: Float[Tensor, " row"],
    labels: Float[Tensor, "problem row class"],
    penalty: float,
    k: int,
) -> Linear:
    """Logistic regression on the k dimensions whose class means are farthest apart, in units of their deviation."""
    weights = x.new_zeros(len(labels), labels.shape[2], x.shape[1])
    bias, is_converged = x.new_zeros(weights.shape[:2]), True
    for problem, chosen in enumerate(_separation(x, share, labels).topk(k, dim=1).indices):
        fit = logistic(x[:, chosen], share, labels[problem : problem + 1], penalty)
        weights[problem, :, chosen], bias[problem] = fit.weights[0], fit.bias[0]
        is_converged = is_converged and fit.is_converged
    return Linear(weights, bias, is_converged)


def _separation(
    x: Float[Tensor, "row d"], share: Float[Tensor, " row"], labels: Float[Tensor, "problem row class"]
) -> Float[Tensor, "problem d"]:
    """The variance of each dimension between classes, as a fraction of that within them."""
    mean = share @ x
    between = ((share @ labels)[..., None] * (means_of(x, share, labels) - mean) ** 2).sum(1)
    total = share @ (x - mean) ** 2
    return between / (total - between).clamp_min(_SMALLEST * total.max().clamp_min(1e-30))
