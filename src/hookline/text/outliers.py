"""Outlying positions, where an activation is many times as large as elsewhere.

Many language models have attention sinks: positions, mostly the first, that heads attend to when there is nothing else
to attend to. In SmolLM2-135M the residual stream there has a norm of 24,240, and of 182 elsewhere. A few such rows
dominate every mean and variance over positions, and say nothing about ordinary ones. So outlying rows are excluded from
means and variances of activations, unless `outliers="include"`; the number of excluded rows is reported.

A row is outlying if its norm is more than `FACTOR` times the median norm of all rows at that point. The median does not
depend on the outlying rows as long as they are a minority. `outliers` may also be a number, which replaces `FACTOR`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hookline.errors import HooklineError

Outliers: TypeAlias = Literal["exclude", "include"] | float
"""What to do with outlying rows: "exclude", "include", or a factor of the median above which to exclude them."""

FACTOR = 10.0


def factor_of(outliers: Outliers) -> float:
    """The multiple of the median norm above which a row is outlying; infinity if none is."""
    if isinstance(outliers, str) and outliers in ("exclude", "include"):
        return FACTOR if outliers == "exclude" else math.inf
    is_number = isinstance(outliers, int | float) and not isinstance(outliers, bool)
    if is_number and 1 < outliers <= sys.float_info.max:  # type: ignore[operator]
        return float(outliers)
    raise HooklineError(
        f'outliers must be "exclude", "include", or the multiple of the median norm (above 1) to exclude rows above, '
        f"not {outliers!r}"
    )


def row_norms(x: Tensor, axes: int = 1) -> Float[Tensor, "*row"]:
    """The norm of each row, where the first `axes` axes count the rows."""
    x = x.detach()
    x = x if x.dtype == torch.float64 else x.float()
    return x.flatten(axes).norm(dim=-1) if x.ndim > axes else x.abs()


def bound_of(norms: Tensor, outliers: Outliers) -> float:
    """The norm above which a row is outlying, among rows with these norms; infinity if none is."""
    factor = factor_of(outliers)
    median = float(norms.flatten().median()) if norms.numel() and math.isfinite(factor) else 0.0
    return factor * median if median > 0 and math.isfinite(median) else math.inf


def is_outlying(norms: Tensor, bound: float | Tensor) -> Bool[Tensor, "*row"]:
    """Which rows are outlying. Rows with infinite or NaN norms are not: such errors should stay visible."""
    return (norms > bound) & norms.isfinite()


@dataclass(frozen=True)
class Outlying:
    """The number of outlying rows, and their norms."""

    count: int = 0
    of: int = 0
    """The number of all rows."""
    largest: float = 0.0
    """The largest norm of an outlying row."""
    median: float = 0.0
    """The median norm of all rows; of the last batch, if there were several."""
    factor: float = FACTOR
    rows: Int[Tensor, " row"] | None = field(default=None, repr=False, compare=False)
    """The indices of the rows, if they are known."""

    @property
    def bound(self) -> float:
        """The norm above which a row is outlying; infinity if none is."""
        return self.factor * self.median if self.median > 0 else math.inf

    def __add__(self, other: Outlying) -> Outlying:
        largest = max(self.largest, other.largest)
        return Outlying(self.count + other.count, self.of + other.of, largest, other.median, other.factor)

    @property
    def share(self) -> float:
        """The share of rows that are outlying."""
        return self.count / self.of if self.of else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with norms to three digits, so that they are the same in every run."""
        norms = {name: float(f"{getattr(self, name):.3g}") for name in ("largest", "median")}
        return {"count": self.count, "of": self.of, **norms, "factor": self.factor}

    def __str__(self) -> str:
        if not self.count:
            return f"none of {self.of:,} rows outlying"
        return (
            f"{self.count:,} of {self.of:,} rows ({self.share:.1%}) outlying: norms up to {self.largest:,.0f}, "
            f"over {self.factor:g} × the median of {self.median:,.3g}"
        )


def outlying(norms: Tensor, outliers: Outliers) -> tuple[Bool[Tensor, "*row"], Outlying]:
    """Which of the rows with these norms are outlying, and a summary."""
    bound = bound_of(norms, outliers)
    is_out = is_outlying(norms, bound)
    return is_out, counted(norms, is_out, bound, outliers)


def counted(norms: Tensor, is_out: Tensor, bound: float, outliers: Outliers) -> Outlying:
    """A summary of the outlying rows."""
    factor, largest = factor_of(outliers), float(norms[is_out].max()) if bool(is_out.any()) else 0.0
    median = bound / factor if math.isfinite(bound) else 0.0
    return Outlying(int(is_out.sum()), is_out.numel(), largest, median, factor)


class RowMean:
    """The mean of rows without the outlying ones. Rows are added in batches, so that not all must fit into memory.

    Each batch is added once. Then `finds_outliers` says whether any row is outlying; if so, all batches must be added a
    second time, and outlying rows are then left out. With `per_position`, the mean is over batches, separately for each
    row of a batch, and a row is compared with the rows at the same position.
    """

    def __init__(self, outliers: Outliers, *, per_position: bool = False) -> None:
        self.outliers, self.per_position = outliers, per_position
        self.outlying = Outlying(factor=factor_of(outliers))
        self.bounds: Float[Tensor, " position"] | None = None
        """The norm above which a row is outlying: for each position, or one for all."""
        self._norms: list[Tensor] = []
        self._total, self._count = torch.zeros(()), torch.zeros(())

    def add(self, x: Float[Tensor, "row ..."], counts: Bool[Tensor, " row"] | None = None) -> None:
        """Add a batch of rows, or those of them that count."""
        counts = torch.ones(len(x), dtype=torch.bool, device=x.device) if counts is None else counts
        if self.bounds is None:
            self._norms.append(row_norms(x).cpu())
        else:
            bounds = self.bounds.to(x.device)[: len(x)]
            counts = counts & ~is_outlying(row_norms(x), bounds)
        shape = (-1, *(1 for _ in x.shape[1:]))
        x, count = torch.where(counts.view(shape), x, 0), counts.view(shape).to(x)
        if not self.per_position:
            x, count = x.sum(0, keepdim=True), count.sum(0, keepdim=True)
        self._total, self._count = _sum(self._total, x), _sum(self._count, count)

    def finds_outliers(self) -> bool:
        """Whether any of the rows added is outlying, so that all must be added again."""
        norms = pad_sequence(self._norms, padding_value=torch.nan)  # [position, batch]
        groups = [group[~group.isnan()] for group in (norms if self.per_position else norms.flatten()[None])]
        self.bounds = torch.tensor([bound_of(group, self.outliers) for group in groups])
        for group in groups:
            self.outlying += outlying(group, self.outliers)[1]
        if self.outlying.count:
            self._total, self._count = torch.zeros(()), torch.zeros(())
        return bool(self.outlying.count)

    @property
    def value(self) -> Float[Tensor, "position ..."]:
        """The mean at each position, or one for all; NaN where nothing counts."""
        return self._total / self._count


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tensors, the shorter one padded with zeros."""
    if not a.ndim:
        return b
    width = max(len(a), len(b))
    a, b = (torch.cat([x, x.new_zeros(width - len(x), *x.shape[1:])]) for x in (a, b))
    return a + b
