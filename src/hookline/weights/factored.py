"""Low-rank products of two matrices, such as `W_Q W_Kᵀ` and `W_V W_O` of a head, and composition scores of heads."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.transformer.precision import upcast


class _ShapeError(HooklineError, AssertionError):
    """Also an AssertionError, which TransformerLens raises for the same mistakes."""


def _no_product(left: torch.Size, right: torch.Size) -> _ShapeError:
    return _ShapeError(f"matrices of shapes {list(left)} and {list(right)} have no product")


class FactoredMatrix:
    """The product `A @ B` of two thin matrices, which is not computed unless requested as `.AB`.

        OV = FactoredMatrix(model.W_V, model.W_O)      # [layer, head, d_model, d_model], as two thin matrices
        OV[0, 3] @ x, OV @ OV, OV.norm(), OV.svd(), OV.eigenvalues

    Axes before the last two are batch axes; they are broadcast.
    """

    def __init__(self, A: Tensor, B: Tensor) -> None:  # noqa: N803
        if A.ndim < 2 or B.ndim < 2 or A.shape[-1] != B.shape[-2]:
            raise _no_product(A.shape, B.shape)
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        self.A, self.B = A.broadcast_to((*batch, *A.shape[-2:])), B.broadcast_to((*batch, *B.shape[-2:]))

    @property
    def shape(self) -> torch.Size:
        """The shape of the product."""
        return torch.Size((*self.A.shape[:-1], self.B.shape[-1]))

    @property
    def ndim(self) -> int:
        """The number of axes of the product."""
        return self.A.ndim

    @property
    def has_leading_dims(self) -> bool:
        """Whether it is a batch of matrices."""
        return self.ndim > 2

    @property
    def ldim(self) -> int:
        """The number of rows of the product."""
        return self.A.shape[-2]

    @property
    def mdim(self) -> int:
        """The size of the inner axis, an upper bound of the rank."""
        return self.A.shape[-1]

    @property
    def rdim(self) -> int:
        """The number of columns of the product."""
        return self.B.shape[-1]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Both factors."""
        return self.A, self.B

    @property
    def AB(self) -> Tensor:  # noqa: N802
        """The full product."""
        return self.A @ self.B

    @property
    def BA(self) -> Tensor:  # noqa: N802
        """The small product in reverse order, for a square matrix: it has the same nonzero eigenvalues."""
        if self.ldim != self.rdim:
            raise _ShapeError(f"a matrix of {self.ldim} × {self.rdim} is not square, so B @ A is not defined")
        return self.B @ self.A

    @property
    def T(self) -> Self:  # noqa: N802
        """The transpose."""
        return type(self)(self.B.mT, self.A.mT)

    def __matmul__(self, other: Tensor | FactoredMatrix) -> Any:
        """The product with a vector is a vector; with a matrix it is a FactoredMatrix."""
        if other.shape[0 if other.ndim == 1 else -2] != self.rdim:
            raise _no_product(self.shape, other.shape)
        if isinstance(other, FactoredMatrix):
            if self.rdim < min(self.mdim, other.mdim):
                return type(self)(self.AB, other.AB)
            middle = self.B @ other.A  # small: between the two thin sides
            if self.mdim <= other.mdim:
                return type(self)(self.A, middle @ other.B)
            return type(self)(self.A @ middle, other.B)
        if other.ndim == 1:
            return (self.A @ (self.B @ other.unsqueeze(-1))).squeeze(-1)
        return type(self)(self.AB, other) if self.rdim < self.mdim else type(self)(self.A, self.B @ other)

    def __rmatmul__(self, other: Tensor) -> Any:
        if other.shape[-1] != self.ldim:
            raise _no_product(other.shape, self.shape)
        if other.ndim == 1:
            return (other[None] @ self.A @ self.B).squeeze(-2)
        return type(self)(other, self.AB) if self.ldim < self.mdim else type(self)(other @ self.A, self.B)

    def __mul__(self, factor: float | Tensor) -> Self:
        """The product with a number, or with one for each matrix of the batch, as [batch, 1, 1]."""
        if isinstance(factor, Tensor) and factor.numel() > 1 and factor.shape[-2:] != (1, 1):
            raise _ShapeError(f"a factor is a number, or has shape [*batch, 1, 1], not {list(factor.shape)}")
        return type(self)(self.A * factor, self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> Self:
        """Index batch axes, then rows, then columns. A single row or column remains as an axis of size 1."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            place = index.index(Ellipsis)
            index = (*index[:place], *[slice(None)] * (self.ndim - len(index) + 1), *index[place + 1 :])
        new = sum(axis_index is None for axis_index in index)
        if len(index) - new > self.ndim:
            raise HooklineError(f"{len(index)} indices for a matrix with {self.ndim} axes")
        n = self.ndim - 2 + new  # new axes are batch axes
        batch, (rows, columns) = index[:n], (*index[n:], slice(None), slice(None))[:2]
        if rows is None or columns is None:
            raise HooklineError("a new axis must come before the axes of rows and columns")
        return type(self)(self.A[batch][..., _as_axis(rows), :], self.B[batch][..., :, _as_axis(columns)])

    def norm(self) -> Tensor:
        """The Frobenius norm, computed from two small products."""
        return ((self.A.mT @ self.A) * (self.B @ self.B.mT).mT).sum((-2, -1)).clamp(min=0).sqrt()

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        u_a, s_a, vh_a = torch.linalg.svd(upcast(self.A), full_matrices=False)
        u_b, s_b, vh_b = torch.linalg.svd(upcast(self.B), full_matrices=False)
        middle = (s_a[..., :, None] * vh_a) @ (u_b * s_b[..., None, :])
        u, s, vh = torch.linalg.svd(middle, full_matrices=False)
        return u_a @ u, s, vh_b.mT @ vh.mT

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """`U`, `S`, `V` such that the product is `U @ diag(S) @ V.T`, computed from small matrices."""
        return self._svd

    @property
    def U(self) -> Tensor:  # noqa: N802
        """Left singular vectors, as columns."""
        return self._svd[0]

    @property
    def S(self) -> Tensor:  # noqa: N802
        """Singular values, the largest first."""
        return self._svd[1]

    @property
    def V(self) -> Tensor:  # noqa: N802
        """Right singular vectors, as columns."""
        return self._svd[2]

    @property
    def Vh(self) -> Tensor:  # noqa: N802
        """Right singular vectors, as rows."""
        return self._svd[2].mT

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of a square product: the nonzero ones, and as many zeros as `mdim` has room for."""
        return torch.linalg.eigvals(upcast(self.BA))

    def make_even(self) -> Self:
        """The same product with the square root of the singular values in each factor."""
        u, s, v = self._svd
        root = s.sqrt()
        return type(self)(u * root[..., None, :], root[..., :, None] * v.mT)

    def get_corner(self, k: int = 3) -> Tensor:
        """The first `k` rows and columns of the product."""
        return self[(..., slice(k), slice(k))].AB

    def unsqueeze(self, dim: int) -> Self:
        """The matrix with another batch axis."""
        return type(self)(self.A.unsqueeze(dim), self.B.unsqueeze(dim))

    def collapse_l(self) -> Tensor:
        """A matrix with the same singular values and right singular vectors as the product."""
        _, s, v = self._svd
        return s[..., :, None] * v.mT

    def collapse_r(self) -> Tensor:
        """A matrix with the same singular values and left singular vectors as the product."""
        u, s, _ = self._svd
        return u * s[..., None, :]

    def __repr__(self) -> str:
        return f"FactoredMatrix({list(self.shape)}, rank at most {min(self.mdim, self.ldim, self.rdim)})"


def _as_axis(index: Any) -> Any:
    """A single index as a slice, which keeps the axis."""
    if not isinstance(index, int):
        return index
    return slice(index, index + 1 if index != -1 else None)


def composition_scores(left: FactoredMatrix, right: FactoredMatrix) -> Float[Tensor, "*batch"]:
    """The norm of each product divided by the product of the norms: at most 1, and near 0 for unrelated heads.

        composition_scores(model.OV[0, 3], model.QK[1, 5])

    Batch axes are broadcast. Only products of the size of a head are computed, none of width d_model.
    """
    middle = left.B @ right.A
    before, after = left.A.mT @ left.A, right.B @ right.B.mT
    square = ((before @ middle) * (middle @ after)).sum((-2, -1))
    return square.clamp(min=0).sqrt() / (left.norm() * right.norm())


def all_scores(left: FactoredMatrix, right: FactoredMatrix) -> Float[Tensor, "layer head layer head"]:
    """The composition score of every head with every head of a later layer; 0 for all other pairs."""
    n_layers = left.shape[0]
    scores = torch.stack([composition_scores(left[n].unsqueeze(1).unsqueeze(1), right) for n in range(n_layers)])
    is_later = torch.ones(n_layers, n_layers, dtype=torch.bool, device=scores.device).triu(1)
    return scores * is_later[:, None, :, None]
