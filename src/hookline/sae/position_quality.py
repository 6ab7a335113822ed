"""The quality of an autoencoder by kind of position: first tokens, other attention sinks, and ordinary tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor

from hookline.edits import zero
from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.pages.text_tables import html_table, table
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.quality import Moments, loss_sum, predictions, predicts_next
from hookline.sae.texts import point_of, text_batches
from hookline.text.outliers import Outliers, outlying, row_norms

CLASSES = ("first", "sinks", "ordinary")


@dataclass(frozen=True)
class PositionQuality:
    """The metrics at the positions of one kind."""

    tokens: int
    l0: float
    """The mean number of active features per token; nan without tokens, and so are the others."""
    norm: float
    """The mean norm of the activations."""
    explained_variance: float
    loss: float
    """The next-token loss of the texts."""
    loss_spliced: float
    """The loss with the reconstruction at the positions of this kind alone."""
    loss_zeroed: float
    """The loss with zeros at the positions of this kind alone."""

    @property
    def loss_recovered(self) -> float:
        """The fraction of the loss increase due to zeros that the reconstruction avoids: 1 is perfect."""
        cost = self.loss_zeroed - self.loss
        return (self.loss_zeroed - self.loss_spliced) / cost if cost else math.nan


class QualityByPosition(dict[str, PositionQuality]):
    """The quality at "first" tokens, other "sinks" and "ordinary" tokens; prints as a table."""

    def _rows(self) -> list[list[str]]:
        head = ["position", "tokens", "norm", "L0", "explained", "loss", "spliced", "zeroed", "recovered"]
        rows = [head]
        for name, q in self.items():
            values = (q.norm, q.l0, q.explained_variance, q.loss, q.loss_spliced, q.loss_zeroed, q.loss_recovered)
            forms = (".1f", ".1f", ".1%", ".4f", ".4f", ".4f", ".1%")
            shown = ["–" if math.isnan(x) else format(x, form) for x, form in zip(values, forms, strict=True)]
            rows.append([name, f"{q.tokens:,}", *shown])
        return rows

    def __repr__(self) -> str:
        return table(self._rows(), ">")

    def _repr_html_(self) -> str:
        return html_table(self._rows())


@torch.no_grad()
def evaluate_by_position(
    sae: SparseAutoencoder,
    model: HookedModel,
    texts: Iterable[str],
    point: str | None = None,
    *,
    batch_size: int = 16,
    outliers: Outliers = "exclude",
) -> QualityByPosition:
    """Evaluate an autoencoder apart at the first token of each text, at other attention sinks, and elsewhere.

    A token is a sink if its norm is over 10 times the median of its batch, or `outliers` times. The losses are with the
    reconstruction, or zeros, at the positions of one kind alone: they say what its errors there cost.
    """
    where = point_of(sae, point)
    sums = {name: _Sums(sae) for name in CLASSES}
    total = torch.zeros(2, dtype=torch.float64)
    has_loss = predicts_next(model)
    for rows, ids, mask in text_batches(sae, model, texts, where, batch_size):
        x = rows[where]
        is_first = (rows.position == 0).to(x.device)
        is_sink = outlying(row_norms(x), outliers)[0] & ~is_first
        kinds = dict(zip(CLASSES, (is_first, is_sink, ~is_first & ~is_sink), strict=True))
        if has_loss:
            total += torch.tensor([loss_sum(model, ids, mask, []), predictions(mask)]).double()
        for name, chosen in kinds.items():
            at = torch.zeros_like(mask, dtype=torch.bool)
            at[mask.bool()] = chosen
            sums[name].update(sae, x[chosen])
            if has_loss and bool(chosen.any()):
                hooks = [(where, partial(_reconstructed, sae, at)), (where, zero(pos=at))]
                sums[name].losses += torch.tensor([loss_sum(model, ids, mask, [hook]) for hook in hooks]).double()
            elif has_loss:
                sums[name].losses += loss_sum(model, ids, mask, [])
    if not sum(kind_sums.moments.rows for kind_sums in sums.values()) or (has_loss and not total[1]):
        raise HooklineError("there are no tokens to evaluate on: pass texts of at least two tokens")
    loss, count = total.tolist()
    return QualityByPosition({name: kind_sums.quality(loss, count) for name, kind_sums in sums.items()})


class _Sums:
    """Running sums over the tokens of one kind."""

    def __init__(self, sae: SparseAutoencoder) -> None:
        self.moments, self.active, self.norms = Moments(sae), 0, 0.0
        self.losses = torch.zeros(2, dtype=torch.float64)

    def update(self, sae: SparseAutoencoder, x: Tensor) -> None:
        features = sae.encode(x)
        self.active += int((features > 0).sum())
        self.norms += float(row_norms(x).double().sum())
        self.moments.update(x, sae.decode(features, x))

    def quality(self, loss: float, count: float) -> PositionQuality:
        rows = self.moments.rows
        if not rows:
            return PositionQuality(0, *[math.nan] * 6)
        losses = [total / count if count else math.nan for total in (loss, *self.losses.tolist())]
        return PositionQuality(rows, self.active / rows, self.norms / rows, self.moments.explained, *losses)


def _reconstructed(sae: SparseAutoencoder, at: Bool[Tensor, "batch pos"], x: Tensor) -> Tensor:
    return torch.where(at.view(*at.shape, *(1 for _ in x.shape[2:])), sae(x).to(x), x)
