"""The mean of the Jacobians of many texts, in all directions of the final stream or in those that need many texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


class MeanJacobian:
    """A mean over texts for each source layer, and its standard error.

    Texts are added as sums over their positions. Each may be added in the first directions of a basis only: then the
    mean along the others is that of the texts that were added in all directions.
    """

    def __init__(self, n_layers: int, width: int, dtype: torch.dtype, *, finds_basis: bool = False) -> None:
        self._total = torch.zeros(n_layers, width, width, dtype=dtype)
        self._squares = torch.zeros(n_layers, width, dtype=torch.float64)
        self._positions = torch.zeros(n_layers, width, dtype=torch.float64)
        self._squared_positions = torch.zeros(n_layers, width, dtype=torch.float64)
        self._texts = torch.zeros(width, dtype=torch.float64)
        self._products = torch.zeros_like(self._total) if finds_basis else None
        """For each layer, the products of the rows of one text, summed over texts; None once a basis is chosen."""
        self.basis = torch.eye(width, dtype=dtype)
        """The directions of the final stream, one per row, in which texts are added."""

    def add(self, sums: Sequence[Float[Tensor, "direction d_model"]], positions: Sequence[int]) -> None:
        """Add a text: for each layer, the sum over its positions in the first directions, and how many these are."""
        n = len(sums[0])
        for layer, (rows, count) in enumerate(zip(sums, positions, strict=True)):
            self._total[layer, :n] += rows
            self._squares[layer, :n] += torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).square()
            self._positions[layer, :n] += count
            self._squared_positions[layer, :n] += count**2
            if self._products is not None:
                self._products[layer] += rows @ rows.T
        self._texts[:n] += 1

    def choose_basis(self) -> None:
        """Make the directions those in which the texts so far differ most, relative to the mean of each layer."""
        assert self._products is not None
        mean = self._mean()
        scatter = torch.zeros_like(self.basis, dtype=torch.float64)
        for layer, x in enumerate(mean):
            spread = self._products[layer].double() - self._squared_positions[layer, 0] * (x @ x.T).double()
            scatter += spread / self._positions[layer, 0].square() / x.double().square().sum()
        axes = torch.linalg.eigh(scatter).eigenvectors.T.flip(0).to(self.basis)
        for layer in range(len(mean)):
            self._squares[layer] = ((axes @ self._products[layer]) * axes).sum(-1)
        self._total = axes @ self._total
        self.basis, self._products = axes @ self.basis, None

    def _mean(self) -> Float[Tensor, "layer direction d_model"]:
        return self._total / self._positions[..., None].to(self._total)

    def matrices(self) -> Float[Tensor, "layer d_model d_model"]:
        """The mean of each layer: rows are dimensions of the final stream."""
        return self.basis.T @ self._mean()

    def errors(self) -> Float[Tensor, " layer"]:
        """The standard error of the mean of each layer, relative to its norm; NaN for a single text."""
        squares = self._mean().double().square().sum(-1)
        spread = (self._squares - self._squared_positions * squares).clamp(min=0)
        variance = spread / self._positions.square() * (self._texts / (self._texts - 1))
        return (variance.sum(-1) / squares.sum(-1)).sqrt()
