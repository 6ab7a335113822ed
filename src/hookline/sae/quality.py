"""Quality: how much of what passes at a point is in an autoencoder's features, and what the model makes of the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from hookline.errors import HooklineError
from hookline.hooks import zero
from hookline.model import HookedModel
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.texts import Batch, batches_of, rows_of
from hookline.text.loss import lm_loss
from hookline.text.outliers import Outliers, Outlying, factor_of, outlying, row_norms


@dataclass(frozen=True)
class Quality:
    """How good an autoencoder is, on some texts."""

    l0: float
    """How many features are active at a token, on average."""
    explained_variance: float
    """The share of the activations' variance that is in the reconstructions, without outlying tokens."""
    dead: float
    """The share of features that were active at no token."""
    loss: float
    """That of the next token; nan of a model that does not predict it."""
    loss_spliced: float
    """With the reconstruction in place of the activation."""
    loss_zeroed: float
    """With zeros in its place."""
    explained_variance_of_all: float = math.nan
    """The same with outlying tokens."""
    outlying: Outlying = field(default_factory=Outlying)
    """The tokens that were left out of everything else: attention sinks, mostly."""

    @property
    def loss_recovered(self) -> float:
        """The share of what zeros cost that the reconstruction does not: 1 for a perfect one."""
        cost = self.loss_zeroed - self.loss
        return (self.loss_zeroed - self.loss_spliced) / cost if cost else math.nan

    def __repr__(self) -> str:
        apart = f" ({self.explained_variance_of_all:.1%} with {self.outlying})" if self.outlying.count else ""
        explained = f"explained variance {self.explained_variance:.1%}{apart}"
        of_features = f"L0 {self.l0:.1f}, {explained}, dead {self.dead:.1%}"
        if math.isnan(self.loss):
            return f"{of_features}; no loss: the model does not predict the next token"
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
    """How good an autoencoder is on texts: what of the activations it explains, and what the model loses by it.

    Tokens whose norm is over 10 times the median of their batch, such as attention sinks, are left out of all of it: in
    the losses they stay as they are. `outliers="include"` counts all tokens. The explained variance is reported both
    ways. A model that does not predict the next token, such as a masked one, has no loss here (nan).
    """
    where = point if point is not None else sae.cfg.hook_name
    if where is None:
        raise HooklineError("the autoencoder does not say where it belongs: name the point")
    losses = torch.zeros(4, dtype=torch.float64)
    active = torch.zeros(sae.d_sae, dtype=torch.float64)
    ordinary, every, left_out = _Moments(sae), _Moments(sae), Outlying(factor=factor_of(outliers))
    predicts = _predicts_next(model)
    for batch in batches_of(model, texts, batch_size):
        x = rows_of(model, sae, where, batch)
        is_out, found = outlying(row_norms(x), outliers)
        left_out, kept = left_out + found, ~is_out
        features = sae.encode(x)
        seen = sae.decode(features, x)
        active += (features[kept] > 0).sum(0).double().cpu()
        every.see(x, seen)
        ordinary.see(x[kept], seen[kept])
        if predicts:
            splice = sae.spliced(where, keep_error=False, outliers=outliers)
            losses += _losses(model, batch, splice, zeroed=_zeroed(where, batch, kept))
    if not every.rows or (predicts and not losses[3]):
        raise HooklineError("there are no tokens to evaluate on: give texts of at least two tokens")
    loss, spliced, zeroed = (losses[:3] / losses[3]).tolist()
    dead = float((active == 0).double().mean())
    l0 = float(active.sum()) / ordinary.rows
    return Quality(l0, ordinary.explained, dead, loss, spliced, zeroed, every.explained, left_out)


def _predicts_next(model: HookedModel) -> bool:
    """Whether its logits are of the next token, of the text that it is given."""
    return model._anatomy.main.name != "encoder" and not model._anatomy.is_encoder_decoder


def _losses(model: HookedModel, batch: Batch, splice: Any, zeroed: Any) -> Tensor:
    """The sums of the loss as it is, with the reconstruction, and with zeros; and of how many tokens."""
    sums = []
    for hooks in ([], [splice], [zeroed]):
        logits = model.run_with_hooks(batch.ids, attention_mask=batch.mask, fwd_hooks=hooks)
        sums.append(float(lm_loss(logits, batch.ids, batch.mask, per_token=True).double().sum()))
    return torch.tensor([*sums, int((batch.mask[:, 1:] * batch.mask[:, :-1]).sum())], dtype=torch.float64)


def _zeroed(point: str, batch: Batch, kept: Bool[Tensor, " row"]) -> Any:
    """The hook that writes zeros, but not at tokens that are left out."""
    is_out = torch.zeros_like(batch.mask, dtype=torch.bool)
    is_out[batch.mask.bool()] = ~kept
    return point, zero(pos=~is_out)


class _Moments:
    """Sums over all rows, from which the explained variance comes."""

    def __init__(self, sae: SparseAutoencoder) -> None:
        self.rows, self.missed, self.squares = 0, 0.0, 0.0
        self.sum = torch.zeros(sae.d_in, dtype=torch.float64, device=sae.device)

    def see(self, x: Tensor, reconstruction: Tensor) -> None:
        """Some rows more."""
        self.rows += len(x)
        self.missed += float((x.double() - reconstruction.double()).pow(2).sum())
        self.squares += float(x.double().pow(2).sum())
        self.sum += x.double().sum(0)

    @property
    def explained(self) -> float:
        """One minus what is missed, as a share of the variance."""
        return 1 - self.missed / (self.squares - float(self.sum.pow(2).sum()) / self.rows)
