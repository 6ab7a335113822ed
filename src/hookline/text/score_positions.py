"""Positions after a score has crossed a bound, in a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hookline.text.forward_pass import ForwardPass, Span
from hookline.text.token_positions import Mask, Meaning


class Watching(Protocol):
    """What has the scores of the generation that runs now."""

    def crossed(self, bound: float, is_above: bool, column: int) -> Tensor:
        """Which rows had a score beyond the bound in a column before this one; an error if nothing is watched."""


@dataclass(frozen=True, eq=False)
class Crossed(Meaning):
    """The new tokens after the one at which a score was beyond a bound, in each row."""

    watching: Watching
    bound: float
    is_above: bool

    def rows(self, column: int) -> Tensor:
        """Which rows it means from this column on."""
        return self.watching.crossed(self.bound, self.is_above, column)

    def mask(self, text: ForwardPass, span: Span) -> Mask:
        """The new tokens of this pass, in the rows whose score has crossed in an earlier pass."""
        rows = self.rows(max(span.positions.start, text.prompt))
        return rows.cpu()[:, None] & torch.tensor(text.is_new(span))

    def __repr__(self) -> str:
        return f"{self.watching!r}.{'above' if self.is_above else 'below'}({self.bound:g})"
