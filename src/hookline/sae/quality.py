"""Evaluation: how well an autoencoder reconstructs activations, and how the model does with the reconstruction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookline.edits import zero
from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.texts import point_of, text_batches
from hookline.text.loss import lm_loss
from hookline.text.outliers import Outliers, Outlying, factor_of, outlying, row_norms


@dataclass(frozen=True)
class Quality:
    """The metrics of an autoencoder on some texts."""

    l0: float
    """The mean number of active features per token."""
    explained_variance: float
    """The fraction of the activations' variance that the reconstruction explains, without outlying tokens."""
    dead: float
    """The fraction of features that were active at no token."""
    loss: float
    """The next-token loss; nan for a model without one."""
    loss_spliced: float
    """The loss with the reconstruction in place of the activation."""
    loss_zeroed: float
    """The loss with zeros in place of the activation."""
    explained_variance_of_all: float = math.nan
    """The explained variance including outlying tokens."""
    outlying: Outlying = field(default_factory=Outlying)
    """The tokens excluded from all other metrics: mostly attention sinks."""

    @property
    def loss_recovered(self) -> float:
        """The fraction of the loss increase due to zeros that the reconstruction avoids: 1 is perfect."""
        cost = self.loss_zeroed - self.loss
        return (self.loss_zeroed - self.loss_spliced) / cost if cost else math.nan

    def __repr__(self) -> str:
        apart = f" ({self.explained_variance_of_all:.1%} with {self.outlying})" if self.outlying.count else ""
        explained = f"explained variance {self.explained_variance:.1%}{apart}"
        of_features = f"L0 {self.l0:.1f}, {explained}, dead {self.dead:.1%}"
        if math.isnan(self.loss):
            return f"{of_features}; no loss: the model has no next-token loss"
        return (
            f"{of_features}, loss {self.loss:.4f}, spliced {self.loss_spliced:.4f}, zeroed {self.loss_zeroed:.4f}, "
            f"recovered {self.loss_recovered:.1%}"
        )


@torch.no_grad()
def evaluate(
    sae: SparseAutoencoder,
    model: HookedModel,
    texts: Iterable[str],
    point: str | None = None,
    *,
    batch_size: int = 16,
    outliers: Outliers = "exclude",
) -> Quality:
    """Evaluate an autoencoder on texts: sparsity, explained variance, and the model's loss with the reconstruction.

        >>> round(hookline.sae.evaluate(sae, model, texts).l0)
        4

    Tokens whose norm is over 10 times the median of their batch, such as attention sinks, are excluded: the losses are
    computed with their original activations. `outliers="include"` includes all tokens. The explained variance is
    reported both ways. The losses are nan for a model without a next-token loss, such as a masked language model.
    """
    where = point_of(sae, point)
    losses = torch.zeros(4, dtype=torch.float64)
    active = torch.zeros(sae.d_sae, dtype=torch.float64)
    ordinary, every, left_out = Moments(sae), Moments(sae), Outlying(factor=factor_of(outliers))
    predicts = predicts_next(model)
    for rows, ids, mask in text_batches(sae, model, texts, where, batch_size):
        x = rows[where]
        is_out, summary = outlying(row_norms(x), outliers)
        left_out, is_ordinary = left_out + summary, ~is_out
        features = sae.encode(x)
        seen = sae.decode(features, x)
        active += (features[is_ordinary] > 0).sum(0).double().cpu()
        every.update(x, seen)
        ordinary.update(x[is_ordinary], seen[is_ordinary])
        if predicts:
            is_zeroed = torch.ones_like(mask, dtype=torch.bool)
            is_zeroed[mask.bool()] = is_ordinary
            splice = sae.spliced(where, keep_error=False, outliers=outliers)
            losses += _losses(model, ids, mask, [splice], [(where, zero(pos=is_zeroed))])
    if not every.rows or (predicts and not losses[3]):
        raise HooklineError("there are no tokens to evaluate on: pass texts of at least two tokens")
    loss, spliced, zeroed = (losses[:3] / losses[3]).tolist()
    dead = float((active == 0).double().mean())
    l0 = float(active.sum()) / ordinary.rows
    return Quality(l0, ordinary.explained, dead, loss, spliced, zeroed, every.explained, left_out)


def predicts_next(model: HookedModel) -> bool:
    """Whether the model predicts the next token of its input."""
    return model.anatomy.main.name != "encoder" and not model.anatomy.is_encoder_decoder


def _losses(model: HookedModel, ids: Tensor, mask: Tensor, spliced: list[Any], zeroed: list[Any]) -> Tensor:
    """The sums of the loss unchanged, with the reconstruction, and with zeros; and the number of tokens."""
    sums = [loss_sum(model, ids, mask, hooks) for hooks in ([], spliced, zeroed)]
    return torch.tensor([*sums, predictions(mask)], dtype=torch.float64)


def loss_sum(model: HookedModel, ids: Tensor, mask: Tensor, hooks: list[Any]) -> float:
    """The sum of the loss over all predicted tokens, in a run with hooks."""
    logits = model.run_with_hooks(ids, attention_mask=mask, fwd_hooks=hooks)
    return float(lm_loss(logits, ids, mask, per_token=True).double().sum())


def predictions(mask: Tensor) -> int:
    """The number of predicted tokens."""
    return int((mask[:, 1:] * mask[:, :-1]).sum())


class Moments:
    """Running sums over rows for the explained variance."""

    def __init__(self, sae: SparseAutoencoder) -> None:
        self.rows, self.squared_error, self.squares = 0, 0.0, 0.0
        self.sum = torch.zeros(sae.d_in, dtype=torch.float64, device=sae.device)

    def update(self, x: Tensor, reconstruction: Tensor) -> None:
        """Add rows."""
        self.rows += len(x)
        self.squared_error += float((x.double() - reconstruction.double()).pow(2).sum())
        self.squares += float(x.double().pow(2).sum())
        self.sum += x.double().sum(0)

    @property
    def explained(self) -> float:
        """One minus the squared error as a fraction of the variance."""
        variance = self.squares - float(self.sum.pow(2).sum()) / self.rows
        return 1 - self.squared_error / variance if variance > 0 else math.nan  # one row has none
