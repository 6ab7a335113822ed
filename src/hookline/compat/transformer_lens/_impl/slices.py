"""Slice: an index, a (start, stop) tuple, or a list, along one axis."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from hookline.compat.transformer_lens._impl.lens_errors import LensValueError
from hookline.errors import HooklineError
from hookline.text.forward_pass import ForwardPass, Span
from hookline.text.token_positions import Meaning

SliceInput = int | slice | tuple[int, ...] | list[int] | Tensor | np.ndarray | None


class Slice:
    """Part of an axis.

    Slice(3)          index 3; the axis is removed
    Slice((1, 5))     indices 1 to 4; Slice((1, 5, 2)) is every other of them
    Slice([1, 4])     indices 1 and 4
    Slice()           the whole axis
    """

    def __init__(self, input_slice: SliceInput = None) -> None:
        self.slice: Any
        if input_slice is None:
            self.slice, self.mode = slice(None), "identity"
        elif isinstance(input_slice, tuple | slice):
            self.slice = input_slice if isinstance(input_slice, slice) else slice(*input_slice)
            self.mode = "slice"
        elif isinstance(input_slice, int) and not isinstance(input_slice, bool):
            self.slice, self.mode = input_slice, "int"
        elif isinstance(input_slice, list | Tensor | np.ndarray):
            indices = input_slice.detach().cpu() if isinstance(input_slice, Tensor) else input_slice
            self.slice, self.mode = np.asarray(indices), "array"
        else:
            raise HooklineError(
                f"a slice must be an index, a tuple (start, stop), a list of indices or None, not {input_slice!r}"
            )

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Slice a tensor along `dim`."""
        where: list[Any] = [slice(None)] * tensor.ndim
        where[dim] = torch.as_tensor(self.slice) if self.mode == "array" else self.slice
        return tensor[tuple(where)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """The selected indices on an axis of this length."""
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise LensValueError(f"{self!r} needs the length of the axis: indices(max_ctx)")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    @classmethod
    def unwrap(cls, slice_input: Slice | SliceInput) -> Slice:
        """Convert to a Slice that keeps the axis of an index."""
        return cls.of([slice_input] if isinstance(slice_input, int) else slice_input)

    @classmethod
    def of(cls, slice_input: Slice | SliceInput) -> Slice:
        """Convert to a Slice; an index removes the axis."""
        return slice_input if isinstance(slice_input, Slice) else cls(slice_input)

    @property
    def index(self) -> Any:
        """The index, slice or list for hookline's own methods; None for all."""
        if self.mode == "identity":
            return None
        return self.slice.tolist() if self.mode == "array" else self.slice

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode} "


@dataclass(frozen=True)
class Columns(Meaning):
    """Positions as columns of the batch, padding included, as in TransformerLens."""

    where: Slice

    def mask(self, text: ForwardPass, span: Span) -> Bool[Tensor, "row pos"]:  # noqa: ARG002
        """A mask of those columns, in every row."""
        chosen = self.where.indices(len(span.positions))
        if any(later <= earlier for earlier, later in pairwise(chosen)):
            raise HooklineError(f"pos_slice must be strictly increasing, not {chosen.tolist()}")
        mask = torch.zeros(len(span.positions), dtype=torch.bool)
        mask[torch.as_tensor(chosen)] = True
        return mask.expand(span.rows, -1)

    def __repr__(self) -> str:
        return f"columns {self.where.slice}"
