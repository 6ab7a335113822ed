"""Means: the mean activation at a point over many texts, without outlying positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.rerun.baseline import Baseline
from hookline.text.outliers import Outliers, Outlying, bound_of, is_outlying, outlying, row_norms


class Mean:
    """The mean at a point: over all positions of all texts or, with `per_position`, over texts.

    `add` sums the values and records their norms. `judge` then returns whether any row was outlying: if so, all texts
    must be added a second time, and outlying rows are then left out. A row is compared with the rows that it is
    averaged with: with `per_position`, those at its position.
    """

    def __init__(self, point: HookPoint, outliers: Outliers, *, per_position: bool) -> None:
        self._point, self._outliers, self._per_position = point, outliers, per_position
        self._total: Tensor | None = None
        self._counts: Tensor | None = None
        self._norms: list[Tensor] = []
        self._bounds: list[float] | None = None
        """The norm above which a row is outlying: for each position, or for all."""
        self.outlying = Outlying()

    def add(self, x: Tensor) -> None:
        """Add one text."""
        x = x.movedim(_position(self._point), 0)
        x = x if x.dtype == torch.float64 else x.float()
        ones = torch.ones(len(x), dtype=x.dtype, device=x.device)
        if self._bounds is None:
            self._norms.append(row_norms(x).cpu())
        elif bool((is_out := self._is_out(x)).any()):
            ones = ones.masked_fill(is_out, 0)
            x = torch.where(is_out.view(-1, *(1 for _ in x.shape[1:])), 0, x)
        x, ones = (x, ones) if self._per_position else (x.sum(0, keepdim=True), ones.sum(0, keepdim=True))
        self._total, self._counts = _plus(self._total, x), _plus(self._counts, ones)

    def judge(self) -> bool:
        """Whether any row was outlying, so that all texts must be added again."""
        longest = max(map(len, self._norms))
        columns = range(longest) if self._per_position else ()
        groups = [torch.cat([each[at : at + 1] for each in self._norms]) for at in columns] or [torch.cat(self._norms)]
        self._bounds = [bound_of(group, self._outliers) for group in groups]
        for group in groups:
            self.outlying += outlying(group, self._outliers)[1]
        if self.outlying.count:
            self._total = self._counts = None
        return bool(self.outlying.count)

    def _is_out(self, x: Tensor) -> Tensor:
        assert self._bounds is not None
        bounds = self._bounds[: len(x)] if self._per_position else self._bounds * len(x)
        bounds += [math.inf] * (len(x) - len(bounds))
        norms = row_norms(x)
        return is_outlying(norms, torch.tensor(bounds, dtype=norms.dtype, device=norms.device))

    def laid_out(self, base: Baseline, *, keeps: bool) -> Tensor:
        """The mean in the shape of one text's activation; with `keeps`, outlying positions keep their value."""
        assert self._total is not None
        assert self._counts is not None
        before = base.kept[self._point.name].movedim(_position(self._point), 0)
        mean = (self._total.movedim(0, -1) / self._counts).movedim(-1, 0)
        if not self._per_position:
            mean = mean.expand(len(before), *mean.shape[1:])
        elif len(mean) < len(before):
            raise HooklineError(
                f"a prompt has {len(before)} tokens, but no text of data has more than {len(mean)}, so there is no "
                f"mean at its last positions. Pass longer texts, or remove per_position"
            )
        found = mean[: len(before)].to(before)
        if keeps and bool((is_out := self._is_out(before)).any()):
            found = torch.where(is_out.view(-1, *(1 for _ in found.shape[1:])), before, found)
        return found.movedim(0, _position(self._point))


def _plus(total: Tensor | None, x: Tensor) -> Tensor:
    """The sum of two tensors, the shorter one padded with zeros."""
    if total is None:
        return x
    longer, shorter = (total, x) if len(total) >= len(x) else (x, total)
    found = longer.clone()
    found[: len(shorter)] += shorter
    return found


def _position(point: HookPoint) -> int:
    return point.axes.split()[1:].index("p")
