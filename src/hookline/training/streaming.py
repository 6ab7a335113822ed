"""Statistics of rows that are too many to keep: each takes batches of rows, and has a value in the end.

A statistic is a function without arguments that returns an object with `add(rows)`, which gets a tensor
`[row, feature]`, and `value()`. Sums are in float64 where the device has it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError


class Accumulator(Protocol):
    """What a statistic returns."""

    def add(self, rows: Tensor) -> None:
        """Take a batch of rows."""

    def value(self) -> Tensor:
        """The statistic of all rows so far."""


class _Sums:
    """The number of rows, their mean, and the products of their differences from it."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.products: Tensor | None = None

    def add_mean(self, rows: Tensor) -> tuple[Tensor, Tensor, float]:
        """Take the mean of a batch. Returns its rows around it, how far it is from the mean before, and a weight."""
        n, before = len(rows), self.count
        mean = rows.mean(0)
        difference = mean if self.mean is None else mean - self.mean
        self.count = before + n
        self.mean = mean if self.mean is None else self.mean + difference * (n / self.count)
        return rows - mean, difference, before * n / self.count

    def checked(self, value: Tensor | None, rows: int = 1) -> Tensor:
        """The value, if there were enough rows."""
        if value is None or self.count < rows:
            raise HooklineError(f"this statistic needs at least {rows} rows, and there were {self.count}")
        return value


class _Mean(_Sums):
    """The mean of each feature."""

    def add(self, rows: Tensor) -> None:
        """Take a batch of rows."""
        self.add_mean(_wide(rows))

    def value(self) -> Float[Tensor, " feature"]:
        """The mean."""
        return self.checked(self.mean)


class _Covariance(_Sums):
    """The covariance of the features, by Chan's update: right also far from 0, where products of values lose digits."""

    def add(self, rows: Tensor) -> None:
        """Take a batch of rows."""
        centered, difference, weight = self.add_mean(_wide(rows))
        products = centered.T @ centered
        if self.products is not None:
            products += self.products + weight * torch.outer(difference, difference)
        self.products = products

    def value(self) -> Float[Tensor, "feature feature"]:
        """The covariance, divided by the number of rows less one."""
        return self.checked(self.products, rows=2) / (self.count - 1)


class _SecondMoment(_Sums):
    """The mean of `x xᵀ`, which is not centered."""

    def add(self, rows: Tensor) -> None:
        """Take a batch of rows."""
        wide = _wide(rows)
        before, self.count = self.count, self.count + len(rows)
        products = (wide.T @ wide) / self.count
        self.products = products if self.products is None else self.products * (before / self.count) + products

    def value(self) -> Float[Tensor, "feature feature"]:
        """The mean product."""
        return self.checked(self.products)


class _AbsoluteMax:
    """The largest absolute value of each feature, in the dtype of the activation."""

    def __init__(self) -> None:
        self._largest: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Take a batch of rows."""
        largest = rows.abs().amax(0)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def value(self) -> Float[Tensor, " feature"]:
        """The largest absolute value."""
        if self._largest is None:
            raise HooklineError("this statistic needs at least 1 row, and there were 0")
        return self._largest


def _wide(rows: Tensor) -> Tensor:
    return rows.float() if rows.device.type == "mps" else rows.double()


def mean() -> Accumulator:
    """The mean of each feature, `[feature]`.

    Examples:
        >>> statistic = hookline.training.mean()
        >>> statistic.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> statistic.value()
        tensor([2., 3.], dtype=torch.float64)
    """
    return _Mean()


def covariance() -> Accumulator:
    """The centered covariance of the features, `[feature, feature]`, divided by the number of rows less one.

    Examples:
        >>> statistic = hookline.training.covariance()
        >>> statistic.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> statistic.value()
        tensor([[2., 2.],
                [2., 2.]], dtype=torch.float64)
    """
    return _Covariance()


def second_moment() -> Accumulator:
    """The mean of `x xᵀ` over rows, `[feature, feature]`: the Hessian of a layer's squared error, up to a factor.

    Examples:
        >>> statistic = hookline.training.second_moment()
        >>> statistic.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> statistic.value()
        tensor([[ 5.,  7.],
                [ 7., 10.]], dtype=torch.float64)
    """
    return _SecondMoment()


def absolute_max() -> Accumulator:
    """The largest absolute value of each feature, `[feature]`.

    Examples:
        >>> statistic = hookline.training.absolute_max()
        >>> statistic.add(torch.tensor([[1.0, -2.0], [-3.0, 1.0]]))
        >>> statistic.value()
        tensor([3., 2.])
    """
    return _AbsoluteMax()
