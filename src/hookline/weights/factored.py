"""Products of two matrices, kept as the two: a head's `W_Q W_Kᵀ` or `W_V W_O` is large and of low rank."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError


class FactoredMatrix:
    """The product `A @ B`, worked out only where it is asked for.

        OV = FactoredMatrix(model.W_V, model.W_O)      # [layer, head, d_model, d_model], as two thin matrices
        OV[0, 3] @ x, OV @ OV, OV.norm(), OV.svd(), OV.eigenvalues

    Axes before the last two are batch axes; they are broadcast.
    """

    def __init__(self, A: Tensor, B: Tensor) -> None:  # noqa: N803
        if A.ndim < 2 or B.ndim < 2 or A.shape[-1] != B.shape[-2]:
            raise HooklineError(f"matrices of shapes {list(A.shape)} and {list(B.shape)} have no product")
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        self.A, self.B = A.expand(*batch, *A.shape[-2:]), B.expand(*batch, *B.shape[-2:])

    @property
    def shape(self) -> torch.Size:
        """Of the product."""
        return torch.Size((*self.A.shape[:-1], self.B.shape[-1]))

    @property
    def ndim(self) -> int:
        """Of the product."""
        return self.A.ndim

    @property
    def ldim(self) -> int:
        """Rows of the product."""
        return self.A.shape[-2]

    @property
    def mdim(self) -> int:
        """What is summed over: its rank is at most that."""
        return self.A.shape[-1]

    @property
    def rdim(self) -> int:
        """Columns of the product."""
        return self.B.shape[-1]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Both factors."""
        return self.A, self.B

    @property
    def AB(self) -> Tensor:  # noqa: N802
        """The product itself."""
        return self.A @ self.B

    @property
    def BA(self) -> Tensor:  # noqa: N802
        """The small product the other way round, of a square matrix: it has the same eigenvalues, but for zeros."""
        if self.ldim != self.rdim:
            raise HooklineError(f"a matrix of {self.ldim} × {self.rdim} is not square: it has no product the other way")
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:  # noqa: N802
        """Transposed."""
        return FactoredMatrix(self.B.mT, self.A.mT)

    def __matmul__(self, other: Tensor | FactoredMatrix) -> Any:
        """Times a vector, a vector; times a matrix, still two factors."""
        if isinstance(other, FactoredMatrix):
            middle = self.B @ other.A  # small: between the two thin sides
            if self.mdim <= other.mdim:
                return FactoredMatrix(self.A, middle @ other.B)
            return FactoredMatrix(self.A @ middle, other.B)
        if other.ndim == 1:
            return (self.A @ (self.B @ other[:, None])).squeeze(-1)
        return FactoredMatrix(self.A, self.B @ other)

    def __rmatmul__(self, other: Tensor) -> Any:
        if other.ndim == 1:
            return (other[None] @ self.A @ self.B).squeeze(-2)
        return FactoredMatrix(other @ self.A, self.B)

    def __mul__(self, factor: float | Tensor) -> FactoredMatrix:
        """Times a number."""
        return FactoredMatrix(self.A * factor, self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """By batch axes; further indices choose rows, then columns. A single row or column stays an axis of one."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            place = index.index(Ellipsis)
            index = (*index[:place], *[slice(None)] * (self.ndim - len(index) + 1), *index[place + 1 :])
        new = sum(each is None for each in index)
        if len(index) - new > self.ndim:
            raise HooklineError(f"{len(index)} indices for a matrix with {self.ndim} axes")
        n = self.ndim - 2 + new  # new axes are batch axes
        batch, (rows, columns) = index[:n], (*index[n:], slice(None), slice(None))[:2]
        if rows is None or columns is None:
            raise HooklineError("a new axis goes before those of rows and columns")
        return FactoredMatrix(self.A[batch][..., _as_axis(rows), :], self.B[batch][..., :, _as_axis(columns)])

    def norm(self) -> Tensor:
        """The root of the sum of all squares, from the two small products."""
        return ((self.A.mT @ self.A) * (self.B @ self.B.mT).mT).sum((-2, -1)).clamp(min=0).sqrt()

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        u_a, s_a, vh_a = torch.linalg.svd(_wide(self.A), full_matrices=False)
        u_b, s_b, vh_b = torch.linalg.svd(_wide(self.B), full_matrices=False)
        middle = (s_a[..., :, None] * vh_a) @ (u_b * s_b[..., None, :])
        u, s, vh = torch.linalg.svd(middle, full_matrices=False)
        return u_a @ u, s, vh_b.mT @ vh.mT

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """`U`, `S`, `V` so that the product is `U @ diag(S) @ V.T`, from small matrices only."""
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
        """Of a square product: those that are not zero for want of rank."""
        return torch.linalg.eigvals(_wide(self.BA if self.mdim <= self.ldim else self.AB))

    def make_even(self) -> FactoredMatrix:
        """The same product with both factors alike in size: the root of the singular values on each side."""
        u, s, v = self._svd
        root = s.sqrt()
        return FactoredMatrix(u * root[..., None, :], root[..., :, None] * v.mT)

    def get_corner(self, k: int = 3) -> Tensor:
        """The first rows and columns of the product."""
        return self[(..., slice(k), slice(k))].AB

    def unsqueeze(self, dim: int) -> FactoredMatrix:
        """One batch axis more."""
        return FactoredMatrix(self.A.unsqueeze(dim), self.B.unsqueeze(dim))

    def collapse_l(self) -> Tensor:
        """The right side alone, with the same singular values and right vectors as the product."""
        _, s, v = self._svd
        return s[..., :, None] * v.mT

    def collapse_r(self) -> Tensor:
        """The left side alone, likewise."""
        u, s, _ = self._svd
        return u * s[..., None, :]

    def __repr__(self) -> str:
        return f"FactoredMatrix({list(self.shape)}, rank at most {min(self.mdim, self.ldim, self.rdim)})"


def _wide(x: Tensor) -> Tensor:
    """At 32 bits or more: torch takes no fewer apart."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _as_axis(index: Any) -> Any:
    """One row is a range of one row."""
    if not isinstance(index, int):
        return index
    return slice(index, index + 1 if index != -1 else None)
