"""What comes of training: the autoencoder, and how it went."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from hookline.sae.autoencoder import SparseAutoencoder
from hookline.text.outliers import Outlying


@dataclass(frozen=True)
class Metrics:
    """How well an autoencoder did on the batches since the metrics before."""

    step: int
    loss: float
    l0: float
    """How many features are active, on average."""
    explained_variance: float
    """The share of the activations' variance that is in the reconstructions."""
    dead: float
    """The share of features that have not been active for a while."""


@dataclass(frozen=True)
class Training:
    """An autoencoder that was trained, with its metrics along the way. It prints as a table."""

    sae: SparseAutoencoder
    history: tuple[Metrics, ...]
    steps: int
    """How many were made."""
    resampled: int
    """How often a dead feature was given another direction."""
    is_interrupted: bool = False
    """Whether it was stopped before its end, by Ctrl-C."""
    outlying: Outlying = field(default_factory=Outlying)
    """The rows that were left out, counted each time they came up."""

    @property
    def last(self) -> Metrics:
        """The metrics of the end."""
        return self.history[-1]

    def __repr__(self) -> str:
        head = [each.name for each in fields(Metrics)]
        shown = _some(list(self.history), 10)
        rows = [[f"{getattr(each, name):.4g}" for name in head] for each in shown]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(f"{x:>{width}}" for x, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        end = "stopped by Ctrl-C after" if self.is_interrupted else "after"
        about = f"{self.sae.extra_repr()}; {end} {self.steps} steps, {self.resampled} features resampled"
        left_out = [f'left out: {self.outlying} (outliers="include" keeps them)'] if self.outlying.count else []
        return "\n".join([about, *left_out, *lines])


def _some(items: list[Metrics], count: int) -> list[Metrics]:
    """As many of them, spread over all, with the last."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
