"""The result of training: the autoencoder and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from hookline.sae.autoencoder import SparseAutoencoder
from hookline.text.outliers import Outlying


@dataclass(frozen=True)
class Metrics:
    """The metrics on the batches since the previous record."""

    step: int
    loss: float
    l0: float
    """The mean number of active features."""
    explained_variance: float
    """The fraction of the activations' variance that the reconstruction explains."""
    dead: float
    """The fraction of dead features."""


@dataclass(frozen=True)
class Training:
    """A trained autoencoder with its history of metrics. Prints as a table."""

    sae: SparseAutoencoder
    history: tuple[Metrics, ...]
    steps: int
    """The number of steps run."""
    resampled: int
    """The number of times a dead feature was resampled."""
    is_interrupted: bool = False
    """Whether Ctrl-C stopped it early."""
    outlying: Outlying = field(default_factory=Outlying)
    """The rows that were excluded, counted in every epoch."""

    @property
    def last(self) -> Metrics:
        """The last metrics."""
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
    """An evenly spaced selection that includes the last item."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
